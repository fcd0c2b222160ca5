"""The numbers of one stage: fp32 masters, working copies, moments and gradient accumulators, each one flat buffer.

P: parameters of the stage. G: trained parameters. Not thread-safe: ``StageArithmetic`` calls it on the compute thread
or under a lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muletrain.errors import CheckpointError
from muletrain.optim.flat import flat_digest
from muletrain.optim.rules import make_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from muletrain.compute.base import Update
    from muletrain.config.schema import OptimizerConfig
    from muletrain.model.module import StageModule
    from muletrain.optim.flat import FlatLayout


MOMENTS = "moment1", "moment2"


class StageWeights:
    """Owns the weights, the moments and the accumulators. The ``versions`` of the stage compute with views.

    There is one version, or two under delayed updates. Step t uses version t mod their number, and a separate
    accumulator. With two, the update by step t makes the weights of step t + 2, while t + 1 computes with the older
    version. In fp32, with the state on the device, the newest working buffer is the masters. ``source`` gives each
    parameter's first value. Raises CheckpointError when ``source`` gives a wrong shape.
    """

    def __init__(
        self,
        versions: Sequence[StageModule],
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        source: Callable[[str], Tensor],
        updates: bool = True,
    ) -> None:
        """``updates`` false: no moments are kept, so ``apply`` and ``state`` are not available."""
        self.layout = versions[0].layout()
        self._trainable = self.layout.trainable()
        state_device = torch.device("cpu") if optimizer.state_device == "cpu" else device
        self.masters = torch.empty(self.layout.size, device=state_device)
        for name, view in self.layout.views(self.masters).items():
            _copy(view, source(name), name)
        self._direct = dtype == torch.float32 and state_device == device
        newest = self.masters if self._direct else self.masters.to(device, dtype)
        self._working = [newest, *(newest.clone() for _ in versions[1:])]
        masters = self.layout.views(self.masters)
        self._exact = {} if self._direct else {name: masters[name].to(device) for name in versions[0].exact(dtype)}
        self._parameters = [self._bound(*pair) for pair in zip(versions, self._working, strict=True)]
        if updates:
            self.rule = make_rule(optimizer, total_steps, self.layout, state_device)
        self._accumulators = [torch.zeros(self.layout.trained, device=device) for _ in versions]
        learned = [a[: self.layout.learned] for a in self._accumulators]
        self._accumulator_views = [list(self._trainable.views(a).values()) for a in learned]
        self.next = 0
        """The step of the next update, which computes with the oldest version."""

    def _bound(self, stage: StageModule, working: Tensor) -> list[Tensor]:
        stage.bind(self.layout.views(working) | self._exact)
        by_name = dict(stage.named_parameters())
        return [by_name[name] for name in self._trainable.names]

    def _version(self, step: int) -> int:
        return step % len(self._working)

    def parameters(self, step: int) -> list[Tensor]:
        """The parameters that ``step`` computes with, but for frozen ones."""
        return self._parameters[self._version(step)]

    def accumulator(self, step: int) -> Tensor:
        """The sum of the gradients of ``step``'s microbatches, flat fp32 [G]."""
        return self._accumulators[self._version(step)]

    def accumulate(self, gradients: Sequence[Tensor], step: int, loss_scale: float) -> None:
        """Add one microbatch's gradients, in the order of ``parameters``, divided by ``loss_scale``."""
        if gradients:
            torch._foreach_add_(self._accumulator_views[self._version(step)], list(gradients), alpha=1 / loss_scale)

    def apply(self, gradient: Tensor, update: Update) -> None:
        """Update the masters with ``gradient`` (flat fp32 [G], not changed). The newest weights replace the step's
        weights. Clears the step's accumulator."""
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

    def newest_for(self) -> tuple[int, ...]:
        """Returns the steps that compute with the newest of two versions; (): there is one."""
        if len(self._working) == 1:
            return ()
        return (self.next + 1,) if self.next else (0, 1)

    def load(self, weights: Tensor, steps: Collection[int] = ()) -> None:
        """Replace the versions that ``steps`` compute with, (): all, by ``weights``, flat fp32 [P]. These become the
        newest."""
        versions = {self._version(step) for step in steps or range(len(self._working))}
        if self._direct:
            self.masters = self._working[min(versions)]
        self.masters.copy_(weights)
        for version in versions:
            if self._working[version] is not self.masters:
                self._working[version].copy_(self.masters)
        self._copy_exact()

    def digest(self) -> bytes:
        """BLAKE3 of the masters."""
        return flat_digest(self.masters.cpu())

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU: 'model/NAME', and of trained parameters 'moment1/NAME', 'moment2/NAME', fp32. With two
        versions also 'delayed/NAME', the older weights, and 'step' [1], the step that uses the older weights."""
        state = {
            f"{kind}/{name}": view
            for kind, flat in self._buffers().items()
            for name, view in state_views(self.layout, kind, flat.to("cpu", torch.float32, copy=True)).items()
        }
        return state if len(self._working) == 1 else {**state, "step": torch.tensor([self.next], dtype=torch.float64)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load a ``state``. Absent moments become zero, and absent older weights the newest ones. Everything is checked
        before anything changes.

        Raises CheckpointError on missing names or wrong shapes.
        """
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
        self._copy_exact()

    def _copy_exact(self) -> None:
        masters = self.layout.views(self.masters)
        for name, tensor in self._exact.items():
            tensor.copy_(masters[name])

    def _buffers(self) -> dict[str, Tensor]:
        buffers = {"model": self.masters, "moment1": self.rule.moment1, "moment2": self.rule.moment2}
        return buffers if len(self._working) == 1 else {**buffers, "delayed": self._working[self._version(self.next)]}


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
