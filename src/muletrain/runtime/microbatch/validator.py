"""Measures the held-out loss of a step's weights, while the step goes on.

Held-out microbatches go through the live peers like other microbatches, with indices after the step's own, but forward
only: no peer adds anything to a gradient, and no dropout is drawn. One trainer, which all peers know
(``validator_of``), sends the held-out microbatches. The same trainer claims microbatch 0 of such a step, and begins it
after the measurement: so the step does not end earlier, as long as that trainer gets answers. Without answers, the
other trainers take over microbatch 0, as from any trainer that gives out nothing (``Trainer.take_over_orphans``), and
the measurement is left out.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from muletrain.errors import DeadlineExceeded, MuletrainError
from muletrain.events import Validated, ValidationLeftOut
from muletrain.policy.deadline import CEILING_S
from muletrain.policy.wiring import claimant
from muletrain.runtime.core.times import PATIENCE_S, pause_s
from muletrain.runtime.microbatch.dispatcher import StageLost
from muletrain.runtime.microbatch.messages import Attempt
from muletrain.wire.codec import encode_samples

if TYPE_CHECKING:
    import numpy.typing as npt

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.roster import Roster
    from muletrain.runtime.microbatch.dispatcher import Dispatcher
    from muletrain.runtime.microbatch.inflight import InFlightStep

TRIES = 5
"""Tries of a held-out microbatch that no peer could take."""
STALL = 1 / 3
"""Share of the patience without a finished microbatch after which a measurement is given up, and after which the limit of
any measurement (``CEILING_S``) is checked: both end long before any peer gives up the step (``core.waiting``)."""


class Heldout(Protocol):
    """Makes held-out microbatches."""

    targets: int
    """Number of all targets, tokens or samples, over which losses are means."""

    def __len__(self) -> int: ...

    def microbatch(self, index: int, /) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
        """Returns inputs and targets, as declared by the plan, and the number of ``targets`` in this microbatch."""
        ...


def validator_of(roster: Roster) -> PeerId | None:
    """Returns the trainer that measures the held-out loss: the trainer that collects reports, else the first by id, if
    any. A hint: a peer with another view costs a second measurement, or none."""
    trainers, coordinator = roster.trainers(), roster.coordinator()
    if coordinator is not None and coordinator.id in trainers:
        return coordinator.id
    return min(trainers, default=None)


def claimant_of(ctx: Context, step: int, index: int, turn: int = 0) -> PeerId:
    """Returns the trainer that gives out microbatch ``index``, or after ``turn`` trainers that did not. The one that
    measures the held-out loss has microbatch 0."""
    if index == turn == 0 and ctx.plan.validates(step):
        return validator_of(ctx.roster) or ctx.net.peer_id
    return claimant(step, index, ctx.roster.trainers(), turn)


class Validator:
    """Measures the held-out loss once, in the step ``work``."""

    def __init__(
        self, ctx: Context, source: Heldout | None, dispatcher: Dispatcher, work: InFlightStep, window: int
    ) -> None:
        """``source``: None: this peer has no held-out text. ``dispatcher``: towards stage 0. ``window``: held-out
        microbatches under way at once."""
        self._ctx, self._source, self._dispatcher, self._work = ctx, source, dispatcher, work
        self._window = window
        self._sums: list[float] = []
        """Loss of each finished microbatch, summed over tokens [nats]."""

    async def run(self) -> None:
        """Measure, and report the loss or the reason why there is none. Raises only CancelledError."""
        ctx = self._ctx
        if self._source is None:
            return self._left_out("the trainer that would measure it has no held-out text")
        try:
            loss = await self._measured(self._source)
        except asyncio.CancelledError:
            self._left_out("the step ended before it was measured")
            raise
        except MuletrainError as e:
            return self._left_out(str(e))
        ctx.meter.validated = event = Validated(
            step=ctx.plan.updates(self._work.step),
            loss=loss,
            perplexity=self._perplexity(loss),
            tokens=self._source.targets,
        )
        ctx.emit(event)

    def _perplexity(self, loss: float) -> float | None:
        plan = self._ctx.plan
        if plan.validation is not None and plan.validation.own_loss:
            return None
        return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf

    async def _measured(self, source: Heldout) -> float:
        """Returns the mean loss [nats/token]. Raises MuletrainError, also after a stall or a timeout. Ends within
        ``STALL * PATIENCE_S`` without a microbatch, or ``CEILING_S``."""
        clock, indices = self._ctx.clock, iter(range(len(source)))
        begun_s = clock.now()

        async def work_off() -> None:
            for k in indices:
                self._sums.append(await self._through(k, source))

        running = {asyncio.create_task(work_off()) for _ in range(self._window)}
        tasks, through = [*running], 0
        try:
            while running:
                try:
                    waiting = asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    done, running = await clock.deadline(waiting, STALL * PATIENCE_S, "a held-out microbatch")
                    for task in done:
                        task.result()
                except DeadlineExceeded:
                    if len(self._sums) == through or clock.now() - begun_s > CEILING_S:
                        raise
                through = len(self._sums)
        finally:
            for task in tasks:  # one failure ends all tasks
                task.cancel()
        return math.fsum(self._sums) / source.targets

    def _left_out(self, reason: str) -> None:
        self._ctx.emit(ValidationLeftOut(step=self._ctx.plan.updates(self._work.step), reason=reason))

    async def _through(self, k: int, source: Heldout) -> float:
        """Returns the sum of the losses of held-out microbatch ``k`` [nats]. Raises MuletrainError."""
        index = self._work.microbatches + k
        inputs, targets, counted = source.microbatch(k)
        tensors = [encode_samples(torch.from_numpy(values)) for values in (inputs, targets)]
        for attempt in range(TRIES):
            request = Attempt(
                lineage=self._work.lineage,
                step=self._work.step,
                index=index,
                attempt=attempt,
                trainer=self._ctx.net.peer_id,
            )
            try:
                return counted * (await self._dispatcher.request(request, (), tensors, gradient=False)).loss
            except StageLost as e:  # the stage's peers may be at the previous step, or dead without our knowledge
                lost = e
                await self._ctx.clock.sleep(pause_s(attempt))
                self._dispatcher.refresh()
        raise lost
