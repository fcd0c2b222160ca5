"""A peer of the run: its actors, the dispatch of what arrives to them, and the loop over steps."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from muletrain.errors import MuletrainError, NetworkError, ProtocolError
from muletrain.events import Event, Note, PeerExpelled, PeerLeft
from muletrain.policy.deadline import RECENT, backoff_s
from muletrain.policy.lineages import Chain, forked_at, gives_way
from muletrain.runtime.checkpoint.checkpoints import Book, CheckpointEnd, Checkpoints, PartReady
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.messages import (
    Abstain,
    AskHeld,
    Away,
    Back,
    Backward,
    Block,
    Busy,
    Done,
    Doubted,
    Finished,
    Forward,
    Gap,
    Held,
    Lost,
    Reduced,
    Report,
    RoundEntry,
    Seal,
    Shard,
    StopRun,
    TrainerDone,
)
from muletrain.runtime.core.plan import StepStats
from muletrain.runtime.members.expected import Expected
from muletrain.runtime.members.hot_spares import HotSpares
from muletrain.runtime.members.leaving import Departure
from muletrain.runtime.members.membership import Membership
from muletrain.runtime.members.rebalancing import Rebalancer
from muletrain.runtime.members.watchdog import Watchdog
from muletrain.runtime.microbatch.dispatcher import Dispatcher
from muletrain.runtime.microbatch.position import Behind, Position
from muletrain.runtime.microbatch.stage_server import StageServer
from muletrain.runtime.microbatch.survey import Survey
from muletrain.runtime.microbatch.trainer import Trainer
from muletrain.runtime.peer.early_frames import EarlyFrames
from muletrain.runtime.peer.reporting import Reporting
from muletrain.runtime.recovery.forks import GivesWay, Lineages
from muletrain.runtime.recovery.rollback import Rollback, StepBack
from muletrain.runtime.step.audit import expelled
from muletrain.runtime.step.exchange import Answers
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.step.runner import StepRunner
from muletrain.runtime.transfer.blocks import Downloader
from muletrain.runtime.transfer.donor import Receiver, Snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import Frame, PeerId
    from muletrain.runtime.core.messages import Message, Snapshot
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.expected import Check
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.trainer import Source
    from muletrain.runtime.step.record import StepRecord
    from muletrain.runtime.transfer.tokens import Sharing
    from muletrain.wire.codec import Encoded

ANNOUNCE_S = 10.0
"""Between announcements in the directory."""
HOLDS_S = 3 * ANNOUNCE_S
"""How long one holds."""
FAREWELL_S = 5.0
"""Longest time that the last announcement of a peer that leaves may take."""
TRIES, PAUSE_S, PAUSE_MAX_S = 12, 0.2, 10.0
"""Times that a checkpoint's part is asked for before a peer gives up; the pause between doubles."""
MAX_PURSUITS = 10
"""States that a peer takes one after the other, each too old to be of use when it has come, before it gives up."""
WEIGH_S = 0.1
"""Between two looks whether word of the end can be believed; doubles."""
OFFER_S = 20.0
"""After the end, a stage whose part of the last checkpoint did not come from its writer offers it from every replica, then again."""

STEP_KINDS: dict[str, type[Message]] = {
    m.KIND: m
    for m in (
        Forward,
        Backward,
        Done,
        Busy,
        Lost,
        TrainerDone,
        Gap,
        Seal,
        Shard,
        Reduced,
        RoundEntry,
        Abstain,
        Back,
        Doubted,
    )
}
OTHER_KINDS: dict[str, type[Message]] = {m.KIND: m for m in (PartReady, CheckpointEnd, Report, Block, Away)}


class Memory(NamedTuple):
    """Copies of states and of checkpoints' parts that a peer offers; states of its own parts of checkpoints; bytes of earlier steps'
    gradients."""

    copies: int
    parts: int
    past: int


