"""A stage server is a peer's part of the pipeline, with overlapping receive, compute and send slots (DT-FM sec. 3.5).

Each admitted request is one coroutine, which holds its place until its backward is through. A forward is admitted only
with room reserved for its backward, so gradients never wait for space and bounded queues cannot deadlock.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from muletrain.compute.base import Microbatch
from muletrain.compute.checks import check_sample_values, check_target_values, is_finite
from muletrain.compute.slot import Turn
from muletrain.errors import Malformed, MuletrainError, NetworkError, ProtocolError
from muletrain.events import MicrobatchServed, MicrobatchTaken
from muletrain.model.loss import positions_in
from muletrain.network.base import Channel
from muletrain.policy.rooms import Turns
from muletrain.runtime.microbatch.cross_check import GradientCrossCheck
from muletrain.runtime.microbatch.dispatcher import Unfinite
from muletrain.runtime.microbatch.inflight import TooLate
from muletrain.runtime.microbatch.messages import Backward, Forward, Lost, Room, Why
from muletrain.wire.codec import decode, encode, sample_codecs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torch import Tensor

    from muletrain.compute.results import Result
    from muletrain.network.base import PeerId
    from muletrain.policy.chaos import Phase
    from muletrain.runtime.core.messages import Request
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.dispatcher import Answer, Dispatcher
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.position import Position
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame

BACKWARD, FORWARD = 0, 1
"""Priorities on the compute slot; the strategy may swap both."""


@dataclass
class _Job:
    """An admitted request. ``busy_s``: this peer's own work on the request [s]; ``computed_s``: the forward [s].
    ``excused``: the result comes from suspicious input, and no other peer could be asked."""

    sender: PeerId
    message: Forward
    work: InFlightStep
    admitted: float
    busy_s: float = 0.0
    begun: float = math.nan
    """Start of the latest turn on the compute slot."""
    computed_s: float = 0.0
    positions: Tensor | None = None
    """See ``Compute.forward``."""
    excused: bool = False
    absences: int = 0
    """Absences of this peer (``Meter``) at the last check that no other replica has the microbatch."""
    elsewhere: bool = False
    """Another replica has the microbatch."""
    task: asyncio.Task[None] | None = None

    def answers(self, sender: PeerId, again: Forward) -> bool:
        """Does the answer also fit ``again`` from ``sender``? The sender may have given up a copy, and ask for a
        comparison."""
        first = self.message
        same = (self.sender, first.key, first.gradient) == (sender, again.key, again.gradient)
        return same and {*again.accumulate} <= {*first.accumulate}

    @property
    def microbatch(self) -> Microbatch:
        return Microbatch(self.message.step, self.message.index, heldout=self.heldout)

    @property
    def heldout(self) -> bool:
        """Does the microbatch only measure the held-out loss?"""
        return self.message.index >= self.work.microbatches


@dataclass
class StageServer:
    """Serves one stage."""

    ctx: Context
    position: Position
    dispatcher: Dispatcher | None
    """Sends to the next stage; None on the last stage."""
    check: Callable[..., None]
    """Compares samples of a forward with our own data, if we have any. Raises ProtocolError."""
    elsewhere: Callable[[InFlightStep, int], Awaitable[bool]]
    """Returns whether another replica has a microbatch."""
    _jobs: dict[tuple[int, int], _Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cross_check = None if self.dispatcher is None else GradientCrossCheck(self.ctx, self.dispatcher)
        self._turns = Turns[Forward](self.ctx.plan.capacity)
        order = self.ctx.plan.strategy.order(self.ctx.roster.own.stage, self.ctx.roster.own.name)
        self._forward, self._backward = (FORWARD, BACKWARD) if order.backward_first else (BACKWARD, FORWARD)
        self._between: asyncio.Semaphore | nullcontext[None] = nullcontext()
        """Held by a microbatch from before its forward until its backward is through, or failed. A deadlock is
        impossible: a microbatch with a place waits only for later stages, and the last stage waits for no other
        stage."""
        if order.most_between is not None:
            self._between = asyncio.Semaphore(order.most_between)

    def load(self) -> int:
        """Returns the number of held requests, waiting or in work."""
        return len(self._jobs)

    async def on_forward(self, sender: PeerId, message: Forward, frame: Frame) -> None:
        """Admit a request, or answer that the queue is full, or that another replica must accumulate the microbatch. A
        microbatch in work is not begun twice; a repeated request gets one answer."""
        work = self.position.computing(message.step)
        if work is None:
            return
        self.expects(sender, message, frame.tensors)  # again: this peer may have moved while the tensors came
        answered = work.answered.get(message.index) == (sender, message.key)
        if message.wanted and answered and message.index in work.ledger.accumulated:
            return self.decline(sender, message, "it has accumulated and answered that")  # sender's requester is gone
        key = (message.step, message.index)
        room = self._turns.admits(sender, message, len(self._jobs), self.ctx.clock.now(), more=message.more)
        if key in self._jobs and self._jobs[key].answers(sender, message):
            return
        if key in self._jobs or not room:
            return self.decline(sender, message, why=Why.AT_IT if room else Why.FULL)
        if message.wanted and not work.ledger.takes(message.index):
            self.decline(sender, message, "its accumulator is sealed")
            return self._offer_room()
        job = _Job(sender, message, work, self.ctx.clock.now(), absences=self.ctx.meter.absences)
        self._jobs[key] = job
        work.serving.add(message.index)
        if self.ctx.plan.trace and not job.heldout:
            self.ctx.emit(MicrobatchTaken(step=message.step, index=message.index, stage=message.stage))
        job.task = self.ctx.spawn(self._serve(job, frame.tensors), f"serve {key}")
        job.task.add_done_callback(lambda _: self._release(job))  # the task may be cancelled before its first line
        self._offer_room()

    def _offer_room(self) -> None:
        """Tell the senders that wait for room, in turn."""
        for sender, latest in self._turns.next(len(self._jobs), self.ctx.clock.now()):
            room = Room(**latest.identity(), stage=latest.stage)
            self.ctx.spawn(self._reply(sender, room, []), "room")

    def decline(self, sender: PeerId, message: Forward, reason: str = "", why: Why = Why.GONE) -> None:
        """Make ``sender`` choose another peer, or try again later."""
        lost = Lost(**message.identity(), stage=message.stage, why=why, reason=reason)
        self.ctx.spawn(self._reply(sender, lost, []), "lost")

    def abandon(self) -> None:
        """Cancel requests of finished steps, which must not count for steps that begin again."""
        self._turns.clear()
        self.end_over()

    def end_over(self) -> None:
        """Cancel requests of finished steps: their senders finish these steps without an answer."""
        for job in self._jobs.values():
            if job.task is not None and job.work.over:
                job.task.cancel()

    def _release(self, job: _Job) -> None:
        """Free the job's place in the queue, if still held."""
        key = (job.message.step, job.message.index)
        if self._jobs.get(key) is job:
            del self._jobs[key]
            job.work.serving.discard(job.message.index)
            self._offer_room()

    async def _serve(self, job: _Job, tensors: list[Encoded]) -> None:
        try:
            loss, gradient = await self._work(job, tensors)
        except MuletrainError as e:  # the sender still holds the activations, and chooses another peer
            if isinstance(e, ProtocolError):
                self.ctx.refused(job.sender, f"{job.message.KIND}: {e}")
            why = Why.UNFINITE if isinstance(e, Unfinite) else Why.GONE
            return self.decline(job.sender, job.message, str(e)[:1000], why)
        finally:
            self.ctx.compute.discard(job.microbatch)
            self._release(job)
        index, answering = job.message.index, job.work.answering
        answering[index] += 1
        try:
            await self._answer(job, loss, gradient)
        finally:
            answering[index] -= 1
            if not answering[index]:
                del answering[index]

    async def _work(self, job: _Job, tensors: list[Encoded]) -> tuple[float, Encoded | None]:
        inputs, targets = await self._receive(job, tensors)
        if self.dispatcher is None:
            return await self._last_stage(job, inputs, targets)
        if self.ctx.plan.targets.apart:
            job.positions, _ = positions_in(targets[:, :-1], self.ctx.plan.vocab)
        # a copy is for another pipeline, which must not stand still meanwhile
        async with self._between if job.message.wanted else nullcontext():
            return await self._there_and_back(job, inputs, tensors[1], self.dispatcher)

    async def _there_and_back(
        self, job: _Job, inputs: Tensor, targets: Encoded, dispatcher: Dispatcher
    ) -> tuple[float, Encoded | None]:
        """Forward, then all later stages, then backward."""
        sent = [await self._compute_forward(job, inputs), targets]
        message, accumulate = job.message, job.message.accumulate
        if job.absences != self.ctx.meter.absences:  # other peers may have finished the microbatch
            accumulate = await dispatcher.missing(message, accumulate)
        backward = message.gradient or message.stage in message.accumulate
        answer = await dispatcher.request(message, accumulate, sent, gradient=backward, unfinite=message.unfinite)
        if answer.gradient is None:  # run again for a later stage alone, or held out
            job.work.computed += not job.heldout
            return answer.loss, None
        return await self._compute_backward(job, answer, sent)

    async def _receive(self, job: _Job, tensors: list[Encoded]) -> tuple[Tensor, Tensor]:
        begin = self.ctx.clock.now()
        inputs = await self.ctx.compute.offload(decode, tensors[0])
        targets = decode(tensors[1])
        job.busy_s += self.ctx.clock.now() - begin
        self.ctx.worked("receive", "decode", begin, job.message.step, job.message.index)
        if job.message.stage == 0:
            check_sample_values("forward", inputs, self.ctx.plan.vocab)
        check_target_values(targets, self.ctx.plan.targets, self.ctx.plan.vocab, heldout=job.heldout)
        if job.message.stage == 0 and job.message.trainer != self.ctx.net.peer_id and not job.heldout:
            self.check(job.message, inputs, targets)
        if job.message.stage > 0 and not await self.ctx.compute.offload(is_finite, inputs):
            if not job.message.unfinite:
                self.ctx.refused(job.sender, f"{job.message.KIND}: activations: not finite")
                raise Unfinite("activations: not finite")
            job.excused = True
        return inputs, targets

    def expects(self, sender: PeerId, message: Forward, tensors: list[Encoded]) -> None:
        """Check the shapes and codecs of a forward before reading, decoding or keeping tensors. Raises
        ProtocolError."""
        plan, stage, (inputs, targets) = self.ctx.plan, self.ctx.roster.own.stage, tensors
        if message.index >= plan.microbatches:
            if not plan.validates_with(message.step, message.index):
                raise Malformed(f"forward of microbatch {message.index}; a step has {plan.microbatches}")
            if message.accumulate or message.gradient:
                raise Malformed(f"forward of held-out microbatch {message.index} that asks for a gradient")
        if message.stage != stage:
            raise ProtocolError(
                f"forward of microbatch {message.index} for stage {message.stage} at a peer of stage {stage}"
            )
        tokens, activations = plan.shape(message.step, message.index), plan.codec(message.index)
        shapes = plan.inputs.batch(*tokens) if stage == 0 else (*tokens, plan.width), plan.targets.batch(*tokens)
        codecs = (
            sample_codecs(plan.inputs.dtype) if stage == 0 else (activations,),
            sample_codecs(plan.targets.dtype),
        )
        if (inputs.shape, targets.shape) != shapes or inputs.codec not in codecs[0] or targets.codec not in codecs[1]:
            raise Malformed(
                f"forward with {inputs.codec} {inputs.shape} and {targets.codec} {targets.shape}, expected {shapes[0]} and {shapes[1]}"
            )

    async def _compute_forward(self, job: _Job, inputs: Tensor) -> Encoded:
        """Ends within ``watchdog.hung_s``."""
        ctx = self.ctx
        outputs = await ctx.compute.forward(
            job.microbatch, inputs, self._turn(self._forward, job, "forward"), job.positions
        )
        took = self._took_s(job)
        ctx.worked("compute", "forward", job.begun, job.message.step, job.message.index)
        ctx.meter.stats.forward_s += took
        ctx.meter.pulse.beat(ctx.clock.now())
        job.busy_s += took
        job.computed_s = took
        return await ctx.compute.offload(encode, await outputs, ctx.plan.codec(job.message.index))

    def _turn(self, priority: int, job: _Job, *phases: Phase) -> Turn:
        return Turn(priority, partial(self._begin, job, phases))

    def _begin(self, job: _Job, phases: tuple[Phase, ...]) -> None:
        """The turn of ``job`` on the compute slot has come. Raises TooLate, before a backward also after a standstill of
        this peer: other peers may have computed the microbatch meanwhile."""
        job.work.check()
        if "backward" in phases and job.absences != self.ctx.meter.absences:
            raise TooLate("this peer stood still")
        for phase in phases:
            self.ctx.reached(phase, job.message.step)
        job.begun = self.ctx.clock.now()

    async def _compute_backward(self, job: _Job, answer: Answer, sent: list[Encoded]) -> tuple[float, Encoded | None]:
        assert self._cross_check is not None  # not on the last stage
        gradient, trusted = await self._cross_check.gradient(job.message, sent, answer)
        job.excused |= not trusted

        async def backward(accumulate: bool) -> tuple[float, Result | None]:
            turn, compute = self._turn(self._backward, job, "backward"), self.ctx.compute
            return answer.loss, await compute.backward(job.microbatch, gradient, turn, accumulate=accumulate)

        return await self._accumulated(job, "backward", backward)

    async def _last_stage(self, job: _Job, inputs: Tensor, targets: Tensor) -> tuple[float, Encoded | None]:
        async def backward(accumulate: bool) -> tuple[float, Result | None]:
            turn, compute = self._turn(self._forward, job, "forward", "backward"), self.ctx.compute
            return await compute.loss_backward(job.microbatch, inputs, targets, turn, accumulate=accumulate)

        return await self._accumulated(job, "forward and backward", backward)

    async def _accumulated(
        self, job: _Job, what: str, backward: Callable[[bool], Awaitable[tuple[float, Result | None]]]
    ) -> tuple[float, Encoded | None]:
        """Run ``backward``, which is told whether to accumulate the microbatch. Returns the loss, and the gradient if the
        sender needs one. If this peer has stood still, other peers may have computed the microbatch again; even so the
        microbatch is accumulated only once. Ends within ``watchdog.hung_s``."""
        ctx, message, work = self.ctx, job.message, job.work
        while True:
            if job.absences != ctx.meter.absences:
                job.absences = ctx.meter.absences
                job.elsewhere = message.wanted and await self.elsewhere(work, message.index)
            work.check()
            granted = message.wanted and not job.elsewhere and work.ledger.begin(message.index)
            try:
                loss, gradient = await backward(granted)
                if granted:
                    work.ledger.commit(message.index, loss)
                if granted and job.excused:
                    work.ledger.excuse(message.index)
                break
            except TooLate:  # of a step that is over, the next check raises it again
                continue
            finally:
                if granted:
                    work.ledger.abort(message.index)
                ctx.news.touched()
        took = self._took_s(job)
        job.busy_s += took
        ctx.meter.stats.backward_s += took
        ctx.meter.pulse.beat(ctx.clock.now())
        ctx.worked("compute", what, job.begun, message.step, message.index)
        if not job.heldout:  # otherwise a forward alone
            ctx.meter.stats.services.append(job.computed_s + took)
            work.computed += 1
        if gradient is None or not message.gradient:
            return loss, None
        return loss, await ctx.compute.offload(encode, await gradient, ctx.plan.activations)

    def _took_s(self, job: _Job) -> float:
        """Seconds for which the job has kept this peer busy in its turn."""
        return self.ctx.compute.busy_s(job.microbatch, self.ctx.clock.now() - job.begun)

    async def _answer(self, job: _Job, loss: float, gradient: Encoded | None) -> None:
        if job.message.wanted:
            job.work.answered[job.message.index] = job.sender, job.message.key
        away = max(0.0, self.ctx.clock.now() - job.admitted - job.busy_s)
        identity, stage = job.message.identity(), job.message.stage
        if self.ctx.plan.trace and not job.heldout:
            step, index = job.message.step, job.message.index
            self.ctx.emit(MicrobatchServed(step=step, index=index, stage=stage, busy_s=job.busy_s))
        answer = Backward(**identity, stage=stage, loss=loss, busy_s=job.busy_s, away_s=away)
        await self._reply(job.sender, answer, [] if gradient is None else [gradient])

    async def _reply(self, peer: PeerId, message: Request, tensors: list[Encoded]) -> None:
        try:
            await self.ctx.send(peer, message, tensors, channel=None if tensors else Channel.CONTROL)
        except NetworkError as e:  # the sender is gone: its trainer tries the microbatch again
            self.ctx.detector.mark_down(peer, e.why)
