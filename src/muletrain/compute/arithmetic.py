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
from muletrain.config.schema import Checkpointing, Precision
from muletrain.errors import CheckpointError
from muletrain.model.dropout import Masks
from muletrain.model.stage import initial_weight
from muletrain.optim.flat import flat_digest
from muletrain.optim.rules import make_rule
from muletrain.optim.sketch import sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from muletrain.compute.base import Microbatch, Update
    from muletrain.config.schema import OptimizerConfig
    from muletrain.model.module import StageModule
    from muletrain.optim.flat import FlatLayout
    from muletrain.optim.sketch import Sketch

Gradients = tuple[Tensor, ...]
MOMENTS = "moment1", "moment2"


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
    microbatches: int = 1
    """Of a step."""
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
    lends: bool = False
    """``Compute.lends``."""
    compiled: bool = False
    """Blocks go through ``torch.compile`` (``compute.compiled``)."""
    masks: type[Masks] = Masks
    """Makes the dropout masks of a microbatch from (seed, step, index)."""


ADDED = 1 << 24
"""Numbers of another accumulator that are on the device at once, while added."""


class StageArithmetic:
    """Owns the stage's weights, moments and gradient accumulators, each one flat buffer, loss scale and counters. The
    ``versions`` of the stage compute with views.

    One thread computes. Another may read the weights (``digest``, ``state``) or update the weights meanwhile: a lock
    serializes both. There is one version, or two under delayed updates. Step t uses version t mod their number, and a
    separate accumulator. With two, the update by step t makes the weights of step t + 2, while t + 1 computes with the
    older version. In fp32, with the state on the device, the newest working buffer is the masters. A client, which does
    not update, has no masters: its newest working buffer, in the working precision, has this place.
    """

    def __init__(
        self, stage: int, versions: list[StageModule], setup: StageSetup, source: Callable[[str], Tensor] | None
    ) -> None:
        """``source`` gives initial weights by name, and those of ``Model.base``, which stay where they are if that is the
        device; None: draw from the seed. Raises CheckpointError when ``source`` gives wrong shapes."""
        self.stage, self.spec = stage, versions[0].spec
        self.setup, self.counters, self._versions = setup, Counters(), versions
        self._timed = Timer(self.counters, setup.device)
        """Of the compute thread. A call waits for the device once, at its end."""
        for version in versions:
            version.by_block = setup.checkpointing == "block"
        device, dtype, shapes = setup.device, precision_dtype(setup.precision), versions[0].shapes()
        first = source or (lambda name: initial_weight(self.spec, name, shapes[name], setup.seed))
        self.layout = layout = versions[0].layout()
        self._trainable = layout.trainable()
        state_device = torch.device("cpu") if setup.optimizer.state_device == "cpu" else device
        state = (state_device, torch.float32) if setup.updates else (device, dtype)
        self.masters = torch.empty(layout.size, device=state[0], dtype=state[1])
        for name, view in layout.views(self.masters).items():
            _copy(view, first(name), name)
        self._direct = state == (device, dtype)
        newest = self.masters if self._direct else self.masters.to(device, dtype)
        self._working = [newest, *(newest.clone() for _ in versions[1:])]
        exact = () if self._direct and dtype == torch.float32 else versions[0].exact(dtype)
        self._exact = {name: first(name).to(device, torch.float32, copy=True) for name in exact}
        base = {name: versions[0].held(name, first(name), dtype, device) for name in versions[0].base_shapes()}
        self._beside = self._exact | base
        """Parameters that do not lie in the flat buffers."""
        self._parameters = [self._bound(*pair) for pair in zip(versions, self._working, strict=True)]
        if setup.updates:
            self.rule = make_rule(setup.optimizer, setup.total_steps, layout, state_device)
        # a client's device has room for little more than weights and one gradient (HYBRID, sec. 4.4)
        self._held = device if setup.updates else torch.device("cpu")
        self._accumulators = [torch.zeros(layout.trained, device=self._held) for _ in versions]
        learned = [a[: layout.learned] for a in self._accumulators]
        self._accumulator_views = [list(self._trainable.views(a).values()) for a in learned]
        self.next = 0
        """The step of the next update, which computes with the oldest version."""
        self.scale = LossScale(fp16=setup.precision is Precision.FP16, versions=len(versions))
        self._lock = threading.Lock()

    def _bound(self, stage: StageModule, working: Tensor) -> list[Tensor]:
        stage.bind(self.layout.views(working) | self._beside, working.dtype)
        by_name = dict(stage.named_parameters())
        return [by_name[name] for name in self._trainable.names]

    def _version(self, step: int) -> int:
        return step % len(self._versions)

    def module(self, step: int) -> StageModule:
        """The stage with the weights that ``step`` computes with."""
        return self._versions[self._version(step)]

    def _run(self, mb: Microbatch, inputs: Tensor, positions: Tensor | None) -> Tensor:
        """fp32 output of ``mb``."""
        output: Tensor = self.module(mb.step)(inputs, self._masks(mb), positions=positions).float()
        return output

    def _masks(self, mb: Microbatch) -> Masks | None:
        return None if mb.heldout else self.setup.masks(self.setup.seed, mb.step, mb.index, mb.first)

    # Microbatches ----------------------------------------------------------------------------------------------------

    def forward(
        self, mb: Microbatch, inputs: Tensor, stash: bool, positions: Tensor | None = None
    ) -> tuple[Kept, Tensor]:
        """Compute ``mb``. Returns the inputs of backward (with the graph if ``stash``), and the output, fp32 on the
        device."""
        leaf = self._leaf(inputs)
        with self._timed("forward_s"), torch.set_grad_enabled(stash):
            output = self._run(mb, leaf, positions)
            result = output.detach().contiguous()
        self._timed.finish()
        return Kept(leaf, output if stash else None, tuple(output.shape), positions), result

    def backward(self, mb: Microbatch, kept: Kept, grad: Tensor, accumulate: bool) -> tuple[Gradients, Tensor | None]:
        """Differentiate ``mb``. Returns the gradients of ``differentiate``."""
        if self.stage == 0 and not accumulate:
            return (), None  # nothing is wanted
        self.counters.recomputed += kept.output is None or self.module(mb.step).by_block
        if kept.output is None:
            with self._timed("recompute_s"), torch.enable_grad():
                kept.output = self._run(mb, kept.inputs, kept.positions)
        with self._timed("backward_s"):
            seed = grad.to(self.setup.device) * self.scale.of(mb.step)
            found = self.differentiate(mb, kept.output, kept.inputs, seed, accumulate)
        self._timed.finish()
        return found

    def loss_backward(
        self,
        mb: Microbatch,
        inputs: Tensor,
        targets: Tensor,
        accumulate: bool,
        weight: float | None = None,
        positions: Tensor | None = None,
    ) -> tuple[float, Gradients, Tensor | None]:
        """Compute and differentiate ``mb``. Returns the mean loss [nats/token] (of a part: the share of the
        microbatch's), and the gradients of ``differentiate``. ``weight``: see ``checks.weighed``; with it, targets of
        ``vocab`` do not count."""
        if targets.device.type == "cpu":  # others were checked on their way: here that would wait for the device
            checks.check_sample_values("targets", targets, self.spec.vocab + (mb.heldout or weight is not None))
        leaf, targets = self._leaf(inputs), targets.to(self.setup.device)
        with self._timed("forward_s"), torch.set_grad_enabled(not mb.heldout):
            loss = self.module(mb.step).loss(leaf, targets, self._masks(mb), self.scale.of(mb.step), positions)
            if weight is not None and not mb.heldout:
                loss = loss * weight
            elif mb.whole:
                loss = loss * mb.share(inputs.shape[0])
            self.counters.recomputed += self.module(mb.step).by_block
        if mb.heldout:
            self._timed.finish()
            return float(loss.detach()), (), None
        with self._timed("backward_s"):
            seed = torch.full_like(loss, self.scale.of(mb.step))
            found = self.differentiate(mb, loss, leaf, seed, accumulate)
        self._timed.finish()
        return float(loss.detach()), *found

    def differentiate(
        self, mb: Microbatch, output: Tensor, leaf: Tensor, seed: Tensor, accumulate: bool
    ) -> tuple[Gradients, Tensor | None]:
        """Gradients of the trained parameters (scaled; none unless ``accumulate``), where the accumulators are, and of the
        inputs (fp32; None at stage 0)."""
        wanted = [leaf] if leaf.requires_grad else []
        wanted += self.parameters(mb.step) if accumulate else []
        if not wanted:
            return (), None
        gradients = torch.autograd.grad(output, wanted, seed)
        passed = gradients[0].div_(self.scale.of(mb.step)).contiguous() if leaf.requires_grad else None
        own = gradients if passed is None else gradients[1:]
        return tuple(g.to(self._held) for g in own), passed

    def _leaf(self, inputs: Tensor) -> Tensor:
        """``inputs``, checked, on the device. The stage's backward ends at activations."""
        if self.stage == 0:
            if inputs.device.type == "cpu":  # as for targets
                checks.check_sample_values("inputs", inputs, self.spec.vocab)
            return inputs.to(self.setup.device)
        return inputs.detach().to(self.setup.device).requires_grad_()

    # The accumulator and the step ------------------------------------------------------------------------------------

    def parameters(self, step: int) -> list[Tensor]:
        """The parameters that ``step`` computes with, but for frozen ones."""
        return self._parameters[self._version(step)]

    def accumulator(self, step: int) -> Tensor:
        """The sum of the gradients of ``step``'s microbatches, flat fp32 [G]."""
        return self._accumulators[self._version(step)]

    def accumulate(self, gradients: Gradients, step: int) -> None:
        """Add the gradients of one microbatch, as ``differentiate`` returned them, to the accumulator of ``step``."""
        if gradients:
            views = self._accumulator_views[self._version(step)]
            torch._foreach_add_(views, list(gradients), alpha=1 / self.scale.of(step))

    def sketch(self, gradients: Gradients, step: int, seed: bytes) -> Sketch:
        """Returns the sketch of one microbatch's gradients, as ``accumulate`` would add them."""
        flat = torch.cat([g.reshape(-1).float() for g in gradients] or [torch.zeros(1)])
        return sketch(flat, seed) / self.scale.of(step)

    def add(self, gradient: Tensor, step: int) -> None:
        """Add ``gradient``, fp32 [G], to the accumulator of ``step``."""
        accumulator = self.accumulator(step)
        for begin in range(0, len(gradient), ADDED):
            part = gradient[begin : begin + ADDED]
            accumulator[begin : begin + len(part)].add_(part.to(self._held))

    def clear(self, step: int) -> None:
        """Empty the accumulator of ``step``."""
        self.accumulator(step).zero_()

    def apply(self, gradient: Tensor, update: Update) -> None:
        """Optimizer step with ``gradient``, fp32 [G], which is not changed. The newest weights replace the step's. Clears the
        step's accumulator."""
        with timed(self.counters, "apply_s", self.setup.device), self._locked():
            step = update.step
            newest, accumulator = self._working[self._version(step)], self.accumulator(step)
            if self._direct and newest is not self.masters:
                newest.copy_(self.masters)
                self.masters = newest
            if not update.skip:
                masters = self.masters[: len(accumulator)]
                scratch = accumulator if masters.device == accumulator.device else torch.empty_like(masters)
                update.write_scaled(gradient, 0, scratch)
                self.rule.step(masters, scratch, step)
            if not self._direct:
                newest.copy_(self.masters)
            accumulator.zero_()
            self.next = step + 1
            self.scale.update(step, skipped=update.skip)

    def newest_for(self) -> tuple[int, ...]:
        """Returns the steps that compute with the newest of two versions; (): there is one."""
        if len(self._working) == 1:
            return ()
        return (self.next + 1,) if self.next else (0, 1)

    # The state -------------------------------------------------------------------------------------------------------

    def digest(self) -> bytes:
        """BLAKE3 over the fp32 weights."""
        with self._locked():
            return flat_digest(self.masters.cpu())

    def copied_weights(self, begin: int = 0, end: int | None = None) -> Tensor:
        """A copy of the fp32 weights from ``begin`` to ``end`` on the CPU, flat."""
        with self._locked():
            return self.masters[begin:end].to("cpu", copy=True)

    def load_weights(self, weights: Tensor, steps: Collection[int]) -> None:
        """Replace the versions that ``steps`` compute with, (): all, by ``weights``, flat fp32 [P]. These become the
        newest."""
        with self._locked():
            versions = {self._version(step) for step in steps or range(len(self._working))}
            if self._direct:
                self.masters = self._working[min(versions)]
            self.masters.copy_(weights)
            for version in versions:
                if self._working[version] is not self.masters:
                    self._working[version].copy_(self.masters)
            self._copy_exact(weights)

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU (``StageSetup.lends``: the buffers themselves): 'model/NAME', and of trained parameters
        'moment1/NAME', 'moment2/NAME', fp32, and the loss scale. With two versions also 'delayed/NAME', the older
        weights, and 'step' [1], the step that uses the older weights."""
        with self._locked():
            buffers = self._buffers()
            if not self.setup.lends:
                buffers = {kind: flat.to("cpu", torch.float32, copy=True) for kind, flat in buffers.items()}
            state = {
                f"{kind}/{name}": view
                for kind, flat in buffers.items()
                for name, view in state_views(self.layout, kind, flat).items()
            }
            if len(self._working) > 1:
                state["step"] = torch.tensor([self.next], dtype=torch.float64)
            return state | self.scale.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load a ``state``. Absent moments become zero, and absent older weights the newest ones. Everything is checked
        before anything changes.

        Raises CheckpointError on missing names or wrong shapes.
        """
        with self._locked():
            step = _step_of(state)
            sources = {kind: checked_state(self.layout, state, kind) for kind in self._buffers()}
            self.next, newest = step, self._working[self._version(step + 1)]
            if self._direct:
                self.masters = newest
            for kind, flat in self._buffers().items():
                if not sources[kind]:
                    flat.zero_() if kind in MOMENTS else flat.copy_(self.masters)
                views = state_views(self.layout, kind, flat)
                for name, value in sources[kind].items():
                    views[name].copy_(value)
            newest.copy_(self.masters)
            self._copy_exact(self.masters)
            self.scale.load_state(state, self.next)

    def _copy_exact(self, weights: Tensor) -> None:
        views = self.layout.views(weights)
        for name, tensor in self._exact.items():
            tensor.copy_(views[name])

    def _buffers(self) -> dict[str, Tensor]:
        buffers = {"model": self.masters, "moment1": self.rule.moment1, "moment2": self.rule.moment2}
        return buffers if len(self._working) == 1 else {**buffers, "delayed": self._working[self._version(self.next)]}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock, torch.no_grad():
            yield


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


