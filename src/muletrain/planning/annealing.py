"""Our search for a placement: populations of simulated annealing on the true objective (``placement``), with the
best matching at every move (``regrouping``).

The regions of a stage are settled early, at high temperature, partly by luck. So a population is annealed together:
before each drop of the temperature, good walkers are copied over bad walkers (``Population.resample``). Several
populations begin with new placements, the first with few moves, because easy tasks are done soon.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.cgroups import cpus
from muletrain.planning.pipelines import Threader
from muletrain.planning.placement import finite, link_times, lower_bound_s, slots
from muletrain.planning.regrouping import SAME, Groups, Problem, anneal, working

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from muletrain.planning.placement import Assignment, Task

    Ints = NDArray[np.int64]

SMALLEST, LARGEST = 4, 16
"""Sizes of a population: the larger if there is time for several rounds."""
HOT, COLD = 9e-3, 2e-4
"""First and last temperature, relative to the cheapest walker's cost above the lower bound."""
FIRST_ROUND, LONGEST_ROUND = 250, 4000
"""Moves per walker and device of the first round, and at most; each round has twice as many as the previous round.
Several short populations end lower than one long population."""
GUIDES, GUIDED = (1.0, 0.3, 0.1), 0.7
"""First weights of the guide, by round in turn, and the share of a round after which the weight is 0. The guide helps
most where the slowest links are equal."""
AGREED = 3
"""Rounds that must end at the best cost for that cost to count as the optimum."""
STEPS = 100
"""Steps of a round, each colder than the previous step."""


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    assignment: Assignment
    tried: int
    """Number of placements that were tried."""
    complete: bool
    """True: the search ended by itself, not by the time limit, so the same seed gives the same result."""


def search(task: Task, *, seed: int, time_limit_s: float, watch: Callable[[float, float], None]) -> Found:
    """Run rounds until ``AGREED`` rounds end at the same best cost, a round reaches the lower bound, or the work is
    done that the time limit allows on one slow core.

    So the same seed and limit give the same result on any number of cores; an even slower machine shortens the rest
    (``Found.complete`` is false). ``watch`` gets the share of the work done and the best cost."""
    rng = np.random.default_rng(seed)
    problem = problem_of(task)
    Walker(task, problem, rng).cool(0, 1.0, 0.0)  # compiles, where that has not been done yet
    deadline = time.monotonic() + time_limit_s
    bound_s = lower_bound_s(task)
    bound_s = bound_s if np.isfinite(bound_s) else 0.0  # links are missing
    moves = time_limit_s / move_s(task)
    size = min(max(SMALLEST, int(moves / (4 * FIRST_ROUND * len(task.devices)))), LARGEST)
    budget = max(STEPS, int(moves / size))  # of each member
    best_s, best, tried = np.inf, np.empty((0, 0), np.int64), 0
    done = rounds = agreed = 0
    complete = True
    with ThreadPoolExecutor(min(size, cpus())) as pool:
        while done < budget and agreed < AGREED and complete and best_s > bound_s * (1 + SAME):
            length = min(FIRST_ROUND << rounds, LONGEST_ROUND) * len(task.devices)
            length = length if budget - done >= 2 * length else budget - done
            population, step_s = Population(task, problem, size, GUIDES[rounds % len(GUIDES)], rng), 0.0
            for step in range(STEPS):
                began, moves = time.monotonic(), length * (step + 1) // STEPS - length * step // STEPS
                left_s = (deadline - began) / (STEPS - step)
                if step_s > max(left_s, 0.0):  # cooling keeps pace with the clock
                    moves, complete = int(moves * max(left_s, 0.0) / step_s), False
                tried += moves * size
                population.cool(step, moves, bound_s, rng, pool)
                step_s = (time.monotonic() - began) * (length / STEPS) / max(moves, 1)
                watch((done + length * (step + 1) / STEPS) / budget, min(best_s, population.best_s))
            agreed += population.best_s <= best_s * (1 + SAME)
            if population.best_s < best_s * (1 - SAME):
                agreed, best_s, best = 1, population.best_s, population.best
            done, rounds = done + length, rounds + 1
    rows = Threader(problem.link).thread([tuple(sorted(row)) for row in best.tolist()])
    return Found(tuple(tuple(task.devices[d] for d in row) for row in rows), tried, complete)


