"""DT-FM (Yuan et al. 2022, sec. 3.4 and 4): what its search finds on the five networks of its evaluation, beside
Kernighan-Lin, random placements and ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median_low

import numpy as np

from muletrain.config.matrices import Matrices, load_matrices
from muletrain.planning.place import place
from muletrain.planning.placement import Assignment, Task, evaluate
from reproduction.evolutionary import evolve, random_placements
from reproduction.reproduction import Statement, Value

STAGES = PIPELINES = 8
GRADIENT_BYTES, ACTIVATION_BYTES = 0.65e9, 471_249_223
"""What the table of the published scheduler's costs is for: 1.3 billion parameters in fp32 over 8 stages; about 56
sequences of 2048 tokens, 2048 wide, in fp16."""
TIME_LIMIT_S = 6.0
"""Of our search."""
DRAWS, SEED, PATIENCE = 200, 0, 700
"""The paper's searches end when so many trials in a row brought no better placement."""
REPETITIONS = 3
"""Of each of the paper's searches, seeds 0, 1...: as many as the main program of the published scheduler makes. The
middle one counts."""


@dataclass(frozen=True)
class Case:
    """Costs [s] of the published scheduler, 4,900 trials and a population of 100; (lowest, highest) where its runs
    differ."""

    name: str
    random: float
    kernighan_lin: tuple[float, float]
    dtfm: tuple[float, float]
    optimum: float
    """Proven by others, with the symmetry of the network."""


CASES = (
    Case("case 1, data centre", 19.80, (16.98, 16.98), (3.440, 3.440), 3.440),
    Case("case 2, spot", 49.50, (49.50, 49.50), (43.5, 49.5), 31.634),
    Case("case 3, two sites", 35.74, (22.3, 26.6), (16.087, 16.087), 16.087),
    Case("case 4, regional", 54.69, (39.24, 39.24), (34.802, 34.802), 34.802),
    Case("case 5, worldwide", 92.28, (59.44, 59.44), (49.218, 49.218), 49.218),
)


@cache
def network(name: str) -> Matrices:
    """One that ships."""
    return load_matrices(name)


def task_of(name: str) -> Task:
    """What the five cases place, on a network that ships."""
    m = network(name)
    return Task(
        np.array(m.delay_ms), np.array(m.bandwidth_gbps), (PIPELINES,) * STAGES, ACTIVATION_BYTES, GRADIENT_BYTES
    )


@cache
def runs(case: int, search: str) -> tuple[tuple[float, Assignment], ...]:
    """Of one of the paper's searches or ours on case 1 to 5, by cost [s], the lowest first: seconds on one core each.
    Every placement is checked by the evaluator, which shares nothing with the searches."""
    task = task_of(f"dtfm-case{case}")
    if search == "muletrain":
        found = [place(task, seed=SEED, time_limit_s=TIME_LIMIT_S).assignment]
    else:
        found = [
            evolve(
                task,
                seed=SEED + repetition,
                time_limit_s=math.inf,
                watch=lambda share, best_s: None,
                patience=PATIENCE,
                kernighan_lin=search == "kernighan-lin",
            ).assignment
            for repetition in range(REPETITIONS)
        ]
    return tuple(sorted((evaluate(task, assignment).cost_s, assignment) for assignment in found))


def placed(case: int, search: str) -> Assignment:
    """By the run that is in the middle."""
    return median_low(runs(case, search))[1]


@cache
def costs(case: int) -> dict[str, float]:
    """Of case 1 to 5, by search [s]: means of random placements, else of the run that is in the middle."""
    drawn = fmean(random_placements(task_of(f"dtfm-case{case}"), seed=SEED, draws=DRAWS))
    searches = ("kernighan-lin", "dtfm", "muletrain")
    return {"random": drawn} | {search: median_low(runs(case, search))[0] for search in searches}


def table() -> tuple[list[Value], list[Statement]]:
    """Published costs beside ours: numbers, and ranges where runs of the published scheduler end apart."""
    values, ranges = [], []
    for n, case in enumerate(CASES, 1):
        ours = costs(n)
        values.append(Value(f"{case.name}: random, best matching, mean", case.random, ours["random"], "s"))
        for kind, (low, high) in (("kernighan-lin", case.kernighan_lin), ("dtfm", case.dtfm)):
            name = "Kernighan-Lin" if kind == "kernighan-lin" else "DT-FM's search"
            if low == high:
                values.append(Value(f"{case.name}: {name}", low, ours[kind], "s"))
            else:
                inside = 0.97 * low <= ours[kind] <= 1.03 * high
                ranges.append(
                    Statement(f"{case.name}: {name} ends between {low} and {high} s", f"{ours[kind]:.2f} s", inside)
                )
        values.append(Value(f"{case.name}: optimum, and muletrain's search", case.optimum, ours["muletrain"], "s"))
    return values, ranges
