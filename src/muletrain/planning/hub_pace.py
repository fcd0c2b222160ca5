"""The speed of a hub, for searches: the sums of ``hub_task.evaluate`` again, remembered by stage and by pair of
neighbours, and the best layers for known transfers. Times are of one microbatch [s]."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muletrain.planning.hub_task import aggregation_s
from muletrain.planning.partition import memory_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.planning.hub_task import HubTask

Devices = tuple[int, ...]
MEMO = 100_000
"""Times of each kind that are remembered."""
SAME = 1e-12
"""Relative difference below which times are equal."""
FIRST_STEP = 0.02
"""Relative increase of the time after one that was too short; then it doubles."""


class Group(NamedTuple):
    """Machines of a stage; a single server is frontal and backward."""

    frontal: Devices
    backward: Devices
    clients: Devices

    @property
    def servers(self) -> Devices:
        return self.frontal if self.frontal == self.backward else self.frontal + self.backward


class Pace:
    """Times of allocations of one task. Missing links count as a hundred times the slowest one; ``evaluate`` finds
    the allocations that need them."""

    def __init__(self, task: HubTask) -> None:
        gbps = np.asarray(task.bandwidth_gbps, dtype=float)
        delay = np.asarray(task.delay_ms, dtype=float) / 1000
        load = task.activation_bytes * 8e-9 / np.where(gbps > 0, gbps, np.inf)
        np.fill_diagonal(delay, 0.0)
        np.fill_diagonal(load, 0.0)
        missing = ~(gbps > 0) & ~np.eye(len(gbps), dtype=bool)
        slowest = max(float(np.where(missing, 0.0, delay + load).max()), sum(task.chain.work) / sum(task.flops))
        self._delay = np.where(missing, 100 * slowest, delay).tolist()
        self._load = load.tolist()  # of a whole microbatch
        self._task, self._flops = task, task.flops
        self._memory = task.memory_bytes
        self._work = np.cumsum((0.0, *task.chain.work)).tolist()
        self._needs = memory_table(task.chain, in_flight=1.0)
        self._ends: dict[float, list[int]] = {}
        self._inside: dict[Group, tuple[float, float, list[int]]] = {}
        self._hops: dict[tuple[Devices, Devices], float] = {}
        self.layers = len(task.chain.work)

    def of(self, groups: Sequence[Group], limit_s: float = math.inf) -> tuple[float, float]:
        """Of stages in order: the time of the slowest one with the best layers, inf where memory suffices for none, and
        the same as if layers could be cut anywhere, which is never more: where already that is above the limit, the
        first is not looked for (inf)."""
        overheads, speeds, ends = self.stages(groups)
        smooth_s = smooth(overheads, speeds, self._work[-1])
        if smooth_s > limit_s:
            return math.inf, smooth_s
        return fastest(overheads, speeds, ends, self._work, smooth_s), smooth_s

    def stages(self, groups: Sequence[Group]) -> tuple[list[float], list[float], list[list[int]]]:
        """By stage: transfers [s], speed, and the end of the longest run of layers by first layer."""
        overheads, speeds, ends = [], [], []
        for k, group in enumerate(groups):
            inside_s, speed, end = self._stage(group)
            before_s = self._hop(groups[k - 1].backward, group.frontal) if k else 0.0
            after_s = self._hop(groups[k + 1].frontal, group.backward) if k + 1 < len(groups) else 0.0
            overheads.append(before_s + after_s + inside_s)
            speeds.append(speed)
            ends.append(end)
        return overheads, speeds, ends

    def _stage(self, group: Group) -> tuple[float, float, list[int]]:
        if (known := self._inside.get(group)) is None:
            if len(self._inside) > MEMO:
                self._inside.clear()
            devices = group.servers + group.clients
            speed = sum([self._flops[d] for d in devices])
            aggregated = speed  # more machines are no faster where they aggregate for longer
            if any(self._task.aggregated):
                ends_s = aggregation_s(self._task, group.servers, group.clients) / self._task.microbatches
                aggregated = 1 / (1 / speed + ends_s / self._work[-1])
            memory = min([self._memory[d] for d in devices]) if self._memory else math.inf
            self._inside[group] = known = (self._dearest(group, speed), aggregated, self._reach(memory))
        return known

    def _dearest(self, group: Group, speed: float) -> float:
        front, back, clients = group
        delay, load, flops = self._delay, self._load, self._flops
        dearest = 0.0
        for c in clients:
            part, ways, loads = flops[c] / speed, delay[c], load[c]
            takes_s = min([delay[s][c] + part * load[s][c] for s in front])
            dearest = max(dearest, takes_s + min([ways[s] + part * loads[s] for s in back]))
        for f in front:
            own, ways, loads = flops[f], delay[f], load[f]
            dearest = max(dearest, *[ways[b] + max(own, flops[b]) / speed * loads[b] for b in back])
        return dearest

    def _hop(self, senders: Devices, receivers: Devices) -> float:
        if (known := self._hops.get((senders, receivers))) is None:
            if len(self._hops) > MEMO:
                self._hops.clear()
            m, n = len(senders), len(receivers)
            i, j, at, known = 0, 0, 0, 0.0  # ``at``: given out so far, in units of 1 / (m n)
            while i < m and j < n:
                end = min((i + 1) * n, (j + 1) * m)
                a, b = senders[i], receivers[j]
                known = max(known, self._delay[a][b] + (end - at) / (m * n) * self._load[a][b])
                at, i, j = end, end // n, end // m
            self._hops[senders, receivers] = known
        return known

    def _reach(self, memory: float) -> list[int]:
        """By first layer: the end of the longest run of layers that fits."""
        if memory not in self._ends:
            fits = self._needs <= memory
            self._ends[memory] = [first + int(fits[first, first + 1 :].sum()) for first in range(self.layers)]
        return self._ends[memory]


def smooth(overheads: Sequence[float], speeds: Sequence[float], work: float) -> float:
    """Seconds of the slowest stage if work can be cut anywhere and a stage may have none: all others take equally
    long."""
    time_s = math.inf
    speed = done = 0.0
    for overhead, own in sorted(zip(overheads, speeds, strict=True)):
        if overhead >= time_s:
            break
        speed += own
        done += own * overhead
        time_s = (work + done) / speed
    return time_s


def fastest(
    overheads: Sequence[float],
    speeds: Sequence[float],
    ends: Sequence[Sequence[int]],
    work: Sequence[float],
    low: float,
) -> float:
    """Seconds of the slowest stage with the best cut; exact for equal layers, else never too low. ``work``: of all
    layers before, (L + 1); ``ends``: see ``Pace.stages``; no cut is faster than ``low``. Bisects the time; stages
    take as many layers as fit into it."""
    stages, layers = len(speeds), len(work) - 1
    high, step = math.inf, 0.0
    low = max(low, *overheads)
    probe = low
    while True:
        at, slowest, more = 0, 0.0, math.inf
        for k in range(stages):
            overhead, speed = overheads[k], speeds[k]
            most = min(ends[k][at], layers - (stages - k - 1))
            end = min(bisect_right(work, work[at] + (probe * (1 + SAME) - overhead) * speed) - 1, most)
            if end < most:
                more = min(more, overhead + (work[end + 1] - work[at]) / speed)
            if end <= at:
                at = -1
                break
            slowest = max(slowest, overhead + (work[end] - work[at]) / speed)
            at = end
        if at == layers:
            high = min(high, slowest)
        elif more == math.inf:
            return high  # memory is the reason: more time changes nothing
        else:
            low = max(more, probe * (1 + SAME))
        if low >= high * (1 - SAME):
            return high
        if high < math.inf:
            probe = (low + high) / 2
        else:
            probe, step = low * (1 + step), max(2 * step, FIRST_STEP)
