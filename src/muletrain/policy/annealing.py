"""Our search for a placement: simulated annealing of many chains at once on the true objective (``placement``), with a guide.

A state is a whole placement, matching and order included, so that a move changes a few sums, and thousands are tried in one sweep of
array operations; for each chain the first of its tries that Metropolis' rule accepts is taken, which is what trying one after another
would do. Most chains begin with near devices side by side: in as many neighbouring stages as the chain's turn says, which makes pipelines
cheap (all stages), data-parallel groups (one stage), or something between. Maxima are flat where several links are equally slow: at first
each hop's root mean square and the mean over the stages' data-parallel costs are added (the guide), so that a hop that has one slow link
less is better; the weight of that falls to zero. Now and then each chain gets the best matching and order for its groups (``pipelines``).

Arrays: K stages, P pipelines, n devices that fit, R chains, Q = tries x R proposals (proposal q is of chain q mod R).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.policy.pipelines import EXACT_STAGES, Threader
from muletrain.policy.placement import link_times, slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from muletrain.policy.placement import Assignment, Task

    Floats = NDArray[np.float64]
    Ints = NDArray[np.intp]

CHAINS, TRIES = 32, 8
HOT, COLD = (0.5, 0.15, 0.05, 0.015), 0.002
"""First (by chain, in turns) and last temperature, over the usual size of a change. Chains of the first kind begin with a random placement;
the others with one that has near devices together, in each other's pipelines or stages, and would not profit from more heat."""
GUIDE, GUIDED = 1.0, 0.7
"""The guide's first weight, and the share of the moves after which it is none."""
MATCHING_MOVES = 0.3
"""Share of sweeps that exchange pipelines instead of devices."""
FIRST_ROUND = 20
"""Sweeps of the first round, times devices."""
AGREED = 3
"""Rounds that end at the best cost, from random placements each, before it is taken for the optimum."""
THREADINGS = 3
"""How often in a round each chain gets the best matching and order."""
PROGRESS = 50
"""Sweeps between two looks at the clock."""
HICCUP = 0.05
"""So much of a round's time may be lost, to other processes, before its cooling hurries."""
SAME = 1e-9
"""Costs nearer than that (relative) are equal."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    assignment: Assignment
    tried: int
    """Placements whose cost was looked at."""
    complete: bool
    """It ended by itself, not by the time limit: the same seed finds the same again."""


def finite(times: Floats) -> Floats:
    """Missing links as ones a hundred times slower than the slowest there is: what has to use one is then found out by ``evaluate``."""
    known = times[np.isfinite(times)]
    return np.where(np.isfinite(times), times, 100 * (known.max(initial=0.0) or 1.0))


@dataclass
class _Layouts:
    """Placements side by side: chains, or proposals. ``at``: (K * P + spares, ..) devices by stage and pipeline, then those left out."""

    at: Ints
    groups: Floats
    """Data-parallel cost by stage, and 0 for those left out: (K + 1, ..)."""
    hops: Floats
    """Pipeline cost."""
    rms: Floats
    """The same with root mean squares instead of maxima."""
    compute: Floats
    cost: Floats
    guide: Floats

    def put(self, where: Ints, other: _Layouts, which: Ints) -> None:
        for name in vars(self):
            getattr(self, name)[..., where] = getattr(other, name)[..., which]


class _Chains:
    def __init__(self, task: Task, rng: np.random.Generator) -> None:
        self._rng = rng
        self.devices = np.array(task.devices)
        self.stages, self.pipelines, self.n = len(task.replicas), task.pipelines, len(self.devices)
        pick = np.ix_(self.devices, self.devices)
        link = finite(link_times(task, task.activation_bytes)[pick])
        self._link = link.ravel()
        self._threader = Threader(link)
        sizes = sorted(set(task.replicas))
        exchanges = [finite(2 * link_times(task, task.gradient_bytes / m)[pick]) for m in sizes]
        self._exchange = np.concatenate(exchanges)  # (sizes * n, n): what two devices of a stage of that size take
        self._compute = np.array(task.compute_s)[self.devices] if task.compute_s else None
        self._chain = np.tile(np.arange(CHAINS), TRIES)
        self._proposal = np.arange(CHAINS * TRIES)
        self._draw(task.replicas, sizes)
        self.refresh()

    def _draw(self, replicas: tuple[int, ...], sizes: list[int]) -> None:
        spares = self.n - sum(replicas)
        at = np.empty((self.stages * self.pipelines + spares, CHAINS), dtype=np.intp)
        # rows of ``_exchange`` for the stage's size begin there
        self._table = np.zeros((self.stages + 1, CHAINS), dtype=np.intp)
        any_height = int(self._rng.integers(self.stages))
        for r in range(CHAINS):
            group, kind = divmod(r, len(HOT))
            left = (self._near_ones_together() if kind else self._rng.permutation(self.n)).tolist()
            drawn = self._rng.permutation(replicas).tolist()
            members: list[list[int]] = [[] for _ in drawn]
            # so many stages are filled side by side, pipeline by pipeline: each number in turn
            height = 1 + (group + any_height) % self.stages
            for first in range(0, self.stages, height):
                for p in range(self.pipelines):
                    for k in range(first, min(first + height, self.stages)):
                        if p < drawn[k]:
                            members[k].append(left.pop(0))
            for k, m in enumerate(drawn):
                at[k * self.pipelines : (k + 1) * self.pipelines, r] = slots(members[k], self.pipelines)
                self._table[k, r] = sizes.index(m) * self.n
            at[self.stages * self.pipelines :, r] = left
        self._at = at
        self.heat = np.resize(HOT, CHAINS)

    def _near_ones_together(self) -> Ints:
        """The devices in an order in which each comes after one that is near; of equally near ones the one with the nearest left."""
        link = self._link.reshape(self.n, self.n) + np.diag(np.full(self.n, np.inf))
        left = self._rng.permutation(self.n)
        here = left[link[left].min(1).argmin()]
        order = [here]
        while len(order) < self.n:
            left = left[left != here]
            near = left[link[here, left] <= link[here, left].min() * (1 + SAME)]
            nearest = link[near[:, None], left].min(1) if len(left) > 1 else np.zeros(1)
            here = near[nearest.argmin()]
            order.append(here)
        return np.array(order)

    def refresh(self) -> None:
        """Everything anew from the placements: rounding errors do not add up."""
        at, chains = self._at, np.arange(CHAINS)
        self._stage = np.full((self.n, CHAINS), self.stages)  # of each device
        for k, row in enumerate(self._rows(at)):
            self._stage[row, chains] = k
        self._sums = np.zeros(
            (self.stages + 1, self.n, CHAINS)
        )  # what a device would take to exchange with all of a stage
        for start in range(0, len(self._exchange), self.n):
            table = self._exchange[start : start + self.n]
            for k in range(self.stages):
                of_size = self._table[k] == start
                self._sums[k][:, of_size] = table @ (self._stage[:, of_size] == k)
        groups = np.zeros((self.stages + 1, CHAINS))
        for k, row in enumerate(self._rows(at)):
            groups[k] = self._sums[k][row, chains].max(0)
        self.now = self._layouts(at, groups)

    def _rows(self, at: Ints) -> Ints:
        return at[: self.stages * self.pipelines].reshape(self.stages, self.pipelines, -1)

    def _layouts(self, at: Ints, groups: Floats) -> _Layouts:
        rows = self._rows(at)
        times = self._link.take(rows[:-1] * self.n + rows[1:])
        hops, rms = times.max(1).sum(0), np.sqrt((times * times).mean(1)).sum(0)
        compute = np.zeros_like(hops) if self._compute is None else self._compute.take(rows).max(1).sum(0)
        cost = groups.max(0) + 2 * hops + compute
        return _Layouts(at, groups, hops, rms, compute, cost, groups[:-1].mean(0) + 2 * rms)

    def swap_devices(self, temperature: Floats, weight: float) -> None:
        """Two devices of each chain change places."""
        r, q = self._chain, self._proposal
        a, b = self._rng.integers(self.n, size=(2, len(q)))
        at = self.now.at.take(r, axis=1)
        is_a, is_b = at == a, at == b
        np.copyto(at, b, where=is_a)
        np.copyto(at, a, where=is_b)
        s, t = self._stage[a, r], self._stage[b, r]
        apart = s != t
        groups = self.now.groups.take(r, axis=1)
        groups[s, q] = self._group(at, s, a, np.where(apart, b, a))
        groups[t, q] = self._group(at, t, b, np.where(apart, a, b))
        groups[self.stages] = 0.0
        which, where = self._accept(self._layouts(at, groups), temperature, weight)
        moved = apart[which]
        which, where = which[moved], where[moved]
        a, b, s, t = a[which], b[which], s[which], t[which]
        for stage, leaves, joins in ((s, a, b), (t, b, a)):
            table = self._table[stage, where]
            self._sums[stage, :, where] += self._exchange[table + joins] - self._exchange[table + leaves]
        self._stage[a, where], self._stage[b, where] = t, s

    def _group(self, at: Ints, stage: Ints, leaves: Ints, joins: Ints) -> Floats:
        """Data-parallel cost of a stage after a device left and another one joined."""
        first = np.minimum(stage, self.stages - 1) * self.pipelines
        members = at[first + np.arange(self.pipelines)[:, None], self._proposal]
        before = self._sums.ravel().take((stage * self.n + members) * CHAINS + self._chain)
        row = (self._table[stage, self._chain] + members) * self.n
        exchange = self._exchange.ravel()
        after: Floats = (before + exchange.take(row + joins) - exchange.take(row + leaves)).max(0)
        return after

    def swap_pipelines(self, temperature: Floats, weight: float) -> None:
        """Two pipelines of each chain exchange their devices in one stage, or from one stage on."""
        q = self._proposal
        first = self._rng.integers(self.stages, size=len(q))
        end = np.where(self._rng.random(len(q)) < 0.5, self.stages, first + 1)
        i, j = self._rng.integers(self.pipelines, size=(2, len(q)))
        at = self.now.at.take(self._chain, axis=1)
        rows, stage = self._rows(at), np.arange(self.stages)[:, None]
        inside = (first <= stage) & (stage < end)
        here, there = rows[:, i, q], rows[:, j, q]
        rows[:, i, q], rows[:, j, q] = np.where(inside, there, here), np.where(inside, here, there)
        self._accept(self._layouts(at, self.now.groups.take(self._chain, axis=1)), temperature, weight)

    def _accept(self, proposals: _Layouts, temperature: Floats, weight: float) -> tuple[Ints, Ints]:
        """Metropolis' rule: which proposals were taken, and in which chains."""
        before = self.now.cost + weight * self.now.guide
        after = (proposals.cost + weight * proposals.guide).reshape(TRIES, CHAINS)
        good = after <= before + temperature * self._rng.standard_exponential((TRIES, CHAINS))
        where = np.flatnonzero(good.any(0))
        which = good.argmax(0)[where] * CHAINS + where
        self.now.put(where, proposals, which)
        return which, where

    def thread(self) -> None:
        """Give every chain the best matching and order for its groups."""
        for r in range(CHAINS):
            rows = self._rows(self.now.at)[:, :, r]
            threaded = np.array(self._threader.thread([tuple(sorted(row)) for row in rows.tolist()]))
            times = self._link.take(threaded[:-1] * self.n + threaded[1:])
            if self.stages <= EXACT_STAGES or times.max(1).sum() < self.now.hops[r]:
                self._table[:-1, r] = self._table[self._stage[threaded[:, 0], r], r]
                self._rows(self._at)[:, :, r] = threaded
        self.refresh()

    def usual_change(self) -> float:
        """Median change of the cost by exchanging two devices."""
        before = self.now.cost.copy()
        self.swap_devices(np.full(CHAINS, 1e30), 0.0)
        changes = np.abs(self.now.cost - before)
        return float(np.median(changes[changes > 0])) if changes.any() else 1.0

    def matching_sweeps(self, sweeps: int) -> list[bool]:
        """Which sweeps exchange pipelines: none where that changes nothing."""
        drawn = self._rng.random(sweeps) < MATCHING_MOVES
        return [bool(d) and min(self.stages, self.pipelines) > 1 for d in drawn]

    def best(self) -> tuple[float, Assignment]:
        r = int(self.now.cost.argmin())
        rows = self.devices[self._rows(self.now.at)[:, :, r]]
        return float(self.now.cost[r]), tuple(map(tuple, rows.tolist()))


