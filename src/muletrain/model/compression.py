"""Layers that compress what goes from stage to stage (SWARM, app. J.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from muletrain.model.chain import Compression, Model

PREFIX = "compression"
"""First part of the parameters' names."""


class _Side(nn.Module):
    """Layer norm, without bias, then ``matrix``, if any. Shapes: D width of the input, E of the output."""

    def __init__(self, width: int, output: int | None) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(width))
        self.matrix = None if output is None else nn.Parameter(torch.empty(output, width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., E]"""
        normed = F.layer_norm(x, self.norm.shape, self.norm)
        return normed if self.matrix is None else F.linear(normed, self.matrix)


class _Maxout(_Side):
    """Layer norm, then the maximum over windows of ``factor`` features (Goodfellow et al. 2013)."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__(width, None)
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        normed = super().forward(x)
        return normed.view(*normed.shape[:-1], -1, self._factor).amax(-1)


class Borders(nn.Module):
    """The compression in a run of layers from ``first`` to before ``end``, on the meta device. At a border inside the run
    both sides are there, so any cut of the model computes the same."""

    def __init__(self, spec: Model, first: int, end: int, *, up: bool = True, down: bool = True) -> None:
        """``up``, ``down``: which sides; a part of a layer has one of them, or none."""
        super().__init__()
        if spec.compression is None:
            return
        for layer in spec.borders:
            sides = {}
            if down and first <= layer < end:
                sides["down"] = _down(spec.compression, spec.width)
            if up and first <= layer + 1 < end:
                sides["up"] = _Side(spec.passed, spec.width)
            if sides:
                self.add_module(str(layer), nn.ModuleDict(sides))

    def enter(self, x: Tensor, layer: int) -> Tensor:
        """The input of ``layer``, from the output of the layer before."""
        return self._side(x, layer - 1, "up")

    def leave(self, x: Tensor, layer: int) -> Tensor:
        """What goes on from ``layer``, from its output."""
        return self._side(x, layer, "down")

    def _side(self, x: Tensor, border: int, side: str) -> Tensor:
        found = self._modules.get(str(border))
        if isinstance(found, nn.ModuleDict) and side in found:
            x = found[side](x)
        return x


def _down(compression: Compression, width: int) -> _Side:
    if compression.kind == "bottleneck":
        return _Side(width, width // compression.factor)
    return _Maxout(width, compression.factor)
