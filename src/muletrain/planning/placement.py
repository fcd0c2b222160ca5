"""The cost of a placement of pipeline stages and replicas on machines with unequal links.

The cost model of DT-FM (Yuan et al. 2022, sec. 2 and 3.1-3.3). A placement gives each tasklet (stage, pipeline) a
device. Times are in seconds, of one step:

- a link takes delay + bytes * 8 / bandwidth; of two unequal directions both delay and bandwidth are averaged (sec. 2),
  and a pair with no bandwidth in one direction has no link;
- data-parallel (eq. 2): each device exchanges a share of the gradient, gradient bytes / replicas of the stage, with
  each further replica, twice (reduce, then gather), one after another; the slowest device of the slowest stage counts;
- pipeline (eq. 3 and 4): the slowest link between devices of one pipeline in neighbouring stages, summed over the
  neighbouring stages;
- cost: data-parallel + 2 x pipeline (forward and backward).

Beyond the paper: stages of unequal size (a device of a smaller stage serves several pipelines, with counts that differ
by at most one, at the same time), machines of unequal speed (the slowest device of each stage adds the time for one
macro-batch), machines that lack the memory for a stage, and more machines than places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Assignment = tuple[tuple[int, ...], ...]
"""Stages in the order of the pipeline; each with the devices by pipeline."""


@dataclass(frozen=True, eq=False)
class Task:
    """The task: N devices; delays [ms] and bandwidths [Gbit/s] from row to column, (N, N), diagonals unused."""

    delay_ms: NDArray[np.float64]
    bandwidth_gbps: NDArray[np.float64]
    replicas: tuple[int, ...]
    """Numbers of devices of the stages, in any order. The largest number is the number of pipelines."""
    activation_bytes: float
    """Bytes of one macro-batch from a stage to the next; the gradient has the same size."""
    gradient_bytes: float
    """Bytes of the gradient of one stage."""
    compute_s: tuple[float, ...] = ()
    """By device: seconds of one macro-batch at any stage, forward and backward; (): not counted."""
    fits: tuple[bool, ...] = ()
    """By device: whether the memory holds a stage; (): true for all."""

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that may be used."""
        every = range(len(self.delay_ms))
        return tuple(d for d in every if self.fits[d]) if self.fits else tuple(every)

    @property
    def pipelines(self) -> int:
        return max(self.replicas)


@dataclass(frozen=True)
class Cost:
    """The cost of one placement [s]."""

    data_parallel_s: float
    pipeline_s: float
    """The pipeline term, one way."""
    compute_s: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.data_parallel_s + 2 * self.pipeline_s + self.compute_s


def evaluate(task: Task, assignment: Assignment) -> Cost:
    """Evaluate a placement from the definition. Every solution of every search is evaluated here, independently of the
    search's sums. Raises ValueError for an invalid placement."""
    _check(task, assignment)
    data_parallel_s = 0.0
    for stage in assignment:
        members = sorted(set(stage))
        share = task.gradient_bytes / len(members)
        for d in members:
            exchange_s = sum(2 * _link_s(task, d, other, share) for other in members if other != d)
            data_parallel_s = max(data_parallel_s, exchange_s)
    hops = [
        max(_link_s(task, a, b, task.activation_bytes) for a, b in zip(here, there, strict=True))
        for here, there in pairwise(assignment)
    ]
    compute_s = sum(max(task.compute_s[d] for d in stage) for stage in assignment) if task.compute_s else 0.0
    return Cost(data_parallel_s, math.fsum(hops), compute_s)


def _link_s(task: Task, a: int, b: int, nbytes: float) -> float:
    there, back = float(task.bandwidth_gbps[a][b]), float(task.bandwidth_gbps[b][a])
    if min(there, back) <= 0:
        return math.inf
    delay_ms = (float(task.delay_ms[a][b]) + float(task.delay_ms[b][a])) / 2
    return delay_ms / 1000 + nbytes * 8 / ((there + back) / 2 * 1e9)


def _check(task: Task, assignment: Assignment) -> None:
    groups = [set(stage) for stage in assignment]
    used = [d for group in groups for d in group]
    if any(len(stage) != task.pipelines for stage in assignment):
        raise ValueError(f"each stage needs a device for each of {task.pipelines} pipelines")
    if sorted(len(group) for group in groups) != sorted(task.replicas):
        raise ValueError(f"stages have {[len(g) for g in groups]} devices, not {list(task.replicas)}")
    if len(used) != len(set(used)):
        raise ValueError("a device serves one stage at most")
    if not set(used) <= set(task.devices):
        raise ValueError("a device is used that is not there, or whose memory holds no stage")
    for stage, group in zip(assignment, groups, strict=True):
        times = [stage.count(d) for d in group]
        if max(times) - min(times) > 1:
            raise ValueError("the pipelines of a stage are not spread evenly over its devices")


def link_times(task: Task, nbytes: float) -> NDArray[np.float64]:
    """Seconds of ``nbytes`` between two devices, (N, N); inf without a link, 0 on the diagonal. For searches."""
    delay_ms, gbps = (np.asarray(m, dtype=float) for m in (task.delay_ms, task.bandwidth_gbps))
    there = np.minimum(gbps, gbps.T) > 0
    mean = np.where(there, (gbps + gbps.T) / 2, 1.0)
    times = np.where(there, (delay_ms + delay_ms.T) / 2000 + nbytes * 8e-9 / mean, np.inf)
    np.fill_diagonal(times, 0.0)
    return times


def finite(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace missing links by links a hundred times slower than the slowest; ``evaluate`` finds infinite cost with
    such links."""
    known = times[np.isfinite(times)]
    return np.where(np.isfinite(times), times, 100 * (known.max(initial=0.0) or 1.0))


def lower_bound_s(task: Task) -> float:
    """Lower bound of any placement's cost [s], in O(N^2 log N): each term minimised separately. Each device exchanges
    shares over links no faster than the nearest. A hop's slowest link is no faster than the nearest link of any device
    in the hop, and the h worst hops include 2 h P devices."""
    usable = list(task.devices)
    used, stages = sum(task.replicas), len(task.replicas)

    def nearest(nbytes: float) -> NDArray[np.float64]:
        return np.sort((link_times(task, nbytes) + np.diag([np.inf] * len(task.delay_ms)))[np.ix_(usable, usable)])

    sums = [2 * nearest(task.gradient_bytes / m)[:, : m - 1].sum(1) for m in sorted(set(task.replicas))]
    total = float(np.sort(np.min(sums, axis=0))[used - 1])
    if stages > 1:
        best = np.sort(nearest(task.activation_bytes)[:, 0])[:used][::-1]
        floor = best[used - 2 * min(task.replicas)]
        total += 2 * sum(float(max(floor, best[min(2 * h * task.pipelines, used - 1)])) for h in range(stages - 1))
    if task.compute_s:
        slowest, left = sorted(task.compute_s[d] for d in usable), used
        for m in sorted(task.replicas, reverse=True):
            total += slowest[left - 1]
            left -= m
    return total


def slots(members: Sequence[int], pipelines: int) -> tuple[int, ...]:
    """Devices of a stage by pipeline; if devices are fewer than pipelines, the first devices serve one more."""
    return tuple(members[i % len(members)] for i in range(pipelines))