class Peer:
    """Serves one stage, perhaps trains, and does its part of the checkpoints."""

    def __init__(
        self,
        ctx: Context,
        *,
        source: Source | None = None,
        book: Book | None = None,
        on_step: Callable[[StepRecord], bool] = lambda _: False,
        on_report: Callable[[Event, str], None] = lambda event, name: None,
        reports: bool = False,
        joining: bool = False,
        back: StepBack | None = None,
        fits: Callable[[int], bool] = lambda stage: True,
        sharing: Sharing | None = None,
        log_bytes: int = 1 << 28,
    ) -> None:
        """``source``: where a trainer gets its microbatches. ``book``: where it writes checkpoints, if it can. ``on_step`` is told of every
        applied step; True asks to stop. ``reports``: this peer's log is not beside the collector's, so what it counts goes there, to
        ``on_report``. ``joining``: the run goes on already; take its state from a replica first, or, with ``back``, from that
        checkpoint. ``fits``: the stages this machine's memory has room for. ``sharing``: of the run's tokens, if its founder shares
        them. ``log_bytes``: of past gradients that this peer keeps for peers that catch up (``step.gradient_log``)."""
        self._ctx = ctx
        self.roster, self.emit = ctx.roster, ctx.emit
        self._on_step = on_step
        self.reporting, self._hot_spares = Reporting(ctx, on_report, apart=reports), HotSpares(ctx)
        self._joining, self._back, self._fits = joining, back, fits
        stage, plan = ctx.roster.own.stage, ctx.plan
        genesis = ctx.roster.genesis
        begin = (genesis.first_step, genesis.lineage) if back is None else (back.step, back.lineage)
        self.position = Position(ctx, *begin, has_state=not joining)
        self._survey = Survey(ctx, self.position)
        onwards = Dispatcher(ctx, stage + 1, self._survey) if stage + 1 < plan.stages else None
        self._pipeline = StageServer(ctx, self.position, onwards)
        self._receiver = Receiver(ctx)
        taker, self._sharing, self._tokens = self._receiver.taker, sharing, Downloader(ctx)
        self._source = source if ctx.roster.own.trainer else None
        self._inwards = Dispatcher(ctx, 0, self._survey)
        self._trainers: dict[int, Trainer] = {}
        """By step."""
        self._membership = Membership(ctx)
        self._log = GradientLog(ctx, log_bytes)
        self._snapshots = Snapshots(ctx, self.position, self._log, self._membership, sharing)
        self._lineages = Lineages(ctx, self.position, self._receiver)
        self._checkpoints = Checkpoints(ctx, self._snapshots, self._receiver, self._membership, book)
        self.departure = Departure(ctx, self._checkpoints.unsafe)
        self.runner = StepRunner(ctx, self.position, self._log, self.departure, self, self._lineages, taker)
        self._answers = Answers(ctx, self.runner, self._log, self._membership)
        self._adoption = Rollback(
            ctx, self._checkpoints, self._where, fits, back, self._lineages.goes_on, self._write_what_there_is
        )
        self._early = EarlyFrames(plan.capacity)
        self._finished: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._claims: set[PeerId] = set()
        """Who said that the end is reached."""
        self._over = False
        self._written: Key | None = None
        """What was written last because no trainer was left."""
        self._leaves = False
        self._pursuits = 0
        self.left = False
        """This peer has gone in order, before the run's end."""
        self.destination: int | None = None
        """The stage it goes to; None: it leaves the run."""
        self.rebalancer = Rebalancer(ctx, self._pipeline.load, fits, self.move)
        checks: dict[type[Message], Check] = {
            Forward: self._pipeline.expects,
            Backward: self._expects_gradient,
            Shard: self.runner.expects_chunk,
            Reduced: self.runner.expects_chunk,
            Block: taker.expects,
        }
        bounds = Expected(self._membership, STEP_KINDS | OTHER_KINDS, plan.microbatches, checks)
        ctx.net.receive(self._on_frame, bounds=bounds)
        ctx.net.on_lost(self._on_lost)
        ctx.net.serve(AskHeld.KIND, self._answer_held)
        ctx.net.serve(StopRun.KIND, self._answer_stop)
        ctx.net.serve(Finished.KIND, self._answer_finished)

    # The loop -------------------------------------------------------------------------------------------------------

    async def run(self) -> bool:
        """Train to the end (or until a member asks to stop), with a last checkpoint. False if that could not be written.

        Raises what any actor could not recover from.
        """
        main = asyncio.create_task(self._train(), name="train")
        self._ctx.spawn(Watchdog(self._ctx).run(), "watchdog")
        try:
            waiting: set[asyncio.Future[Any]] = {main, self._ctx.failure, self._adoption.ordered}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._ctx.failure.done() and not main.done() and not self.begins_anew:
                self._ctx.failure.result()
            return self.begins_anew or await main
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)
            await self._ctx.close()

    @property
    def begins_anew(self) -> bool:
        """The run stepped back, or we were on a branch that it gave up."""
        return self._adoption.ordered.done() and not (self._over and self._finished.done())

    @property
    def begins_at(self) -> StepBack | None:
        """Then: where; None: with what replicas give."""
        return self._adoption.ordered.result()

    def _where(self) -> Key:
        return Key(self.position.step, self.position.applied)

    async def _train(self) -> bool:
        ctx, plan = self._ctx, self._ctx.plan
        announcing = ctx.spawn(self._announce_often(), "announce")
        written, returned, sure, followed = True, False, False, 0
        self.rebalancer.settled = not self._joining
        if plan.rebalance != "off":
            ctx.spawn(self.rebalancer.run(), "rebalancing")
        ctx.spawn(self._adoption.watch(), "adoption")
        if self._sharing is not None:
            taking = self._sharing.run(ctx, self._tokens, self._membership, self._serves, self._train_too)
            ctx.spawn(taking, "tokens")
        if self._joining:
            if await (self._begin_anew(self._back) if self._back is not None else self._begin_late()):
                announcing.cancel()
                return await self._finish()
            returned = self.rebalancer.settled = True
        else:
            await self.runner.open()
        receivers = ctx.roster.receivers()
        others = ctx.roster.spread(max(0, RECENT - len(receivers)))
        for peer in dict.fromkeys((*others, *receivers)):  # how long an answer takes, before one is missed
            ctx.spawn(ctx.detector.measure(peer, self.position.lineage, self.position.step), "measure")
        ctx.stats.started = ctx.clock.now()
        while True:
            step = self.position.step
            try:
                if returned:
                    await self.runner.meet(sure=sure)
                self._begin_step(self.position.work, retry=returned)
                await self._redeliver()
                record = await self.runner.run()
                returned, followed, self._pursuits = False, 0, 0
            except Behind as e:
                self._end_trainers(step)
                returned = True
                sure = isinstance(e, GivesWay)
                if isinstance(e, GivesWay):
                    if await self._go_over(e.renamed):
                        written = await self._finish()
                        break
                    continue
                replayed = await self.runner.replay() if e.weights_hold else None
                if replayed is None:
                    followed = 0
                    if await self._catch_up(e):
                        written = await self._finish()
                        break
                    continue
                followed += 1
                message = f"{e}: took it from a replica and applied it"
                ctx.emit(Note(level="warning" if followed == 1 else "info", message=message))
                record = replayed
            self._end_trainers(step)
            self.rebalancer.count(ctx.stats)
            self.reporting.applied(record, self.position.work)
            self._hot_spares.look(speaks=self.reporting.speaks())
            self._answers.next_step()
            if self._on_step(record):
                self.departure.stop_requested = True
            last = record.stop or step + 1 == plan.steps
            gone = () if last else self._without(record)
            if ctx.net.peer_id not in gone and (
                last or (plan.checkpoint_every and (step + 1) % plan.checkpoint_every == 0)
            ):
                await self._checkpoint(Key(step + 1, record.hash), last=last)
            if last:
                self._over = self.position.over = True
                self.runner.advance(record)
                self._end_trainers(step + 1)
                self.position.work.end()
                self._pipeline.abandon()
                written = await self._finish()
                break
            self.runner.advance(record)
            if ctx.net.peer_id in gone and await self._leave():
                break
            if returned:
                self._say_back()
        announcing.cancel()
        if self.left and self.destination is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._announce(left=True)
        return written

    def _without(self, record: StepRecord) -> tuple[PeerId, ...]:
        """Nobody counts on those that leave after ``record``, or are expelled by it, any more. The ids of those that leave. Raises
        MuletrainError where we are expelled, and missed that."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        for stage, entry in enumerate(record.stages):
            for peer in entry.expelled if self.runner.state.builder.sentenced(stage) else ():
                if ctx.roster.knows(peer) and ctx.roster.member(peer).stage == stage:
                    ctx.emit(PeerExpelled(peer_id=peer, name=ctx.roster.name(peer), step=record.step + 1))
                    ctx.roster.expel(peer)
        if ctx.roster.expelled(me):
            raise expelled(record.step)
        known = {m.id: m for m in ctx.roster.members()}
        leavers = record.leavers(lambda peer: peer in known and known[peer].trainer)
        for peer in leavers:
            if peer in known and (self.reporting.speaks() or peer == me):
                ctx.emit(PeerLeft(peer_id=peer, name=known[peer].name, step=record.step + 1))
            if peer != me and peer in known and peer in record.stages[known[peer].stage].leaves:
                ctx.roster.left(peer)  # else it is back already, at another stage
        return leavers

    async def _leave(self) -> bool:
        """Go, once the other replicas have the step. False: none has, so we are needed and come back."""
        ctx, at = self._ctx, self.position
        self._over = self.left = True  # from now on only what others lack of the steps before
        if await self.departure.taken_over(at.lineage, at.step):
            if self.destination is None:
                await self._checkpoints.tidy(over=False)
            return True
        self._over = self.left = False
        ctx.emit(
            Note(level="warning", message=f"no other peer of stage {ctx.roster.own.stage} came on: this one is back")
        )
        await ctx.tell(ctx.roster.everyone(), Back(lineage=at.lineage, step=at.step))
        return False

    async def _begin_late(self) -> bool:
        """As a newcomer; True if the run has ended."""
        self._adoption.state = "comes"
        await self._membership.introduce()
        return await self._take_state(lambda offer: True)

    async def _begin_anew(self, back: StepBack) -> bool:
        """At the run's checkpoint, or, where our part of it is not to be had any more, at what replicas made of it since. True if the
        run has ended there. Raises MuletrainError."""
        ctx, branch = self._ctx, branch_of(back.lineage)
        self._adoption.state = "loads"
        ctx.spawn(self._membership.introduce(), "introduce")

        def acceptable(offer: Snapshot) -> bool:
            return branch_of(offer.lineage) >= branch

        for attempt in range(TRIES if back.parts else 0):
            try:
                state = await self._checkpoints.base(back.key, back.parts[ctx.roster.own.stage])
                await ctx.compute.load_state(state)
                break
            except MuletrainError as e:  # those that have it may be beginning anew, too
                if attempt % 2 and (attempt == TRIES - 1 or await self._receiver.has_donor(acceptable)):
                    ctx.emit(Note(level="warning", message=f"{e}: this peer takes a replica's state"))
                    return await self._take_state(acceptable)
            await ctx.clock.sleep(backoff_s(attempt, PAUSE_S, PAUSE_MAX_S))
        await self.runner.rejoin(Chain(back.step, (back.lineage,)))
        self._adoption.state = "serves"
        self._say_back()
        if back.step == ctx.plan.steps:
            self._over = self.position.over = True
            await self._checkpoint(self._where(), last=True)
        return self._over

    async def _catch_up(self, why: Behind) -> bool:
        """Take the state of a replica that has gone on, or, where our weights are not right, of one at our step; True if the run has ended
        there. Raises MuletrainError when there is none to take it from."""
        self._ctx.emit(Note(level="warning", message=f"{why}: this peer takes a replica's state"))
        self._adoption.state = "lacks"
        await self._let_go()
        await self._membership.introduce()
        own = self.position.chain
        if why.weights_hold:
            return await self._take_state(_later(own), own.step + 1)
        return await self._take_state(lambda offer: offer.step >= own.step, own.step)

    async def _go_over(self, renamed: Chain | None) -> bool:
        """Take the state of the lineage that stays, or (``renamed``) its name alone, or go on in ours where that cannot be had; True if the
        run has ended there."""
        await self._let_go()
        if renamed is not None:  # our weights are those of the other lineage, at our own step
            own = self.position.chain
            await self.runner.rejoin(renamed)
            self._lineages.left(own, renamed)
        else:
            await self._membership.introduce()
            snapshot = await self._lineages.go_over()
            if snapshot is not None:
                return await self._take_up(snapshot)
            await self.runner.rejoin(self.position.chain)
        self._say_back()
        return False

    async def _let_go(self) -> None:
        """Of all that is under way."""
        self._ctx.spawn(self._ctx.tell(self._ctx.roster.everyone(), Away()), "away")
        self._end_trainers(self.position.step + 1)
        await self.runner.let_go()
        self._pipeline.abandon()

    async def _take_state(self, acceptable: Callable[[Snapshot], bool], after: int = 0) -> bool:
        """Of a step not before ``after``, if possible. What was agreed on meanwhile is applied step by step from there
        (``StepRunner.replay``)."""
        ctx = self._ctx
        self._pursuits += 1
        if self._pursuits > MAX_PURSUITS:
            raise MuletrainError(
                f"{MAX_PURSUITS} states of stage {ctx.roster.own.stage} were too old to be of use when they had come: this peer's link, or "
                f"its replicas', is too slow for the stage's gradients; join with more bandwidth, or cut the model into more stages"
            )
        return await self._take_up(await self._receiver.fetch(acceptable, after=after))

    async def _take_up(self, snapshot: Snapshot) -> bool:
        """Go on with the state that was loaded. True if no step follows."""
        await self.runner.rejoin(snapshot.chain)
        self._adoption.state = "serves"
        if snapshot.over:
            self._over = self.position.over = True
            return True
        self._early.forget(snapshot.step)
        self._ctx.stats = StepStats(started=self._ctx.clock.now())
        self._say_back()
        return False

    def _say_back(self) -> None:
        back = Back(lineage=self.position.lineage, step=self.position.step)
        self._ctx.spawn(self._ctx.tell(self._ctx.roster.everyone(), back), "back")

    def _refresh_routes(self) -> None:
        if self._pipeline.dispatcher is not None:
            self._pipeline.dispatcher.refresh()
        self._inwards.refresh()

    def _begin_step(self, work: InFlightStep, *, retry: bool) -> None:
        if self._pipeline.dispatcher is not None:
            self._pipeline.dispatcher.begin(self.position.under_way())
        if work.step in self._trainers:  # it was begun ahead; who trained then may be gone
            self.take_over_orphans(work, late=False)
        elif self._source is not None:
            self._inwards.refresh()
            trainer = Trainer(self._ctx, self._source, self._inwards, self._survey, _window(self._ctx), work)
            self._trainers[work.step] = trainer
            trainer.spawn(trainer.run_step(retry=retry), "trainer step")

    def _serves(self) -> bool:
        return not self.position.away and self._adoption.state == "serves"

    def _train_too(self, source: Source) -> None:
        """This peer has got the data: it builds microbatches, also of the step that is under way."""
        self.roster.train()
        self._source = source
        for work in self.position.under_way():
            if not work.over:
                self._begin_step(work, retry=True)

    async def begin_ahead(self, work: InFlightStep) -> None:
        """See ``step.reduction.Trainers``."""
        if not work.ledger.sealed:  # else we may be gone by then
            self._begin_step(work, retry=False)
        await self._redeliver()

    def _end_trainers(self, last: int) -> None:
        """Those of the steps up to ``last``."""
        for step in [s for s in self._trainers if s <= last]:
            self._trainers.pop(step).end()

    def take_over_orphans(self, work: InFlightStep, *, late: bool) -> None:
        """See ``step.reduction.Trainers``."""
        trainer = self._trainers.get(work.step)
        if trainer is not None and not work.all_through:
            trainer.spawn(trainer.adopt(late=late), "adopt")

    async def _checkpoint(self, key: Key, *, last: bool) -> None:
        """Our part of it, while training goes on."""
        if self._checkpoints.begins(key, last=last):
            state = await self._ctx.compute.state()
            self._ctx.spawn(self._checkpoints.write(key, state), f"part of checkpoint {key.step}")

    async def _write_what_there_is(self) -> None:
        """Our part of a checkpoint of the weights before this step, which may never be done: once."""
        key, at = self._where(), self.position
        done = key == self._written or not key.step or at.work.all_through  # then another follows soon
        if done or not at.settled or at.away or not self._checkpoints.begins(key, last=True):
            return
        state = await self._ctx.compute.state()
        if at.settled and key == self._where():
            self._written = key
            self._ctx.spawn(self._checkpoints.write(key, state), f"part of checkpoint {key.step}")

    async def _finish(self) -> bool:
        """The last checkpoint is waited for, by everyone. False if it could not be written."""
        ctx, key = self._ctx, self._where()
        if ctx.roster.collector() is None and not self._finished.done():  # others may have told us
            self._finished.set_result(True)
        for work in (self._hear_of_end(key), self._offer_last(key)):
            ctx.spawn(work, "last checkpoint")
        written = await asyncio.shield(self._finished)
        await self._checkpoints.tidy(over=written)
        # everyone passes it on: whoever wrote it may not reach them all, and has no time to try again
        await asyncio.gather(*(self._dismiss(peer, written) for peer in ctx.roster.everyone()))
        return written

    async def _hear_of_end(self, key: Key) -> None:
        written = await self._checkpoints.ended(key)
        if not self._finished.done():
            self._finished.set_result(written)

    async def _offer_last(self, key: Key) -> None:
        """Our stage's writer may have died, or its word got lost."""
        while not self._finished.done():
            await self._ctx.clock.sleep(OFFER_S)
            if self._checkpoints.wants(key):
                await self._checkpoints.write(key, await self._ctx.compute.state())

    async def _dismiss(self, peer: PeerId, written: bool) -> None:
        """Tell ``peer`` that it may go: as a call, since we go next and a frame could still be on its way."""
        with contextlib.suppress(NetworkError):  # it is gone, or others tell it
            await self._ctx.net.call(
                peer, Finished.KIND, Finished(written=written).pack(), timeout_s=self._ctx.detector.deadline.seconds(1)
            )

    async def _announce_often(self) -> None:
        while True:
            await self._announce(left=False)
            await self._ctx.clock.sleep(ANNOUNCE_S)

    async def _announce(self, *, left: bool) -> None:
        """Tell the directory that we are here, or have ``left``: a hint for status, and for those who banned us."""
        ctx, status = self._ctx, self.reporting.status(self.position.step, left=left)
        try:
            await ctx.net.announce(f"{ctx.roster.genesis.run_id}/peers", json.dumps(status).encode(), HOLDS_S)
        except NetworkError as e:  # a hint that did not get through
            ctx.emit(Note(level="info", message=f"the directory was not told of us: {e}"))

    # What arrives ---------------------------------------------------------------------------------------------------

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        """Only members, only valid headers of known kinds (``Expected``); then the current step's go to their actor."""
        await self._membership.acquaint(sender)
        if frame.kind in OTHER_KINDS:
            await self._on_other(sender, OTHER_KINDS[frame.kind].parse(frame), frame)
        else:
            await self._on_step_frame(sender, STEP_KINDS[frame.kind].parse(frame), frame)

    async def _on_step_frame(self, sender: PeerId, message: Message, frame: Frame) -> None:
        step = message.step  # type: ignore[attr-defined]  # all STEP_KINDS have one
        branch = branch_of(getattr(message, "lineage", self.position.lineage))
        if branch != branch_of(self.position.lineage):
            return self._adoption.met(sender, branch)
        rival = hasattr(message, "lineage") and self._lineages.heard(sender, step, message.lineage)
        if self._over or step < self.position.step:
            return  # late: that step is agreed already
        work = self.position.computing(step)
        if rival or (work is not None and getattr(message, "lineage", work.lineage) != work.lineage):
            raise ProtocolError(f"{frame.kind} of step {step} from another lineage")
        if self._ctx.roster.alive(sender):
            self._refresh_routes()
        agreeing = isinstance(message, Seal | Shard | Reduced | RoundEntry | Abstain)
        loads = self._adoption.state == "loads"
        if loads or work is None or (agreeing and step > self.position.step):
            ahead = int(self._ctx.plan.delayed)
            if not loads:
                self.runner.exchange.on_later(sender, applied=agreeing or step > self.position.step + ahead)
            if step <= self.position.step + 1 + ahead:  # else we are far behind, and find that out
                self._early.keep(sender, frame, step)
            return
        if isinstance(message, Seal | RoundEntry):
            await self._membership.acquaint(sender, message.stage)
        await self._dispatch(sender, message, frame)
        self._ctx.news.touched()

    async def _dispatch(self, sender: PeerId, message: Message, frame: Frame) -> None:
        match message:
            case Forward():
                await self._pipeline.on_forward(sender, message, frame)
            case Backward() | Done() | Busy() | Lost():
                self._on_reply(sender, message, frame)
            case TrainerDone():
                self._on_trainer_done(message)
            case Gap() if message.step in self._trainers:
                if message.stage >= self._ctx.plan.stages or any(
                    i >= self._ctx.plan.microbatches for i in message.indices
                ):
                    raise ProtocolError("gap outside the step")
                trainer = self._trainers[message.step]
                trainer.spawn(trainer.on_gap(sender, message), "gap")
            case Gap() if self._source is not None:
                pass  # this trainer has not begun that step: who asks, asks again
            case Seal():
                self.runner.exchange.on_seal(sender, message)
            case Shard() | Reduced():
                self.runner.state.averager.on_chunk(sender, message, frame.tensors[0])
            case RoundEntry():
                self.runner.exchange.on_entry(sender, message)
            case Abstain():
                self.runner.exchange.on_abstain(sender, message.attempt)
            case Back():
                self._refresh_routes()
            case Doubted():
                self._ctx.detector.look_after(message.peer, message.lineage, message.step)
            case _:
                raise ProtocolError(f"{frame.kind}: not for this peer")

    def _on_trainer_done(self, message: TrainerDone) -> None:
        work = self.position.computing(message.step)
        if work is not None and not work.through(message.indices, message.losses):
            raise ProtocolError("trainer_done: indices outside the step, or not one loss for each")
        self._ctx.news.touched()

    def _expects_gradient(self, sender: PeerId, message: Backward, tensors: list[Encoded]) -> None:
        """Raises ProtocolError."""
        if self._pipeline.dispatcher is None or message.stage != self._ctx.roster.own.stage + 1:
            raise ProtocolError(f"{message.KIND} from stage {message.stage}: no gradient was asked for there")
        self._pipeline.dispatcher.expects(sender, message, tensors)

    def _on_reply(self, sender: PeerId, message: Backward | Done | Busy | Lost, frame: Frame) -> None:
        """Answers from stage 0 are the trainer's; from the next stage, the pipeline's."""
        dispatcher = self._pipeline.dispatcher
        if dispatcher is not None and message.stage == self._ctx.roster.own.stage + 1:
            dispatcher.on_reply(sender, message, frame.tensors)
        elif message.stage == 0 and self._source is not None:
            self._inwards.on_reply(sender, message, frame.tensors)
        else:
            raise ProtocolError(f"{frame.kind} from stage {message.stage}: nothing was sent there")

    async def _on_other(self, sender: PeerId, message: Message, frame: Frame) -> None:
        match message:
            case Report():
                self.reporting.told(sender, message)
            case Block():
                for taker in (self._receiver.taker, self._tokens):  # who does not wait for it drops it
                    taker.on_block(sender, message, frame.tensors[0])
            case Away():
                self._ctx.detector.stand_aside(sender)
            case PartReady():
                self._checkpoints.on_ready(sender, message)
            case CheckpointEnd():
                await self._checkpoints.on_end(sender, message)
            case _:
                raise ProtocolError(f"{frame.kind}: not for this peer")

    async def _redeliver(self) -> None:
        """Frames that came while the last step was being applied are of this one."""
        for sender, frame in self._early.take():
            try:
                await self._on_frame(sender, frame)
            except ProtocolError as e:
                self._ctx.refused(sender, str(e))

    def _on_lost(self, peer: PeerId) -> None:
        """A stream ended: whoever is gone with it is found out about now, and not when something is missed."""
        self.runner.state.averager.broken(peer)
        if not self._over:
            self._ctx.detector.look_after(peer, self.position.lineage, self.position.step)

    # Calls ----------------------------------------------------------------------------------------------------------

    async def _answer_held(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises MuletrainError while nobody is to count on us."""
        ask, at = AskHeld.unpack(payload), self.position
        if not self._ctx.works.is_set():
            raise MuletrainError("its device does not return")
        branch = branch_of(at.lineage)
        self._adoption.met(sender, branch_of(ask.lineage))
        rival = branch_of(ask.lineage) == branch and self._lineages.heard(sender, ask.step, ask.lineage)
        held = at.progress(ask.step, ask.lineage, brief=ask.brief)
        if self.left:
            held = Held(current=False, step=at.step, stage=self._ctx.roster.own.stage, branch=branch)
        return held.model_copy(update={"rival": rival, "late": self._ctx.late}).pack()

    async def _answer_stop(self, sender: PeerId, payload: bytes) -> bytes:
        StopRun.unpack(payload)
        self.departure.stop_requested = True
        return b""

    async def _answer_finished(self, sender: PeerId, payload: bytes) -> bytes:
        finished = Finished.unpack(payload)
        if not self._over:  # it goes next
            await self.runner.exchange.find_out(sender)
        if sender not in self._claims:
            self._claims.add(sender)
            self._ctx.spawn(self._weigh(sender, finished.written), "word of the end")
        return b""

    async def _weigh(self, sender: PeerId, written: bool) -> None:
        """Whether the last checkpoint was written the collector says; of others it is believed once this peer is at the end, too, and
        the collector that it could ask has gone, or everyone, if that is itself (another may have been before it)."""
        roster, me = self._ctx.roster, self._ctx.net.peer_id
        first = roster.collector()
        for tries in itertools.count():
            if self._finished.done() or me == roster.genesis.collector:  # nobody knows better
                return
            now = roster.collector()
            if first is not None and first.id == me:
                waits = bool(roster.others())
            else:
                waits = first is not None and now is not None and now.id == first.id != sender
            if self._over and not waits:
                return self._finished.set_result(written)
            await self._ctx.clock.sleep(backoff_s(tries, WEIGH_S, OFFER_S))

    def load(self) -> int:
        """Requests it holds, waiting or being worked on; at most ``Plan.capacity``."""
        return self._pipeline.load()

    def memory(self) -> Memory:
        """What it keeps for others."""
        return Memory(self._snapshots.copies, self._checkpoints.copies, self._log.nbytes)

    def stop(self) -> None:
        """Ask for an orderly end after the current step."""
        self.departure.stop_requested = True

    def leave(self) -> None:
        """Ask to go, alone: after the current step, or as soon as the others can do without this peer."""
        self.destination, self._leaves = None, True
        self.departure.wanted = True

    def move(self, stage: int | None) -> None:
        """Ask to serve ``stage`` instead, or, with None, to stay after all."""
        if self._leaves:
            return
        if stage is not None and not self._fits(stage):  # whatever others' announcements led to
            message = f"stage {stage} needs more memory than this machine may use (--memory): this peer stays"
            self._ctx.emit(Note(level="warning", message=message))
            stage = None
        self.departure.wanted = stage not in (None, self._ctx.roster.own.stage)
        if self.departure.wanted:  # else it may be announced already, and then it goes where it wanted to
            self.destination = stage


def _later(own: Chain) -> Callable[[Snapshot], bool]:
    """States of later steps, in the lineage of ``own`` or in one that stays."""

    def acceptable(offer: Snapshot) -> bool:
        chain = offer.chain
        ours, theirs = branch_of(own.lineages[-1]), branch_of(offer.lineage)
        if ours != theirs:
            return theirs > ours
        return offer.step > own.step and (forked_at(own, chain) is None or gives_way(own, chain, stalled=False))

    return acceptable


def _window(ctx: Context) -> int:
    """Microbatches a trainer has under way: half of what the smallest stage admits, shared among the trainers. With planned membership, of
    each pipeline (``Seats.window``)."""
    if (seats := ctx.plan.seats) is not None:
        return seats.window(ctx.plan.capacity, len(ctx.roster.trainers()))
    smallest = min(len(ctx.roster.stage(s)) for s in range(ctx.plan.stages))
    return max(2, smallest * ctx.plan.capacity // (2 * len(ctx.roster.trainers())))
