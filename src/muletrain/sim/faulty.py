"""A stage on hardware that computes wrongly for a while."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Microbatch
    from muletrain.compute.torch_compute import TorchCompute

GRADIENTS = {"nan": math.nan, "hundredfold": 100.0, "huge": 1e4, "zero": 0.0}
"""What becomes of a gradient, that of the parameters and that of the inputs."""
ACTIVATIONS = "activations"
"""They are not finite; the rest is right."""


class FaultyCompute:
    """``inner``, where ``how`` says what comes out wrong; empty: nothing."""

    def __init__(self, inner: TorchCompute) -> None:
        self._inner = inner
        self.how = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def forward(self, mb: Microbatch, inputs: Tensor) -> Tensor:
        outputs = await self._inner.forward(mb, inputs)
        return outputs * math.nan if self.how == ACTIVATIONS else outputs

    async def backward(self, mb: Microbatch, grad: Tensor, *, accumulate: bool) -> Tensor | None:
        before = self._inner.gradient(mb.step).clone()
        return self._spoiled(mb, before, await self._inner.backward(mb, grad, accumulate=accumulate))

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, *, accumulate: bool
    ) -> tuple[float, Tensor | None]:
        before = self._inner.gradient(mb.step).clone()
        loss, gradient = await self._inner.loss_backward(mb, inputs, targets, accumulate=accumulate)
        return loss, self._spoiled(mb, before, gradient)

    def _spoiled(self, mb: Microbatch, before: Tensor, gradient: Tensor | None) -> Tensor | None:
        """``gradient``, and what was added to the accumulator since ``before``."""
        if self.how not in GRADIENTS:
            return gradient
        factor, accumulator = GRADIENTS[self.how], self._inner.gradient(mb.step)
        if not torch.equal(before, accumulator):
            accumulator.copy_(before + factor * (accumulator - before))
        return None if gradient is None else gradient * factor
