"""This check says which replicas' gradients of one step stand out, and whether a recomputation confirms them.

Replicas of a stage hold gradients of different microbatches of one step, each a sum over ``count`` microbatches. If a
microbatch's gradient is the common one plus noise, the length of a mean over n microbatches lies between the length for
many and sqrt(many / n) times that (McCandlish et al. 2018, sec. 2.2: E|mean|^2 = |G|^2 + tr(S) / n). A replica that
holds few is granted this much, and ``FACTOR`` beyond it. The check is cheap and proves nothing: another peer recomputes
a gradient that stands out, and only disagreement counts.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

FACTOR = 10.0
"""A gradient stands out if longer than the rest suggest by this factor. For real training see benchmarks/outliers."""
ALIKE = 0.25
"""Two gradients are alike if the length of their difference is at most this share of the gradients' length. Replicas on
different devices, fed by 8-bit activations, differ by a few percent; a false gradient is off by several times the
length, or not at all."""
LEAST_FOR_SMALL = 3
"""Replicas needed to call a gradient too small: of two, the large one may be false."""


class Sum(NamedTuple):
    """A replica's accumulator: the number of microbatches (at least one), and the sketch."""

    count: int  # type: ignore[assignment]  # tuple.count is never used
    sketch: NDArray[np.float64]

    @property
    def length(self) -> float:
        """Length of the mean per microbatch; infinite if not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            length = float(np.linalg.norm(self.sketch)) / self.count
        return length if math.isfinite(length) else math.inf


def outlying(sums: Mapping[str, Sum]) -> list[str]:
    """Returns the members with microbatches to be recomputed by another peer, if there is one: gradients that are not
    finite, are zero, or far from the rest. The least costly come first.

    If there are several and all are not finite, each confirms the rest, and none stands out. A single finite one does
    not stand out, either.
    """
    lengths = {m: s.length for m, s in sums.items()}
    sound = {m: (lengths[m], s.count) for m, s in sums.items() if 0 < lengths[m] < math.inf}
    if not sound:  # all zero: nothing to compare with; several infinite: the step itself is not finite
        suspects = [m for m in sums if len(sums) == 1 and lengths[m] == math.inf]
    else:
        suspects = [m for m in sums if m not in sound or _stands_out(m, sound)]
    return sorted(suspects, key=lambda m: (sums[m].count, m))


def _stands_out(member: str, sums: Mapping[str, tuple[float, int]]) -> bool:
    """``sums``: length and count, by member."""
    (own, count), others = sums[member], [s for m, s in sums.items() if m != member]
    if not others:
        return False
    # of an even number take the median that suspects less: one of two may be false
    large = statistics.median_high([length * math.sqrt(max(1.0, n / count)) for length, n in others])
    small = statistics.median_low([length / math.sqrt(max(1.0, count / n)) for length, n in others])
    return own > FACTOR * large or (len(sums) >= LEAST_FOR_SMALL and own * FACTOR < small)


def strange(length: float, before: Sequence[float]) -> bool:
    """Does the gradient of one microbatch, of this length (infinite if not finite), stand out from the gradients
    ``before``?"""
    if length == math.inf or not before:
        return length == math.inf
    usual = statistics.median(before)
    return length > FACTOR * usual or (length == 0 < usual)


def alike(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """Do two sketches stand for the same gradient? All gradients that are not finite are alike."""
    finite = bool(np.isfinite(a).all()), bool(np.isfinite(b).all())
    if not all(finite):
        return not any(finite)
    return float(np.linalg.norm(a - b)) <= ALIKE * max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
