"""The trainers of one peer: one for each step that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.errors import ProtocolError
from muletrain.runtime.microbatch.trainer import Trainer

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.core.messages import Gap
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.dispatcher import Dispatcher
    from muletrain.runtime.microbatch.inflight import InFlightStep
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.microbatch.survey import Survey
    from muletrain.runtime.microbatch.trainer import Source


class Trainers:
    """Give out microbatches, where this peer has the data."""

    def __init__(
        self, ctx: Context, position: Position, inwards: Dispatcher, survey: Survey, source: Source | None
    ) -> None:
        """``inwards``: towards stage 0. ``source``: of microbatches; None: this peer does not train (yet)."""
        self._ctx, self._position, self._inwards, self._survey, self.source = ctx, position, inwards, survey, source
        self._of_step: dict[int, Trainer] = {}

    def begin(self, work: InFlightStep, *, retry: bool) -> None:
        """``retry``: this peer was away, so that others may have begun the step's microbatches."""
        if work.step in self._of_step:  # it was begun ahead; who trained then may be gone
            self.take_over_orphans(work, late=False)
        elif self.source is not None:
            self._inwards.refresh()
            trainer = Trainer(self._ctx, self.source, self._inwards, self._survey, _window(self._ctx), work)
            self._of_step[work.step] = trainer
            trainer.spawn(trainer.run_step(retry=retry), "trainer step")

    def begin_late(self, source: Source) -> None:
        """This peer has got the data: it builds microbatches, also of the steps that are under way."""
        self._ctx.roster.train()
        self.source = source
        for work in self._position.under_way():
            if not work.over:
                self.begin(work, retry=True)

    def take_over_orphans(self, work: InFlightStep, *, late: bool) -> None:
        """Microbatches of ``work`` are not through: after a death, or (``late``) although nothing came for as long as a step takes."""
        trainer = self._of_step.get(work.step)
        if trainer is not None and not work.all_through:
            trainer.spawn(trainer.adopt(late=late), "adopt")

    def on_gap(self, sender: PeerId, gap: Gap) -> None:
        """Raises ProtocolError."""
        trainer, plan = self._of_step.get(gap.step), self._ctx.plan
        if trainer is None:
            if self.source is None:
                raise ProtocolError(f"{gap.KIND}: this peer does not train")
            return  # it has not begun that step: who asks, asks again
        if gap.stage >= plan.stages or any(i >= plan.microbatches for i in gap.indices):
            raise ProtocolError("gap outside the step")
        trainer.spawn(trainer.on_gap(sender, gap), "gap")

    def end(self, last: int) -> None:
        """Those of the steps up to ``last``."""
        for step in [s for s in self._of_step if s <= last]:
            self._of_step.pop(step).end()


def _window(ctx: Context) -> int:
    """Microbatches a trainer has under way: half of what the smallest stage admits, shared among the trainers. With planned membership, of
    each pipeline (``Seats.window``)."""
    if (seats := ctx.plan.seats) is not None:
        return seats.window(ctx.plan.capacity, len(ctx.roster.trainers()))
    smallest = min(len(ctx.roster.stage(s)) for s in range(ctx.plan.stages))
    return max(2, smallest * ctx.plan.capacity // (2 * len(ctx.roster.trainers())))
