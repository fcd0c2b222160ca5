"""Passes each arriving frame to its actor: only frames of members, of known kinds, within bounds."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from muletrain.errors import Malformed, MuletrainError, ProtocolError
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.checkpoint.messages import CheckpointEnd, PartReady
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.core.times import pause_s
from muletrain.runtime.members.messages import Suspected
from muletrain.runtime.members.row import Row, Statements, Sync
from muletrain.runtime.microbatch.messages import Backward, Forward, Gap, Lost, Room, TrainerDone, Why
from muletrain.runtime.peer.messages import Presence, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import Channel, PeerId
    from muletrain.runtime.checkpoint.checkpointing import Checkpointing
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.microbatch.microbatches import Microbatches
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.peer.reporting import Reporting
    from muletrain.runtime.recovery.forks import Forks
    from muletrain.runtime.recovery.rollback import Rollback
    from muletrain.runtime.step.runner import StepRunner
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame


LIMIT, BYTES = 4096, 1 << 30
"""Most kept frames, and most bytes of their tensors: a peer with more early frames is far behind, and finds that
out."""
NOTICES = 256
"""Most kept frames without tensors of one sender. With tensors, the limit is this peer's request capacity."""


class EarlyFrames:
    """Keeps frames of steps that this peer has not come to, in order of arrival: other peers are ahead by a moment, and
    send nothing twice. No sender takes another sender's room."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: requests that this peer holds."""
        self._capacity = capacity
        self._frames: list[tuple[PeerId, Frame]] = []
        self._of: Counter[tuple[PeerId, bool]] = Counter()
        """Frames by sender, with tensors or without."""
        self._bytes = 0

    def keep(self, sender: PeerId, frame: Frame) -> bool:
        """Keep a frame. Returns False if there are too many."""
        kind, nbytes = (sender, bool(frame.tensors)), sum(t.nbytes for t in frame.tensors)
        room = self._of[kind] < (self._capacity if frame.tensors else NOTICES)
        if not room or len(self._frames) >= LIMIT or self._bytes + nbytes > BYTES:
            return False
        self._frames.append((sender, frame))
        self._of[kind] += 1
        self._bytes += nbytes
        return True

    def take(self) -> list[tuple[PeerId, Frame]]:
        """Take all frames out."""
        taken, self._frames, self._bytes = self._frames, [], 0
        self._of.clear()
        return taken


BREAK_TRIES = 7
"""Most probes of a peer after a broken stream."""
OF_MICROBATCHES = (Forward, Backward, Room, Lost, TrainerDone, Gap)
AGREEING = (Statements, Shard, Reduced)
OF_PEERS = (Presence, Suspected, PartReady, CheckpointEnd, Report)
KINDS: dict[str, type[Message]] = {m.KIND: m for m in (*OF_MICROBATCHES, *AGREEING, *OF_PEERS)}


