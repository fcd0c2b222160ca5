"""Which of a peer's frames go first: those of the step, then state for others (newcomers, checkpoints), which has time."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from muletrain.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from muletrain.clock import Clock

TRAINING_S = 5.0
"""After a frame of a step, more of them are expected for so long."""
PAUSES = 3.0
"""Between two frames of state, while a step is under way: in times that the first took, so that frames of the step rarely find one
before them."""
PATIENCE = 8.0
"""Longest wait for a gap in the step's own traffic, likewise: state comes through on a busy link, too."""
LONGEST_S = 10.0


class Uplink:
    """One peer's, to all others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way = 0
        self._last = float("-inf")
        self._gap = asyncio.Event()
        self._gap.set()
        self._turn = asyncio.Lock()
        self._took_s = 0.0

    @asynccontextmanager
    async def urgent(self) -> AsyncIterator[None]:
        """While a frame of the step is handed over: nothing holds it up here."""
        self._under_way += 1
        self._gap.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            self._last = self._clock.now()
            if not self._under_way:
                self._gap.set()

    @asynccontextmanager
    async def spare(self) -> AsyncIterator[None]:
        """While a frame of state is handed over: one at a time, in the gaps that the step leaves."""
        async with self._turn:
            if self._under_way or self._clock.now() - self._last < TRAINING_S:
                await self._clock.sleep(PAUSES * self._took_s)
                with contextlib.suppress(DeadlineExceeded):
                    await self._clock.deadline(self._gap.wait(), PATIENCE * self._took_s, "a gap between frames")
            begin = self._clock.now()
            try:
                yield
            finally:
                self._took_s = min(LONGEST_S, self._clock.now() - begin)
