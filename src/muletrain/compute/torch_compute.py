"""``TorchCompute``: one stage resident on one device.

``StageArithmetic`` computes, on the compute thread, in the order of the slot. Delayed updates, ``offload`` and copies
from the device to the host have separate threads.

A cancelled call that has not started never starts. A cancelled call that has started completes, but the result is
dropped: the gradients of a microbatch are temporaries until the caller's coroutine resumes, and are sent to the
accumulator only then, without another await. So a microbatch is in the accumulator exactly when the call returned.
Shapes: B sequences, T tokens, D width, P parameters.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muletrain.compute import checks
from muletrain.compute.arithmetic import StageArithmetic, Stash
from muletrain.compute.arrivals import Coming, arrivals_for, taken
from muletrain.compute.compiled import Compiling, compile_blocks
from muletrain.compute.estimate import stash_bytes
from muletrain.compute.results import PIECE, Result, staging_for
from muletrain.compute.slot import AT_ONCE, Slot, Turn
from muletrain.compute.threads import ThreadedCompute, Threads, passed
from muletrain.model.loss import positions_in
from muletrain.model.make import make_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from concurrent.futures import Future

    from muletrain.compute.arithmetic import Counters, Gradients, StageSetup
    from muletrain.compute.base import Microbatch, Update
    from muletrain.model.chain import Model
    from muletrain.model.module import StageModule
    from muletrain.optim.sketch import Sketch
    from muletrain.planning.partition import Cut


class TorchCompute(ThreadedCompute):
    """The ``Compute`` protocol on torch. ``source`` gives initial weights by name (a checkpoint), default: drawn from
    the seed.

    Raises CheckpointError when ``source`` gives wrong shapes.
    """

    parts = 1

    def __init__(
        self, spec: Model, cut: Cut, stage: int, setup: StageSetup, source: Callable[[str], Tensor] | None = None
    ) -> None:
        self.stage, self.stages = stage, len(cut)
        self.delayed, self.lends = setup.optimizer.delayed, setup.lends
        versions = [self._empty(spec, cut) for _ in range(2 if self.delayed else 1)]
        self.arithmetic = StageArithmetic(stage, versions, setup, source)
        self.layout = layout = self.arithmetic.layout
        self.n_params, self.n_trained = layout.size, layout.trained
        self.threads = Threads(stage, delayed=self.delayed, inline=setup.inline)
        self.jobs = self.threads.jobs
        self.by_block = setup.checkpointing == "block"
        token_bytes = stash_bytes(spec, cut, stage, 1, setup.precision, by_block=self.by_block)
        self._spec, self._sequences, self._microbatches = spec, setup.sequences, setup.microbatches
        self._stash = Stash(setup.checkpointing, setup.stash_budget, token_bytes)
        self._slot, self._staging = Slot(), staging_for(setup.device)
        self._arrivals = arrivals_for(setup.device, self.threads.arrivals)
        self.compiling: Compiling | None = None
        """What came of compiling the blocks; None: not asked for."""
        if setup.compiled:  # on the thread that computes: what is compiled depends on the thread's settings
            asked = versions, setup.sequences, setup.device
            self.compiling = self.threads.submit(self.threads.compute, compile_blocks, *asked).result()
        self._changed: Future[None] | None = None
        """The last change of the accumulator."""
        self._uncounted: dict[Microbatch, Gradients] = {}
        """Gradients of parts not counted yet."""

    def _empty(self, spec: Model, cut: Cut) -> StageModule:
        """The stage, without storage."""
        return make_stage(spec, self.stage, cut)

    @property
    def counters(self) -> Counters:
        """Times and recomputations, since the start."""
        return self.arithmetic.counters

    @property
    def skipped(self) -> int:
        return self.arithmetic.scale.skipped

    # Forward and backward -------------------------------------------------------------------------------------------

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        self._check_shape(inputs)
        checks.check_positions(positions, inputs)
        async with self._bringing((inputs, self._check_inputs)) as (there,), self._slot(turn):
            samples = self.stage == 0 and self._spec.inputs.shape is not None
            length = 1 if samples else inputs.shape[1]
            reserved = 0 if mb.heldout else self._stash.reserve(inputs.shape[0] * length)
            try:
                kept, output = await self._compute(taken(self.arithmetic.forward), mb, there, reserved > 0, positions)
            except BaseException:
                self._stash.release(reserved)
                raise
            if not mb.heldout:
                self._stash.put(mb, kept, reserved)
        return Result(output, self._to_host)

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        """However the call ends, ``mb`` is no longer held once the turn has come, unless ``grad`` was refused
        (ProtocolError).
        """
        ahead = self._stash.holds(mb, grad)  # a tensor that will be refused takes no memory of the device
        async with self._bringing((grad, None), ahead=ahead) as (there,), self._slot(turn):
            checks.check_gradient_shape(grad, self._stash.shape(mb))
            kept, reserved = self._stash.pop(mb)
            try:
                work = self._compute(taken(self.arithmetic.backward), mb, kept, there, accumulate)
                gradients, inputs_gradient = await work
            finally:
                self._stash.release(reserved)
            self._commit(mb, gradients, accumulate)
        return None if inputs_gradient is None else Result(inputs_gradient, self._to_host)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        self._check_shape(inputs)
        declared, vocab = self._spec.targets, self._spec.vocab
        targets, weight = checks.weighed(targets, declared, inputs.shape[1], vocab, self._microbatches)
        checks.check_targets(targets, inputs, self._spec, self._sequences)
        places, vocab = None, vocab + (mb.heldout or weight is not None)
        if self._spec.apart:
            places, targets = positions_in(targets, self._spec.vocab)
        both = (inputs, self._check_inputs), (targets, lambda t: checks.check_sample_values("targets", t, vocab))
        async with self._bringing(*both) as there, self._slot(turn):
            work = self._compute(taken(self.arithmetic.loss_backward), mb, *there, accumulate, weight, places)
            loss, gradients, inputs_gradient = await work
            self._commit(mb, gradients, accumulate)
        return loss, None if inputs_gradient is None else Result(inputs_gradient, self._to_host)

    def busy_s(self, mb: Microbatch, took_s: float) -> float:
        return took_s

    def discard(self, mb: Microbatch) -> None:
        self._stash.discard(mb)
        self._uncounted.pop(mb, None)

    def count(self, mb: Microbatch) -> None:
        self._add(self._uncounted.pop(mb), mb.step)

    async def part_sketch(self, mb: Microbatch, seed: bytes) -> Sketch:
        return await self._compute(self.arithmetic.sketch, self._uncounted[mb], mb.step, seed)

    def _check_shape(self, inputs: Tensor) -> None:
        if self.stage == 0:
            checks.check_sample_shape("inputs", inputs, self._spec.inputs, self._spec, self._sequences)
        else:
            checks.check_activation_shape(inputs, self._spec, self._sequences)

    def _check_inputs(self, inputs: Tensor) -> None:
        if self.stage == 0:
            checks.check_sample_values("inputs", inputs, self._spec.vocab)

    @asynccontextmanager
    async def _bringing(
        self, *given: tuple[Tensor, Callable[[Tensor], None] | None], ahead: bool = True
    ) -> AsyncIterator[list[Any]]:
        """Tensors with checks of their values, on their way to an accelerator meanwhile if ``ahead``."""
        if self._arrivals is None or not ahead:
            yield [values for values, _ in given]
            return
        there = [self._arrivals.bring(values, check) for values, check in given]
        try:
            yield there
        finally:
            for coming in there:
                if isinstance(coming, Coming):
                    coming.drop()

    # The accumulator and the step -----------------------------------------------------------------------------------

    def _commit(self, mb: Microbatch, gradients: Gradients, accumulate: bool) -> None:
        if not accumulate or mb.heldout:
            return
        if mb.whole:
            self._uncounted[mb] = gradients
        else:
            self._add(gradients, mb.step)

    def _add(self, gradients: Gradients, step: int) -> None:
        """Queue the addition; later calls see the sum."""
        self._changed = self.threads.submit(self.threads.compute, self.arithmetic.accumulate, gradients, step)

    def add(self, step: int, gradient: Tensor) -> None:
        self._changed = self.threads.submit(self.threads.compute, self.arithmetic.add, gradient, step)

    def clear(self, step: int) -> None:
        self._changed = self.threads.submit(self.threads.compute, self.arithmetic.clear, step)

    async def gradient(self, step: int) -> Tensor:
        """Waits for additions still queued. On the CPU the result is the accumulator itself, until the step is
        applied."""
        if self._changed is not None and not self._changed.done():
            await asyncio.shield(asyncio.wrap_future(self._changed))  # a cancelled caller must not cancel the addition
        if self._staging is not None:
            self._staging.follow()
        return await self._to_host(self.arithmetic.accumulator(step)[: self.n_trained])

    async def room(self, numbers: int) -> Tensor:
        return torch.empty(numbers)

    async def _to_host(self, values: Tensor) -> Tensor:
        """Copies contiguous fp32 ``values`` in pieces, so that a result never waits for a whole gradient."""
        if self._staging is None or values.device.type != self.arithmetic.setup.device.type:
            return values
        flat, out = values.view(-1), torch.empty(values.numel())
        for begin in range(0, values.numel(), PIECE):
            piece = slice(begin, begin + PIECE)
            await self.threads.run(self.threads.copies, self._staging.copy, flat[piece], out[piece])
        return out.view(values.shape)

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        """Raises ProtocolError unless ``gradient`` is fp32 [G]. A cancelled call has either not started or is
        completed.
        """
        checks.check_gradient_shape(gradient, (self.n_trained,))
        async with self._slot(turn, brief=self.delayed):
            if self.delayed:
                await self._compute(passed)  # a waiting ``clear`` would empty the update's buffer
            await self.threads.run(self.threads.updates, self.arithmetic.apply, gradient, update)

    # The state ------------------------------------------------------------------------------------------------------

    async def digest(self) -> bytes:
        return await self._read(self.arithmetic.digest)

    async def copied_weights(self, begin: int = 0, end: int | None = None) -> Tensor:
        return await self.offload(self.arithmetic.copied_weights, begin, end)

    def newest_for(self) -> tuple[int, ...]:
        return self.arithmetic.newest_for()

    async def load_weights(self, weights: Tensor, steps: Collection[int] = ()) -> None:
        """Raises ProtocolError unless ``weights`` is fp32 [P]."""
        checks.check_gradient_shape(weights, (self.n_params,))
        await self._compute(self.arithmetic.load_weights, weights, steps)

    async def state(self) -> dict[str, Tensor]:
        return await self._read(self.arithmetic.state)

    async def load_state(self, state: dict[str, Tensor]) -> None:
        await self._compute(self.arithmetic.load_state, state)

    def close(self) -> None:
        self.threads.close()
        self._stash.clear()