class Incoming:
    """Takes in the frames of one peer, and bounds them before reading (``network.base.Bounds``).

    Headers have the bounds of their kind's fields. Tensors have the codec and shape that follow from the run's
    configuration: inputs and gradients of this cut, chunks of this stage's averaging. So no member can make this peer
    read, or hold, more than a correct member sends.
    """

    def __init__(
        self,
        ctx: Context,
        position: Position,
        membership: Membership,
        microbatches: Microbatches,
        runner: StepRunner,
        forks: Forks,
        rollback: Rollback,
        checkpointing: Checkpointing,
        reporting: Reporting,
    ) -> None:
        self._ctx, self._position, self._membership, self._microbatches = ctx, position, membership, microbatches
        self._runner, self._forks, self._rollback = runner, forks, rollback
        self._checkpointing, self._reporting = checkpointing, reporting
        self._early = EarlyFrames(ctx.plan.capacity)
        self._furthest = 0
        """See ``passed_by``."""
        self._breaks: Counter[PeerId] = Counter()
        """Broken streams, by peers probed since."""
        self._checks: dict[type[Message], Callable[[PeerId, Any, list[Encoded]], None]] = {
            Forward: microbatches.server.expects,
            Backward: microbatches.expects_gradient,
            Shard: runner.expects_chunk,
            Reduced: runner.expects_chunk,
        }
        """For each kind with tensors: raises ProtocolError for a message that is not expected from its sender now, or
        whose tensors have an unexpected shape or codec. The tensors' bytes are still unread."""
        ctx.net.receive(self._on_frame, bounds=self)
        ctx.net.on_lost(self._on_lost)
        Sync.serve(ctx.net, self._answer)
        ctx.net.serve(Suspected.KIND, self._hears)

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        if kind not in KINDS:
            raise Malformed(f"frame of unknown kind {kind[:64]!r}")
        described = 128 * (KINDS[kind].TENSORS + KINDS[kind].MORE)
        return 128 + described + KINDS[kind].most(self._ctx.plan.microbatches)

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``."""
        self.header(frame.kind)
        await self._membership.acquaint(sender)
        frame.message = message = KINDS[frame.kind].parse(frame)
        if (check := self._checks.get(type(message))) is not None:
            check(sender, message, frame.tensors)

    async def redeliver(self) -> None:
        """Pass on the frames that came too early, some of which belong to the present step."""
        for sender, frame in self._early.take():
            try:
                await self._on_frame(sender, frame)
            except ProtocolError as e:
                self._ctx.refused(sender, str(e))

    def passed_by(self) -> bool:
        """Has a frame of a later step than ours come since the last call that was too early to be kept?"""
        furthest, self._furthest = self._furthest, 0
        return furthest > self._position.step

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        """Pass on a frame of a member, whose header was checked (``expect``)."""
        await self._membership.acquaint(sender)
        match message := KINDS[frame.kind].parse(frame):
            case Report():
                self._reporting.told(sender, message)
            case PartReady():
                self._checkpointing.on_ready(sender, message)
            case CheckpointEnd():
                await self._checkpointing.on_end(sender, message)
            case Presence(away=True):  # at any step, in any lineage
                self._ctx.detector.stand_aside(sender)
            case _:
                await self._on_step_frame(sender, message, frame)

    async def _on_step_frame(self, sender: PeerId, message: Message, frame: Frame) -> None:
        at = self._position
        step = message.step  # type: ignore[attr-defined]  # these have one
        branch = branch_of(getattr(message, "lineage", at.lineage))
        if branch != branch_of(at.lineage):
            return self._rollback.met(sender, branch)
        rival = hasattr(message, "lineage") and self._forks.heard(sender, step, message.lineage)
        if at.life.done or step < at.step:
            return  # late: that step is agreed already
        work = at.computing(step)
        if rival or (work is not None and getattr(message, "lineage", work.lineage) != work.lineage):
            raise ProtocolError(f"{frame.kind} of step {step} from another lineage")
        away = isinstance(message, Room) or (isinstance(message, Lost) and message.why in (Why.GONE, Why.UNFINITE))
        of_use = not away  # such a sender may have gone away
        if of_use and self._ctx.detector.mark_back(sender):
            self._microbatches.welcome(sender)
        agreeing = isinstance(message, AGREEING)
        loads = at.life.state is State.ROLLED_BACK
        if loads or work is None or (agreeing and step > at.step):
            ahead = int(self._ctx.plan.delayed)
            if not loads:
                self._runner.exchange.on_later(sender, applied=agreeing or step > at.step + ahead)
            kept = step <= at.step + 1 + ahead and self._early.keep(sender, frame)
            if not kept:  # otherwise we are far behind, and find that out, at the latest in the next step
                self._furthest = max(self._furthest, step)
            if not kept and isinstance(message, Forward):
                self._microbatches.server.decline(sender, message, "it is at an earlier step")
            return
        if isinstance(message, Statements):
            await self._membership.acquaint(sender, message.stage)
        if isinstance(message, Forward):
            await self._check_sender(sender, message)
        await self._to_actor(sender, message, frame)
        self._ctx.news.touched()

    async def _check_sender(self, sender: PeerId, forward: Forward) -> None:
        """Raises ProtocolError for a forward from neither its trainer nor a peer of the previous stage: its result
        would count in place of the right result."""
        if forward.stage == 0:
            if sender != forward.trainer or not self._ctx.roster.member(sender).trainer:
                raise ProtocolError("forward: of another peer's microbatch, or from one that does not train")
        elif not await self._membership.serves(sender, forward.stage - 1):
            raise ProtocolError(f"forward for stage {forward.stage} from a peer of another stage than the one before")

    async def _to_actor(self, sender: PeerId, message: Message, frame: Frame) -> None:
        match message:
            case Forward():
                await self._microbatches.server.on_forward(sender, message, frame)
            case Backward() | Lost() | Room():
                self._microbatches.on_reply(sender, message, frame)
            case TrainerDone():
                self._microbatches.on_trainer_done(sender, message)
            case Gap():
                self._microbatches.on_gap(sender, message)
            case Statements():
                self._runner.exchange.on_statements(sender, message)
            case Shard() | Reduced():
                self._runner.state.averager.on_chunk(sender, message, frame.tensors[0])
            case Presence():
                self._microbatches.welcome(sender)
            case Suspected():
                self._ctx.detector.look_after(message.peer, message.lineage, message.step)
            case _:
                raise ProtocolError(f"{frame.kind}: not for this peer")

    def _on_lost(self, peer: PeerId, channel: Channel) -> None:
        """A stream with ``peer`` ended: find out now whether the peer is gone, not after a missed deadline."""
        self._runner.state.averager.broken(peer, channel)
        if not self._position.life.done and peer in self._ctx.roster.everyone():
            self._breaks[peer] += 1
            if self._breaks[peer] == 1:
                self._ctx.spawn(self._after_break(peer), f"after a break with {peer[-6:]}")

    async def _after_break(self, peer: PeerId) -> None:
        """Frames on the stream are lost. Once ``peer`` answers, ask at once for all awaited answers; again if another
        stream ended meanwhile. Ends within ``BREAK_TRIES`` probes after the last break."""
        ctx, at, tries = self._ctx, self._position, 0
        while tries < BREAK_TRIES:
            breaks = self._breaks[peer]
            if await ctx.detector.probe(peer, at.lineage, at.step, hearsay=True, brief=True) is not None:
                self._microbatches.on_broken(peer)
                ctx.news.hurry()
                tries = BREAK_TRIES
            await ctx.clock.sleep(pause_s(tries % BREAK_TRIES))
            tries = tries + 1 if breaks == self._breaks[peer] else 0
        del self._breaks[peer]

    async def _hears(self, sender: PeerId, payload: bytes) -> bytes:
        """Answer whether we count on a replica of ``sender`` that ``sender`` does not hear, and find out whether we still
        hear it."""
        await self._membership.acquaint(sender)
        suspected, at, roster = Suspected.unpack(payload), self._position, self._ctx.roster
        self._ctx.detector.look_after(suspected.peer, at.lineage, at.step)
        replica = roster.knows(suspected.peer) and roster.member(suspected.peer).stage == roster.member(sender).stage
        counts = replica and roster.is_alive(suspected.peer) and branch_of(suspected.lineage) == branch_of(at.lineage)
        return b"alive" if counts else b""

    async def _answer(self, sender: PeerId, ask: Sync) -> Row:
        """Answer with our row. Raises MuletrainError while no peer should count on us."""
        at = self._position
        if not self._ctx.meter.works.is_set():
            raise MuletrainError("an operation of its device does not return")
        self._rollback.met(sender, branch_of(ask.lineage))
        branch = branch_of(at.lineage)
        rival = branch_of(ask.lineage) == branch and self._forks.heard(sender, ask.step, ask.lineage)
        row = at.row(ask.step, ask.lineage, brief=ask.brief, through=ask.record)
        if at.life.state is State.LEAVING:
            row = Row(current=False, step=at.step, stage=self._ctx.roster.own.stage, branch=branch)
        said = self._runner.exchange.statements(sender, ask)
        return row.model_copy(update={"rival": rival, "late": bool(self._ctx.meter.late), **said})
