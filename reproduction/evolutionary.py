"""The searches that DT-FM compares (Yuan et al. 2022, sec. 3.4): its evolutionary search with its own local search, the
same with a circular Kernighan-Lin, and random placements.

Where the paper leaves something open, this follows what its published scheduler does (github.com/DS3Lab/DT-FM): five
points are taken over from the first parent, groups that became too large give devices to the first that is too small;
an offspring that costs no more than its first parent replaces the worse of the two; a local search makes up to one
cycle of moves for each group, and what the last of them leads to is never taken.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muletrain.planning.annealing import Found
from muletrain.planning.pipelines import Threader
from muletrain.planning.placement import finite, link_times, slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from muletrain.planning.placement import Task

    Floats = NDArray[np.float64]
    Labels = NDArray[np.intp]
    Watch = Callable[[float, float], None]

TRIALS, POPULATION = 4900, 100
CROSSOVER_POINTS = 5


class Groups:
    """Groups of a task's devices as labels (n,): each device's group, K if unused; and their cost."""

    def __init__(self, task: Task, rng: np.random.Generator) -> None:
        self._task, self._rng = task, rng
        self.devices = np.array(task.devices)
        self.k, self.n = len(task.replicas), len(self.devices)
        self.sizes = np.array([*task.replicas, self.n - sum(task.replicas)])
        pick = np.ix_(self.devices, self.devices)
        self.activation = finite(link_times(task, task.activation_bytes)[pick])
        self.gradient = finite(link_times(task, task.gradient_bytes)[pick])
        shares = {m: finite(2 * link_times(task, task.gradient_bytes / m)[pick]) for m in set(task.replicas)}
        self._exchange = [shares[m] for m in task.replicas]
        self._compute = np.array(task.compute_s)[self.devices] if task.compute_s else np.zeros(self.n)
        self._threader = Threader(self.activation)

    def draw(self) -> Labels:
        return self._rng.permutation(np.repeat(np.arange(self.k + 1), self.sizes))

    def members(self, labels: Labels) -> list[tuple[int, ...]]:
        order = np.argsort(labels, kind="stable").tolist()
        ends = np.cumsum(self.sizes).tolist()
        return [tuple(order[end - m : end]) for end, m in zip(ends[:-1], self._task.replicas, strict=True)]

    def cost(self, labels: Labels, unless_above: float = math.inf) -> float:
        """Cost with the best matching and order [s]; inf if data-parallel costs alone exceed ``unless_above``."""
        groups = self.members(labels)
        exchange = max(float(table[np.ix_(g, g)].sum(1).max()) for table, g in zip(self._exchange, groups, strict=True))
        if exchange > unless_above:
            return math.inf
        compute = sum(float(self._compute[list(g)].max()) for g in groups)
        return exchange + 2 * self._threader.cost([self._by_pipeline(g) for g in groups]) + compute

    def assignment(self, labels: Labels) -> tuple[tuple[int, ...], ...]:
        rows = self._threader.thread([self._by_pipeline(g) for g in self.members(labels)])
        return tuple(tuple(self.devices[list(row)].tolist()) for row in rows)

    def _by_pipeline(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(slots(group, self._task.pipelines)))


def random_placements(task: Task, *, seed: int, draws: int = POPULATION) -> list[float]:
    """Cost of random groups with the best matching and order [s]."""
    groups = Groups(task, np.random.default_rng(seed))
    return [groups.cost(groups.draw()) for _ in range(draws)]


def evolve(
    task: Task,
    *,
    seed: int,
    time_limit_s: float,
    watch: Watch,
    kernighan_lin: bool = False,
    trials: int = TRIALS,
    population: int = POPULATION,
    patience: float = math.inf,
) -> Found:
    """The hybrid genetic search of sec. 3.4, until ``trials`` offspring were made, so many in a row (``patience``)
    brought no better placement, or the time is over."""
    deadline = time.monotonic() + time_limit_s
    rng = np.random.default_rng(seed)
    groups = Groups(task, rng)
    improve = (KernighanLin if kernighan_lin else FastLinks)(groups).improve
    people = [groups.draw() for _ in range(population)]
    costs = [groups.cost(labels) for labels in people]
    tried, lowest, since = population, min(costs), 0
    for trial in range(trials):
        if since >= patience or time.monotonic() > deadline:
            break
        first, second = rng.integers(population, size=2).tolist()
        child = improve(_crossed(people[first], people[second], groups, rng))
        cost = groups.cost(child, unless_above=costs[first])
        tried += 1
        if cost <= costs[first]:
            worse = first if costs[first] > costs[second] else second
            people[worse], costs[worse] = child, cost
        since = 0 if cost < lowest else since + 1
        lowest = min(lowest, cost)
        if trial % 20 == 0:
            watch(trial / trials, min(costs))
    best = people[min(range(population), key=costs.__getitem__)]
    return Found(groups.assignment(best), tried, since >= patience or tried == population + trials)


def _crossed(first: Labels, second: Labels, groups: Groups, rng: np.random.Generator) -> Labels:
    """The second parent with some devices as in the first, and groups of the right sizes."""
    child = second.copy()
    points = rng.permutation(groups.n)[:CROSSOVER_POINTS]
    child[points] = first[points]
    have = np.bincount(child, minlength=groups.k + 1)
    for d in range(groups.n) if (have != groups.sizes).any() else ():
        if have[child[d]] > groups.sizes[child[d]]:
            to = int(np.flatnonzero(have < groups.sizes)[0])
            have[child[d]] -= 1
            have[to] += 1
            child[d] = to
    return child


class Moves(NamedTuple):
    """The best move out of each group."""

    device: Labels
    """(K,)."""
    target: Labels
    """(K,)."""
    gain: Floats
    """(K, K): the most there is from a group to each other; -inf to itself, and from a group that no device may
    leave."""
    free: NDArray[np.bool_]
    """(K,): a device may leave it."""


class _Cyclic:
    """Local search by cycles of moves: a device goes from group to group along the best gains until the first one has
    one again, so that sizes stay (circular Kernighan-Lin, Kang and Moon 2000)."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._ids = np.arange(groups.k)

    def moves(self, labels: Labels, locked: NDArray[np.bool_]) -> Moves:
        raise NotImplementedError

    def _sums(self, labels: Labels, weights: Floats) -> Floats:
        """Of weights (rows, n * m), m for each device, by row and group: (rows, K + 1). They are added one by one, as
        the published scheduler does: rounding breaks the many ties of regular networks."""
        width = self._groups.k + 1
        slots = np.repeat(labels, weights.shape[1] // len(labels)) + width * np.arange(len(weights))[:, None]
        sums: Floats = np.bincount(slots.ravel(), weights.ravel(), width * len(weights)).astype(float)
        return sums.reshape(-1, width)

    def improve(self, labels: Labels) -> Labels:
        """Up to one cycle a group, then back to the best of the states before them; the published scheduler never takes
        the last state."""
        k = self._groups.k
        locked, reached = np.zeros(self._groups.n, dtype=bool), set[int]()
        states, gains = [labels], [0.0]
        while len(states) <= k and len(reached) < k:
            found = self._cycle(states[-1], locked, reached)
            if found is None:
                break
            states.append(found[0])
            gains.append(gains[-1] + found[1])
        return states[int(np.argmax(gains[:-1] or gains))]

    def _cycle(self, labels: Labels, locked: NDArray[np.bool_], reached: set[int]) -> tuple[Labels, float] | None:
        """Labels after the best closed part of one cycle, and its gain; None where no device may move. Locks what was
        moved."""
        best_moves, at = self.moves(labels, locked), labels.copy()
        start = group = int(best_moves.gain.max(1).argmax())
        moves: list[tuple[int, int]] = []  # device, and where it came from
        total, best, kept = 0.0, 0.0, 0  # gain so far, the best of a cycle closed at once, and after how many moves
        while best_moves.free[group] and len(moves) < self._groups.n:
            device, target, gain = int(best_moves.device[group]), int(best_moves.target[group]), best_moves.gain[group]
            if moves and total + gain[start] > best:
                best, kept = total + float(gain[start]), len(moves)
            at[device] = target
            locked[device] = True
            reached.add(target)
            moves.append((device, group))
            total += float(gain[target])
            if target == start:
                break
            group = target
            best_moves = self.moves(at, locked)
        if not moves:
            return None
        for device, origin in moves[kept + 1 :]:
            at[device] = origin
        at[moves[kept][0]] = start
        return at, best


class FastLinks(_Cyclic):
    """DT-FM's own (sec. 3.4): of each group the device with the fastest link inside it may move; it gains the mean link
    to the target group, which pipelines would have to use, less that fast one, which they can use then."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self._near = groups.activation + np.diag([math.inf] * groups.n)

    def moves(self, labels: Labels, locked: NDArray[np.bool_]) -> Moves:
        fastest = np.where(labels[:, None] == labels, self._near, math.inf).min(1)
        fastest[locked] = math.inf
        by_group = np.where(labels == self._ids[:, None], fastest, math.inf)
        device = by_group.argmin(1)
        used = by_group[self._ids, device]
        gain = self._sums(labels, self._groups.activation[device] / np.bincount(labels)[labels])[:, :-1] - used[:, None]
        np.fill_diagonal(gain, -math.inf)
        return Moves(device, gain.argmax(1), gain, used < math.inf)


class KernighanLin(_Cyclic):
    """The baseline: a move gains by all links to the target group, less those inside its own. A link weighs what it
    costs a pipeline less what it costs to exchange gradients over it."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self._weights = np.stack([groups.activation, -groups.gradient], axis=2).reshape(groups.n, -1)

    def moves(self, labels: Labels, locked: NDArray[np.bool_]) -> Moves:
        sums, every = self._sums(labels, self._weights), np.arange(self._groups.n)
        gains = sums - sums[every, labels][:, None]
        gains[every, labels] = -math.inf
        gains = gains[:, :-1]  # (n, K)
        may_leave = (labels == self._ids[:, None]) & ~locked  # (K, n)
        device = np.where(may_leave, gains.max(1), -math.inf).argmax(1)
        gain = np.where(may_leave[:, :, None], gains, -math.inf).max(1)
        return Moves(device, gains[device].argmax(1), gain, may_leave.any(1))
