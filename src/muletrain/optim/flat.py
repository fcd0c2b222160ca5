"""A stage's parameters lie in one flat buffer for averaging, digests and the optimizer."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class FlatLayout:
    """Says where each parameter lies in the flat buffer: matrices first, then the 1-D norms, so that weight decay applies
    to one contiguous run."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    size: int
    """P: numbers in the buffer."""
    decayed: int
    """Numbers of the first run, to which weight decay applies."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> FlatLayout:
        """The layout of parameters with these ``shapes``, in their order within each run."""
        names = tuple(sorted(shapes, key=lambda name: len(shapes[name]) < 2))
        sizes = {name: math.prod(shapes[name]) for name in names}
        decayed = sum(size for name, size in sizes.items() if len(shapes[name]) >= 2)
        return cls(names, tuple(shapes[name] for name in names), sum(sizes.values()), decayed)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of ``flat`` [P] in the parameter's shape."""
        pieces = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        return {name: piece.view(shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of each parameter in the flat buffer, in the order of ``names``."""
        ends = list(itertools.accumulate(map(math.prod, self.shapes)))
        return zip([0, *ends[:-1]], ends, strict=True)