def problem_of(task: Task) -> Problem:
    """Build the problem of the devices that fit."""
    pick = np.ix_(task.devices, task.devices)
    sizes = sorted(set(task.replicas))
    compute = np.array(task.compute_s)[list(task.devices)] if task.compute_s else np.zeros(len(task.devices))
    return Problem(
        finite(link_times(task, task.activation_bytes)[pick]),
        np.stack([finite(2 * link_times(task, task.gradient_bytes / m)[pick]) for m in sizes]),
        compute,
        np.array(sizes),
    )


class Walker:
    """One walker of a population: a placement, the best placement so far, and a random generator."""

    def __init__(self, task: Task, problem: Problem, rng: np.random.Generator) -> None:
        self._problem = problem
        (self._rng,) = rng.spawn(1)
        left, replicas = rng.permutation(len(problem.link)).tolist(), rng.permutation(task.replicas).tolist()
        rows = [slots([left.pop() for _ in range(m)], task.pipelines) for m in replicas]
        self.groups = Groups(np.array(rows), np.searchsorted(problem.sizes, replicas), np.array(left, np.int64))
        self._best = _copied(self.groups)
        self._working = working(len(replicas), task.pipelines, len(problem.link))

    def cool(self, moves: int, temperature: float, weight: float) -> tuple[float, float]:
        """Make ``moves``; return the lowest cost so far, and the last cost with the guide."""
        return anneal(self._problem, self.groups, self._best, self._working, self._rng, moves, temperature, weight)

    @property
    def best(self) -> Ints:
        return self._best.at.copy()


def _copied(groups: Groups) -> Groups:
    return Groups(*(part.copy() for part in groups))


class Population:
    def __init__(self, task: Task, problem: Problem, size: int, guide: float, rng: np.random.Generator) -> None:
        self._guide = guide
        self.walkers = [Walker(task, problem, rng) for _ in range(size)]
        self.ends = [walker.cool(0, 1.0, 0.0) for walker in self.walkers]
        self.best_s, self.best = np.inf, self.walkers[0].best

    def cool(self, step: int, moves: int, bound_s: float, rng: np.random.Generator, pool: ThreadPoolExecutor) -> None:
        """Run step ``step`` of ``STEPS``, with ``moves``."""
        cheapest_s = min(cost_s for cost_s, _ in self.ends)
        scale_s = max(cheapest_s - bound_s, SAME * cheapest_s)
        before, now = (scale_s * HOT * (COLD / HOT) ** (s / STEPS) for s in (step - 1, step))
        weight = self._guide * max(0.0, 1 - step / STEPS / GUIDED)
        if step and now > 0:
            self.resample(1 / now - 1 / before, rng)
        self.ends = list(pool.map(lambda walker: walker.cool(moves, now, weight), self.walkers))
        for walker, (cost_s, _) in zip(self.walkers, self.ends, strict=True):
            if cost_s < self.best_s * (1 - SAME):
                self.best_s, self.best = cost_s, walker.best

    def resample(self, colder: float, rng: np.random.Generator) -> None:
        """Population annealing (Hukushima and Iba 2003): before a drop of the temperature, draw walkers in proportion
        to the ratio of their probabilities at the new and the old temperature. ``colder``: the increase of the inverse
        temperature [1/s]."""
        energies = np.array([energy for _, energy in self.ends])
        shares = np.exp(-colder * (energies - energies.min())).cumsum()
        ticks = (rng.random() + np.arange(len(shares))) / len(shares)
        chosen = np.minimum(np.searchsorted(shares / shares[-1], ticks), len(shares) - 1).tolist()
        copies = [_copied(self.walkers[k].groups) for k in chosen]
        for walker, groups in zip(self.walkers, copies, strict=True):
            walker.groups = groups


def move_s(task: Task) -> float:
    """Approximate seconds of a move on a slow core."""
    return 1.2e-6 + 3e-8 * len(task.replicas) + 2.6e-8 * task.pipelines**2
