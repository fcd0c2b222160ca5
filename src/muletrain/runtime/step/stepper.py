"""One step's agreement: seal, reduce, record, apply (DESIGN "How a step goes", points 5-8).

Whoever holds the whole mean gradient of its stage says so and keeps it; whoever does not takes it from one that does. A peer applies
the step with the record that follows from what the holders of all stages say.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeVar

from muletrain.compute.base import Update
from muletrain.errors import MuletrainError, NetworkError, Refused
from muletrain.events import Note
from muletrain.policy.deadline import backoff_s
from muletrain.runtime.core.messages import RoundEntry
from muletrain.runtime.microbatch.inflight import InFlightStep
from muletrain.runtime.step.averaging import Averager
from muletrain.runtime.step.holding import Holding, fetch_gradient
from muletrain.runtime.step.knowledge import MAX_ATTEMPTS, Behind
from muletrain.runtime.step.record import alike
from muletrain.runtime.step.rounds import Round, RoundFailed
from muletrain.runtime.step.sealing import PAUSE_MAX_S, PAUSE_S, LeftOut, Sealing
from muletrain.runtime.step.trail import take_past

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.policy.lineages import Chain
    from muletrain.runtime.core.messages import ShardFacts
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.step.record import StepRecord
    from muletrain.runtime.transfer.blocks import Downloader

T = TypeVar("T")


SWIFT_TRIES = 4
"""Attempts at a round that follow each other at once: gaps are run again, a trial is held, a member dies."""


FAILED_S, FAILED_MAX_S = 0.2, 10.0
"""After the second attempt whose averaging failed; doubles."""


class _HeldElsewhere(Exception):
    """A replica holds a round of this step."""


class Stepper(Sealing):
    """Takes the run from one lineage to the next."""

    def __init__(
        self,
        ctx: Context,
        step: int,
        lineage: bytes,
        running: Callable[[int], list[int]],
        answering: Callable[[int], list[int]],
        orphaned: Callable[[InFlightStep, bool], None],
        begun: Callable[[], Coroutine[Any, Any, None]],
        taker: Downloader,
    ) -> None:
        """See ``Knowledge``. ``begun``: the next step is computed from now on (``ahead``). ``taker``: of what lies back."""
        super().__init__(ctx, step, lineage, running, answering, orphaned)
        self._taker = taker
        self._begun = begun
        self.averager = Averager(ctx, lambda: bool(self._held_by_replicas()))

    def _round(self) -> bytes:
        return self.averager.round

    def _shards(self, round_: bytes) -> Mapping[PeerId, ShardFacts]:
        return self.averager.shards.get(round_, {})

    def _give_way(self) -> None:
        """We go on attesting to what we hold: should it count after all, they take it."""
        if self._holding is None or self._gave_way or self.ledger.running or self._builder.record() is not None:
            return
        me, live = self._ctx.net.peer_id, self._ctx.roster.stage(self._ctx.roster.own.stage)
        without_us = [m for m, view in self._views().items() if m in live and me not in view.members]
        if 2 * sum(m not in self._committed for m in without_us) > len(live):
            message = f"step {self.step}: most replicas average without this peer, so what it holds will not count"
            self._ctx.emit(Note(level="warning", message=message))
            self._gave_way = True
            self._drop()
            self.ledger.seal()

    async def open(self) -> None:
        """Replicas must begin with the same weights, too."""
        self._weights = await self._ctx.compute.digest()

    async def meet(self, *, sure: bool) -> None:
        """We were away: learn what replicas hold of this step. Raises Behind where they have gone on, or, unless we are ``sure`` of our
        lineage, where most came here another way: who told us of the steps before lied then."""
        held = await self._ask_holders()
        if sure:
            return
        others = [h for h in held if h.step == self.step and h.lineage not in (b"", self.applied)]
        if len(others) > sum(h.current for h in held if h.lineage == self.applied):
            raise Behind(f"step {self.step}: the replicas have another history", weights_hold=False)

    async def run(self) -> StepRecord:
        """From the first microbatch to the applied update. Raises Behind, and MuletrainError when the step cannot be completed."""
        holding = self._holding = await self._hold()
        begin = self._ctx.clock.now()
        await self._waits.until(
            lambda: self._builder.record() is not None, self._record_deadline, f"the record of step {self.step}", self._ask_entries
        )  # fmt: skip
        record = self._builder.record()
        assert record is not None  # until returned
        self._ctx.stats.averaging_s += self._ctx.clock.now() - begin
        await self._apply(record, holding.gradient)
        return record

    async def replay(self) -> StepRecord | None:
        """The others finished this step without us, but keep what it takes: apply it. None where nobody has it (any more)."""
        await self._quiesce(self.work)
        replicas, alive = self._ctx.roster.replicas(), self._ctx.roster.is_alive  # replicas keep it for longest
        peers = sorted(self._ctx.roster.everyone(), key=lambda p: (not alive(p), p not in replicas))
        await self._learn_record(peers)
        record = self._builder.record()
        if record is None:
            return None
        entry = self._builder.agreed()[self._ctx.roster.own.stage]
        if self._holding is None or not alike(self._holding.entry, entry):
            self._holding = await self._past(entry) or await self._taken(entry)
        if self._holding is None:
            return None
        await self._apply(record, self._holding.gradient)
        return record

    async def _past(self, entry: RoundEntry) -> Holding | None:
        """The gradient of ``entry``'s round, if the others are beyond the next step: nobody waits for us, and they are to lose no time by
        it."""
        if self.others_at <= self.step + 1:
            return None
        try:
            holding = await take_past(self._ctx, self._taker, entry)
        except NetworkError as e:
            self._ctx.emit(
                Note(level="info", message=f"the gradient of step {self.step} did not come as state does: {e}")
            )
            return None
        if holding is not None and self._ctx.net.peer_id not in entry.members:
            self.work.uncount()
        return holding

    # Holding the stage's gradient -------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """During every wait. Whoever holds a round never tries another: it says so, and whom it goes on without. Whoever holds none takes
        it from one that does. Raises _HeldElsewhere; RoundFailed when a member of the round being reduced tries another; Behind when
        the run agreed on what we do not hold."""
        if self.away:
            return
        if self._behind is not None:
            raise self._behind
        if self._reducing is not None and self._latest_attempt(self._reducing.members) > self._reducing.attempt:
            raise RoundFailed(f"averaging step {self.step}: another attempt has begun")
        record, own = self._builder.record(), self._ctx.roster.own.stage
        if self._holding is not None:
            self._attest(self._holding.entry)
            record = self._builder.record()
        if record is not None and (
            self._holding is None or not alike(self._holding.entry, self._builder.agreed()[own])
        ):
            raise Behind(f"step {self.step}: the run agreed on a gradient of stage {own} that this peer does not hold")
        if self._holding is None and self._held_by_replicas():
            lost = self._reducing is not None and not all(map(self._ctx.roster.is_alive, self._reducing.members))
            if lost or not self._gathering:
                raise _HeldElsewhere

    def _attest(self, entry: RoundEntry) -> None:
        """Tell everyone that we hold the round; again when another of its members is believed dead, or when we hear of another round of
        our stage: whoever knew only one of them would have another record. A member that is alive all the same applies what we hold, as
        soon as it hears of the record."""
        seen = entry.round, self._builder.known[entry.stage], self._ctx.roster.version
        if self._attested_of == seen:
            return
        self._attested_of = seen
        me, alive = self._ctx.net.peer_id, self._ctx.roster.is_alive
        known = self._builder.holders(entry)
        without = {m for m in entry.members if m != me and m not in known and not alive(m)}
        others = {r.facts.round for r in self._builder.rounds(entry.stage)} - {entry.round}
        if self._attested is not None:
            if without <= set(self._attested.without) and others <= self._rivals:
                return
            without |= set(self._attested.without)
        self._rivals = others
        self._attested = entry.model_copy(update={"holder": me, "without": tuple(sorted(without))})
        self._builder.add(self._attested)
        everyone = self._ctx.roster.everyone()
        self._ctx.spawn(self._ctx.tell(everyone, self._attested), "entry")  # a frozen peer must not hold us up

    async def _hold(self) -> Holding:
        """This stage's mean gradient: reduced with the other replicas, or taken from one that holds it, or what we held of this step
        before (``rejoin``)."""
        if self._holding is not None:
            await self._begin_ahead()
            return self._holding
        for tries in itertools.count():
            try:
                await self._waits.until(
                    self._all_through, self._step_deadline, "microbatches to go through", self._ask_progress, self._ctx.pulse.goes_on_s
                )  # fmt: skip
                await self._begin_ahead()
                return await self._reduce()
            except _HeldElsewhere:
                self._abstain()
                await self._begin_ahead()
                holding = await self._gathered(self._taken(None))
                if holding is not None:
                    return holding
                await self._ctx.clock.sleep(backoff_s(tries, PAUSE_S, PAUSE_MAX_S))
        raise AssertionError  # itertools.count does not end

    async def _begin_ahead(self) -> None:
        """Under delayed updates the next step is computed while this one is agreed on."""
        plan = self._ctx.plan
        if not plan.delayed or self.ahead is not None or self.step + 1 == plan.steps or self.stop_requested:
            return
        self.ahead = InFlightStep(self.step + 1, self.applied, plan.microbatches)
        if self.departure.announced():
            self.ahead.ledger.seal()
        await self._begun()

    async def _taken(self, agreed: RoundEntry | None) -> Holding | None:
        """The gradient of the round that was ``agreed`` on (None: of any that a live replica holds), from whoever has it."""
        ctx = self._ctx
        alive = ctx.roster.is_alive
        if agreed is None:
            known = sorted(((e.holder, e) for e in self._held_by_replicas()), key=lambda k: not self._averages(k[0]))
        else:
            holders = self._builder.holders(agreed)
            peers = sorted(ctx.roster.replicas(), key=lambda p: (not alive(p), p not in holders, not self._averages(p)))
            known = [(p, agreed) for p in peers]
        for peer, entry in known:
            try:
                holding = await fetch_gradient(ctx, peer, entry)
            except Refused:  # it has none, and is well
                continue
            except NetworkError as e:
                ctx.detector.mark_down(peer, f"gave no gradient of step {self.step}: {e}")
                continue
            if ctx.net.peer_id not in entry.members:  # what we accumulated is not in it
                self.work.uncount()
            return holding
        return None

    async def _reduce(self) -> Holding:
        """Attempts, until one succeeds or somebody else's did (_HeldElsewhere)."""
        failed = 0
        for tries in range(MAX_ATTEMPTS):
            if tries >= SWIFT_TRIES:  # what keeps us from agreeing takes longer
                pause = backoff_s(tries - SWIFT_TRIES, PAUSE_S, PAUSE_MAX_S)
                await self._waits.watched(self._ctx.clock.sleep(pause))
            attempt = self._next_attempt()
            self.averager.begin()
            try:
                round_ = await self._agree(attempt)
                if round_ is None:
                    continue
                return await self._averaged(round_)
            except RoundFailed as e:
                self._ctx.emit(Note(level="warning", message=f"averaging step {self.step}, attempt {attempt}: {e}"))
                self.ledger.reopen(keep=True)
                self._part(self.averager.silent())
                self._untrue.update(self.averager.absent())
                failed += 1
                if failed > 1:  # each attempt sends the whole gradient
                    await self._waits.watched(self._ctx.clock.sleep(backoff_s(failed - 2, FAILED_S, FAILED_MAX_S)))
                await self._ask_holders()
            except LeftOut:
                await self._look_on()
        raise MuletrainError(
            f"step {self.step}: {MAX_ATTEMPTS} attempts to average the stage failed; see the events for why"
        )

    async def _averaged(self, round_: Round) -> Holding:
        """Raises RoundFailed."""
        begin = self._ctx.clock.now()
        self._reducing = self.announced
        try:
            gradient, shards = await self._gathered(self.averager.reduce(round_, self._ctx.compute.gradient(self.step)))
        finally:
            self._reducing = None
        self._ctx.stats.averaging_s += self._ctx.clock.now() - begin
        self._ctx.worked("average", "reduce", begin, self.step)
        if round_.finite and not self._overflowed and not all(s.finite for s in shards):
            self._overflowed = True  # all members see that; at the second time it is the codec that cannot hold it
            raise RoundFailed("what was finite when it was sealed is not any more: all look again at what they hold")
        entry = RoundEntry(
            lineage=self.lineage, step=self.step, stage=round_.stage, round=round_.id, members=round_.members, shards=shards,
            stop=round_.stop, leaves=round_.leaves, expelled=round_.expelled, holder=self._ctx.net.peer_id,
        )  # fmt: skip
        return Holding(entry, gradient)

    async def _gathered(self, work: Coroutine[Any, Any, T]) -> T:
        """While a gradient is on its way to us, that others have it already is no reason to stop."""
        self._gathering = True
        try:
            return await self._waits.watched(work)
        finally:
            self._gathering = False

    # Applying it ------------------------------------------------------------------------------------------------------

    async def _apply(self, record: StepRecord, gradient: Tensor) -> None:
        ctx = self._ctx
        await self._nothing_running(self.work)
        self.ledger.seal()
        begin = ctx.clock.now()
        self._builder.settle()
        self.settled = False
        ctx.reached("applying", self.step)
        update = Update(self.step, record.clip_scale(ctx.plan.clip), record.skip)
        async with ctx.device(0):
            self.work.over = True  # what still waits for the device must not compute with other weights
            if not ctx.plan.delayed:
                await ctx.compute.apply(gradient, update)
        if ctx.plan.delayed:  # the next step computes with weights of its own meanwhile
            await ctx.compute.apply(gradient, update)
        self._weights = await ctx.compute.digest()
        took = ctx.clock.now() - begin
        ctx.stats.apply_s += took
        ctx.worked("compute", "apply", begin, self.step)
        self._late_deadline.measured(took)

    def advance(self, record: StepRecord) -> None:
        """The next step: the record's hash is its lineage (under delayed updates that of the one after it)."""
        self.averager.forget()
        assert self._holding is not None  # it was applied
        self.trail.add(self._builder, self._holding)
        self._enter(self._chain.then(record.hash))
        self.settled = True

    async def let_go(self) -> None:
        """No donor may take what comes now for this step's state."""
        await self._quiesce(self.work)
        if self.ahead is not None:
            await self._quiesce(self.ahead)
            self.ahead = None
        self.settled = False

    async def _quiesce(self, work: InFlightStep) -> None:
        """What we accumulated is of no use any more, and nothing that still runs may end in an accumulator of another step."""
        self.away = True
        work.over = True
        await self._nothing_running(work)
        self._ctx.compute.clear(work.step)
        work.ledger.reopen(keep=False)
        work.ledger.seal()

    async def rejoin(self, chain: Chain) -> None:
        """Go on at its step, whose state was loaded; what we did for another step is forgotten. What was said of this one still holds, by
        us, too: a round that we attested to must not come to have another mean, nor an attempt other sums."""
        self.averager.forget()
        for dropped in (chain.step, chain.step + 1):
            self._ctx.compute.clear(dropped)
        same = (chain.step, chain.lineages[-1]) == (self.step, self.applied)
        said, before = (self._seals, self.announced, self._holding), self.work
        self._enter(chain)
        if same:
            self._seals, self.announced, self._holding = said
        if self._holding is not None:  # what we accumulated is in it
            self.work.accumulated, self.work.recomputed = before.accumulated, before.recomputed
        self._fresh = True
        for member, seal in self._seals.items():
            self._announced_by[member].add(frozenset(seal.members))
        self.settled = True
        await self.open()
