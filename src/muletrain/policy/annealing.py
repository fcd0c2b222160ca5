"""Our search for a placement: simulated annealing of many chains at once on the true objective (``placement``), with a guide.

Most chains begin with near devices side by side: in as many neighbouring stages as the chain's turn says, which makes pipelines
cheap (all stages), data-parallel groups (one stage), or something between. Maxima are flat where several links are equally slow: at first
each hop's root mean square and the mean over the stages' data-parallel costs are added (the guide), so that a hop that has one slow link
less is better; the weight of that falls to zero. Which regions a stage gets is settled early, and seldom changes later: so chains that
did well there are continued by several, and others are given up (``layouts.Chains.resample``). Now and then each chain gets the best
matching and order for its groups (``pipelines``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.policy.layouts import CHAINS, SAME, TRIES, Chains

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from muletrain.policy.placement import Assignment, Task

HOT, COLD = (0.8, 0.25, 0.08, 0.03), 0.008
"""First (by kind of chain) and last temperature, over the usual size of a change. Chains of the first kind begin with a random placement;
the others with one that has near devices together, in each other's pipelines or stages, and would not profit from more heat."""
GUIDE, GUIDED = 1.0, 0.7
"""The guide's first weight, and the share of the moves after which it is none."""
MATCHING_MOVES, RUN_MOVES = 0.15, 0.5
"""Shares of sweeps that exchange pipelines, and runs of devices in a pipeline; the others exchange two devices."""
LONGEST_RUN = 8
FIRST_ROUND = 20
"""Sweeps of the first round, times devices."""
AGREED = 3
"""Rounds that end at the best cost, from new placements each, before it is taken for the optimum."""
THREADINGS = 3
"""How often in a round each chain gets the best matching and order."""
RESAMPLINGS = 100
"""In a round."""
PROGRESS = 50
"""Sweeps between two looks at the clock."""
HICCUP = 0.05
"""So much of a round's time may be lost, to other processes, before its cooling hurries."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    assignment: Assignment
    tried: int
    """Placements whose cost was looked at."""
    complete: bool
    """It ended by itself, not by the time limit: the same seed finds the same again."""


def search(task: Task, *, seed: int, time_limit_s: float, watch: Callable[[float, float], None]) -> Found:
    """Rounds, each from new placements and twice as long as the one before, until ``AGREED`` of them ended at the same best cost or the
    work is done that the time limit allows on a slow core. So the same seed and limit find the same; on a slower machine yet, the
    last round is shortened (``Found.complete`` is false). ``watch`` hears now and then which share of that work is done, and the best
    cost."""
    rng = np.random.default_rng(seed)
    scale = Chains(task, rng).usual_change()
    deadline = time.monotonic() + time_limit_s
    budget = max(THREADINGS, int(time_limit_s / _sweep_s(task)))
    done, length, agreed, tried = 0, FIRST_ROUND * len(task.devices), 0, 0
    best_s, complete = np.inf, True
    best: Assignment = ()

    def progress(sweeps: int, cost_s: float) -> None:
        watch((done + sweeps) / budget, min(best_s, cost_s))

    while done < budget and agreed < AGREED and complete:
        sweeps = length if budget - done >= 3 * length else budget - done
        chains = Chains(task, rng)
        made = _anneal(chains, _moves(chains, sweeps, rng), scale, deadline, progress)
        complete = made == sweeps
        found_s, found = chains.best()
        agreed = agreed + 1 if abs(found_s - best_s) <= SAME * found_s else agreed if found_s > best_s else 1
        if found_s < best_s:
            best_s, best = found_s, found
        tried += made
        done += sweeps
        length *= 2
    return Found(best, tried * CHAINS * TRIES, complete)


def _moves(chains: Chains, sweeps: int, rng: np.random.Generator) -> list[int]:
    """What each sweep exchanges: 0 for pipelines, else runs of so many devices. What changes nothing is left out."""
    longest = min(max(1, chains.stages // 2), LONGEST_RUN)
    kinds, lengths = rng.random(sweeps), rng.integers(min(2, longest), longest + 1, size=sweeps)
    moves = np.where(kinds < MATCHING_MOVES + RUN_MOVES, lengths, 1)
    if min(chains.stages, chains.pipelines) > 1:
        moves[kinds < MATCHING_MOVES] = 0
    return list(map(int, moves))


def _anneal(
    chains: Chains, moves: list[int], scale: float, deadline: float, progress: Callable[[int, float], None]
) -> int:
    """How many sweeps there was time for: where it runs out, cooling keeps pace with it."""
    sweeps, heat = len(moves), np.resize(HOT, CHAINS)
    started, threading_s = time.monotonic(), 0.0
    done = threaded = resampled = 0
    share = late = 0.0  # of the sweeps, and of the time

    def temperature(share: float) -> NDArray[np.float64]:
        return scale * heat * (COLD / heat) ** share

    while share < 1:
        weight = GUIDE * max(0.0, 1 - share / GUIDED)
        length = moves[done]
        if not length:
            chains.swap_pipelines(temperature(share), weight)
        elif length == 1:
            chains.swap_devices(temperature(share), weight)
        else:
            chains.swap_runs(length, temperature(share), weight)
        done += 1
        if done % PROGRESS == 0:
            progress(done, chains.best()[0])
            late = (time.monotonic() - started) / max(deadline - threading_s - started, 1e-9)
        share = done / sweeps
        if late > share + HICCUP * (1 - late):
            share = min(late, 1.0)
        if int(share * RESAMPLINGS) > resampled and share < 1:
            resampled = int(share * RESAMPLINGS)
            chains.resample(temperature((resampled - 1) / RESAMPLINGS), temperature(resampled / RESAMPLINGS), weight)
        if int(share * THREADINGS) > threaded:
            threaded, before = int(share * THREADINGS), time.monotonic()
            chains.thread()
            threading_s = time.monotonic() - before
    return done


def _sweep_s(task: Task) -> float:
    """What a sweep takes on a slow core, about."""
    return 4e-4 + 4.9e-8 * CHAINS * TRIES * len(task.devices)
