"""``StageArithmetic`` computes one stage on torch, without decisions about order, threads or cancellation.

Shapes: B sequences, T tokens, D width, P parameters.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muletrain.compute import checks
from muletrain.compute.probe import precision_dtype
from muletrain.compute.scaling import LossScale
from muletrain.compute.stash import Kept
from muletrain.compute.weights import StageWeights
from muletrain.config.schema import Precision
from muletrain.model.dropout import Masks
from muletrain.model.stage import initial_weight
from muletrain.optim.sketch import sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    from muletrain.compute.base import Microbatch, Update
    from muletrain.compute.stash import Checkpointing
    from muletrain.config.schema import OptimizerConfig
    from muletrain.model.module import StageModule
    from muletrain.optim.sketch import Sketch

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
    """Microbatches with a repeated forward pass."""


@dataclass(frozen=True)
class StageSetup:
    """Settings of a stage beside the model: facts of the run and choices of this machine."""

    optimizer: OptimizerConfig
    total_steps: int
    seed: int
    sequences: int
    """Largest B accepted."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = Precision.FP32
    """A chosen precision, not 'auto' (``probe.choose_precision``)."""
    checkpointing: Checkpointing = "auto"
    stash_budget: int = 1 << 30
    """Memory for graphs kept between forward and backward under 'auto' [bytes]."""
    inline: bool = False
    """Compute in the caller's thread (virtual event loops)."""
    updates: bool = True
    """The optimizer's moments are kept here. False: this machine only computes gradients."""
    masks: type[Masks] = Masks
    """Makes the dropout masks of a microbatch from (seed, step, index)."""


