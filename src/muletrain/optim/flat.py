"""A stage's parameters lie in one flat buffer for averaging, digests and the optimizer."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

SHARED_WORK = 1 << 22
"""Size from which on all threads hash together: starting threads takes a third of a millisecond."""


def flat_digest(values: Tensor) -> bytes:
    """BLAKE3 of ``values`` (flat, contiguous, on the CPU), by as many threads as torch computes with: one thread takes
    a second for 1.2 billion fp32 numbers."""
    threads = torch.get_num_threads() if values.numel() >= SHARED_WORK else 1
    return blake3(values.numpy().data.cast("B"), max_threads=threads).digest()


@dataclass(frozen=True)
class FlatLayout:
    """Says where each parameter lies in the flat buffer: matrices first, then the 1-D norms, then frozen ones, so that
    weight decay applies to one contiguous run, and the gradient is another one."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    size: int
    """P: numbers in the buffer."""
    decayed: int
    """Numbers of the first run, to which weight decay applies."""
    learned: int
    """Numbers of the first two runs, which are trained."""

    @property
    def trained(self) -> int:
        """G: length of the gradient and of the moments. As many as are ``learned``, but at least one, which stays zero if
        all are frozen."""
        return max(self.learned, min(self.size, 1))

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], frozen: Collection[str] = ()) -> FlatLayout:
        """The layout of parameters with these ``shapes``, in the given order within each run. ``frozen`` ones never
        change."""
        run = {name: 2 if name in frozen else int(len(shape) < 2) for name, shape in shapes.items()}
        names = tuple(sorted(shapes, key=run.__getitem__))
        sizes = [0, 0, 0]
        for name in names:
            sizes[run[name]] += math.prod(shapes[name])
        return cls(
            names,
            tuple(shapes[name] for name in names),
            sum(sizes),
            sizes[0],
            sizes[0] + sizes[1],
        )

    def only(self, names: Collection[str]) -> FlatLayout:
        """Of some of the parameters, in the same order."""
        kept = [k for k, name in enumerate(self.names) if name in names]
        ends = [end for _, end in self.ranges()]
        shapes = tuple(self.shapes[k] for k in kept)
        sizes = [math.prod(shape) for shape in shapes]
        decayed, learned = (
            sum(size for k, size in zip(kept, sizes, strict=True) if ends[k] <= run)
            for run in (self.decayed, self.learned)
        )
        return FlatLayout(tuple(self.names[k] for k in kept), shapes, sum(sizes), decayed, learned)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> view of ``flat`` [P] in the parameter's shape."""
        pieces = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        return {name: piece.view(shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}

    def trainable(self) -> FlatLayout:
        """Of the parameters that are not frozen, in the same places."""
        ends = [end for _, end in self.ranges()]
        count = sum(end <= self.learned for end in ends)
        return replace(self, names=self.names[:count], shapes=self.shapes[:count], size=self.learned)

    def first_not_finite(self, gradient: Tensor) -> str:
        """Name of the first trained parameter with a part of ``gradient`` (flat fp32 [G]) that is not finite; '':
        none."""
        names = zip(self.names, self.ranges(), strict=True)
        return next((name for name, (a, b) in names if not bool(gradient[a:b].isfinite().all())), "")

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(begin, end) of each parameter in the flat buffer, in the order of ``names``."""
        ends = list(itertools.accumulate(map(math.prod, self.shapes)))
        return zip([0, *ends[:-1]], ends, strict=True)
