"""``TorchCompute``: one stage resident on one device.

All arithmetic runs on one compute thread, in the order of the slot. Delayed updates, ``offload`` and copies from the
device to the host have threads of their own. Bookkeeping (what is held, how much is stashed) happens on the event
loop's thread only, so it needs no lock.

Cancellation. A cancelled call that has not started never starts; one that has runs to its end, but its result is
dropped: the gradients of a microbatch are temporaries until the caller's coroutine resumes, and only then are they sent
to the accumulator, without another await. So a microbatch is in the accumulator exactly when the call returned. Shapes:
B sequences, T tokens, D width, P parameters.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from muletrain.clock import LoopClock
from muletrain.compute import checks
from muletrain.compute.estimate import stash_bytes
from muletrain.compute.executor import InlineExecutor
from muletrain.compute.jobs import Jobs
from muletrain.compute.probe import precision_dtype
from muletrain.compute.results import PIECE, Result, staging_for
from muletrain.compute.scaling import LossScale
from muletrain.compute.slot import AT_ONCE, Slot, Turn
from muletrain.compute.weights import StageWeights
from muletrain.config.schema import Precision
from muletrain.errors import ProtocolError
from muletrain.model.dropout import Masks
from muletrain.model.stage import Stage, initial_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muletrain.compute.base import Microbatch, Update
    from muletrain.config.schema import OptimizerConfig
    from muletrain.model.spec import ModelSpec
    from muletrain.planning.partition import Cut

R = TypeVar("R")
Gradients = tuple[Tensor, ...]


@dataclass
class Counters:
    """Counted since the start, on the compute thread."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    """Forward passes repeated in backward; not part of ``backward_s``."""
    apply_s: float = 0.0
    recomputed: int = 0
    """Microbatches whose forward pass was repeated."""


@dataclass(frozen=True)
class StageSetup:
    """What a stage computes with, beyond the model: facts of the run and choices of this machine."""

    optimizer: OptimizerConfig
    total_steps: int
    seed: int
    sequences: int
    """Largest B accepted."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = Precision.FP32
    """Chosen, not 'auto' (``probe.choose_precision``)."""
    checkpointing: Literal["auto", "always", "never"] = "auto"
    stash_budget: int = 1 << 30
    """Memory for graphs kept between forward and backward under 'auto' [bytes]."""
    inline: bool = False
    """Compute in the caller's thread (virtual event loops)."""


@dataclass
class _Held:
    """What ``forward`` keeps. ``output`` has its graph if stashed, else it is None and is computed again."""

    inputs: Tensor
    output: Tensor | None
    shape: tuple[int, ...]
    reserved: int