def search(task: Task, *, seed: int, time_limit_s: float, watch: Callable[[float, float], None]) -> Found:
    """Rounds, each from new placements and twice as long as the one before, until ``AGREED`` of them ended at the same best cost or the
    work is done that the time limit allows on a slow core. So the same seed and limit find the same; on a slower machine yet, the
    last round is shortened (``Found.complete`` is false). ``watch`` hears now and then which share of that work is done, and the best
    cost."""
    rng = np.random.default_rng(seed)
    deadline = time.monotonic() + time_limit_s
    budget = max(THREADINGS, int(time_limit_s / _sweep_s(task)))
    done, length, agreed, tried = 0, FIRST_ROUND * len(task.devices), 0, 0
    best_s, complete = np.inf, True
    best: Assignment = ()

    def progress(sweeps: int, cost_s: float) -> None:
        watch((done + sweeps) / budget, min(best_s, cost_s))

    while done < budget and agreed < AGREED and complete:
        sweeps = length if budget - done >= 3 * length else budget - done
        chains = _Chains(task, rng)
        made = _anneal(chains, sweeps, deadline, progress)
        complete = made == sweeps
        found_s, found = chains.best()
        agreed = agreed + 1 if abs(found_s - best_s) <= SAME * found_s else agreed if found_s > best_s else 1
        if found_s < best_s:
            best_s, best = found_s, found
        tried += made
        done += sweeps
        length *= 2
    return Found(best, tried * CHAINS * TRIES, complete)


