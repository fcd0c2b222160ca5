"""One stage's numbers: fp32 masters, working copy, moments and gradient accumulator, each one flat buffer.

P: parameters of the stage. Not thread-safe; ``TorchCompute`` calls it from its compute thread or under its lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor

from muletrain.errors import CheckpointError
from muletrain.optim.flat import FlatLayout
from muletrain.optim.rules import make_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.config.schema import OptimizerConfig
    from muletrain.model.stage import Stage


class StageWeights:
    """Binds ``stage`` to views of a flat working buffer and keeps everything the optimizer needs beside it.

    In fp32, with the state on the device, the masters themselves are the working buffer. ``source`` gives each
    parameter's first value. Raises CheckpointError when ``source`` gives another shape.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        source: Callable[[str], Tensor],
    ) -> None:
        self.layout = FlatLayout.of(stage.shapes())
        state_device = torch.device("cpu") if optimizer.state_device == "cpu" else device
        self.masters = torch.empty(self.layout.size, device=state_device)
        for name, view in self.layout.views(self.masters).items():
            _copy(view, source(name), name)
        direct = dtype == torch.float32 and state_device == device
        self._working = self.masters if direct else self.masters.to(device, dtype)
        stage.bind(self.layout.views(self._working))
        by_name = dict(stage.named_parameters())
        self.parameters = [by_name[name] for name in self.layout.names]
        self._rule = make_rule(optimizer, total_steps, self.layout, state_device)
        self.accumulator = torch.zeros(self.layout.size, device=device)
        self._accumulator_views = list(self.layout.views(self.accumulator).values())

    def accumulate(self, gradients: Sequence[Tensor], loss_scale: float) -> None:
        """Add one microbatch's gradients, in the order of ``parameters``, divided by ``loss_scale``."""
        torch._foreach_add_(self._accumulator_views, list(gradients), alpha=1 / loss_scale)

    def apply(self, gradient: Tensor, scale: float, step: int) -> None:
        """Optimizer step with ``gradient`` (flat fp32 [P], not changed) times ``scale``. Overwrites the accumulator."""
        same_device = self.masters.device == self.accumulator.device
        scratch = self.accumulator if same_device else torch.empty_like(self.masters)
        scratch.copy_(gradient)
        if scale != 1.0:
            scratch.mul_(scale)
        self._rule.step(self.masters, scratch, step)
        self._refresh()

    def digest(self) -> bytes:
        return blake3(self.masters.cpu().numpy().data.cast("B")).digest()

    def state(self) -> dict[str, Tensor]:
        """Copies: 'model/NAME', 'moment1/NAME', 'moment2/NAME'; fp32 on the CPU."""
        return {
            f"{kind}/{name}": view
            for kind, flat in self._buffers().items()
            for name, view in self.layout.views(flat.to("cpu", copy=True)).items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``state``; moments that are absent altogether become zero. Everything is checked before
        anything changes.

        Raises CheckpointError on missing names or other shapes.
        """
        sources = {kind: self._collect(state, kind) for kind in self._buffers()}
        for kind, flat in self._buffers().items():
            if not sources[kind]:
                flat.zero_()
            for name, value in sources[kind].items():
                self.layout.views(flat)[name].copy_(value)
        self._refresh()

    def _collect(self, state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
        """The tensors of one kind by parameter name, checked; empty for absent moments."""
        if kind != "model" and not any(key.startswith(f"{kind}/") for key in state):
            return {}
        found = {}
        for name, shape in zip(self.layout.names, self.layout.shapes, strict=True):
            value = state.get(f"{kind}/{name}")
            if value is None or tuple(value.shape) != shape:
                what = "is missing" if value is None else f"has shape {tuple(value.shape)} instead of {shape}"
                raise CheckpointError(f"{kind}/{name} {what}: a state of another model or another cut")
            found[name] = value
        return found

    def _buffers(self) -> dict[str, Tensor]:
        return {"model": self.masters, "moment1": self._rule.moment1, "moment2": self._rule.moment2}

    def _refresh(self) -> None:
        if self._working is not self.masters:
            self._working.copy_(self.masters)


def _copy(view: Tensor, value: Tensor, name: str) -> None:
    if value.shape != view.shape:
        raise CheckpointError(f"{name} has shape {tuple(value.shape)}, but the model needs {tuple(view.shape)}")
    view.copy_(value)
