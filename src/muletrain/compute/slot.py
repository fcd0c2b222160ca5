"""The compute slot decides which call computes next, and runs the call's check right before the work."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


def _nothing() -> None:
    pass


class Turn(NamedTuple):
    """How urgent a call of ``Compute`` is, and a check right before the work."""

    priority: int = 0
    """Lower numbers go first. Calls with the same number go in order of arrival."""
    begins: Callable[[], None] = _nothing
    """Called once, right before the work. If it raises, the call raises the same error and computes nothing."""


AT_ONCE = Turn()


class Slot:
    """Has one holder at a time. A cancelled waiter leaves the queue; a holder that fails frees the slot."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._held = False

    @asynccontextmanager
    async def __call__(self, turn: Turn, *, brief: bool = False) -> AsyncIterator[None]:
        """Holds the slot from ``turn`` to the end of the block; with ``brief``, only until ``turn.begins`` has
        returned."""
        await self._acquire(turn.priority)
        with ExitStack() as held:
            held.callback(self._release)
            turn.begins()
            if brief:
                held.close()
            yield

    async def _acquire(self, priority: int) -> None:
        if self._held:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the slot was ours already: pass it on
                    self._release()
                raise
        self._held = True

    def _release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)  # stays held: the slot passes straight to the next call
                return
        self._held = False
