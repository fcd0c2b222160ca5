"""Our search for a placement: simulated annealing of many chains at once on the true objective (``placement``), with a guide; and then of
the groups of the best of them, with the best matching at every move (``regrouping``).

Most chains begin with near devices side by side, in as many neighbouring stages as was drawn. Maxima are flat where several links are
equally slow: at first each hop's root mean square and the mean over the stages' data-parallel costs are added (the guide), so that a hop
that has one slow link less is better; the weight of that falls to zero. Which regions a stage gets is settled early, and seldom changes
later: so chains that did well there are continued by several, and others are given up (``layouts.Chains.resample``). Now and then each
chain gets the best matching and order for its groups (``pipelines``). Which devices of a region a stage has is what regrouping settles.
The last kind of chains goes on from the best placements of earlier rounds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.policy.layouts import CHAINS, KINDS, SAME, TRIES, Chains, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
FIRST_ROUND, LONGEST_ROUND = 20, 128
"""Sweeps of the first round, and the most, times devices; each round has twice as many as the one before. Which structure a chain settles
on is a matter of luck, so that from some length on several rounds end lower than a long one."""
AGREED = 3
"""Rounds that end at the best cost, from new placements each, before it is taken for the optimum."""
REGROUPING = 0.35
"""The share of the time for it, where stages are equal."""
HOT_GROUPS, COLD_GROUPS = (0.08, 0.08, 0.03), 0.003
"""Its first temperatures, for the best new placements and for the best of all, and the last one; over the usual size of a change."""
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
    """Rounds until ``AGREED`` of them ended at the same best cost, from new placements each, or the work is done that the time limit allows
    on a slow core. So the same seed and limit find the same; on a slower machine yet, what is left is shortened (``Found.complete`` is
    false). ``watch`` hears now and then which share of that work is done, and the best cost."""
    rng = np.random.default_rng(seed)
    scale = Chains(task, rng).usual_change()
    deadline = time.monotonic() + time_limit_s
    share = REGROUPING if len(set(task.replicas)) == 1 and len(task.replicas) > 1 else 0.0
    budget = max(THREADINGS, int((1 - share) * time_limit_s / _sweep_s(task)))
    done, moved, rounds, agreed = 0, 0, 0, 0
    best_s, complete = np.inf, True
    known: list[Layout] = []

    def progress(sweeps: int, cost_s: float) -> None:
        watch((done + sweeps) / budget, min(best_s, cost_s))

    while done < budget and agreed < AGREED and complete:
        length = min(FIRST_ROUND << rounds, LONGEST_ROUND) * len(task.devices)
        sweeps = length if budget - done >= 2 * length else budget - done
        moves = int(share / (1 - share) * sweeps * _sweep_s(task) / len(HOT_GROUPS) / _move_s(task))
        chains = Chains(task, rng, known)
        then_s = moves * _move_s(task)
        made = _anneal(chains, _moves(chains, sweeps, rng), scale, deadline - len(HOT_GROUPS) * then_s, progress)
        complete = made == sweeps
        ends = chains.ends()
        fresh = sorted(ends[:-1] if known else ends, key=_cost)[: len(HOT_GROUPS) - 1]  # from new placements
        for n, hot in enumerate(HOT_GROUPS if moves else ()):
            start = fresh[n] if n < len(fresh) else min((*known, *ends), key=_cost)
            until = deadline - (len(HOT_GROUPS) - 1 - n) * then_s
            end, tried = chains.regrouped(start, scale * hot, scale * COLD_GROUPS, moves, until)
            moved, complete = moved + tried, complete and tried == moves
            fresh[n : n + 1] = [end] if n < len(fresh) else []
            ends.append(end)
        known = _best((*known, *ends))
        if known[0].cost_s < best_s * (1 - SAME):
            agreed = 0
        best_s = known[0].cost_s
        agreed += min(map(_cost, fresh)) <= best_s * (1 + SAME)
        done += made
        rounds += 1
    return Found(chains.assignment(known[0]), done * CHAINS * TRIES + moved, complete)


def _cost(layout: Layout) -> float:
    return layout.cost_s


def _best(layouts: Iterable[Layout]) -> list[Layout]:
    """As many as a kind has chains, of equal ones one."""
    apart = {f"{layout.cost_s:.8e}": layout for layout in layouts}
    return sorted(apart.values(), key=_cost)[: CHAINS // KINDS]


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
            progress(done, float(chains.cost.min()))
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
    return 3e-4 + 3.4e-8 * CHAINS * TRIES * len(task.devices)


def _move_s(task: Task) -> float:
    """What a move of regrouping takes on a slow core, about."""
    return 2e-5 + 1.5e-6 * task.pipelines**2
