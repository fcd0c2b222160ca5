"""A peer of the run consists of its actors and the loop over steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from muletrain.errors import NetworkError
from muletrain.events import DirectoryFailed, GradientTaken, LeaveCancelled, MoveRefused, PeerExpelled, PeerLeft
from muletrain.policy.deadline import RECENT
from muletrain.runtime.checkpoint.checkpointing import Checkpointing
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.lifecycle import Lifecycle, State
from muletrain.runtime.core.times import AGAIN_S
from muletrain.runtime.members.leaving import Departure
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.rebalancing import Rebalancer
from muletrain.runtime.members.watchdog import Watchdog
from muletrain.runtime.microbatch.microbatches import Microbatches
from muletrain.runtime.microbatch.position import Behind, Position
from muletrain.runtime.peer.arrival import Arrival
from muletrain.runtime.peer.ending import Ending
from muletrain.runtime.peer.incoming import Incoming
from muletrain.runtime.peer.messages import ANNOUNCE_S, HOLDS_S, StopRun
from muletrain.runtime.peer.reporting import PeerHost, Reporting
from muletrain.runtime.recovery.forks import Forks
from muletrain.runtime.recovery.rollback import Rollback
from muletrain.runtime.step.audit import computes_falsely
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.step.runner import StepRunner
from muletrain.runtime.transfer.donor import Receiver, Snapshots

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.checkpointing import Book
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.trainer import Source
    from muletrain.runtime.microbatch.validator import Heldout
    from muletrain.runtime.recovery.messages import StepBack
    from muletrain.runtime.step.record import StepRecord
    from muletrain.runtime.transfer.tokens import Sharing


class Peer:
    """Serves one stage, perhaps trains, and does its part of the checkpoints."""

    def __init__(
        self,
        ctx: Context,
        *,
        book: Book,
        host: PeerHost | None = None,
        source: Source | None = None,
        heldout: Heldout | None = None,
        reports: bool = False,
        joining: bool = False,
        back: StepBack | None = None,
        sharing: Sharing | None = None,
        log_bytes: int = 1 << 28,
    ) -> None:
        """Build a peer at the stage that the roster names.

        ``book``: place of the checkpoints. ``source``, ``heldout``: make training and held-out microbatches, if the
        peer has the data. ``reports``: send this peer's counts to the coordinator, on another machine. ``joining``: the
        run goes on already; begin with a replica's state or, with ``back``, with the checkpoint that the run rolled
        back to. ``sharing``: of the run's tokens, if the founder shares them. ``log_bytes``: of past gradients, kept
        for peers that catch up."""
        self._ctx, self._back, self._sharing = ctx, back, sharing
        self._host = host = host or PeerHost()
        self.roster, self.emit = ctx.roster, ctx.emit
        self._leaves = False
        self.destination: int | None = None
        """The stage that this peer moves to; None: the peer leaves the run."""
        coming = State.JOINING if back is None else State.ROLLED_BACK
        self._life = Lifecycle(coming if joining else State.TRAINING)
        begin = ctx.roster.genesis.begin if back is None else (back.step, back.lineage)
        self.position = at = Position(ctx, *begin, self._life)
        # members
        self._membership = membership = Membership(ctx, lambda: not self._life.has_state)
        self.rebalancer = Rebalancer(ctx, host, self.load, self.move)
        # microbatch and transfer
        self._microbatches = microbatches = Microbatches(ctx, at, source if ctx.roster.own.trainer else None, heldout)
        self._log, receiver, self._tokens = GradientLog(ctx, log_bytes), Receiver(ctx), ctx.downloader()
        self._snapshots = Snapshots(ctx, at, self._log, membership)
        if sharing is not None:
            sharing.offer(ctx)
        # checkpoint
        self._checkpointing = parts = Checkpointing(ctx, membership, book)
        self.departure = Departure(ctx, parts.unsafe)
        # step and recovery
        forks = Forks(ctx, at, receiver)
        self.runner = runner = StepRunner(
            ctx, at, self.departure, self._log, membership, microbatches, self._begin_ahead, forks.met, receiver.taker
        )
        self._rollback = rollback = Rollback(ctx, at, host, back, forks, parts)
        # peer
        self._arrival = Arrival(ctx, at, runner, membership, receiver, parts, forks, microbatches)
        self.reporting, self._ending = Reporting(ctx, host, apart=reports), Ending(ctx, at, parts, runner)
        self._incoming = Incoming(ctx, at, membership, microbatches, runner, forks, rollback, parts, self.reporting)
        ctx.net.serve(StopRun.KIND, self._answer_stop)

    async def run(self) -> bool:
        """Train to the end, or until a member asks to stop, and write the last checkpoint. Returns False if the
        checkpoint could not be written. Raises the error of any actor that could not recover. Ends after
        ``step/runner.run`` of each step, and ``peer/ending.finish``."""
        main = asyncio.create_task(self._train(), name="train")
        self._ctx.spawn(Watchdog(self._ctx).run(), "watchdog")
        try:
            waiting: set[asyncio.Future[Any]] = {main, self._ctx.tasks.failure, self._rollback.ordered}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._ctx.tasks.failure.done() and not main.done() and not self.begins_anew:
                self._ctx.tasks.failure.result()
            return self.begins_anew or await main
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)
            await self._ctx.tasks.close()

    @property
    def begins_anew(self) -> bool:
        """The run rolled back, or gave up the branch that we were on."""
        return self._rollback.ordered.done() and not (self._life.done and self._ending.known)

    @property
    def begins_at(self) -> StepBack | None:
        """The rollback to begin anew with; None: begin with a replica's state."""
        return self._rollback.ordered.result()

    @property
    def left(self) -> bool:
        """This peer has left in order, before the end of the run."""
        return self._life.state is State.LEAVING

    # The loop -------------------------------------------------------------------------------------------------------

    async def _train(self) -> bool:
        announcing = self._ctx.spawn(self._announce_often(), "announce")
        comes = not self._life.arrived
        await self._begin()
        await self._steps(returned=comes)
        written = self.left or await self._ending.finish()
        await self._ctx.compute.end(over=not self.left)
        announcing.cancel()
        if self.left and self.destination is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self._announce(left=True)
        return written

    async def _begin(self) -> None:
        """Come to the run's step, and begin the work beside the steps."""
        ctx, at, comes = self._ctx, self.position, not self._life.arrived
        self.rebalancer.settled = not comes
        if ctx.plan.rebalance != "off":
            ctx.spawn(self.rebalancer.run(), "rebalancing")
        ctx.spawn(self._rollback.watch(), "rollback")
        if self._sharing is not None:
            taking = self._sharing.run(ctx, self._tokens, self._membership, self.position, self._microbatches)
            ctx.spawn(taking, "tokens")
        if not comes:
            await self.runner.open()
        elif self._back is not None:
            await self._arrival.begin_anew(self._back)
        else:
            await self._arrival.join()
        self.rebalancer.settled = True
        receivers = ctx.roster.receivers()
        others = ctx.roster.spread(max(0, RECENT - len(receivers)))
        for peer in dict.fromkeys((*others, *receivers)):  # before an answer is missed
            ctx.spawn(ctx.detector.is_gone(peer, at.lineage, at.step), "measure")
        ctx.meter.stats.started = ctx.clock.now()

    async def _steps(self, *, returned: bool) -> None:
        """Take one step after the other, until the run has ended or this peer leaves. ``returned``: other peers may
        have begun the first step."""
        at, sure, absences = self.position, False, self._ctx.meter.absences
        while not self._life.done:
            step = at.step
            try:
                if self._incoming.passed_by() or returned:
                    await self.runner.meet(sure=sure)
                self._microbatches.begin(at.work, retry=returned)
                await self._incoming.redeliver()
                record = await self.runner.run()
                # others may have begun the next step without us
                returned, absences = absences != self._ctx.meter.absences, self._ctx.meter.absences
                self._arrival.caught_up()
            except Behind as e:
                self._microbatches.end(step)
                returned, sure = True, e.rival
                replayed = await self._recover(e)
                if replayed is None:
                    continue
                self.emit(GradientTaken(reason=str(e)))
                record = replayed
            await self._applied(record)
            if returned and not self._life.done:
                self._arrival.say_back()

    async def _recover(self, why: Behind) -> StepRecord | None:
        """Apply the step that was agreed on without us, or take a state instead and return None. Raises
        MuletrainError."""
        if why.rival:
            await self._arrival.go_over(why.renamed)
            return None
        record = await self.runner.replay() if why.weights_hold else None
        if record is None:
            await self._arrival.catch_up(why)
        return record

    async def _applied(self, record: StepRecord) -> None:
        """Report the step, write a due checkpoint, and go to the next step, or leave."""
        ctx, plan, step = self._ctx, self._ctx.plan, record.step
        self._microbatches.end(step)
        self.rebalancer.count(ctx.meter.stats)
        self.reporting.applied(record, self.position.work, self.runner.not_finite)
        if self._host.applied(record):
            self.stop()
        stuck = record.skip and 0 < plan.max_skipped <= ctx.compute.skipped  # all peers count the same
        last = record.stop or stuck or step + 1 == plan.steps
        leaves = not last and ctx.net.peer_id in self._without(record)
        if not leaves and (last or (plan.checkpoint_every and (step + 1) % plan.checkpoint_every == 0)):
            await self._checkpointing.due(Key(step + 1, record.hash), last=last)
        if last:
            self._life.to(State.FINISHED)
        self.runner.advance(record)
        if last:
            self.position.work.end()
            self._microbatches.abandon(step + 1)
        elif leaves:
            await self._leave()

    def _without(self, record: StepRecord) -> tuple[PeerId, ...]:
        """Stop counting on peers that leave after ``record``, or that ``record`` expels. Returns the ids of the leaving
        peers. Raises MuletrainError if we are expelled."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        for stage, entry in enumerate(record.stages):
            for peer in entry.expelled if self.runner.state.builder.sentenced(stage) else ():
                if ctx.roster.knows(peer) and ctx.roster.member(peer).stage == stage:
                    ctx.emit(PeerExpelled(peer_id=peer, name=ctx.roster.name(peer), step=record.step + 1))
                    ctx.roster.expel(peer)
        if ctx.roster.expelled(me):
            raise computes_falsely(record.step)
        known = {m.id: m for m in ctx.roster.members()}
        leavers = record.leavers(lambda peer: peer in known and known[peer].trainer)
        # some leavers are back already, at another stage
        leavers = tuple(p for p in leavers if p in known and p in record.stages[known[p].stage].leaves)
        for peer in leavers:
            if self.reporting.speaks() or peer == me:
                ctx.emit(PeerLeft(peer_id=peer, name=known[peer].name, step=record.step + 1))
            if peer != me:
                ctx.roster.left(peer)
        return leavers

    async def _leave(self) -> None:
        """Leave, once the other replicas have the step. Otherwise we are needed and come back."""
        ctx, at = self._ctx, self.position
        self._life.to(State.LEAVING)
        if not await self.departure.taken_over(at.lineage, at.step):
            self._life.to(State.TRAINING)
            ctx.emit(LeaveCancelled(stage=ctx.roster.own.stage))
            self._arrival.say_back()
        elif self.destination is None:
            await self._checkpointing.parts.tidy(over=False)

    async def _begin_ahead(self, work: InFlightStep) -> None:
        """Begin to compute ``work``, the next step, beside the present step."""
        if not work.ledger.sealed:  # otherwise we may be gone by then
            self._microbatches.begin(work, retry=False)
        await self._incoming.redeliver()

    async def _announce_often(self) -> None:
        """Ends when cancelled."""
        while True:
            self.reporting.tell_wait(self.position.step)
            await self._announce(left=False)
            await self._ctx.clock.sleep(ANNOUNCE_S)

    async def _announce(self, *, left: bool) -> None:
        """Tell the directory that we are here, or have ``left``: a hint for status, and for peers that banned us."""
        ctx, loading = self._ctx, not self._life.has_state
        status = self.reporting.status(self.position.step, left=left, loading=loading)
        try:
            await ctx.net.announce(f"{ctx.roster.genesis.run_id}/peers", json.dumps(status).encode(), HOLDS_S)
        except NetworkError as e:  # the announcement was only a hint
            ctx.emit(DirectoryFailed(what="the directory did not take this peer's announcement", reason=str(e)))

    # From outside -----------------------------------------------------------------------------------------------------

    async def _answer_stop(self, sender: PeerId, payload: bytes) -> bytes:
        StopRun.unpack(payload)
        self.stop()
        return b""

    def load(self) -> int:
        """Returns the number of held requests, waiting or in work; at most ``Plan.capacity``."""
        return self._microbatches.server.load()

    def kept(self) -> tuple[int, int, int]:
        """Returns what is kept for other peers: copies of our state to serve, and for checkpoints, and bytes of earlier
        gradients."""
        return self._snapshots.copies, self._checkpointing.copies, self._log.nbytes

    def stop(self) -> None:
        """Ask for an orderly end after the current step."""
        self.departure.stop_requested = True

    def leave(self) -> None:
        """Ask to leave alone: after the current step, or as soon as the run can do without this peer."""
        self.destination, self._leaves = None, True
        self.departure.wanted = True

    def move(self, stage: int | None) -> None:
        """Ask to serve ``stage`` instead; None: stay after all."""
        if self._leaves:
            return
        if stage is not None and not self._host.fits(stage):  # announcements may be wrong
            self._ctx.emit(MoveRefused(stage=stage))
            stage = None
        self.departure.wanted = stage not in (None, self._ctx.roster.own.stage)
        if self.departure.wanted:  # an already announced move keeps its destination
            self.destination = stage
