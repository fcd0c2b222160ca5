"""Parameters that two stages share (tied weights). Each stage has a copy; the mean gradients are added before the
update, so that both copies stay equal bit for bit.

The gradient of the sum has the squared norm |a|^2 + |b|^2 + 2 a.b. Stages state the first two anyway, so the last is
all that a global norm still needs. G: numbers of a stage's gradient; T: numbers that two stages share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.optim.flat import flat_digest

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 20
"""Numbers that are multiplied at a time."""


@dataclass(frozen=True)
class Tied:
    """Two ``stages`` that share parameters, and the places in each one's flat gradient: ranges in one order."""

    stages: tuple[int, int]
    ranges: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
    sizes: tuple[int, int]
    """G of each of the stages."""

    def ranges_of(self, stage: int) -> tuple[tuple[int, int], ...]:
        """One of ``ranges``."""
        return self.ranges[self.stages.index(stage)]

    def part(self, gradient: Tensor, stage: int) -> Tensor:
        """The shared numbers of a stage's ``gradient`` [G]: [T], to read only; a copy if not contiguous."""
        found = [gradient[begin:end] for begin, end in self.ranges_of(stage)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def placed(self, part: Tensor, stage: int) -> list[tuple[int, int, Tensor]]:
        """The place of the tied stage's ``part`` [T] in a stage's gradient: (begin, end, values)."""
        ranges = self.ranges_of(stage)
        pieces = torch.split(part, [end - begin for begin, end in ranges])
        return [(*span, piece) for span, piece in zip(ranges, pieces, strict=True)]

    def pieces(self, stage: int, size: int) -> dict[int, int]:
        """The pieces of at most ``size`` numbers that hold the shared ones of a stage's gradient: begin to length."""
        begins = {k for begin, end in self.ranges_of(stage) for k in range(begin // size * size, end, size)}
        length = self.sizes[self.stages.index(stage)]
        return {k: min(size, length - k) for k in sorted(begins)}


def content(part: Tensor) -> bytes:
    """BLAKE3 of a ``part`` [T]. All that are not finite have the same, as shards have."""
    return flat_digest(part) if bool(torch.isfinite(part.sum())) else blake3(b"not finite").digest()


def product(a: Tensor, b: Tensor) -> float:
    """The inner product of two parts fp32 [T], the same bits on every machine; 0 unless finite throughout.

    The products are exact in fp64, and are added by halves, so that no library chooses the order of the sum."""
    pieces = [_product(*pair) for pair in zip(torch.split(a, PIECE), torch.split(b, PIECE), strict=True)]
    return math.fsum(pieces) if all(map(math.isfinite, pieces)) else 0.0


def _product(a: Tensor, b: Tensor) -> float:
    sums = torch.zeros(1 << max(0, len(a) - 1).bit_length(), dtype=torch.float64)
    torch.mul(a.double(), b.double(), out=sums[: len(a)])
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return float(sums[0])
