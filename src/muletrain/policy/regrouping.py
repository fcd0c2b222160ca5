"""Simulated annealing of which devices a stage has, each hop with its best matching at every move.

Given the groups of neighbouring stages, who talks to whom is a bottleneck matching (DT-FM eq. 3), each hop by itself. So moves that
only change the matching need not be tried, and a state is as good as its groups are: what array operations on whole placements
(``layouts``) found is improved by far fewer moves. Two devices of different stages change places, in turn.

Sets of devices are integers here: bit d is device d.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from itertools import accumulate
from operator import or_
from typing import TYPE_CHECKING

from muletrain.policy.pipelines import perfect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


LOOK = 64
"""Moves between two looks at the clock."""
HICCUP = 0.05
"""So much of the time may be lost before cooling hurries."""


class Regrouping:
    """Equal stages. link, exchange: (n, n), symmetric [s], what activations and gradients take; compute: (n,) [s]; groups: devices of each
    stage."""

    def __init__(self, link: Floats, exchange: Floats, compute: Floats, groups: Sequence[Sequence[int]]) -> None:
        self._compute: list[float] = compute.tolist()
        self._link: list[list[float]] = link.tolist()
        self._exchange: list[list[float]] = exchange.tolist()
        self._times = [sorted(row) for row in self._link]  # of each device's links
        self._within: list[list[int]] = []  # and whom it reaches over the first so many
        for order in link.argsort(axis=1).tolist():
            self._within.append(list(accumulate((1 << d for d in order), or_, initial=0)))
        self._begin(groups)

    def _begin(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = [list(map(int, group)) for group in groups]
        self._sets = [sum(1 << d for d in group) for group in self.groups]
        self._sums = [0.0] * len(self._link)  # what each device exchanges with its stage
        for group in self.groups:
            for d in group:
                self._sums[d] = sum(self._exchange[d][e] for e in group)
        self._slowest = [max(self._sums[d] for d in group) for group in self.groups]
        self._computing = [max(self._compute[d] for d in group) for group in self.groups]
        self._hops = [self._hop(k, math.inf, math.inf) for k in range(len(self.groups) - 1)]

    @property
    def cost(self) -> float:
        """With the best matchings, stages in this order [s]."""
        return max(self._slowest) + math.fsum(self._computing) + 2 * math.fsum(self._hops)

    def anneal(self, hot: float, cold: float, moves: int, deadline: float, random: Random) -> int:
        """Metropolis' rule, cooling from ``hot`` to ``cold`` [s]; ends with the best groups that there were. How many moves there was
        time for."""
        best_s, best, started = self.cost, [list(group) for group in self.groups], time.monotonic()
        cost, temperature, made = best_s, hot, moves
        for move in range(moves):
            if move % LOOK == 0:
                late = (time.monotonic() - started) / max(deadline - started, 1e-9)
                if late >= 1:
                    made = move
                    break
                temperature = hot * (cold / hot) ** max(move / moves, late - HICCUP)
                cost = self.cost  # rounding errors do not add up
            if (after := self._swap(cost + temperature * random.expovariate(1.0), random)) is not None:
                cost = after
                if cost < best_s - 1e-9:
                    best_s, best = cost, [list(group) for group in self.groups]
        self._begin(best)
        return made

    def _swap(self, limit: float, random: Random) -> float | None:
        """Two devices of different stages change places, if the cost stays within the limit: the cost then."""
        stages, width = len(self.groups), len(self.groups[0])
        k, m = int(random.random() * stages), int(random.random() * (stages - 1))
        m += m >= k
        i, j = int(random.random() * width), int(random.random() * width)
        a, b = self.groups[k][i], self.groups[m][j]
        sums = self._replaced(k, a, b), self._replaced(m, b, a)
        slowest = self._slowest.copy()
        slowest[k], slowest[m] = max(sums[0]), max(sums[1])
        computing = self._computing.copy()
        for stage, leaves, joins in ((k, a, b), (m, b, a)):
            computing[stage] = max(
                [self._compute[joins], *(self._compute[d] for d in self.groups[stage] if d != leaves)]
            )
        fixed = max(slowest) + math.fsum(computing)
        room = (limit - fixed) / 2 - math.fsum(self._hops)  # how much all hops together may take longer
        touched = {h for h in (k - 1, k, m - 1, m) if 0 <= h < stages - 1}
        if room < -sum(self._hops[h] for h in touched):
            return None
        self._put(k, i, b)
        self._put(m, j, a)
        after = {h: self._hop(h, self._hops[h], self._hops[h]) for h in touched}
        room += sum(self._hops[h] - time_s for h, time_s in after.items() if time_s < math.inf)
        for h in touched:
            if after[h] == math.inf and room >= 0:
                after[h] = self._hop(h, self._hops[h], self._hops[h] + room)
                room -= after[h] - self._hops[h]
        if room < 0:
            self._put(k, i, a)
            self._put(m, j, b)
            return None
        for h, time_s in after.items():
            self._hops[h] = time_s
        for stage, new in ((k, sums[0]), (m, sums[1])):
            for d, s in zip(self.groups[stage], new, strict=True):
                self._sums[d] = s
        self._slowest, self._computing = slowest, computing
        return fixed + 2 * math.fsum(self._hops)

    def _put(self, k: int, i: int, device: int) -> None:
        self._sets[k] ^= 1 << self.groups[k][i] | 1 << device
        self.groups[k][i] = device

    def _replaced(self, k: int, leaves: int, joins: int) -> list[float]:
        """What the devices of a stage exchange after one has taken another's place."""
        out, into, group = self._exchange[leaves], self._exchange[joins], self.groups[k]
        own = sum([into[d] for d in group]) - into[leaves]
        return [own if d == leaves else self._sums[d] - out[d] + into[d] for d in group]

    def _feasible(self, k: int, time_s: float) -> bool:
        """Whether all pipelines can go from stage k to the next over links that are as fast."""
        there = self._sets[k + 1]
        rows = [self._within[d][bisect_right(self._times[d], time_s)] & there for d in self.groups[k]]
        return all(rows) and perfect(rows, there) is not None

    def _hop(self, k: int, now: float, at_most: float) -> float:
        """What the best matching of stage k with the next one takes, beginning to look at ``now``; inf if it is above ``at_most``."""
        feasible = self._feasible(k, now)
        if not feasible and at_most <= now:
            return math.inf
        times = sorted([link[e] for d in self.groups[k] for link in [self._link[d]] for e in self.groups[k + 1]])
        if feasible:
            low, high = 0, bisect_right(times, now) - 1
            below = bisect_left(times, times[high]) - 1
            if below < 0 or not self._feasible(k, times[below]):
                return times[high]
            high = below
        else:
            low, high = bisect_right(times, now), bisect_right(times, at_most) - 1
            if high < low or not self._feasible(k, times[high]):
                return math.inf
        while low < high:
            middle = (low + high) // 2
            if self._feasible(k, times[middle]):
                high = middle
            else:
                low = middle + 1
        return times[low]
