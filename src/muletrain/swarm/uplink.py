"""Which of a peer's frames go first: those of the step, then state for others (newcomers, checkpoints), which has time.

While a step is under way, state goes in the gaps that it leaves, and in pieces that occupy the uplink only briefly: what is handed over
cannot be overtaken, so a frame of the step that comes meanwhile waits for one piece.
"""

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
PIECE_S = 0.01
"""How long a piece occupies the uplink, about."""
SMALLEST, FIRST = 512, 1 << 16
"""Bytes of a piece: at least; and while it is not known what the uplink carries."""
PAUSE = 1.0
"""After a block, in times that handing it over took: what transports and routers still hold is to drain, for a step's frames wait
behind it, too."""
PATIENCE = 20.0
"""Longest wait for a gap in the step's own traffic, in pieces: state comes through on a busy link, too."""
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
        self._bytes_per_s: float | None = None
        self._piece_s = PIECE_S
        self._spent_s = 0.0
        self._urgent = _Urgent(self)

    def urgent(self) -> _Urgent:
        """While a frame of the step is handed over: nothing holds it up here."""
        return self._urgent

    def _begin(self) -> None:
        self._under_way += 1
        self._gap.clear()

    def _end(self) -> None:
        self._under_way -= 1
        self._last = self._clock.now()
        if not self._under_way:
            self._gap.set()

    @asynccontextmanager
    async def spare(self) -> AsyncIterator[None]:
        """While a frame of anything else is handed over: in a gap."""
        if training := self._training():
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.deadline(self._gap.wait(), PATIENCE * self._piece_s, "a gap between frames")
        begin = self._clock.now()
        try:
            yield
        finally:
            took = self._clock.now() - begin
            self._spent_s += took
            self._piece_s = min(LONGEST_S, max(PIECE_S, took)) if training else PIECE_S

    @asynccontextmanager
    async def turn(self, nbytes: int, *, pause: float) -> AsyncIterator[None]:
        """While a block of state is handed over, piece by piece: one at a time, with a pause of as many times that time after it."""
        async with self._turn:
            self._spent_s = 0.0
            yield
            if self._spent_s > 0.0:
                self._bytes_per_s = nbytes / self._spent_s
            if self._training():
                await self._clock.sleep(min(LONGEST_S, pause * self._spent_s))

    def piece(self) -> int:
        """Bytes of state to hand over at once."""
        if not self._training():
            return 1 << 62
        return FIRST if self._bytes_per_s is None else max(SMALLEST, int(PIECE_S * self._bytes_per_s))

    def _training(self) -> bool:
        return self._under_way > 0 or self._clock.now() - self._last < TRAINING_S


class _Urgent:
    """Of every frame of the step: one for all."""

    def __init__(self, uplink: Uplink) -> None:
        self._uplink = uplink

    async def __aenter__(self) -> None:
        self._uplink._begin()

    async def __aexit__(self, *_: object) -> None:
        self._uplink._end()