class StageArithmetic:
    """Owns the stage's weights, loss scale and counters.

    One thread computes. Another may read the weights (``digest``, ``state``) or update the weights meanwhile: a lock
    serializes both. Under delayed updates ``versions`` are two copies of the stage, which steps use in turn.
    """

    def __init__(
        self, stage: int, versions: list[StageModule], setup: StageSetup, source: Callable[[str], Tensor] | None
    ) -> None:
        """``source`` gives initial weights by name; None: draw from the seed. Raises CheckpointError when ``source``
        gives wrong shapes."""
        self.stage, self.spec = stage, versions[0].spec
        self.setup, self.counters, self._versions = setup, Counters(), versions
        shapes = versions[0].shapes()
        self.weights = StageWeights(
            versions,
            setup.optimizer,
            setup.total_steps,
            device=setup.device,
            dtype=precision_dtype(setup.precision),
            source=source or (lambda name: initial_weight(self.spec, name, shapes[name], setup.seed)),
            updates=setup.updates,
        )
        self.scale = LossScale(fp16=setup.precision is Precision.FP16, versions=len(versions))
        self._lock = threading.Lock()

    def module(self, step: int) -> StageModule:
        """The stage with the weights that ``step`` computes with."""
        return self._versions[step % len(self._versions)]

    def _run(self, mb: Microbatch, inputs: Tensor) -> Tensor:
        """fp32 output of ``mb``."""
        output: Tensor = self.module(mb.step)(inputs, self._masks(mb)).float()
        return output

    def _masks(self, mb: Microbatch) -> Masks | None:
        return None if mb.heldout else self.setup.masks(self.setup.seed, mb.step, mb.index, mb.first)

    # Microbatches ----------------------------------------------------------------------------------------------------

    def forward(self, mb: Microbatch, inputs: Tensor, stash: bool) -> tuple[Kept, Tensor]:
        """Compute ``mb``. Returns the inputs of backward (with the graph if ``stash``), and the output, fp32 on the
        device."""
        leaf = self._leaf(inputs)
        with self._timed("forward_s"), torch.set_grad_enabled(stash):
            output = self._run(mb, leaf)
            result = output.detach().contiguous()
        return Kept(leaf, output if stash else None, tuple(output.shape)), result

    def backward(self, mb: Microbatch, kept: Kept, grad: Tensor, accumulate: bool) -> tuple[Gradients, Tensor | None]:
        """Differentiate ``mb``. Returns the gradients of ``differentiate``."""
        if self.stage == 0 and not accumulate:
            return (), None  # nothing is wanted
        if kept.output is None:
            with self._timed("recompute_s"), torch.enable_grad():
                kept.output = self._run(mb, kept.inputs)
            self.counters.recomputed += 1
        with self._timed("backward_s"):
            seed = grad.to(self.setup.device) * self.scale.of(mb.step)
            return self.differentiate(mb, kept.output, kept.inputs, seed, accumulate)

    def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, accumulate: bool
    ) -> tuple[float, Gradients, Tensor | None]:
        """Compute and differentiate ``mb``. Returns the mean loss [nats/token] (of a part: the share of the
        microbatch's), and the gradients of ``differentiate``."""
        checks.check_sample_values("targets", targets, self.spec.vocab + mb.heldout)
        leaf = self._leaf(inputs)
        with self._timed("forward_s"), torch.set_grad_enabled(not mb.heldout):
            loss = self.module(mb.step).loss(leaf, targets, self._masks(mb))
            if mb.whole:
                loss = loss * mb.share(inputs.shape[0])
            nats = float(loss.detach())
        if mb.heldout:
            return nats, (), None
        with self._timed("backward_s"):
            seed = torch.full_like(loss, self.scale.of(mb.step))
            return nats, *self.differentiate(mb, loss, leaf, seed, accumulate)

    def differentiate(
        self, mb: Microbatch, output: Tensor, leaf: Tensor, seed: Tensor, accumulate: bool
    ) -> tuple[Gradients, Tensor | None]:
        """Gradients of the trained parameters (scaled; none unless ``accumulate``) and of the inputs (fp32; None at
        stage 0)."""
        wanted = [leaf] if leaf.requires_grad else []
        wanted += self.weights.parameters(mb.step) if accumulate else []
        if not wanted:
            return (), None
        gradients = torch.autograd.grad(output, wanted, seed)
        if not leaf.requires_grad:
            return gradients, None
        return gradients[1:], gradients[0].div_(self.scale.of(mb.step)).contiguous()

    def _leaf(self, inputs: Tensor) -> Tensor:
        """``inputs``, checked, on the device. The stage's backward ends at activations."""
        if self.stage == 0:
            checks.check_sample_values("inputs", inputs, self.spec.vocab)
            return inputs.to(self.setup.device)
        return inputs.detach().to(self.setup.device).requires_grad_()

    # The accumulator and the step ------------------------------------------------------------------------------------

    def accumulate(self, gradients: Gradients, step: int) -> None:
        """Add the gradients of one microbatch, as ``differentiate`` returned them, to the accumulator of ``step``."""
        self.weights.accumulate(gradients, step, self.scale.of(step))

    def sketch(self, gradients: Gradients, step: int, seed: bytes) -> Sketch:
        """Returns the sketch of one microbatch's gradients, as ``accumulate`` would add them."""
        flat = torch.cat([g.reshape(-1).float() for g in gradients] or [torch.zeros(1)])
        return sketch(flat, seed) / self.scale.of(step)

    def add(self, gradient: Tensor, step: int) -> None:
        """Add ``gradient``, fp32 [G], to the accumulator of ``step``."""
        self.weights.accumulator(step)[: len(gradient)].add_(gradient.to(self.setup.device))

    def clear(self, step: int) -> None:
        """Empty the accumulator of ``step``."""
        self.weights.accumulator(step).zero_()

    def apply(self, gradient: Tensor, update: Update) -> None:
        """Optimizer step with ``gradient``, fp32 [G]."""
        with self._timed("apply_s"), self._locked():
            self.weights.apply(gradient, update)
            self.scale.update(update.step, skipped=update.skip)

    # The state -------------------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """BLAKE3 over the fp32 weights."""
        with self._locked():
            return self.weights.digest()

    def copied_weights(self) -> Tensor:
        """A copy of the fp32 weights on the CPU, flat [P]."""
        with self._locked():
            return self.weights.masters.to("cpu", copy=True)

    def load_weights(self, weights: Tensor, steps: Collection[int]) -> None:
        """Replace the weights that ``steps`` compute with, (): all, by ``weights``, flat fp32 [P]."""
        with self._locked():
            self.weights.load(weights, steps)

    def state(self) -> dict[str, Tensor]:
        """Copies of weights, moments and loss scale."""
        with self._locked():
            return {**self.weights.state(), **self.scale.state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``state``. Raises CheckpointError, and changes nothing then."""
        with self._locked():
            self.weights.load_state(state)
            self.scale.load_state(state, self.weights.next)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock, torch.no_grad():
            yield

    def _timed(self, counter: str) -> AbstractContextManager[None]:
        return timed(self.counters, counter, self.setup.device)


class Timer:
    """Adds the seconds of operations to ``counters``. On CUDA this is device time, and an operation's kernels may be
    launched while the previous operation computes, so that the device does not wait for this thread. Only one thread
    uses it."""

    def __init__(self, counters: Counters, device: torch.device) -> None:
        self._counters, self._device = counters, device
        self._begun: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, counter: str) -> Iterator[None]:
        if self._device.type != "cuda":
            with timed(self._counters, counter, self._device):
                yield
            return
        stream = torch.cuda.current_stream(self._device)
        begin = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        yield
        end = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._begun.append((counter, begin, end))
        self._collect(1)

    def finish(self) -> None:
        """Returns when the device has finished; a device failure shows up here, or at an earlier operation."""
        self._collect(0)

    def _collect(self, left: int) -> None:
        while len(self._begun) > left:
            counter, begin, end = self._begun.pop(0)
            end.synchronize()
            before: float = getattr(self._counters, counter)
            setattr(self._counters, counter, before + begin.elapsed_time(end) / 1000)


@contextmanager
def timed(counters: Counters, counter: str, device: torch.device) -> Iterator[None]:
    """Adds the seconds until this thread's kernels are done to ``counter``; a device's failure shows up here, not
    later. Copies of earlier results, on a separate stream, are not waited for."""
    begin = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    setattr(counters, counter, getattr(counters, counter) + time.perf_counter() - begin)
