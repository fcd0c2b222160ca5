"""``Passage``: one microbatch on its way through a swapped stage.

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
    """One microbatch on its way through the stage. ``targets``: at the last stage; ``grad``: at the others, once there
    is one."""

    mb: Microbatch
    inputs: Tensor
    targets: Tensor | None = None
    grad: Tensor | None = None
    accumulate: bool = False
    between: Region | None = None
    """What goes into each sub-model but the first, and later its gradient, fp32 [sub-models - 1, B, T, D]."""
    loss: float = 0.0
    output: Tensor | None = None
    inputs_gradient: Tensor | None = None
    shape: tuple[int, ...] = ()
    """The output's."""
    rows: tuple[int, int] = (0, 0)
    """B, T of what goes from one sub-model to the next."""
    dropped: bool = False
    """Nobody waits for it any more."""


@dataclass
class Spare:
    """Regions for ``Passage.between`` that are not in use, by size."""

    regions: list[Region] = field(default_factory=list)

    def take(self, numbers: int, backing: Backing) -> Region:
        found = next((r for r in self.regions if r.values.numel() >= numbers), None)
        if found is None:
            self.regions.clear()  # sequences have become longer: they are too small from now on
            return backing.region(numbers, copied=True)
        self.regions.remove(found)
        return found
