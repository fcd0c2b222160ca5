"""A peer reduces the whole mean gradient of its stage with the other replicas, or takes the gradient from a holder
(CONTRIBUTING, "How a step goes", 4). A holder keeps and attests to the gradient."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from muletrain.errors import MuletrainError
from muletrain.events import AveragingFailed, RoundGivenUp
from muletrain.runtime.averaging.mean_gradient import MeanGradient, fetch_gradient, tied_content
from muletrain.runtime.averaging.rounds import Round, RoundFailed
from muletrain.runtime.core.times import pause_s
from muletrain.runtime.core.waiting import Awaited
from muletrain.runtime.members.row import RoundEntry
from muletrain.runtime.microbatch.position import Behind
from muletrain.runtime.step.company import LeftOut
from muletrain.runtime.step.record import same_facts
from muletrain.runtime.step.state import MAX_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.row import Seal
    from muletrain.runtime.step.agreement import RoundAgreement
    from muletrain.runtime.step.company import Company
    from muletrain.runtime.step.exchange import Exchange
    from muletrain.runtime.step.reruns import Reruns
    from muletrain.runtime.step.state import Lasting, StepState

T = TypeVar("T")
SWIFT_TRIES = 4
"""Attempts at a round without a pause in between: gaps are run again, a member dies."""


class _HeldElsewhere(Exception):
    """A replica holds a round of this step: take its gradient instead of waiting."""


class Reduction:
    """Gets the mean gradient of one step; each step has a new one."""

    def __init__(
        self,
        lasting: Lasting,
        state: StepState,
        company: Company,
        exchange: Exchange,
        reruns: Reruns,
        agreement: RoundAgreement,
    ) -> None:
        self._lasting, self._ctx, self._position = lasting, lasting.ctx, lasting.position
        self._waits, self._lessons = lasting.waits, lasting.lessons
        self._state, self._company, self._exchange = state, company, exchange
        self._reruns, self._agreement, self._work = reruns, agreement, state.work
        self._gathering = False
        """We are receiving a gradient."""
        self._reducing: Seal | None = None
        self._overflowed = False
        """Finite accumulators gave a mean that is not finite."""
        self._held_at = lasting.ctx.clock.now()
        """When we got the gradient: at the latest when this step began here."""

    async def hold(self, weights: bytes) -> MeanGradient:
        """Get our stage's mean gradient by a reduction with the other replicas, or from a holder. ``weights``: digest
        of the weights used for the gradient. Raises Behind and MuletrainError. Ends after ``microbatch/trainer._run``
        of all trainers, then ``step/reruns._run``, ``step/agreement._announce`` and ``averaging/averager._chunk`` of
        this stage."""
        if self._state.gradient is not None:
            await self._begin_ahead()
            return self._state.gradient
        for tries in itertools.count():
            try:
                await self._waits.until(
                    lambda: self._work.all_completed,
                    self._lessons.step,
                    "microbatches to go through",
                    self._ask_progress,
                    self._ctx.meter.pulse,
                    lambda: len(self._work.losses) + len(self._work.ledger.accumulated),
                    whom=self._exchange.at_work,
                )
                await self._begin_ahead()
                gradient = await self._reduce(weights)
                break
            except _HeldElsewhere:
                await self._begin_ahead()
                holders = [e.holder for e in self._state.holders()]
                if (taken := await self._gathered(self._take_any())) is not None:
                    self._exchange.abstain()  # not before: a holder that gives nobody its gradient would decide alone
                    gradient = taken
                    break
                self._company.note(holders)
                await self._ctx.clock.sleep(pause_s(tries))
        self._held_at = self._ctx.clock.now()
        self._state.hold(gradient)
        return gradient

    async def take(self, entry: RoundEntry) -> bool:
        """Get the gradient of the agreed round ``entry`` from a holder. False if no peer gives the gradient (any
        more)."""
        if self._state.gradient is None or not same_facts(self._state.gradient.entry, entry):
            holders = self._state.builder.holders(entry.for_record())
            replicas = sorted(self._ctx.roster.replicas(), key=lambda p: p not in holders)
            gradient = await self._fetch(entry, replicas)
            if gradient is None:
                return False
            self._state.hold(gradient)
        return True

    # While we wait ----------------------------------------------------------------------------------------------------

    def look_around(self) -> None:
        """Check during every wait whether the wait still makes sense. A holder of a round attests to that round and
        never tries another. Raises _HeldElsewhere when another replica holds a round; RoundFailed when a member of our
        round tries another; Behind when the run agreed on a gradient that we do not hold."""
        state, roster = self._state, self._ctx.roster
        if self._position.away:
            return
        if self._position.interrupted is not None:
            raise self._position.interrupted
        if (seal := self._reducing) is not None and state.latest_attempt(seal.members) > seal.attempt:
            self._company.note_outran(seal)
            raise RoundFailed(f"averaging step {state.step + 1}: another attempt has begun")
        self.attest()  # again, where a member is lost
        self._exchange.speak()
        self._exchange.make_sure()
        held = None if state.gradient is None else state.gradient.for_record
        if (record := state.builder.record()) is not None and held != record.stages[roster.own.stage]:
            raise Behind(
                f"step {state.step + 1}: the run agreed on a gradient of stage {roster.own.stage} that this peer does not hold"
            )
        if state.gradient is None and any(self._company.may_average_with(e.holder) for e in state.holders()):
            lost = self._reducing is not None and not all(map(roster.is_alive, self._reducing.members))
            if lost or not self._gathering:
                raise _HeldElsewhere

    def attest(self) -> None:
        """Tell that we hold our gradient's round, if we do. Repeat this when another member is marked down. A member that
        is alive after all applies our round on hearing of the record. A member that answers, but does not attest for
        longer than a round takes, may never attest, and is given up, too."""
        ctx, state, builder, gradient = self._ctx, self._state, self._state.builder, self._state.gradient
        if gradient is None:
            return
        entry = gradient.entry
        overdue = ctx.clock.now() - self._held_at >= self._lessons.averaging.seconds()
        me, alive, known = ctx.net.peer_id, ctx.roster.is_alive, builder.holders(gradient.for_record)
        lacking = {m for m in entry.members if m != me and m not in known}
        without = {m for m in lacking if overdue or not alive(m)}
        if state.attested is not None:
            if without <= set(state.attested.without):
                return
            without |= set(state.attested.without)
            self._company.note_overdue(m for m in without if alive(m))
        state.attested = entry.model_copy(update={"holder": me, "without": tuple(sorted(without))})
        builder.add(state.attested)
        self._exchange.state(state.audience(), entry=state.attested)

    async def ask_entries(self) -> None:
        """Ask for round entries while we wait for the record."""
        await self._exchange.ask_everyone()
        self._give_way()

    def _give_way(self) -> None:
        """If we hold a round, but most of our replicas try another without us, empty our accumulator, so that they can
        repeat its microbatches. We still attest to our round, in case it counts after all."""
        ctx, state, work = self._ctx, self._state, self._work
        if state.gradient is None or work.gave_way or work.ledger.in_flight or state.builder.record() is not None:
            return
        me, live = ctx.net.peer_id, ctx.roster.stage(ctx.roster.own.stage)
        without_us = [m for m, view in self._company.views().items() if m in live and me not in view.members]
        if 2 * len({*without_us} - state.committed()) > len(live):
            ctx.emit(RoundGivenUp(step=state.step + 1))
            work.gave_way = True
            ctx.compute.clear(state.step)
            work.ledger.reopen(keep=False)
            work.ledger.seal()

    async def _ask_progress(self) -> None:
        """A wait takes long, or a peer died: ask for present peers and finished microbatches. Take over the rest of dead
        trainers; if the step is late, also of trainers that give out nothing. Have the microbatches of dead replicas run
        again."""
        await self._exchange.ask_everyone()
        now, due_s = self._ctx.clock.now(), self._lessons.step.seconds()
        late = now - self._position.begun >= due_s and self._ctx.meter.pulse.goes_on_s(now, due_s / 2) <= 0
        self._lasting.microbatches.take_over_orphans(self._work, late=late)
        await self._reruns.rerun_lost()

    async def _begin_ahead(self) -> None:
        """Under delayed updates, begin to compute the next step during the agreement on this step."""
        plan, position = self._ctx.plan, self._position
        last = position.step + 1 == plan.steps or self._lasting.departure.stop_requested
        if not plan.delayed or position.ahead is not None or last:
            return
        ahead = position.begin_ahead()
        if self._lasting.departure.announced():
            ahead.ledger.seal()
        await self._lasting.begin_ahead(ahead)

    # Taking it from others --------------------------------------------------------------------------------------------

    async def _take_any(self) -> MeanGradient | None:
        """Take the gradient of any round that a live replica holds. Rounds held by most of our company come first."""
        rounds = defaultdict[bytes, list[RoundEntry]](list)
        for entry in self._state.holders():
            rounds[entry.round].append(entry)
        for entries in sorted(rounds.values(), key=lambda r: -sum(self._company.may_average_with(e.holder) for e in r)):
            if (gradient := await self._fetch(entries[0], [e.holder for e in entries])) is not None:
                return gradient
        return None

    async def _fetch(self, entry: RoundEntry, holders: list[PeerId]) -> MeanGradient | None:
        """Take the gradient of ``entry`` from ``holders``. Holders outside our company come last, because their chunks
        may not arrive."""
        with_us = [p for p in holders if self._company.may_average_with(p)]
        for asked in (with_us, [p for p in holders if p not in with_us]):
            gradient = await fetch_gradient(self._ctx, self._lasting.downloader, entry, asked)
            if gradient is not None:
                return gradient
        return None

    # Reducing it ------------------------------------------------------------------------------------------------------

    async def _reduce(self, weights: bytes) -> MeanGradient:
        """Make attempts until one succeeds. Raises _HeldElsewhere when another replica succeeded first."""
        ctx, step, averager = self._ctx, self._state.step, self._state.averager
        for tries in range(MAX_ATTEMPTS):
            if tries >= SWIFT_TRIES:  # the cause lasts longer
                await self._waits.watched(ctx.clock.sleep(pause_s(tries - SWIFT_TRIES)))
            attempt = self._agreement.next_attempt()
            averager.begin()
            try:
                round_ = await self._agreement.agree(attempt, weights)
                if round_ is None:
                    continue
                return await self._average(round_)
            except RoundFailed as e:
                ctx.emit(AveragingFailed(step=step + 1, attempt=attempt, reason=str(e)))
                if ctx.plan.alone:
                    self._reruns.drop()  # the accumulator became the mean
                self._work.ledger.reopen(keep=True)
                self._company.note_silent(averager.silent())
                self._company.note(averager.gone())
                await self._exchange.ask_replicas(live=True)
            except LeftOut:
                await self._agreement.look_on()
        raise MuletrainError(
            f"step {step + 1}: {MAX_ATTEMPTS} attempts to average the stage failed; see the events for why"
        )

    async def _average(self, round_: Round) -> MeanGradient:
        """Reduce one round. Raises RoundFailed."""
        ctx, averager, begin = self._ctx, self._state.averager, self._ctx.clock.now()
        self._reducing, self._work.round = self._state.announced, round_.id
        self._work.counted[round_.id] = len(self._work.ledger.accumulated)  # sealed
        try:
            accumulator = await self._waits.watched(ctx.compute.gradient(round_.step))
            then = f"tries another round {self._lessons.averaging.seconds():.0f} s after a member's last chunk"
            with ctx.news.waits(Awaited("chunks of the gradient", begin, averager.owing, lambda: then)):
                gradient, shards = await self._gathered(averager.reduce(round_, accumulator))
        finally:
            self._reducing = None
        took = ctx.clock.now() - begin
        ctx.meter.stats.averaging_s += took
        self._lessons.averaging.measured(took)
        ctx.worked("average", "reduce", begin, round_.step)
        if round_.finite and not self._overflowed and not all(s.finite for s in shards):
            self._overflowed = True  # all members see the overflow; a second overflow is the codec's limit
            raise RoundFailed(
                "finite accumulators gave a mean that is not finite: all members check their accumulators"
            )
        entry = RoundEntry(
            lineage=round_.lineage,
            step=round_.step,
            stage=round_.stage,
            round=round_.id,
            members=round_.members,
            shards=shards,
            stop=round_.stop,
            leaves=round_.leaves,
            expelled=round_.expelled,
            tied=await tied_content(ctx, round_.stage, gradient),
            holder=ctx.net.peer_id,
        )
        return MeanGradient(entry, gradient)

    async def _gathered(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``, which receives a gradient. Other holders do not interrupt ``work`` meanwhile."""
        self._gathering = True
        try:
            return await self._waits.watched(work)
        finally:
            self._gathering = False
