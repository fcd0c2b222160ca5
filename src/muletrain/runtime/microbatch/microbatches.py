"""A peer handles microbatches in two roles: as server of its stage and, with the data, as trainer of its own share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from muletrain.errors import Malformed, ProtocolError
from muletrain.runtime.microbatch.dispatcher import Dispatcher
from muletrain.runtime.microbatch.messages import Room
from muletrain.runtime.microbatch.position import Survey
from muletrain.runtime.microbatch.stage_server import StageServer
from muletrain.runtime.microbatch.trainer import Trainer
from muletrain.runtime.microbatch.validator import Validator, claimant_of, validator_of

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.messages import Backward, Forward, Gap, Lost, TrainerDone
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.microbatch.trainer import Source
    from muletrain.runtime.microbatch.validator import Heldout
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame


class Microbatches:
    """A peer's stage server, its dispatchers to the next stage and to the first, and a trainer for each step in
    flight."""

    def __init__(self, ctx: Context, position: Position, source: Source | None, heldout: Heldout | None = None) -> None:
        """``source``: makes microbatches; None: this peer does not train yet. ``heldout``: makes held-out microbatches,
        if any."""
        self._ctx, self._position, self.source, self._heldout = ctx, position, source, heldout
        self.survey = Survey(ctx, position)
        stage = ctx.roster.own.stage
        self._onwards = Dispatcher(ctx, stage + 1, self.survey) if stage + 1 < ctx.plan.stages else None
        self._inwards = Dispatcher(ctx, 0, self.survey)
        self._dispatchers = [self._inwards] if self._onwards is None else [self._onwards, self._inwards]
        self.server = StageServer(ctx, position, self._onwards, self._check, self._elsewhere)
        self._trainers: dict[int, Trainer] = {}
        """The trainer of each step under way."""

    def begin(self, work: InFlightStep, *, retry: bool) -> None:
        """Begin to give out the microbatches of ``work``. ``retry``: this peer was away, so other peers may have begun
        some."""
        self.server.end_over()
        if self._onwards is not None:
            self._onwards.begin()
        if work.step in self._trainers:  # begun ahead; other trainers may be gone since
            self.take_over_orphans(work, late=False)
        elif self.source is not None:
            self._inwards.begin()
            trainer = Trainer(self._ctx, self.source, self._inwards, self.survey, self._window(), work)
            self._trainers[work.step] = trainer
            if not retry:  # otherwise the step may be about to end
                ctx = self._ctx
                if ctx.plan.validates(work.step) and validator_of(ctx.roster) == ctx.net.peer_id:
                    trainer.validate(Validator(ctx, self._heldout, self._inwards, work, self._window()))
            trainer.spawn(trainer.run_step(retry=retry), "trainer step")

    def _check(self, message: Forward, *sent: Tensor) -> None:
        """See ``StageServer.check``."""
        if self.source is None:
            return
        step, index = message.step, message.index
        for right, values in zip(map(torch.from_numpy, self.source.microbatch(step, index)), sent, strict=True):
            # machines may round differently on the way to a sample
            alike = (
                torch.allclose(right, values, 1e-3, 1e-3) if right.is_floating_point() else torch.equal(right, values)
            )
            if not alike:
                raise ProtocolError(f"forward: microbatch {step}/{index} has other samples than the data of this peer")

    async def _elsewhere(self, work: InFlightStep, index: int) -> bool:
        """See ``StageServer.elsewhere``."""
        me, stage = self._ctx.net.peer_id, self._ctx.roster.own.stage
        missing, _ = await self.survey.still_missing(
            work.lineage, work.step, index, (stage,), self._inwards.trips.usual_s, me.__eq__
        )
        return not missing

    def train_too(self, source: Source) -> None:
        """This peer has got the data, and builds microbatches from now on, also of steps in flight."""
        self._ctx.roster.train()
        self.source = source
        for work in self._position.under_way():
            if not work.over:
                self.begin(work, retry=True)

    def take_over_orphans(self, work: InFlightStep, *, late: bool) -> None:
        """Microbatches of ``work`` are not through, after a death or, with ``late``, although nothing came for as long
        as a step takes: give out this peer's share."""
        trainer = self._trainers.get(work.step)
        if trainer is not None and not work.all_completed:
            trainer.spawn(trainer.take_over_orphans(late=late), "orphans")

    def on_gap(self, sender: PeerId, gap: Gap) -> None:
        """Run the missing microbatches that fall to this peer again. Raises ProtocolError."""
        trainer, plan = self._trainers.get(gap.step), self._ctx.plan
        if trainer is None:
            if self.source is None:
                raise ProtocolError(f"{gap.KIND}: this peer does not train")
            return  # that step has not begun here; the sender repeats the message
        if gap.stage >= plan.stages or any(i >= plan.microbatches for i in gap.indices):
            raise ProtocolError("gap: a stage or microbatch that the step does not have")
        trainer.on_gap(sender, gap)

    def end(self, last: int) -> None:
        """Give out no more microbatches of the steps up to ``last``."""
        for step in [s for s in self._trainers if s <= last]:
            self._trainers.pop(step).end()

    def abandon(self, last: int) -> None:
        """Drop work of the steps up to ``last``, which must not count for steps that begin again."""
        self.end(last)
        self.server.abandon()

    def welcome(self, peer: PeerId) -> None:
        """``peer`` is back, and may get the next microbatches."""
        for dispatcher in self._dispatchers:
            dispatcher.welcome(peer)

    def on_broken(self, peer: PeerId) -> None:
        """A stream with ``peer`` ended."""
        for dispatcher in self._dispatchers:
            dispatcher.debtors.broken(peer)

    def on_trainer_done(self, sender: PeerId, message: TrainerDone) -> None:
        """Note microbatches that a trainer reports as through. Raises ProtocolError for an invalid report."""
        work, roster = self._position.computing(message.step), self._ctx.roster
        if work is None or not roster.member(sender).trainer:
            return
        if not work.complete(
            message.indices, message.losses, lambda i: claimant_of(self._ctx, message.step, i) == sender
        ):
            raise ProtocolError("trainer_done: microbatches that the step does not have, or not one loss for each")

    def expects_gradient(self, sender: PeerId, message: Backward, tensors: list[Encoded]) -> None:
        """Check a gradient before reading; the gradient may be late. Raises ProtocolError."""
        if tensors and (self._onwards is None or message.stage != self._ctx.roster.own.stage + 1):
            raise ProtocolError(f"{message.KIND} from stage {message.stage}: no gradient was requested there")
        plan = self._ctx.plan
        shape = plan.sequences, plan.sequence_length(message.step), plan.width
        for gradient in tensors:
            if (gradient.shape, gradient.codec) != (shape, plan.activations):
                raise Malformed(
                    f"a gradient of {gradient.codec} {gradient.shape} that is not {plan.activations} {shape}"
                )

    def on_reply(self, sender: PeerId, message: Backward | Lost | Room, frame: Frame) -> None:
        """Pass answers from stage 0 to the trainer, and answers from the next stage to the stage server. Raises
        ProtocolError."""
        if self._onwards is not None and message.stage == self._ctx.roster.own.stage + 1:
            dispatcher = self._onwards
        elif message.stage == 0 and self.source is not None:
            dispatcher = self._inwards
        else:
            raise ProtocolError(f"{frame.kind} from stage {message.stage}: nothing was sent there")
        if isinstance(message, Room):
            dispatcher.on_room(sender)
        else:
            dispatcher.on_reply(sender, message, frame.tensors)

    def _window(self) -> int:
        plan, roster = self._ctx.plan, self._ctx.roster
        serving = [len(roster.stage(s)) for s in range(plan.stages)]
        return plan.strategy.window(plan.capacity, serving, len(roster.trainers()))
