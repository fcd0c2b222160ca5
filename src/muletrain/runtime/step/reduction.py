"""How a peer comes to hold the whole mean gradient of its stage: it reduces it with the other replicas, or takes it
from one that holds it (DESIGN "How a step goes", 6). Whoever holds it says so, and keeps it for those that don't."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from muletrain.errors import MuletrainError
from muletrain.events import AveragingFailed, RoundGivenUp
from muletrain.policy.deadline import backoff_s
from muletrain.runtime.microbatch.position import Behind
from muletrain.runtime.step.company import LeftOut
from muletrain.runtime.step.gradient_log import MeanGradient, fetch_gradient
from muletrain.runtime.step.messages import RoundEntry
from muletrain.runtime.step.record import alike
from muletrain.runtime.step.rounds import Round, RoundFailed
from muletrain.runtime.step.state import MAX_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.core.waiting import Waits
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.leaving import Departure
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.step.agreement import RoundAgreement
    from muletrain.runtime.step.company import Company
    from muletrain.runtime.step.exchange import Exchange
    from muletrain.runtime.step.messages import Seal, ShardFacts
    from muletrain.runtime.step.reruns import Deadlines, Reruns
    from muletrain.runtime.step.state import StepState
    from muletrain.runtime.transfer.blocks import Downloader

T = TypeVar("T")
SWIFT_TRIES = 4
"""Attempts at a round that follow each other at once: gaps are run again, a member dies."""
PAUSE_S, PAUSE_MAX_S = 0.05, 2.0
"""Seconds between the attempts after these, and between two tries to take a gradient that others hold; doubles."""
FAILED_S, FAILED_MAX_S = 0.2, 10.0
"""Seconds after the second attempt whose averaging failed; doubles."""


class Trainers(Protocol):
    """Who gives out the microbatches of this peer (``peer``)."""

    def take_over_orphans(self, work: InFlightStep, *, late: bool) -> None:
        """Microbatches of ``work`` are not through: after a death, or (``late``) although nothing came for as long as a
        step takes."""
        ...

    async def begin_ahead(self, work: InFlightStep) -> None:
        """From now on ``work``, the next step, is computed, too."""
        ...


class _HeldElsewhere(Exception):
    """A replica holds a round of this step."""


class Reduction:
    """Of one step, and made anew for each."""

    def __init__(
        self,
        ctx: Context,
        position: Position,
        departure: Departure,
        trainers: Trainers,
        state: StepState,
        company: Company,
        exchange: Exchange,
        reruns: Reruns,
        agreement: RoundAgreement,
        waits: Waits,
        deadlines: Deadlines,
        downloader: Downloader,
    ) -> None:
        self._ctx, self._position, self._departure, self._trainers = ctx, position, departure, trainers
        self._state, self._company, self._exchange = state, company, exchange
        self._reruns, self._agreement, self._waits, self._deadlines = reruns, agreement, waits, deadlines
        self._downloader = downloader
        self._work = state.work
        self._gathering = False
        """A gradient is on its way to us."""
        self._reducing: Seal | None = None
        self._overflowed = False
        """Finite gradients came to a mean that is not."""
        self._rivals: set[bytes] = set()
        """Other rounds of our stage that we knew of when we attested to ours."""
        self._attested_at: tuple[bytes, int, int] | None = None
        """The round that we attested to, and what was known then."""

    async def hold(self, weights: bytes) -> MeanGradient:
        """This stage's mean gradient: reduced with the other replicas (from ``weights``, by their digest), or taken
        from one that holds it, or what we held of this step before our weights were loaded. Raises Behind and
        MuletrainError."""
        if self._state.gradient is not None:
            await self._begin_ahead()
            return self._state.gradient
        for tries in itertools.count():
            try:
                await self._waits.until(
                    lambda: self._work.all_completed,
                    self._deadlines.step,
                    "microbatches to go through",
                    self._ask_progress,
                    self._ctx.meter.pulse,
                )
                await self._begin_ahead()
                gradient = await self._reduce(weights)
                break
            except _HeldElsewhere:
                self._exchange.abstain()
                await self._begin_ahead()
                if (taken := await self._gathered(self._take_any())) is not None:
                    gradient = taken
                    break
                await self._ctx.clock.sleep(backoff_s(tries, PAUSE_S, PAUSE_MAX_S))
        self._state.hold(gradient)
        return gradient

    async def take(self, entry: RoundEntry) -> bool:
        """Hold the gradient of the round that was agreed on, from whoever has it. False where nobody does (any
        more)."""
        if self._state.gradient is None or not alike(self._state.gradient.entry, entry):
            holders = self._state.builder.holders(entry)
            replicas = sorted(self._ctx.roster.replicas(), key=lambda p: p not in holders)
            gradient = await self._fetch(entry, replicas)
            if gradient is None:
                return False
            self._state.hold(gradient)
        return True

    # While we wait ----------------------------------------------------------------------------------------------------

    def look_around(self) -> None:
        """During every wait. Whoever holds a round never tries another: it says so, and whom it goes on without.
        Whoever holds none takes it from one that does. Raises _HeldElsewhere; RoundFailed when a member of the round
        being reduced tries another; Behind when the run agreed on what we do not hold."""
        state, roster = self._state, self._ctx.roster
        if self._position.away:
            return
        if self._position.interrupted is not None:
            raise self._position.interrupted
        if self._reducing is not None and state.latest_attempt(self._reducing.members) > self._reducing.attempt:
            raise RoundFailed(f"averaging step {state.step}: another attempt has begun")
        if state.gradient is not None:
            self._attest(state.gradient.entry)
        if state.builder.record() is not None:
            entry = state.builder.agreed()[roster.own.stage]
            if state.gradient is None or not alike(state.gradient.entry, entry):
                raise Behind(
                    f"step {state.step}: the run agreed on a gradient of stage {roster.own.stage} that this peer does not hold"
                )
        if state.gradient is None and state.held_by_a_replica():
            lost = self._reducing is not None and not all(map(roster.is_alive, self._reducing.members))
            if lost or not self._gathering:
                raise _HeldElsewhere

    def _attest(self, entry: RoundEntry) -> None:
        """Tell everyone that we hold the round; again when another of its members is marked down, or when we hear of
        another round of our stage: whoever knew only one of them would have another record. A member that is alive all
        the same applies what we hold, as soon as it hears of the record."""
        ctx, state, builder = self._ctx, self._state, self._state.builder
        seen = entry.round, builder.known[entry.stage], ctx.roster.version
        if self._attested_at == seen:
            return
        self._attested_at = seen
        me, alive, known = ctx.net.peer_id, ctx.roster.is_alive, builder.holders(entry)
        without = {m for m in entry.members if m != me and m not in known and not alive(m)}
        others = {r.facts.round for r in builder.rounds(entry.stage)} - {entry.round}
        if state.attested is not None:
            if without <= set(state.attested.without) and others <= self._rivals:
                return
            without |= set(state.attested.without)
        self._rivals = others
        state.attested = entry.model_copy(update={"holder": me, "without": tuple(sorted(without))})
        builder.add(state.attested)
        ctx.spawn(ctx.tell(ctx.roster.everyone(), state.attested), "entry")  # a frozen peer must not hold us up

    async def ask_entries(self) -> None:
        """While we wait for the record."""
        await self._exchange.ask_entries()
        self._give_way()

    def _give_way(self) -> None:
        """If we hold a round, and most of our replicas try another without us: have them run again what we accumulated.
        We go on attesting to what we hold: should it count after all, they take it."""
        ctx, state, work = self._ctx, self._state, self._work
        if state.gradient is None or work.gave_way or work.ledger.in_flight or state.builder.record() is not None:
            return
        me, live = ctx.net.peer_id, ctx.roster.stage(ctx.roster.own.stage)
        without_us = [m for m, view in self._company.views().items() if m in live and me not in view.members]
        if 2 * sum(not state.is_committed(m) for m in without_us) > len(live):
            ctx.emit(RoundGivenUp(step=state.step))
            work.gave_way = True
            self._reruns.drop()
            work.ledger.seal()

    async def _ask_progress(self) -> None:
        """Nothing moved for long, or somebody died: find out who is there, and what is through."""
        await asyncio.gather(self._ask_what_is_through(), self._reruns.mourn())

    async def _ask_what_is_through(self) -> None:
        """A dead trainer's microbatches fall to the others; when the step is late, those of one that gives out nothing,
        too."""
        await self._exchange.ask_everyone()
        now, due_s = self._ctx.clock.now(), self._deadlines.step.seconds()
        late = now - self._position.begun >= due_s and self._ctx.meter.pulse.goes_on_s(now, due_s / 2) <= 0
        self._trainers.take_over_orphans(self._work, late=late)

    async def _begin_ahead(self) -> None:
        """Under delayed updates the next step is computed while this one is agreed on."""
        plan, position = self._ctx.plan, self._position
        last = position.step + 1 == plan.steps or self._departure.stop_requested
        if not plan.delayed or position.ahead is not None or last:
            return
        ahead = position.begin_ahead()
        if self._departure.announced():
            ahead.ledger.seal()
        await self._trainers.begin_ahead(ahead)

    # Taking it from others --------------------------------------------------------------------------------------------

    async def _take_any(self) -> MeanGradient | None:
        """Of any round that a live replica holds: first of those that most of the replicas that we average with hold."""
        rounds = defaultdict[bytes, list[RoundEntry]](list)
        for entry in self._state.holders():
            rounds[entry.round].append(entry)
        for entries in sorted(rounds.values(), key=lambda r: -sum(self._company.averages(e.holder) for e in r)):
            if (gradient := await self._fetch(entries[0], [e.holder for e in entries])) is not None:
                return gradient
        return None

    async def _fetch(self, entry: RoundEntry, holders: list[PeerId]) -> MeanGradient | None:
        """Nothing may come from those that we average nothing with: they are asked last."""
        with_us = [p for p in holders if self._company.averages(p)]
        for asked in (with_us, [p for p in holders if p not in with_us]):
            gradient = await fetch_gradient(self._ctx, self._downloader, entry, asked)
            if gradient is not None:
                if self._ctx.net.peer_id not in entry.members:  # what we accumulated is not in it
                    self._work.uncount()
                return gradient
        return None

    # Reducing it ------------------------------------------------------------------------------------------------------

    async def _reduce(self, weights: bytes) -> MeanGradient:
        """Attempts, until one succeeds or somebody else's did (_HeldElsewhere)."""
        ctx, step, averager, failed = self._ctx, self._state.step, self._state.averager, 0
        for tries in range(MAX_ATTEMPTS):
            if tries >= SWIFT_TRIES:  # what keeps us from agreeing takes longer
                await self._pause(backoff_s(tries - SWIFT_TRIES, PAUSE_S, PAUSE_MAX_S))
            attempt = self._agreement.next_attempt()
            averager.begin()
            try:
                round_ = await self._agreement.agree(attempt, weights)
                if round_ is None:
                    continue
                return await self._average(round_)
            except RoundFailed as e:
                ctx.emit(AveragingFailed(step=step, attempt=attempt, reason=str(e)))
                self._work.ledger.reopen(keep=True)
                self._company.silent(averager.silent())
                self._company.untrue(averager.absent())
                failed += 1
                if failed > 1:  # each attempt sends the whole gradient
                    await self._pause(backoff_s(failed - 2, FAILED_S, FAILED_MAX_S))
                await self._exchange.ask_holders()
            except LeftOut:
                await self._agreement.look_on()
        raise MuletrainError(
            f"step {step}: {MAX_ATTEMPTS} attempts to average the stage failed; see the events for why"
        )

    async def _pause(self, seconds: float) -> None:
        await self._waits.watched(self._ctx.clock.sleep(seconds))

    async def _average(self, round_: Round) -> MeanGradient:
        """Raises RoundFailed."""
        ctx, begin = self._ctx, self._ctx.clock.now()
        self._reducing, self._work.round = self._state.announced, round_.id
        try:
            gradient, shards = await self._gathered(self._mean(round_))
        finally:
            self._reducing = None
        ctx.meter.stats.averaging_s += ctx.clock.now() - begin
        ctx.worked("average", "reduce", begin, round_.step)
        if round_.finite and not self._overflowed and not all(s.finite for s in shards):
            self._overflowed = True  # all members see that; at the second time it is the codec that cannot hold it
            raise RoundFailed("what was finite when it was sealed is not any more: all look again at what they hold")
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
            holder=ctx.net.peer_id,
        )
        return MeanGradient(entry, gradient)

    async def _mean(self, round_: Round) -> tuple[Tensor, tuple[ShardFacts, ...]]:
        return await self._state.averager.reduce(round_, await self._ctx.compute.gradient(round_.step))

    async def _gathered(self, work: Coroutine[Any, Any, T]) -> T:
        """While a gradient is on its way to us, that others have it already is no reason to stop."""
        self._gathering = True
        try:
            return await self._waits.watched(work)
        finally:
            self._gathering = False
