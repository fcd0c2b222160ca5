"""The runner takes a peer through each step, from the first microbatch to the applied update.

A peer that holds its stage's whole mean gradient keeps and attests to the gradient; other replicas take the gradient
from a holder. The attestations of all stages make the record that every peer applies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.compute.base import Update
from muletrain.compute.slot import Turn
from muletrain.runtime.core.waiting import Waits
from muletrain.runtime.microbatch.position import Behind
from muletrain.runtime.step.agreement import RoundAgreement
from muletrain.runtime.step.audit import Audit
from muletrain.runtime.step.company import Company
from muletrain.runtime.step.exchange import Exchange
from muletrain.runtime.step.reduction import Reduction
from muletrain.runtime.step.reruns import Reruns
from muletrain.runtime.step.state import Lasting, StepState
from muletrain.runtime.step.tied import TiedSum

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.policy.fork_choice import Chain
    from muletrain.runtime.averaging.messages import Reduced, Shard
    from muletrain.runtime.core.blocks import Downloader, StateImage
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.leaving import Departure
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.members.row import Row
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.microbatches import Microbatches
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.step.gradient_log import GradientLog
    from muletrain.runtime.step.record import StepRecord
    from muletrain.wire.codec import Encoded


class StepRunner:
    """Runs one peer's steps, one after the other. ``state`` and ``exchange`` belong to the current step."""

    def __init__(
        self,
        ctx: Context,
        position: Position,
        departure: Departure,
        log: GradientLog,
        membership: Membership,
        microbatches: Microbatches,
        begin_ahead: Callable[[InFlightStep], Awaitable[None]],
        met_rival: Callable[[PeerId], None],
        downloader: Downloader,
    ) -> None:
        """See ``Lasting``."""
        self._ctx, self._position, self._log, self._membership = ctx, position, log, membership
        self._waits = waits = Waits(ctx.clock, ctx.news, self.look_around, ctx.who_is_there)
        self._lasting = Lasting(ctx, position, departure, log, microbatches, begin_ahead, met_rival, downloader, waits)
        self._weights = bytes(32)
        """Digest of our weights."""
        ctx.detector.known, ctx.detector.hear = self._known, self._hear
        ctx.blocks.offers("gradients", self._given)
        self.not_finite = ""
        """Name of the first parameter of our stage with a non-finite gradient in the last step; '': there is none."""
        self._begin()

    def _begin(self) -> None:
        """Make all objects of the current step."""
        lasting = self._lasting
        self.state = state = StepState(lasting)
        self.exchange = exchange = Exchange(lasting, state)
        company = Company(lasting, state)
        self._reruns = reruns = Reruns(lasting, state, company, exchange)
        audit = Audit(lasting, state, reruns)
        agreement = RoundAgreement(lasting, state, company, exchange, reruns, audit)
        self._tied = TiedSum(lasting, state, exchange)
        self._reduction = Reduction(lasting, state, company, exchange, reruns, agreement)

    def look_around(self) -> None:
        """See ``core.waiting.Waits``."""
        self._reduction.look_around()
        if not self._position.away:
            self._tied.look_around()

    def _known(self, peer: PeerId, lineage: bytes, step: int) -> int:
        """See ``FailureDetector``."""
        return self.exchange.known(peer) if (step, lineage) == (self.state.step, self.state.lineage) else 0

    def _hear(self, peer: PeerId, lineage: bytes, step: int, row: Row) -> None:
        """See ``FailureDetector``."""
        if (step, lineage) == (self.state.step, self.state.lineage) and self.state.current:
            self.exchange.hear(peer, row)

    async def _given(self, peer: PeerId, name: bytes) -> StateImage | None:
        """See ``core.blocks.Reader``. A gradient is for replicas of its stage; the tied part also for the other stage
        that shares these parameters."""
        state, roster = self.state, self._ctx.roster
        own, sharing = roster.own.stage, state.builder.tied
        served = roster.member(peer).stage if roster.knows(peer) else None
        for tied, stages in ((False, (own,)), (True, sharing if own in sharing else ())):
            image = await self._log.image(peer, name, state.gradient, state.other, tied=tied) if stages else None
            if image is not None and (
                served in stages or any([await self._membership.serves(peer, s) for s in stages])
            ):
                return image
        return None

    def expects_chunk(self, sender: PeerId, message: Shard | Reduced, tensors: list[Encoded]) -> None:
        """Check a chunk before reading. Raises ProtocolError."""
        self.state.averager.expects(sender, message, tensors)

    async def open(self) -> None:
        """Take the digest of the weights that we begin with, which replicas compare. Without replicas, an update need not
        be over for the next step to begin."""
        if not self._ctx.plan.alone:
            self._weights = await self._ctx.compute.digest()

    async def meet(self, *, sure: bool) -> None:
        """We were away: ask replicas about this step. Raises Behind if the replicas have gone on, or if most have
        another history, unless we are ``sure`` of our history: then the replicas lied."""
        answers = await self.exchange.ask_replicas(live=True)
        step, applied = self._position.step, self._position.applied
        if sure:
            return
        others = [h for h in answers if h.step == step and h.lineage not in (b"", applied)]
        if len(others) > sum(h.current for h in answers if h.lineage == applied):
            raise Behind(f"step {step + 1}: the replicas have another history", weights_hold=False)

    async def run(self) -> StepRecord:
        """Run the step until its update is applied. Raises Behind, and MuletrainError if the step cannot be completed.
        Ends after ``step/reduction.hold`` at a replica of each stage."""
        gradient = await self._reduction.hold(self._weights)
        builder, begin = self.state.builder, self._ctx.clock.now()
        await self._waits.until(
            lambda: builder.record() is not None and self._tied.ready,
            self._lasting.lessons.record,
            "the step's record",
            self._reduction.ask_entries,
            whom=builder.owing,
        )
        record = builder.record()
        assert record is not None  # until returned
        self._ctx.meter.stats.averaging_s += self._ctx.clock.now() - begin
        await self.apply(record, gradient.values)
        return record

    async def replay(self) -> StepRecord | None:
        """Apply the step, which other peers finished without us, from kept data. None if no peer keeps the data (any
        more)."""
        await self._quiesce(self._position.work)
        state, roster = self.state, self._ctx.roster
        replicas = roster.replicas()  # replicas keep gradients for longest
        await self.exchange.learn_record(
            sorted(roster.everyone(), key=lambda p: (not roster.is_alive(p), p not in replicas))
        )
        record = state.builder.record()
        entry = None if record is None else state.builder.told(record.stages[roster.own.stage])
        if record is None or entry is None or not await self._reduction.take(entry):
            return None
        if not await self._tied.take_agreed() or state.builder.record() != record:
            return None
        assert state.gradient is not None  # taken
        await self.apply(record, state.gradient.values)
        return record

    async def apply(self, record: StepRecord, gradient: Tensor) -> None:
        """Update the weights with the step's ``record`` and our stage's mean gradient."""
        ctx, position, work = self._ctx, self._position, self._position.work
        self.state.builder.settle()
        await self._reruns.drained()
        work.ledger.seal()
        begin = ctx.clock.now()
        position.settled = False
        ctx.reached("applying", work.step)
        self.not_finite = ""
        if record.skip:  # looked at before the update, which may empty an accumulator that is the gradient
            self.not_finite = await ctx.compute.offload(ctx.compute.layout.first_not_finite, gradient)
        update = Update(work.step, record.clip_scale(ctx.plan.clip), record.skip, self._tied.update())
        await ctx.compute.apply(gradient, update, Turn(begins=work.end))
        await self.open()
        took = ctx.clock.now() - begin
        ctx.meter.stats.apply_s += took
        ctx.worked("compute", "apply", begin, work.step)
        self._lasting.lessons.late.measured(took)

    def advance(self, record: StepRecord) -> None:
        """Go on to the next step. The record's hash is that step's lineage (under delayed updates: of the step after
        it)."""
        state = self.state
        state.averager.close()
        self._tied.close()
        assert state.gradient is not None  # the applied gradient
        self._log.add(state.builder, state.gradient, state.other)
        state.gradient = state.other = None  # cycles keep the state until garbage is collected: 1 GB for each step
        self._ctx.roster.sure(self._ctx.roster.doubted())  # the step went on without them
        self._position.advance(record.hash)
        self._begin()
        self._position.settled = True

    async def let_go(self) -> None:
        """Stop work on this step. From now on our weights must not be copied."""
        await self._quiesce(self._position.work)
        if self._position.ahead is not None:
            await self._quiesce(self._position.ahead)
            self._position.ahead = None
        self._position.settled = False

    async def _quiesce(self, work: InFlightStep) -> None:
        """End ``work`` and empty its accumulator. No running microbatch may end in another step's accumulator."""
        self._position.away = True
        self._tied.close()
        work.end()
        await self._reruns.drained(work)
        self._ctx.compute.clear(work.step)
        work.ledger.reopen(keep=False)
        work.ledger.seal()

    async def rejoin(self, chain: Chain) -> None:
        """Go on at the step of ``chain``, whose state was loaded. Work for other steps is dropped."""
        before, position = self.state, self._position
        before.averager.close()
        self._tied.close()
        for dropped in (chain.step, chain.step + 1):
            self._ctx.compute.clear(dropped)
        same = (chain.step, chain.lineages[-1]) == (position.step, position.applied)
        position.enter(chain)
        self._begin()
        self.state.load(before if same else None)
        position.settled = True
        await self.open()
