"""Microbatches that are in no accumulator of the stage, or in two, are run again for this stage alone (CONTRIBUTING,
"How a step goes", 3)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from typing import TYPE_CHECKING

from muletrain.errors import DeadlineExceeded, MuletrainError
from muletrain.events import MicrobatchesRerun
from muletrain.runtime.core.times import AGAIN_S, GONE_S
from muletrain.runtime.core.waiting import MAX_SILENCE, Awaited
from muletrain.runtime.microbatch.messages import Gap
from muletrain.runtime.step.exchange import MAX_ASKED
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Collection

    from muletrain.network.base import PeerId
    from muletrain.policy.cover import Cover
    from muletrain.runtime.members.row import Seal
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.step.company import Company
    from muletrain.runtime.step.exchange import Exchange
    from muletrain.runtime.step.state import Lasting, StepState

OF_WAIT = 0.02
"""Share of the time waited that passes between two questions to the replicas whether the gaps are filled, so that a slow
stage is not asked thousands of times. At first the pause is short, because all replicas wait for that."""


class Reruns:
    """Has missing microbatches of one step run again; each step has a new one."""

    def __init__(self, lasting: Lasting, state: StepState, company: Company, exchange: Exchange) -> None:
        self._ctx, self._waits, self._lessons = lasting.ctx, lasting.waits, lasting.lessons
        self._state, self._company, self._exchange = state, company, exchange
        self._work, self._ledger = state.work, state.work.ledger
        self._known_down = self._down()
        self._turn = 0
        """Questions about gaps so far."""
        self._filled_most = 0
        """Largest number of the last gaps that some replica held."""
        self._asked: Gap | None = None
        """The last gaps that trainers were told of."""
        self._told: set[PeerId] = set()
        """The trainers told of ``_asked``."""
        self._claims: dict[PeerId, frozenset[int]] = {}
        """The last gaps that each replica claimed to hold. We stopped waiting because of that; the replica's next seal
        shows whether the claim was true."""

    def _down(self) -> set[PeerId]:
        return {p for p in self._ctx.roster.replicas() if not self._ctx.roster.is_alive(p)}

    async def drained(self, work: InFlightStep | None = None) -> None:
        """Wait until no microbatch of the step (or of ``work``) is being accumulated, however long our device works on
        earlier microbatches. Ends after ``microbatch/dispatcher._try``."""
        ledger, ctx = self._ledger if work is None else work.ledger, self._ctx

        async def look() -> None:
            if ctx.meter.pulse.goes_on_s(ctx.clock.now(), ctx.news.patience_s) > 0:
                self._waits.came_on()

        await self._waits.until(lambda: not ledger.in_flight, self._lessons.seal, "running microbatches", look)

    async def rerun_lost(self) -> None:
        """Have a dead replica's microbatches run again while the rest of the step goes on. The replica must be gone for
        sure: a silent replica may come back with its accumulator, and one of two accumulators would be discarded."""
        ctx, state, down = self._ctx, self._state, self._down()
        new, self._known_down = down - self._known_down, down
        if not any(await asyncio.gather(*(ctx.detector.is_gone(p, state.lineage, state.step) for p in sorted(new)))):
            return
        known = self._ledger.accumulated | self._work.serving
        for row in await self._exchange.ask_replicas(live=True):
            known |= {*row.accumulated, *row.in_flight} if row.current else set()
        await self._tell_trainers(frozenset(range(ctx.plan.microbatches)) - known, early=True)

    def believe_less(self, seals: dict[PeerId, Seal]) -> None:
        """Trust replicas less that claimed missing microbatches and then sealed without them."""
        false = [m for m, claimed in self._claims.items() if m in seals and claimed - {*seals[m].indices}]
        self._company.note(false)
        self._claims = {}

    def drop(self, gaps: Collection[int] | None = None) -> None:
        """Empty our accumulator. ``gaps``: see ``Ledger.reopen``."""
        self._ctx.compute.clear(self._state.step)
        self._ledger.reopen(keep=False, gaps=gaps)

    async def refill(self, cover: Cover, attempt: int, left_out: tuple[PeerId, ...]) -> None:
        """Keep our accumulator if chosen, and have the gaps run again. The microbatches of members ``left_out`` do not
        count."""
        ctx, state, gaps = self._ctx, self._state, frozenset(cover.gaps)
        if ctx.net.peer_id in cover.chosen:
            self._ledger.reopen(keep=True, gaps=gaps)
        else:
            self.drop(gaps)
        unusual, stage = ", ".join(sorted(map(ctx.roster.name, left_out))), ctx.roster.own.stage
        ctx.emit(MicrobatchesRerun(step=state.step + 1, stage=stage, microbatches=len(gaps), unusual=unusual))
        await self._run(gaps, attempt, left_out)

    async def _filled(self, gaps: frozenset[int], attempt: int, left_out: tuple[PeerId, ...], begin: float) -> None:
        """Wait until no replica misses the gaps, by each replica's own word: replicas tell each other which gaps they
        filled, and ask now and then, since a word may be lost. A replica that announced another attempt found the gaps
        filled, or its company has changed: then we try again, too. Ends within the deadline of ``step/reruns._run``,
        which asks again."""
        ctx, state = self._ctx, self._state
        assert state.announced is not None  # the gaps follow from our seal
        told, asked_s, known = frozenset[int](), -math.inf, frozenset[str]()
        while True:
            await self._tell_newcomers()
            ctx.news.changed.clear()
            with_us, now_s = {*self._company.members()} - {*left_out}, ctx.clock.now()
            live = frozenset(filter(ctx.roster.is_alive, ctx.roster.replicas()))
            if not live <= known or now_s - asked_s >= max(AGAIN_S, OF_WAIT * (now_s - begin)):
                asked_s, known, self._turn = now_s, live, self._turn + 1  # one that is back may hold the gaps
                asked = ctx.roster.spread(MAX_ASKED, self._turn, tuple(sorted(live)))
                answers = zip(asked, await asyncio.gather(*map(self._exchange.ask, asked)), strict=True)
                state.filled.update((p, frozenset(row.accumulated)) for p, row in answers if row and row.current)
            if own := (gaps & self._ledger.accumulated) - told:
                told |= own
                self._exchange.tell(tuple(sorted(live)), filled=tuple(sorted(told)))
            claims = {p: gaps & state.filled.get(p, frozenset()) for p in with_us}
            filled = told.union(*claims.values())
            if len(filled) > self._filled_most:
                self._filled_most = len(filled)
                self._waits.grew()
            alone = self._ledger.barred and not all(map(ctx.roster.is_alive, state.announced.members))
            later = state.latest_attempt({*state.announced.members, *with_us}) > attempt
            if alone or gaps <= filled or later:
                self._claims = claims
                return
            self._company.check()  # raises LeftOut: replicas that go on without us may hold the microbatches
            with contextlib.suppress(DeadlineExceeded):
                await ctx.clock.deadline(ctx.news.changed.wait(), AGAIN_S, "news of gaps")

    async def _run(self, gaps: frozenset[int], attempt: int, left_out: tuple[PeerId, ...]) -> None:
        """Have the trainers run ``gaps`` for this stage alone, until all are filled. Raises MuletrainError when the
        gaps are never filled; Behind and LeftOut. Repeat the request to the responsible trainers, as their view may
        have changed. Further trainers would begin the same work, so their turn comes only when no peer works on the
        gaps any more and no trainer waits for room for them, or when none was filled for as long as a full queue takes.
        Ends after ``microbatch/dispatcher._from`` and ``microbatch/position.still_missing`` of a trainer, which repairs
        the gaps."""
        ctx, begin = self._ctx, self._ctx.clock.now()
        self._filled_most, turn, filled, since_s = 0, 0, 0, begin
        what = f"{plural(len(gaps), 'microbatch')} that {'is' if len(gaps) == 1 else 'are'} run again"
        present = Awaited(what, begin, self._exchange.at_work, lambda: "asks more trainers")
        for tries in itertools.count(1):
            await self._tell_trainers(
                gaps - self._ledger.accumulated, turn=turn, without=self._company.without(left_out)
            )
            limit_s = self._lessons.step.seconds(tries - 1, longest_s=GONE_S / 2)
            due_s = ctx.clock.now() + limit_s
            try:
                with ctx.news.waits(present):
                    return await ctx.clock.deadline(
                        self._waits.watched(self._filled(gaps, attempt, left_out, begin)), limit_s, what
                    )
            except DeadlineExceeded:
                self._waits.missed(due_s)
                # a device that hangs keeps microbatches for up to 300 s before its peer is left out (``watchdog``)
                if tries >= MAX_SILENCE and self._waits.hopeless(begin, times=2):
                    break
                answers = await self._exchange.ask_everyone()
            under_way = self._ledger.in_flight.union(*({*p.in_flight, *p.given} for p in answers if not p.late))
            now_s = ctx.clock.now()
            if self._filled_most > filled:
                filled, since_s = self._filled_most, now_s
            elif not gaps & under_way or now_s - since_s >= ctx.queue_s():
                turn, since_s = turn + 1, now_s
        raise MuletrainError(
            f"step {self._state.step + 1}: {len(gaps)} missing microbatches were not run again; {ctx.who_is_there()}"
        )

    async def _tell_trainers(
        self,
        indices: frozenset[int],
        *,
        turn: int = 0,
        early: bool = False,
        without: tuple[PeerId, ...] = (),
    ) -> None:
        ctx, state = self._ctx, self._state
        gap = Gap(
            lineage=state.lineage,
            step=state.step,
            stage=ctx.roster.own.stage,
            turn=turn,
            early=early,
            indices=tuple(sorted(indices)),
            without=without,
        )
        trainers = ctx.roster.trainers()
        self._asked, self._told = None if early else gap, {*trainers}
        await ctx.tell(trainers, gap)

    async def _tell_newcomers(self) -> None:
        """Gaps of the last request may fall to trainers that came, or came back, meanwhile."""
        live = {*self._ctx.roster.trainers()}
        new, self._told = tuple(sorted(live - self._told)), live
        if new and self._asked is not None:
            await self._ctx.tell(new, self._asked)