@dataclass
class Kept:
    """One microbatch. ``output`` has the autograd graph if stashed; None: backward recomputes ``output`` from
    ``inputs``."""

    inputs: Tensor
    output: Tensor | None
    shape: tuple[int, ...]
    """The output's."""
    positions: Tensor | None = None
    """See ``StageModule.forward``."""


class Stash:
    """Owns the stashed entries, by microbatch. Only the event loop's thread uses the stash, so there is no lock."""

    def __init__(self, checkpointing: Checkpointing, budget: int, token_bytes: int) -> None:
        """``budget`` [bytes] bounds the graphs kept under 'auto' and 'block'; ``token_bytes``: size of the graph of one
        token."""
        self._checkpointing, self._budget, self._token_bytes = checkpointing, budget, token_bytes
        self._kept: dict[Microbatch, tuple[Kept, int]] = {}
        self._used = 0

    def reserve(self, tokens: int) -> int:
        """Take room for the graph of a microbatch [bytes]; 0: recompute it."""
        size = 0 if self._checkpointing == "always" else tokens * self._token_bytes
        if self._checkpointing != "never" and self._used + size > self._budget:
            return 0
        self._used += size
        return size

    def release(self, reserved: int) -> None:
        """Give room back."""
        self._used -= reserved

    def put(self, mb: Microbatch, kept: Kept, reserved: int) -> None:
        """Keep ``kept``, which has ``reserved`` bytes, in place of the previous entry of ``mb``."""
        self.discard(mb)
        self._kept[mb] = kept, reserved

    def shape(self, mb: Microbatch) -> tuple[int, ...]:
        """Shape of the output. Raises KeyError when nothing is kept."""
        return self._kept[mb][0].shape

    def holds(self, mb: Microbatch, grad: Tensor) -> bool:
        """Is something kept that ``grad``, fp32 in the output's shape, can be the gradient of?"""
        return mb in self._kept and grad.dtype == torch.float32 and self.shape(mb) == tuple(grad.shape)

    def pop(self, mb: Microbatch) -> tuple[Kept, int]:
        """The entry, and the bytes to ``release`` after use."""
        return self._kept.pop(mb)

    def discard(self, mb: Microbatch) -> None:
        """Forget ``mb``."""
        if mb in self._kept:
            self.release(self._kept.pop(mb)[1])

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._used = 0


