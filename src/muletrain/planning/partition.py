"""Cutting the layers into pipeline stages.

SWARM (sec. 3.2) partitions the model into "evenly sized" stages of equally many layers. Counting layers ignores the
embedding and the output head: with a large vocabulary the head costs as much as several layers, and the last stage
delays the pipeline. Here the time of the slowest stage is minimised exactly: ``partition`` for equal stages,
``cheapest_cut`` for stages of unequal speed and memory.

Arrays: K stages, L layers; ``cost[k, first, end]``.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Cut = tuple[tuple[int, int], ...]
"""(first layer, end layer) of each stage: contiguous, at least one layer each."""


def partition(layer_costs: Sequence[float], stages: int, *, first_extra: float = 0.0, last_extra: float = 0.0) -> Cut:
    """The cut into ``stages`` contiguous runs with the smallest largest cost, and the most even of equal cuts.

    ``layer_costs``: one per layer; ``first_extra`` (embedding) goes to the first stage, ``last_extra`` (head and loss)
    to the last. Any unit, the same for all. Raises ValueError unless 1 <= stages <= layers.
    """
    layers = len(layer_costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"cannot cut {layers} layers into {stages} stages of at least one layer")
    costs = np.repeat(_sums(layer_costs)[None], stages, axis=0)
    costs[0] += first_extra
    costs[-1] += last_extra
    return _most_even(costs)


def cheapest_cut(costs: Floats) -> tuple[float, Cut] | None:
    """The smallest cost of the most expensive stage, and the most even of the cuts with that cost. ``costs``: as above,
    inf: not possible; None: no cut is possible."""
    largest = _best(costs, np.maximum)[0]
    return (largest, _most_even(costs)) if math.isfinite(largest) else None


def _sums(values: Sequence[float] | Floats) -> Floats:
    """Sums of the values from ``first`` to before ``end``, (L + 1, L + 1); meaningless where end < first."""
    prefix: Floats = np.array([0.0, *np.cumsum(values)])
    between: Floats = prefix[None, :] - prefix[:, None]
    return between


def _most_even(costs: Floats) -> Cut:
    """The cut with the smallest largest cost, and of such cuts the one with the smallest sum of squares (a maximum
    alone does not constrain the remaining stages): two dynamic programs, O(K L^2) each."""
    largest, _ = _best(costs, np.maximum)
    bound = largest * (1 + 1e-9)  # sums of the same costs in another order differ in the last bits
    return _best(np.where(costs <= bound, costs * costs, np.inf), np.add)[1]


def _best(costs: Floats, combine: np.ufunc) -> tuple[float, Cut]:
    """The cheapest cut by the stages' costs, combined from left to right; of equal cuts, the cut with the earliest
    ends."""
    stages, layers = len(costs), costs.shape[1] - 1
    first, end = np.indices(costs.shape[1:])
    reached = np.full(layers + 1, np.inf)  # by layers given out so far: the lowest cost
    reached[0] = 0.0
    choices = []
    for k in range(stages):
        options = np.where(first < end, combine(reached[:, None], costs[k]), np.inf)
        choices.append(options.argmin(0))
        reached = options.min(0)
    ends = [layers]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    ends.reverse()
    return float(reached[layers]), tuple(pairwise(ends))
