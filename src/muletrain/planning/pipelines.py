"""Find the best pipelines through given groups of devices (DT-FM sec. 3.3): each device's partner in the next stage
(eq. 3), and the order of the stages (eq. 4)."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from muletrain.planning.matching import bottlenecks, scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

EXACT_STAGES = 12
"""Number of stages up to which the order is optimal (2^stages subsets); with more, 2-opt moves improve the given or a
greedy order."""

Group = tuple[int, ...]
"""Devices of a stage by pipeline, sorted; repeated if serving several pipelines."""


def shortest_path(weights: NDArray[np.float64]) -> tuple[float, tuple[int, ...]]:
    """The cost and order of the cheapest path through all stages (eq. 4). ``weights``: (K, K), symmetric."""
    stages = len(weights)
    if stages > EXACT_STAGES:
        starts = (list(range(stages)), _greedy(weights))
        return min((_two_opt(weights, order) for order in starts), key=lambda found: found[0])
    best = np.full((1 << stages, stages), math.inf)  # by the set of passed stages, and the last stage
    before = np.zeros((1 << stages, stages), dtype=np.intp)
    best[1 << np.arange(stages), np.arange(stages)] = 0.0
    for sets, last, without in _layers(stages):
        costs = best[without] + weights[last]
        before[sets, last] = chosen = costs.argmin(1)
        best[sets, last] = costs[np.arange(len(sets)), chosen]
    passed = (1 << stages) - 1
    stage = int(best[passed].argmin())
    cost, order = float(best[passed, stage]), [stage]
    while passed & (passed - 1):
        passed, stage = passed ^ 1 << stage, int(before[passed, stage])
        order.append(stage)
    return cost, tuple(order)


@lru_cache
def _layers(stages: int) -> list[tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]]:
    """For sets of 2, 3... stages: (set, last stage, set without that stage), as arrays."""
    by_size: list[list[tuple[int, int, int]]] = [[] for _ in range(stages + 1)]
    for passed in range(1 << stages):
        by_size[passed.bit_count()] += [(passed, s, passed ^ 1 << s) for s in range(stages) if passed >> s & 1]
    return [(a[:, 0], a[:, 1], a[:, 2]) for entries in by_size[2:] for a in (np.array(entries, dtype=np.intp),)]


def _greedy(weights: NDArray[np.float64]) -> list[int]:
    order, left = [0], set(range(1, len(weights)))
    while left:
        order.append(min(left, key=lambda s: (weights[order[-1], s], s)))
        left.remove(order[-1])
    return order


def _two_opt(weights: NDArray[np.float64], order: list[int]) -> tuple[float, tuple[int, ...]]:
    """Reverse parts of the path while that lowers the cost."""
    w, n = weights.tolist(), len(order)

    def step(i: int, j: int) -> float:
        return float(w[order[i]][order[j]]) if i >= 0 and j < n else 0.0

    improved = True
    while improved:
        improved = False
        for i in range(n - 1):
            for j in range(i + 1, n):
                after = (w[order[i - 1]][order[j]] if i else 0.0) + (w[order[i]][order[j + 1]] if j + 1 < n else 0.0)
                if after < step(i - 1, i) + step(j, j + 1) - 1e-12:
                    order[i : j + 1] = order[i : j + 1][::-1]
                    improved = True
    return sum(step(i, i + 1) for i in range(n - 1)), tuple(order)


class Threader:
    """Finds the best pipelines through groups. ``link``: (N, N), finite, symmetric."""

    def __init__(self, link: NDArray[np.float64]) -> None:
        self._link = link

    def cost(self, groups: Sequence[Group]) -> float:
        """The cost of the best pipelines, one way [s]."""
        return shortest_path(self._matched(groups)[0])[0]

    def thread(self, groups: Sequence[Group]) -> list[Group]:
        """The groups in the order of the pipeline, each with the devices by pipeline."""
        weights, matches = self._matched(groups)
        _, order = shortest_path(weights)
        positions = [list(range(len(groups[0])))]  # in each group, by pipeline
        for here, there in pairwise(order):
            match = matches[here, there].tolist()
            positions.append([match[p] for p in positions[-1]])
        return [tuple(groups[k][p] for p in places) for k, places in zip(order, positions, strict=True)]

    def _matched(self, groups: Sequence[Group]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        return bottlenecks(self._link, np.array(groups), scratch(len(groups[0])))