def state_layout(layout: FlatLayout, kind: str) -> FlatLayout:
    """The parameters that a state has ``kind`` of: frozen ones have no moments."""
    return layout.trainable() if kind in MOMENTS else layout


def state_views(layout: FlatLayout, kind: str, flat: Tensor) -> dict[str, Tensor]:
    """Name -> view of ``flat``, weights [P] or moments [G]."""
    found = state_layout(layout, kind)
    return found.views(flat[: found.size])


def checked_state(layout: FlatLayout, state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of one kind by parameter name; empty for absent moments. Raises CheckpointError for missing names and
    wrong shapes."""
    layout = state_layout(layout, kind)
    if kind != "model" and not any(key.startswith(f"{kind}/") for key in state):
        return {}
    found = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        value = state.get(f"{kind}/{name}")
        if value is None or tuple(value.shape) != shape:
            what = "is missing" if value is None else f"has shape {tuple(value.shape)} instead of {shape}"
            raise CheckpointError(f"{kind}/{name} {what}: a state of another model or another cut")
        found[name] = value
    return found


def _step_of(state: dict[str, Tensor]) -> int:
    """The step in ``state``, or 0. Raises CheckpointError for an impossible step."""
    step = float(state["step"].sum()) if "step" in state else 0.0
    if not (step.is_integer() and 0 <= step < 2**48):
        raise CheckpointError(f"step is {step}: not a stage's state")
    return int(step)


def _copy(view: Tensor, value: Tensor, name: str) -> None:
    if value.shape != view.shape:
        raise CheckpointError(f"{name} has shape {tuple(value.shape)}, but the model needs {tuple(view.shape)}")
    view.copy_(value)
