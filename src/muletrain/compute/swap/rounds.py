"""Rounds are formed from the waiting calls: the most urgent one, and all of the same kind and step, up to a bound.

At an idle device, a call waits a moment while fewer than C calls wait: each round loads the whole stage. The calls of a
round are settled together: a caller that resumed counts, a cancelled one does not, and the round's gradient becomes the
accumulator's only after all callers have done either.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muletrain.compute.slot import Turn
    from muletrain.compute.swap.passage import Passage

PATIENCE, PATIENCE_MAX_S, PATIENCE_FIRST_S = 0.1, 2.0, 0.05
"""A round waits for more calls for this share of the last round's time, at most so long, and so long at first [s]."""
ARRIVING_S = 0.01
"""A round that has enough calls waits on while each next one comes within this time [s]."""


@dataclass(eq=False)
class Call:
    """One waiting call. ``kind``: which calls are computed together; ``p`` None: computed alone."""

    kind: str
    turn: Turn
    order: int
    work: Callable[[Sequence[Passage]], Awaitable[None]]
    p: Passage | None
    done: asyncio.Future[None]
    round: Round | None = None

    @property
    def urgency(self) -> tuple[int, int]:
        return self.turn.priority, self.order

    def together(self, other: Call) -> bool:
        """Can both be in one round?"""
        if self.p is None or other.p is None:
            return self is other
        return (self.kind, self.p.mb.step) == (other.kind, other.p.mb.step)


@dataclass(eq=False)
class Round:
    """Calls that are computed together. ``over``: settled which calls count."""

    calls: list[Call]
    counted: set[Call] = field(default_factory=set)
    settled: set[Call] = field(default_factory=set)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Rounds:
    """Runs one round at a time. Only for the event loop's thread."""

    def __init__(self, enough: int, most: int, settle: Callable[[Round], None]) -> None:
        """``enough``: C; ``most``: calls of a round; ``settle``: told once about each round that is over."""
        self._enough, self._most, self._settle = enough, most, settle
        self._waiting: list[Call] = []
        self._order = itertools.count()
        self._arrived: asyncio.Event | None = None
        self._worker: asyncio.Task[None] | None = None
        self._open: set[Round] = set()
        self._last_s = PATIENCE_FIRST_S / PATIENCE
        self.rounds = self.microbatches = 0
        self._closed = False

    async def call(
        self, kind: str, turn: Turn, work: Callable[[Sequence[Passage]], Awaitable[None]], p: Passage | None = None
    ) -> None:
        """Returns when ``work`` on ``p`` (and the rest of the round) is done. Raises the errors of ``work`` and
        ``turn.begins``."""
        if self._closed:
            raise asyncio.CancelledError
        call = Call(kind, turn, next(self._order), work, p, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._arrived is not None:
            self._arrived.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            await call.done
        except BaseException:
            if call in self._waiting:
                self._waiting.remove(call)
            if p is not None:
                p.dropped = True
            self._resumed(call, counts=False)
            raise
        self._resumed(call, counts=True)

    def _resumed(self, call: Call, *, counts: bool) -> None:
        if (round_ := call.round) is None:
            return
        round_.settled.add(call)
        if counts:
            round_.counted.add(call)
        if len(round_.settled) == len(round_.calls):
            self._open.discard(round_)
            self._settle(round_)
            round_.over.set()

    async def settled(self) -> None:
        """Returns when every finished round is settled."""
        for round_ in [r for r in self._open if all(c.done.done() for c in r.calls)]:
            await round_.over.wait()

    async def _work(self) -> None:
        try:
            await self._work_off()
        except Exception as e:  # nobody may wait for ever
            for call in [c for c in self._waiting if not c.done.done()]:
                call.done.set_exception(e)

    async def _work_off(self) -> None:
        while self._waiting:
            calls = await self._begun(await self._chosen())
            if not calls:
                continue
            round_ = Round(calls)
            self._open.add(round_)
            for call in calls:
                call.round = round_
            begin = asyncio.get_running_loop().time()
            await self._run(round_)
            if calls[0].p is not None:
                self._last_s = asyncio.get_running_loop().time() - begin
                self.rounds, self.microbatches = self.rounds + 1, self.microbatches + len(calls)
                await round_.over.wait()  # the next round needs room for a gradient

    async def _run(self, round_: Round) -> None:
        passages = [c.p for c in round_.calls if c.p is not None]
        try:
            await round_.calls[0].work(passages)
        except Exception as e:
            for call in round_.calls:
                if not call.done.done():
                    call.done.set_exception(e)
        for call in round_.calls:
            if not call.done.done():
                call.done.set_result(None)

    async def _chosen(self) -> list[Call]:
        """The calls of the next round: waits for more of the most urgent one's kind while few are there."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(PATIENCE * self._last_s, PATIENCE_MAX_S)
        while self._waiting:
            first = min(self._waiting, key=lambda c: c.urgency)
            calls = sorted((c for c in self._waiting if first.together(c)), key=lambda c: c.urgency)
            left_s = until - loop.time()
            if first.p is None or len(calls) >= self._most or left_s <= 0:
                return calls[: self._most]
            if len(calls) >= self._enough:
                left_s = min(left_s, ARRIVING_S)
            self._arrived = asyncio.Event()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrived.wait()
            except TimeoutError:
                until = loop.time()
        return []

    async def _begun(self, calls: list[Call]) -> list[Call]:
        """The ``calls`` that pass the check."""
        begun = []
        for call in calls:
            if call not in self._waiting:  # cancelled meanwhile
                continue
            self._waiting.remove(call)
            try:
                call.turn.begins()
            except Exception as e:
                if not call.done.done():
                    call.done.set_exception(e)
                continue
            begun.append(call)
        return begun

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
        self._closed = True
        for call in (*self._waiting, *(call for round_ in self._open for call in round_.calls)):
            call.done.cancel()
