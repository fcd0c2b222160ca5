"""Stages of unequal size: machines and layers of each stage, and the pipelines through the stages.

Unlike in the placement search (``planning.place``), stages have different numbers of layers, so that a machine may have
room for some stages only, and different numbers of machines, each of which serves pipelines in proportion to its speed.
Machines of one kind are alike, so the task is to find the number of machines of each kind for each stage. A local
search begins with groups of machines of similar room. The layers of each choice are cut exactly
(``planning.partition``).

Arrays: S stages, K kinds, L layers.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from muletrain.planning.partition import cheapest_cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from muletrain.planning.partition import Cut

Serving = tuple[tuple[int, ...], ...]
"""Machines by stage and kind."""
LEVELS = 4
"""Levels of room that the search begins with."""
BEGUN = 3
"""Choices that the search continues from."""


@dataclass(frozen=True, eq=False)
class Work:
    """The task of the search."""

    takes_s: NDArray[np.float64]
    """Seconds of a microbatch, forward and backward, by stage, kind and number of layers, (S, K, L + 1); inf without
    room."""
    counts: tuple[int, ...]
    """Machines, by kind."""

    def cut(self, serving: Serving) -> tuple[float, Cut] | None:
        """Seconds of the slowest stage for a microbatch, with the work shared by speed, and the layers; None: no
        room."""
        here = np.array(serving, dtype=float)[:, :, None]
        rates = (here / self.takes_s).sum(1)
        held = (np.isfinite(self.takes_s) | (here == 0)).all(1) & (rates > 0)
        times = np.where(held, 1 / np.where(held, rates, 1.0), np.inf)
        first, end = np.indices((times.shape[1],) * 2)
        return cheapest_cut(times[:, np.maximum(end - first, 0)])


@dataclass(frozen=True)
class Choice:
    """One choice of machines and layers; ``cost_s``: by the search's cost function."""

    cost_s: float
    serving: Serving
    cut: Cut


class Search:
    """A local search, from a few beginnings, until ``deadline`` by the monotonic clock. ``cost_s``: of machines by stage,
    a cut, and the slowest stage's time for a microbatch; never less than the slowest stage takes for all
    ``microbatches``."""

    def __init__(
        self,
        work: Work,
        cost_s: Callable[[Serving, Cut, float], float],
        microbatches: int,
        *,
        seed: int,
        deadline: float,
    ) -> None:
        self._work, self._cost_s, self._microbatches = work, cost_s, microbatches
        self._draw, self._deadline = random.Random(seed), deadline
        self._cuts: dict[Serving, tuple[float, Cut] | None] = {}
        self._known: dict[Serving, Choice] = {}

    @property
    def over(self) -> bool:
        return time.monotonic() > self._deadline

    def begun(self) -> list[Choice]:
        """Return the best beginnings, the best first; none without room for all layers."""
        least_s, began_s = dict[Serving, float](), time.monotonic()
        for serving in beginnings(self._work):  # hundreds of thousands for many stages
            least_s[serving] = self._least_s(serving)
            if time.monotonic() > began_s + (self._deadline - began_s) / 4 and least_s[serving] < math.inf:
                break
        found: list[Choice] = []
        for serving in sorted(least_s, key=lambda serving: (least_s[serving], serving)):
            choice = self.choice(serving, found[-1].cost_s if len(found) == BEGUN else math.inf)
            if choice is not None:
                found = sorted([*found, choice], key=lambda c: (c.cost_s, c.serving))[:BEGUN]
            if found and self.over:
                break
        return found

    def descended(self, best: Choice, counts: Sequence[int]) -> Choice:
        """Move one of ``counts`` machines or swap two, until no move helps or time is over."""
        improved = True
        while improved:
            improved = False
            moves = list(_moves(best.serving, counts))
            self._draw.shuffle(moves)
            for serving in moves:
                if self.over:
                    return best
                if (found := self.choice(serving, best.cost_s * (1 - 1e-9))) is not None:
                    best, improved = found, True
                    break
        return best

    def choice(self, serving: Serving, below_s: float = math.inf) -> Choice | None:
        """The choice of ``serving`` with the best cut. None: the cost is at least ``below_s``."""
        if serving not in self._known and self._least_s(serving) < below_s:
            slowest_s, cut = self._cuts[serving] or (math.inf, ())
            self._known[serving] = Choice(self._cost_s(serving, cut, slowest_s), serving, cut)
        found = self._known.get(serving)
        return found if found is not None and found.cost_s < below_s else None

    def _least_s(self, serving: Serving) -> float:
        """A lower bound of the cost."""
        if serving not in self._cuts:
            self._cuts[serving] = self._work.cut(serving)
        found = self._cuts[serving]
        return math.inf if found is None else self._microbatches * found[0]


def _moves(serving: Serving, counts: Sequence[int]) -> Iterator[Serving]:
    """Yield the choice after each move of one machine, or swap of two, between stages or the row of idle machines."""
    rows = [*map(list, serving), [n - sum(here) for n, here in zip(counts, zip(*serving, strict=True), strict=True)]]
    places = [(s, k) for s, row in enumerate(rows) for k, n in enumerate(row) if n]

    def after(*moved: tuple[int, int, int]) -> Serving:
        changed = [list(row) for row in rows]
        for s, t, k in moved:
            changed[s][k] -= 1
            changed[t][k] += 1
        return tuple(map(tuple, changed[:-1]))

    for s, k in places:
        yield from (after((s, t, k)) for t in range(len(rows)) if t != s and (s == len(serving) or sum(rows[s]) > 1))
    for (s, k), (t, m) in combinations(places, 2):
        if s != t and k != m:
            yield after((s, t, k), (t, s, m))


