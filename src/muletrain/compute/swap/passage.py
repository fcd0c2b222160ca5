"""``Passage``: one microbatch under way through a swapped stage.

Shapes: B sequences, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Microbatch
    from muletrain.compute.swap.backing import Backing, Region


@dataclass(eq=False)
class Passage:
    """One microbatch under way through the stage. ``targets``: at the last stage; ``grad``: at earlier stages, once
    received."""

    mb: Microbatch
    inputs: Tensor
    targets: Tensor | None = None
    grad: Tensor | None = None
    accumulate: bool = False
    between: Region | None = None
    """The input of each sub-model but the first, and later the gradient, fp32 [sub-models - 1, B, T, D]."""
    loss: float = 0.0
    output: Tensor | None = None
    inputs_gradient: Tensor | None = None
    shape: tuple[int, ...] = ()
    """The output's."""
    rows: tuple[int, int] = (0, 0)
    """B, T of the activations between sub-models."""
    dropped: bool = False
    """Nobody waits any more."""


@dataclass
class Spare:
    """Regions for ``Passage.between`` that are not in use, by size."""

    regions: list[Region] = field(default_factory=list)

    def take(self, numbers: int, backing: Backing) -> Region:
        found = next((r for r in self.regions if r.values.numel() >= numbers), None)
        if found is None:
            self.regions.clear()  # sequences have become longer: the old buffers are too small from now on
            return backing.region(numbers, copied=True)
        self.regions.remove(found)
        return found
