"""Tasks of placing, drawn from seeds, and their solution by enumeration."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise, permutations

import numpy as np
from scipy.optimize import linear_sum_assignment

from muletrain.planning.placement import Assignment, Task, evaluate


def network(seed: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Delays and bandwidths, unequal in the two directions."""
    rng = np.random.default_rng(seed)
    return rng.uniform(1, 200, (devices, devices)), rng.uniform(0.1, 5, (devices, devices))


def task_of(seed: int, replicas: tuple[int, ...], spares: int = 0, *, unequal: bool = False) -> Task:
    devices = sum(replicas) + spares
    compute = tuple(np.random.default_rng(seed).uniform(0.1, 2, devices).tolist()) if unequal else ()
    return Task(*network(seed, devices), replicas, 3e8, 5e8, compute)


def link_s(task: Task, a: int, b: int, nbytes: float) -> float:
    delay = (task.delay_ms[a, b] + task.delay_ms[b, a]) / 2e3
    return float(delay + 8 * nbytes / ((task.bandwidth_gbps[a, b] + task.bandwidth_gbps[b, a]) / 2 * 1e9))


def exhaustive(task: Task) -> float:
    """The best of all groups, of all ways to match them, in all orders."""
    pipelines = max(task.replicas)

    def partitions(left: frozenset[int], sizes: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
        if not sizes:
            yield []
            return
        for group in combinations(sorted(left), sizes[0]):
            for rest in partitions(left - set(group), sizes[1:]):
                yield [group, *rest]

    @cache
    def exchange(group: tuple[int, ...]) -> float:
        share = task.gradient_bytes / len(group)
        return max(sum(2 * link_s(task, d, e, share) for e in group if e != d) for d in group)

    @cache
    def by_pipeline(group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All ways to give each pipeline a device of the group."""
        each, more = divmod(pipelines, len(group))
        ways = (sorted((*group * each, *extra)) for extra in combinations(group, more))
        return [way for slots in ways for way in set(permutations(slots))]

    @cache
    def hop(a: tuple[int, ...], b: tuple[int, ...]) -> float:
        return min(
            max(link_s(task, d, e, task.activation_bytes) for d, e in zip(x, y, strict=True))
            for x in by_pipeline(a)
            for y in by_pipeline(b)
        )

    best = math.inf
    for groups in partitions(frozenset(task.devices), task.replicas):
        compute = sum(max(task.compute_s[d] for d in group) for group in groups) if task.compute_s else 0.0
        fixed = max(map(exchange, groups)) + compute
        if fixed < best:
            best = min(
                best, *(fixed + 2 * sum(hop(a, b) for a, b in pairwise(order)) for order in permutations(groups)), best
            )
    return best


def valid(task: Task, assignment: Assignment) -> bool:
    return math.isfinite(evaluate(task, assignment).cost_s)


def least(weights: np.ndarray) -> float:
    """The slowest link of the best matching, by scipy: the lowest weight at which there is a matching."""
    values = np.unique(weights)

    def perfect(value: float) -> bool:
        dear = weights > value
        return not dear[linear_sum_assignment(dear)].any()

    return float(values[bisect_left(values, True, key=perfect)])