def _anneal(chains: _Chains, sweeps: int, deadline: float, progress: Callable[[int, float], None]) -> int:
    """How many sweeps there was time for: where it runs out, cooling keeps pace with it."""
    scale, matching = chains.usual_change(), chains.matching_sweeps(sweeps)
    started, threading_s = time.monotonic(), 0.0
    done = threaded = 0
    share = late = 0.0  # of the sweeps, and of the time
    while share < 1:
        temperature = scale * chains.heat * (COLD / chains.heat) ** share
        weight = GUIDE * max(0.0, 1 - share / GUIDED)
        (chains.swap_pipelines if matching[done] else chains.swap_devices)(temperature, weight)
        done += 1
        if done % PROGRESS == 0:
            progress(done, chains.best()[0])
            late = (time.monotonic() - started) / max(deadline - threading_s - started, 1e-9)
        share = done / sweeps
        if late > share + HICCUP * (1 - late):
            share = min(late, 1.0)
        if int(share * THREADINGS) > threaded:
            threaded, before = int(share * THREADINGS), time.monotonic()
            chains.thread()
            threading_s = time.monotonic() - before
    return done


def _sweep_s(task: Task) -> float:
    """What a sweep takes on a slow core."""
    return 4e-4 + 3.6e-8 * CHAINS * TRIES * len(task.devices)