def beginnings(work: Work) -> Iterator[Serving]:
    """All ways to distribute stages over levels of room, from the first stage on and from the last. Machines of a level
    without stages serve the stages of the next smaller level."""
    stages = len(work.takes_s)
    lengths = range(work.takes_s.shape[2])
    room = [max((n for n in lengths if np.isfinite(of[:, n]).any()), default=0) for of in work.takes_s.swapaxes(0, 1)]
    levels = _levels([k for k in range(len(room)) if room[k]], room)
    for ends in combinations(range(stages + len(levels) - 1), len(levels) - 1) if levels else ():
        bars = (-1, *ends, stages + len(levels) - 1)
        sizes = [b - a - 1 for a, b in pairwise(bars)]
        rows, kinds = list[list[int]](), list[int]()
        for level, size in zip(levels, sizes, strict=True):
            kinds += level
            if size:
                rows += _spread(work, kinds, size)
                kinds = []
        if len(rows) == stages and all(map(any, rows)):
            yield tuple(map(tuple, rows))
            yield tuple(map(tuple, reversed(rows)))


def _levels(kinds: Sequence[int], room: Sequence[int]) -> list[list[int]]:
    """Group kinds by room, the largest first, split at the largest relative gaps."""
    order = sorted(kinds, key=lambda k: -room[k])
    gaps = sorted(range(1, len(order)), key=lambda i: room[order[i]] / room[order[i - 1]])
    apart = sorted(i for i in gaps[: LEVELS - 1] if room[order[i]] < room[order[i - 1]])
    return [order[a:b] for a, b in zip([0, *apart], [*apart, len(order)], strict=True)] if order else []


def _spread(work: Work, kinds: Sequence[int], stages: int) -> list[list[int]]:
    """Distribute machines over stages, the fastest first, each to the stage with least speed."""
    rows, speeds = [[0] * len(work.counts) for _ in range(stages)], [0.0] * stages
    speed = {k: 1 / float(work.takes_s[:, k][np.isfinite(work.takes_s[:, k])].min()) for k in kinds}
    for k in sorted(kinds, key=lambda k: -speed[k]):
        for _ in range(work.counts[k]):
            s = speeds.index(min(speeds))
            rows[s][k] += 1
            speeds[s] += speed[k]
    return rows


def pipelines(
    groups: Sequence[Sequence[int]],
    takes_s: Callable[[int, int], float],
    link_s: Callable[[int, int], tuple[float, float]],
    count: int,
) -> tuple[tuple[int, ...], ...]:
    """Lay ``count`` pipelines through groups of machines; return machines by stage and pipeline. ``takes_s``: of a
    machine at a stage, for a microbatch; ``link_s``: seconds for which a microbatch occupies a path, and the path's
    delay.

    Beginning with the largest group, each pipeline, the busiest first, continues to the machine with the least work,
    and among equals to the nearest."""
    begin = max(range(len(groups)), key=lambda s: len(groups[s]))
    slots = _seats([1 / takes_s(begin, d) for d in groups[begin]], count)
    first = [d for d, n in zip(groups[begin], slots, strict=True) for _ in range(n)]
    share = dict(zip(groups[begin], slots, strict=True))
    weights = [1 / takes_s(begin, d) / share[d] for d in first]
    rows = {begin: first}
    for s in [*range(begin + 1, len(groups)), *range(begin - 1, -1, -1)]:
        rows[s] = _joined(rows[s - 1 if s > begin else s + 1], groups[s], weights, lambda d, s=s: takes_s(s, d), link_s)  # type: ignore[misc]
    return tuple(tuple(rows[s]) for s in range(len(groups)))


def _seats(speeds: Sequence[float], count: int) -> list[int]:
    """Share out ``count`` slots in proportion to ``speeds``, at least one each."""
    found = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        found[max(range(len(speeds)), key=lambda i: speeds[i] / found[i])] += 1
    return found


def _joined(
    before: Sequence[int],
    group: Sequence[int],
    weights: Sequence[float],
    takes_s: Callable[[int], float],
    link_s: Callable[[int, int], tuple[float, float]],
) -> list[int]:
    load_s, row = defaultdict[int, float](float), [-1] * len(before)
    for p in sorted(range(len(before)), key=lambda p: -weights[p]):

        def rank(d: int, p: int = p) -> tuple[float, Any]:
            busy_s, waits_s = link_s(before[p], d)
            return max(load_s[d] + weights[p] * takes_s(d), weights[p] * busy_s), waits_s

        row[p] = min(group, key=rank)
        load_s[row[p]] += weights[p] * takes_s(row[p])
    return row


def counts_of_pipelines(sizes: Sequence[int], most: int) -> list[int]:
    """Numbers of pipelines worth a try: as many as the largest stage has machines, twice as many, and a common
    multiple."""
    largest = max(sizes)
    return sorted({n for n in (largest, 2 * largest, math.lcm(*sizes)) if n == largest or n <= min(most, 4 * largest)})
