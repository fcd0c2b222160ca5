"""A slot that one microbatch has at a time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import NamedTuple


class PriorityLock:
    """One holder at a time; the waiter with the lowest priority number goes first, then first come."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._held = False

    def __call__(self, priority: int) -> _Turn:
        return _Turn(self, priority)

    async def acquire(self, priority: int) -> None:
        if self._held:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was ours already: pass it on
                    self.release()
                raise
        self._held = True

    def release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)  # stays held: it passes straight to the next
                return
        self._held = False


class _Turn(NamedTuple):
    """Somebody's turn, from when it comes to its end."""

    lock: PriorityLock
    priority: int

    async def __aenter__(self) -> None:
        await self.lock.acquire(self.priority)

    async def __aexit__(self, *_: object) -> None:
        self.lock.release()
