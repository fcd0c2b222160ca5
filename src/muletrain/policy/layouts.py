"""Many placements side by side, and moves of simulated annealing on them, as array operations (``annealing``).

A state is a whole placement, matching and order included, so that a move changes a few sums. One sweep proposes ``TRIES`` moves to each
chain; the first of them that Metropolis' rule accepts is taken, which is what trying one after another would do. Three kinds of moves:
two devices change places; so do two runs of devices, each side by side in one pipeline, which keeps the fast links inside both;
two pipelines exchange their devices in some stages.

Arrays: K stages, P pipelines, n devices that fit, R chains, Q = tries x R proposals (proposal q is of chain q mod R).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from muletrain.policy.pipelines import EXACT_STAGES, Threader
from muletrain.policy.placement import link_times, slots
from muletrain.policy.regrouping import Regrouping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from muletrain.policy.placement import Assignment, Task

    Floats = NDArray[np.float64]
    Ints = NDArray[np.intp]
    Devices = NDArray[np.int16]

CHAINS, TRIES = 32, 8
KINDS = 4
"""Of chains: r mod 4. The first begin with a random placement, the others with near devices side by side in each pipeline, for as many
stages as was drawn."""
CANDIDATES = 16
"""Devices that such a run may be drawn around: the best of them is taken."""
SAMPLES = 32
"""Exchanges whose changes are averaged."""
SAME = 1e-9
"""Times nearer than that (relative) are equal."""


def finite(times: Floats) -> Floats:
    """Missing links as ones a hundred times slower than the slowest there is: what has to use one is then found out by ``evaluate``."""
    known = times[np.isfinite(times)]
    return np.where(np.isfinite(times), times, 100 * (known.max(initial=0.0) or 1.0))


@dataclass
class Pipelines:
    """What pipelines cost, of chains or proposals: (..)."""

    hops: Floats
    """The sum over neighbouring stages of the slowest link."""
    rms: Floats
    """The same with root mean squares instead of maxima."""
    fixed: Floats
    """``hops`` there and back, and computing: what they add to the cost."""


@dataclass(frozen=True)
class Layout:
    """A placement as a chain has it."""

    cost_s: float
    at: Devices
    table: Ints


class Chains:
    """``CHAINS`` placements of a task, drawn anew; those of the last kind are ``known`` ones, if there are any."""

    def __init__(self, task: Task, rng: np.random.Generator, known: Sequence[Layout] = ()) -> None:
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
        self._proposal = np.arange(CHAINS * TRIES)
        self._chain = self._proposal % CHAINS
        self._draw(task.replicas, sizes)
        for r, layout in zip(range(KINDS - 1, CHAINS, KINDS) if known else (), cycle(known)):
            self.at[:, r], self._table[:, r] = layout.at, layout.table
        self.refresh()

    def _draw(self, replicas: tuple[int, ...], sizes: list[int]) -> None:
        spares = self.n - sum(replicas)
        at = np.empty((self.stages * self.pipelines + spares, CHAINS), dtype=np.int16)
        # rows of ``_exchange`` for the stage's size begin there
        self._table = np.zeros((self.stages + 1, CHAINS), dtype=np.intp)
        for r in range(CHAINS):
            left, drawn = self._rng.permutation(self.n).tolist(), self._rng.permutation(replicas).tolist()
            members: list[list[int]] = [[] for _ in drawn]
            for block in self._blocks():
                for p in range(self.pipelines):
                    takers = [k for k in block if p < drawn[k]]
                    run = self._near(left, len(takers)) if r % KINDS else left[: len(takers)]
                    for k, d in zip(takers, run, strict=True):
                        members[k].append(d)
                        left.remove(d)
            for k, m in enumerate(drawn):
                at[k * self.pipelines : (k + 1) * self.pipelines, r] = slots(members[k], self.pipelines)
                self._table[k, r] = sizes.index(m) * self.n
            at[self.stages * self.pipelines :, r] = left
        self.at = at

    def _blocks(self) -> list[range]:
        """The stages in parts of any length, the longest first."""
        inside = self._rng.permutation(self.stages - 1)[: self._rng.integers(self.stages)] + 1
        cuts = [0, *sorted(inside.tolist()), self.stages]
        return sorted((range(a, b) for a, b in pairwise(cuts)), key=len, reverse=True)

    def _near(self, left: list[int], length: int) -> list[int]:
        """A device and those nearest to it, of some that are left: where the farthest of them is nearest."""
        if not length:
            return []
        some = self._rng.permutation(len(left))[:CANDIDATES]
        times = self._link.reshape(self.n, self.n)[np.ix_(np.array(left)[some], np.array(left))]
        times[np.arange(len(some)), some] = -1.0  # itself first
        nearest = np.argpartition(times, length - 1, axis=1)[:, :length]
        best = int(np.take_along_axis(times, nearest, 1).max(1).argmin())
        return [left[k] for k in nearest[best].tolist()]

    def refresh(self) -> None:
        """Everything anew from the placements: rounding errors do not add up."""
        at, chains = self.at.astype(np.intp), np.arange(CHAINS)
        self._stage = np.full((self.n, CHAINS), self.stages)  # of each device
        for k, row in enumerate(self._rows(at)):
            self._stage[row, chains] = k
        # what a device would take to exchange with all of a stage
        self._sums = np.zeros((self.stages + 1, CHAINS, self.n))
        for start in range(0, len(self._exchange), self.n):
            table = self._exchange[start : start + self.n]
            for k in range(self.stages):
                of_size = self._table[k] == start
                self._sums[k, of_size] = (table @ (self._stage[:, of_size] == k)).T
        self._groups = np.zeros((self.stages + 1, CHAINS))  # data-parallel cost by stage; 0 for those left out
        for k, row in enumerate(self._rows(at)):
            self._groups[k] = self._sums[k, chains, row].max(0)
        self._lines = self._pipelines(at)

    @property
    def cost(self) -> Floats:
        """Of each chain [s]."""
        cost: Floats = self._groups.max(0) + self._lines.fixed
        return cost

    def _energy(self, groups: Floats, lines: Pipelines, weight: float) -> Floats:
        """The cost and, so much weighted, the guide, which is smoother: the mean over the stages' data-parallel costs, and root mean
        squares of hops instead of maxima."""
        guide: Floats = groups.sum(0) / self.stages + 2 * lines.rms
        energy: Floats = groups.max(0) + lines.fixed + weight * guide
        return energy

    def _rows(self, at: NDArray[Any]) -> NDArray[Any]:
        return at[: self.stages * self.pipelines].reshape(self.stages, self.pipelines, -1)

    def _pipelines(self, at: Ints) -> Pipelines:
        rows = self._rows(at)
        index = rows[:-1] * self.n
        index += rows[1:]
        times = self._link.take(index)
        hops = times.max(1).sum(0)
        rms = np.sqrt(np.einsum("kpq,kpq->kq", times, times) / self.pipelines).sum(0)
        fixed = 2 * hops
        if self._compute is not None:
            fixed += self._compute.take(rows).max(1).sum(0)
        return Pipelines(hops, rms, fixed)

    def swap_devices(self, temperature: Floats, weight: float) -> None:
        """Two devices of each chain change places."""
        here, there = self._rng.integers(self.n, size=(2, 1, len(self._proposal)))
        self._swap(here, there, temperature, weight)

    def swap_runs(self, length: int, temperature: Floats, weight: float) -> None:
        """Devices side by side in so many stages of one pipeline change places with as many others."""
        first, other = self._rng.integers(self.stages - length + 1, size=(2, len(self._proposal)))
        i, j = self._rng.integers(self.pipelines, size=(2, len(self._proposal)))
        other = np.where(np.abs(first - other) < length, first, other)  # a stage loses one device at most
        steps = np.arange(length)[:, None]
        here, there = (self.at[(k + steps) * self.pipelines + p, self._chain] for k, p in ((first, i), (other, j)))
        self._swap(here, there, temperature, weight)

    def _swap(self, here: Ints, there: Ints, temperature: Floats, weight: float) -> None:
        """Each device of ``here`` changes places with the one of ``there``: (moved, Q)."""
        r = self._chain
        before, at = self.at[:, None], np.zeros((len(self.at), TRIES, CHAINS), dtype=np.int16)
        for a, b in zip(here.astype(np.int16), there.astype(np.int16), strict=True):
            a, b = a.reshape(TRIES, CHAINS), b.reshape(TRIES, CHAINS)
            at |= ((before == a) | (before == b)) * (a ^ b)
        at ^= before
        s, t = self._stage[here, r], self._stage[there, r]
        apart = s != t
        stage, leaves, joins = (np.concatenate(pair) for pair in ((s, t), (here, there), (there, here)))
        which, where = self._accept(
            at.reshape(len(at), -1),
            (stage, leaves, np.where(np.tile(apart, (2, 1)), joins, leaves)),
            temperature,
            weight,
        )
        moves, taken = apart[:, which].nonzero()
        which, where = which[taken], where[taken]
        here, there, s, t = here[moves, which], there[moves, which], s[moves, which], t[moves, which]
        for stage, leaves, joins in ((s, here, there), (t, there, here)):
            table = self._table[stage, where]
            self._sums[stage, where] += self._exchange[table + joins] - self._exchange[table + leaves]
        self._stage[here, where], self._stage[there, where] = t, s

    def _group(self, at: Ints, some: Ints, stage: Ints, leaves: Ints, joins: Ints) -> Floats:
        """Data-parallel cost of stages after a device left and another one joined, in some proposals: (changed, some)."""
        r = self._chain[some]
        first = np.minimum(stage, self.stages - 1) * self.pipelines
        members = at.ravel().take(
            (first * at.shape[1] + some)[:, None] + np.arange(self.pipelines)[:, None] * at.shape[1]
        )
        after = self._sums.ravel().take(((stage * CHAINS + r) * self.n)[:, None] + members)
        if len(self._exchange) > self.n:
            members += self._table[stage, r][:, None]
        members *= self.n
        exchange = self._exchange.ravel()
        after += exchange.take(members + joins[:, None])
        after -= exchange.take(members + leaves[:, None])
        slowest: Floats = after.max(1)
        return slowest

    def swap_pipelines(self, temperature: Floats, weight: float) -> None:
        """Two pipelines of each chain exchange their devices in one stage, or from one stage on."""
        q = self._proposal
        first = self._rng.integers(self.stages, size=len(q))
        end = np.where(self._rng.random(len(q)) < 0.5, self.stages, first + 1)
        i, j = self._rng.integers(self.pipelines, size=(2, len(q)))
        at = self.at.take(self._chain, axis=1)
        rows, stage = self._rows(at), np.arange(self.stages)[:, None]
        inside = (first <= stage) & (stage < end)
        here, there = rows[:, i, q], rows[:, j, q]
        rows[:, i, q], rows[:, j, q] = np.where(inside, there, here), np.where(inside, here, there)
        self._accept(at, None, temperature, weight)

    def _accept(
        self, at: Devices, change: tuple[Ints, Ints, Ints] | None, temperature: Floats, weight: float
    ) -> tuple[Ints, Ints]:
        """Metropolis' rule: which proposals were taken, and in which chains. change: what stages lose and get, (changed, Q) each."""
        thresholds = self._energy(self._groups, self._lines, weight) + temperature * self._rng.standard_exponential(
            (TRIES, CHAINS)
        )
        limit = thresholds.ravel()
        wide = at.astype(np.intp)
        lines = self._pipelines(wide)
        groups = self._groups.take(self._chain, axis=1)
        if change is None:
            good = (self._energy(groups, lines, weight) <= limit).nonzero()[0]
        else:
            groups[change[0], self._proposal] = 0.0
            some = (self._energy(groups, lines, weight) <= limit).nonzero()[0]  # no more than the others cost, yet
            stage, leaves, joins = (part[:, some] for part in change)
            groups[stage, some] = self._group(wide, some, stage, leaves, joins)
            groups[self.stages] = 0.0
            good = some[(self._energy(groups, lines, weight) <= limit)[some]]
        where, first = np.unique(self._chain[good], return_index=True)
        which = good[first]
        self.at[:, where], self._groups[:, where] = at[:, which], groups[:, which]
        for name, value in vars(self._lines).items():
            value[where] = getattr(lines, name)[which]
        return which, where

    def resample(self, temperature: Floats, colder: Floats, weight: float) -> None:
        """Population annealing (Hukushima and Iba 2003): before it gets colder, the chains of each kind are drawn from the same, each as
        often as the colder distribution has it more often."""
        energy = self._energy(self._groups, self._lines, weight)
        kept = np.arange(CHAINS)
        for kind in range(KINDS):
            of_kind = np.arange(kind, CHAINS, KINDS)
            favour = (1 / temperature - 1 / colder)[of_kind] * energy[of_kind]
            shares = np.exp(favour - favour.max()).cumsum()
            ticks = (self._rng.random() + np.arange(len(of_kind))) / len(of_kind)
            kept[of_kind] = of_kind[np.minimum(np.searchsorted(shares / shares[-1], ticks), len(of_kind) - 1)]
        for name in ("at", "_table", "_stage", "_sums", "_groups"):
            setattr(self, name, getattr(self, name).take(kept, axis=1))
        self._lines = Pipelines(*(part[kept] for part in vars(self._lines).values()))

    def thread(self) -> None:
        """Give every chain the best matching and order for its groups."""
        for r in range(CHAINS):
            rows = self._rows(self.at)[:, :, r]
            threaded = np.array(self._threader.thread([tuple(sorted(row)) for row in rows.tolist()]))
            times = self._link.take(threaded[:-1] * self.n + threaded[1:])
            if self.stages <= EXACT_STAGES or times.max(1).sum() < self._lines.hops[r]:
                self._table[:-1, r] = self._table[self._stage[threaded[:, 0], r], r]
                rows[...] = threaded
        self.refresh()

    def usual_change(self) -> float:
        """Mean change of the cost by exchanging two devices, over some that take place."""
        changes = []
        for _ in range(SAMPLES):
            before = self.cost
            self.swap_devices(np.full(CHAINS, np.inf), 0.0)
            changes.append(np.abs(self.cost - before).mean())
        return float(np.mean(changes)) or 1.0

    def ends(self) -> list[Layout]:
        """The best of each kind of chains."""
        return [self.layout(min(range(kind, CHAINS, KINDS), key=self.cost.__getitem__)) for kind in range(KINDS)]

    def layout(self, r: int) -> Layout:
        """Of a chain."""
        return Layout(float(self.cost[r]), self.at[:, r].copy(), self._table[:, r].copy())

    def regrouped(self, layout: Layout, hot: float, cold: float, moves: int, deadline: float) -> tuple[Layout, int]:
        """A layout of equal stages after so many moves of ``Regrouping``, with the best matching and order; and how many there was time
        for."""
        link, n = self._link.reshape(self.n, self.n), self.n
        compute = np.zeros(n) if self._compute is None else self._compute
        at = layout.at.copy()
        rows = self._rows(at[:, None])[..., 0]
        search = Regrouping(link, self._exchange, compute, rows.tolist())
        made = search.anneal(hot, cold, moves, deadline, Random(int(self._rng.integers(1 << 62))))
        rows[...] = np.array(self._threader.thread([tuple(sorted(group)) for group in search.groups]))
        exchange = max(float(self._exchange[np.ix_(row, row)].sum(1).max()) for row in rows)
        hops = float(link[rows[:-1], rows[1:]].max(1, initial=0.0).sum())
        cost_s = exchange + 2 * hops + float(compute[rows].max(1).sum())
        return min(layout, Layout(cost_s, at, layout.table), key=lambda found: found.cost_s), made

    def assignment(self, layout: Layout) -> Assignment:
        return tuple(map(tuple, self.devices[self._rows(layout.at[:, None])[..., 0]].tolist()))