class TorchCompute:
    """The ``Compute`` protocol on torch. ``source`` gives initial weights by name (a checkpoint), default: drawn from
    the seed.

    Raises CheckpointError when ``source`` gives other shapes.
    """

    def __init__(
        self, spec: ModelSpec, cut: Cut, stage: int, setup: StageSetup, source: Callable[[str], Tensor] | None = None
    ) -> None:
        self.stage, self.stages = stage, len(cut)
        self.delayed = setup.optimizer.delayed
        self.counters = Counters()
        self.jobs = Jobs(LoopClock().now)
        self._spec, self._cut, self._setup = spec, cut, setup
        self._versions = [self._empty() for _ in range(2 if self.delayed else 1)]
        shapes = self._versions[0].shapes()
        self._weights = StageWeights(
            self._versions,
            setup.optimizer,
            setup.total_steps,
            device=setup.device,
            dtype=precision_dtype(setup.precision),
            source=source or (lambda name: initial_weight(spec, name, shapes[name], setup.seed)),
        )
        self.n_params = self._weights.layout.size
        self._scale = LossScale(fp16=setup.precision is Precision.FP16, versions=len(self._versions))
        self._held: dict[Microbatch, _Held] = {}
        self._stashed = 0
        self._weights_lock = threading.Lock()  # between the compute thread and the offload thread
        self._slot = Slot()
        self._staging = staging_for(setup.device)
        self._thread = _executor(f"compute-{stage}", inline=setup.inline)
        self._updates = self._thread
        if self.delayed:  # the next step computes meanwhile
            self._updates = _executor(f"update-{stage}", inline=setup.inline)
        self._aside = _executor(f"offload-{stage}", inline=setup.inline)
        self._copies = _executor(f"copy-{stage}", inline=setup.inline)
        self._pending: Future[None] | None = None  # the last change of the accumulator

    def _empty(self) -> Stage:
        """Without storage. It is made once for each version of the weights."""
        return Stage(self._spec, self.stage, self._cut)

    # Forward and backward -------------------------------------------------------------------------------------------

    async def forward(self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE) -> Result:
        self._check_shape(inputs)
        async with self._slot(turn):
            reserved = self._reserve(inputs)
            try:
                held, output = await self._run(self._forward, mb, inputs, reserved)
            except BaseException:
                self._stashed -= reserved
                raise
            self.discard(mb)
            self._held[mb] = held
        return Result(output, self._to_host)

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        """Whatever becomes of the call, ``mb`` is no longer held once its turn has come, unless ``grad`` was refused
        (ProtocolError).
        """
        async with self._slot(turn):
            checks.check_gradient_shape(grad, self._held[mb].shape)
            held = self._held.pop(mb)
            try:
                gradients, inputs_gradient = await self._run(self._backward, mb, held, grad, accumulate)
            finally:
                self._stashed -= held.reserved
            self._commit(mb, gradients)
        return None if inputs_gradient is None else Result(inputs_gradient, self._to_host)

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        self._check_shape(inputs)
        checks.check_token_shape("targets", targets, self._spec, self._setup.sequences)
        if targets.shape != inputs.shape[:2]:
            raise ProtocolError(f"targets: {tuple(targets.shape)} for inputs {tuple(inputs.shape)}")
        async with self._slot(turn):
            loss, gradients, inputs_gradient = await self._run(self._loss_backward, mb, inputs, targets, accumulate)
            self._commit(mb, gradients)
        return loss, None if inputs_gradient is None else Result(inputs_gradient, self._to_host)

    def discard(self, mb: Microbatch) -> None:
        held = self._held.pop(mb, None)
        if held is not None:
            self._stashed -= held.reserved

    def _reserve(self, inputs: Tensor) -> int:
        """Bytes of the budget set aside for stashing this microbatch; 0: recompute it."""
        if self._setup.checkpointing == "always":
            return 0
        tokens = inputs.shape[0] * inputs.shape[1]
        size = stash_bytes(self._spec, self._cut, self.stage, tokens, self._setup.precision)
        if self._setup.checkpointing == "auto" and self._stashed + size > self._setup.stash_budget:
            return 0
        self._stashed += size
        return size

    def _forward(self, mb: Microbatch, inputs: Tensor, reserved: int) -> tuple[_Held, Tensor]:
        leaf = self._leaf(inputs)
        with self._timed("forward_s"), torch.set_grad_enabled(reserved > 0):
            output = self._module(mb)(leaf, self._masks(mb)).float()
            result = output.detach().contiguous()
        return _Held(leaf, output if reserved else None, tuple(output.shape), reserved), result

    def _backward(self, mb: Microbatch, held: _Held, grad: Tensor, accumulate: bool) -> tuple[Gradients, Tensor | None]:
        if self._is_first and not accumulate:
            return (), None  # nobody wants anything of it
        if held.output is None:
            with self._timed("recompute_s"), torch.enable_grad():
                held.output = self._module(mb)(held.inputs, self._masks(mb)).float()
            self.counters.recomputed += 1
        with self._timed("backward_s"):
            seed = grad.to(self._setup.device) * self._scale.of(mb.step)
            return self._differentiate(mb, held.output, held.inputs, seed, accumulate)

    def _loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, accumulate: bool
    ) -> tuple[float, Gradients, Tensor | None]:
        checks.check_token_values("targets", targets, self._spec.vocab)
        leaf = self._leaf(inputs)
        with self._timed("forward_s"), torch.enable_grad():
            logits = self._module(mb)(leaf, self._masks(mb)).float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(logits.device).flatten())
            nats = float(loss.detach())
        with self._timed("backward_s"):
            seed = torch.full_like(loss, self._scale.of(mb.step))
            return nats, *self._differentiate(mb, loss, leaf, seed, accumulate)

    def _differentiate(
        self, mb: Microbatch, output: Tensor, leaf: Tensor, seed: Tensor, accumulate: bool
    ) -> tuple[Gradients, Tensor | None]:
        """Gradients of the parameters (scaled; none unless ``accumulate``) and of the inputs (fp32; None at stage
        0)."""
        wanted = [leaf] if leaf.requires_grad else []
        wanted += self._weights.parameters(mb.step) if accumulate else []
        if not wanted:
            return (), None
        gradients = torch.autograd.grad(output, wanted, seed)
        if not leaf.requires_grad:
            return gradients, None
        return gradients[1:], gradients[0].div_(self._scale.of(mb.step)).contiguous()

    def _leaf(self, inputs: Tensor) -> Tensor:
        """``inputs``, checked, on the device; activations are where the stage's backward ends."""
        if self._is_first:
            checks.check_token_values("inputs", inputs, self._spec.vocab)
            return inputs.to(self._setup.device)
        return inputs.detach().to(self._setup.device).requires_grad_()

    def _check_shape(self, inputs: Tensor) -> None:
        if self._is_first:
            checks.check_token_shape("inputs", inputs, self._spec, self._setup.sequences)
        else:
            checks.check_activation_shape(inputs, self._spec, self._setup.sequences)

    @property
    def _is_first(self) -> bool:
        return self.stage == 0

    def _module(self, mb: Microbatch) -> Stage:
        """With the weights of its step."""
        return self._versions[mb.step % len(self._versions)]

    def _masks(self, mb: Microbatch) -> Masks:
        return Masks(self._setup.seed, mb.step, mb.index)

    # The accumulator and the step -----------------------------------------------------------------------------------

    def _commit(self, mb: Microbatch, gradients: Gradients) -> None:
        """Queue the addition; whatever is called later sees it."""
        if gradients:
            scale = self._scale.of(mb.step)
            self._pending = self._thread.submit(self._noted, True, self._weights.accumulate, gradients, mb.step, scale)

    async def gradient(self, step: int) -> Tensor:
        """Waits for additions still queued. On the CPU it is the accumulator itself, until the step is applied."""
        if self._pending is not None and not self._pending.done():
            await asyncio.shield(asyncio.wrap_future(self._pending))  # a cancelled caller must not cancel the addition
        if self._staging is not None:
            self._staging.follow()
        return await self._to_host(self._weights.accumulator(step))

    async def _to_host(self, values: Tensor) -> Tensor:
        """Copies contiguous fp32 ``values`` in pieces, so that a result never waits for a whole gradient."""
        if self._staging is None:
            return values
        flat, out = values.view(-1), torch.empty(values.numel())
        for begin in range(0, values.numel(), PIECE):
            piece = slice(begin, begin + PIECE)
            await self._on(self._copies, self._staging.copy, flat[piece], out[piece])
        return out.view(values.shape)

    def clear(self, step: int) -> None:
        self._pending = self._thread.submit(self._noted, True, _zero, self._weights.accumulator(step))

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        """Raises ProtocolError unless ``gradient`` is fp32 [P]. A cancelled call has either not started or is
        completed.
        """
        checks.check_gradient_shape(gradient, (self.n_params,))
        async with self._slot(turn, brief=self.delayed):
            if self.delayed:
                await self._run(_passed)  # a ``clear`` that waits would empty what the update computes in
            await self._on(self._updates, self._apply, gradient, update)

    def _apply(self, gradient: Tensor, update: Update) -> None:
        with self._timed("apply_s"), self._weights_lock, torch.no_grad():
            self._weights.apply(gradient, update.scale, update.step, skip=update.skip)
            self._scale.update(update.step, skipped=update.skip)

    # The state ------------------------------------------------------------------------------------------------------

    async def digest(self) -> bytes:
        return await self._read(self._weights.digest)

    async def state(self) -> dict[str, Tensor]:
        return await self._read(self._state)

    async def load_state(self, state: dict[str, Tensor]) -> None:
        await self._run(self._locked, self._load_state, state)

    def _state(self) -> dict[str, Tensor]:
        return {**self._weights.state(), **self._scale.state()}

    def _load_state(self, state: dict[str, Tensor]) -> None:
        self._weights.load_state(state)
        self._scale.load_state(state, self._weights.next)

    async def _read(self, fn: Callable[[], R]) -> R:
        """``fn`` beside the compute thread, but after every ``apply`` and ``load_state`` called before."""
        await self._run(_passed)
        await self._on(self._updates, _passed)
        return await self.offload(self._locked, fn)

    def _locked(self, fn: Callable[..., R], *args: object) -> R:
        with self._weights_lock, torch.no_grad():
            return fn(*args)

    # Threads --------------------------------------------------------------------------------------------------------

    async def offload(self, fn: Callable[..., R], *args: object) -> R:
        return await self._on(self._aside, fn, *args)

    def close(self) -> None:
        """Jobs that wait are dropped; one that runs ends by itself."""
        for executor in (self._thread, self._updates, self._aside, self._copies):
            executor.shutdown(wait=False, cancel_futures=True)
        self._held.clear()
        self._stashed = 0

    async def _run(self, fn: Callable[..., R], *args: object) -> R:
        return await self._on(self._thread, fn, *args)

    async def _on(self, executor: Executor, fn: Callable[..., R], *args: object) -> R:
        """A cancelled call leaves its thread at what it is at (``jobs``)."""
        job = partial(self._noted, executor is not self._aside, fn, *args)
        return await asyncio.get_running_loop().run_in_executor(executor, job)

    def _noted(self, device: bool, fn: Callable[..., R], *args: object) -> R:
        """In the thread."""
        operation = args[0] if fn == self._locked else fn
        with self.jobs.at(getattr(operation, "__name__", type(operation).__name__).strip("_"), device=device):
            return fn(*args)

    @contextmanager
    def _timed(self, counter: str) -> Iterator[None]:
        """Adds the seconds until this thread's kernels are done to ``counter``; a device's failure shows up here, not
        later. Copies of earlier results, on a stream of their own, are not waited for."""
        begin = time.perf_counter()
        yield
        if self._setup.device.type == "cuda":
            torch.cuda.current_stream(self._setup.device).synchronize()
        setattr(self.counters, counter, getattr(self.counters, counter) + time.perf_counter() - begin)


def _executor(name: str, *, inline: bool) -> Executor:
    return InlineExecutor() if inline else ThreadPoolExecutor(1, thread_name_prefix=name)


def _passed() -> None:
    """A job that is done when those before it are."""


def _zero(accumulator: Tensor) -> None:
    accumulator.zero_()
