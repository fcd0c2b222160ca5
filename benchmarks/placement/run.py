"""How good are the searches for a placement, and how fast? On DT-FM's five networks, and on such as have no symmetry.
See README.md.

``python run.py [--parts cases published asymmetric untuned large live]``: what is in results.json is measured again
only with ``--again``."""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from live import Live
from networks import asymmetric, large, untuned
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from muletrain.planning import annealing
from muletrain.planning.place import place
from muletrain.planning.placement import Task, evaluate, link_times
from reproduction.dtfm_searches import CASES, DRAWS, SEED, task_of
from reproduction.evolutionary import TRIALS, evolve, random_placements

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
NEAR_S = 6e-4
"""Published optima are rounded to a millisecond."""
PAPER = "DT-FM, 4,900 trials"
KERNIGHAN_LIN, OWN, RANDOM = "Kernighan-Lin", "DT-FM's search", "random, best matching, mean"
Row = dict[str, Any]


def timed(task: Task, search: Callable[..., annealing.Found], limit_s: float, seed: int, reached_s: float = 0.0) -> Row:
    """One search. ``first_*``: when it was at ``reached_s`` first."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    first: list[float] = []

    def watch(share: float, best_s: float) -> None:
        if not first and best_s <= reached_s:
            first.extend((time.perf_counter() - started_s, time.process_time() - started_cpu_s))

    found = place(task, search=search, seed=seed, time_limit_s=limit_s, watch=watch)
    took = {"seconds": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s}
    if not first and found.cost.cost_s <= reached_s:
        first.extend(took.values())
    firsts = dict(zip(("first_s", "first_cpu_s"), first, strict=True)) if first else {}
    gap = {"lower_bound_s": found.lower_bound_s, "complete": found.complete, "tried": found.tried}
    return {"seed": seed, "cost_s": found.cost.cost_s, **firsts, **took, **gap}


class Annealer:
    """``annealer.c``, compiled here. Its costs are checked by our evaluator."""

    def __init__(self, folder: str) -> None:
        self._program = str(Path(folder) / "annealer")
        subprocess.run(["cc", "-O3", "-o", self._program, str(HERE / "annealer.c"), "-lm"], check=True)

    def search(self, task: Task, cpu_s: float, seed: int) -> Row:
        sizes, share = (len(task.replicas), task.pipelines), task.gradient_bytes / task.pipelines
        tables = np.stack([link_times(task, task.activation_bytes), 2 * link_times(task, share)])
        problem = "\n".join(
            [f"{sizes[0]} {sizes[1]}", *(" ".join(map(repr, row)) for t in tables.tolist() for row in t)]
        )
        command = [self._program, str(seed), str(cpu_s)]
        out = subprocess.run(command, input=problem, capture_output=True, text=True, check=True).stdout.split("\n")
        assignment = tuple(tuple(map(int, line.split())) for line in out[1 : 1 + sizes[0]])
        cost_s = evaluate(task, assignment).cost_s
        if not math.isclose(cost_s, float(out[0].split()[0]), rel_tol=1e-6):
            raise RuntimeError(f"annealer.c says {out[0]}, and the evaluator {cost_s}")
        return {"seed": seed, "cost_s": cost_s, "cpu_s": cpu_s, "tried": int(out[0].split()[1])}


def cases(seeds: int) -> list[tuple[str, str, Callable[[], Row]]]:
    """The proven optimum, from so many seeds, within 30 s."""
    return [
        (
            f"case {n}",
            f"seed {seed}",
            lambda n=n, seed=seed: timed(
                task_of(f"dtfm-case{n}"), annealing.search, 30.0, seed, CASES[n - 1].optimum + NEAR_S
            ),
        )
        for n in range(1, 6)
        for seed in range(seeds)
    ]


def ends_of(search: str, patience: int) -> str:
    """What the runs of one of the paper's searches are called, but for the seed."""
    return f"{search}, " + (f"{patience} in vain, " if patience < TRIALS else "") + "seed "


def published(seeds: int, patience: int) -> list[tuple[str, str, Callable[[], Row]]]:
    """Where the paper's searches end, from so many seeds."""

    def random(n: int) -> Row:
        return {"cost_s": fmean(random_placements(task_of(f"dtfm-case{n}"), seed=SEED, draws=DRAWS))}

    def evolved(n: int, search: str, seed: int) -> Row:
        task, started_cpu_s = task_of(f"dtfm-case{n}"), time.process_time()
        found = evolve(
            task,
            seed=seed,
            time_limit_s=math.inf,
            watch=lambda share, best_s: None,
            patience=patience,
            kernighan_lin=search == KERNIGHAN_LIN,
        )
        cost_s = evaluate(task, found.assignment).cost_s
        return {"seed": seed, "cost_s": cost_s, "cpu_s": time.process_time() - started_cpu_s, "tried": found.tried}

    return [(f"case {n}", RANDOM, partial(random, n)) for n in range(1, 6)] + [
        (f"case {n}", f"{ends_of(search, patience)}{seed}", partial(evolved, n, search, seed))
        for seed in range(seeds)
        for search in (KERNIGHAN_LIN, OWN)
        for n in range(1, 6)
    ]


def beside_published(kept: dict[str, Any], patience: int) -> Table:
    """What was measured beside the published scheduler's costs."""
    table = Table("case", RANDOM, "published", KERNIGHAN_LIN, "published", OWN, "published", box=None)

    def ends(rows: Row, search: str) -> str:
        found = Counter(
            f"{row['cost_s']:.2f}" for kind, row in rows.items() if kind.startswith(ends_of(search, patience))
        )
        return ", ".join(f"{times} x {cost_s}" for cost_s, times in found.most_common())

    for n, case in enumerate(CASES, 1):
        rows = kept.get(f"case {n}", {})
        mean = f"{rows[RANDOM]['cost_s']:.2f}" if RANDOM in rows else ""
        theirs = ["-".join(f"{c:g}" for c in dict.fromkeys(costs)) for costs in (case.kernighan_lin, case.dtfm)]
        table.add_row(
            case.name, mean, f"{case.random:.2f}", ends(rows, KERNIGHAN_LIN), theirs[0], ends(rows, OWN), theirs[1]
        )
    return table


def without_symmetry(
    networks: int, annealer: Annealer, known: dict[str, Any]
) -> list[tuple[str, str, Callable[[], Row]]]:
    """The paper's searches, ours, and a plain annealer from three seeds. known: results so far."""
    jobs: list[tuple[str, str, Callable[[], Row]]] = []
    for k in range(networks):
        for name, task in asymmetric(k).items():

            def random(task: Task = task) -> Row:
                return {"cost_s": fmean(random_placements(task, seed=0))}

            def evolved(task: Task = task) -> Row:
                return timed(task, evolve, math.inf, 0)

            def equal(task: Task = task, name: str = name) -> Row:
                return timed(task, annealing.search, known[name][PAPER]["cpu_s"], 0)

            jobs += [
                (name, RANDOM, random),
                (name, PAPER, evolved),
                (name, "muletrain, at DT-FM's time", equal),
                (name, "muletrain, 60 s", lambda task=task: timed(task, annealing.search, 60.0, 0)),
            ]
            if len(set(task.replicas)) == 1:
                jobs += [
                    (
                        name,
                        f"plain annealer, 60 s, seed {seed}",
                        lambda task=task, seed=seed: annealer.search(task, 60.0, seed),
                    )
                    for seed in range(3)
                ]
    return jobs


def without_tuning(annealer: Annealer) -> list[tuple[str, str, Callable[[], Row]]]:
    """Networks that nothing was tuned on: ours, and a plain annealer three times in the same CPU time."""
    return [
        job
        for name, task in untuned().items()
        for job in (
            (name, "muletrain, 60 s", lambda task=task: timed(task, annealing.search, 60.0, 0)),
            *(
                (
                    name,
                    f"plain annealer, 20 s, seed {seed}",
                    lambda task=task, seed=seed: annealer.search(task, 20.0, seed),
                )
                for seed in range(3)
            ),
        )
    ]


def many(long_s: float, annealer: Annealer) -> list[tuple[str, str, Callable[[], Row]]]:
    """512 devices."""
    return [
        job
        for k, p in ((16, 32), (32, 16))
        for task in [large(k, p)]
        for name in [f"512 devices, {k} stages x {p} pipelines"]
        for job in (
            (name, RANDOM, lambda task=task: {"cost_s": fmean(random_placements(task, seed=0, draws=10))}),
            (name, "muletrain, 50 s", lambda task=task: timed(task, annealing.search, 50.0, 0)),
            (name, f"muletrain, {long_s:g} s", lambda task=task: timed(task, annealing.search, long_s, 1)),
            (name, f"plain annealer, {long_s:g} s", lambda task=task: annealer.search(task, long_s, 2)),
        )
    ]


def live(folder: str) -> list[tuple[str, str, Callable[[], Row]]]:
    """Real processes: ``live.py``."""
    two = Live(folder)
    return [
        ("two regions, live", name, lambda seed=seed: two.run(seed))
        for name, seed in (("planned", None), ("random 0", 0), ("random 1", 1))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["cases", "published", "asymmetric", "untuned", "large", "live"])
    parser.add_argument("--seeds", type=int, default=10, help="of the five networks")
    parser.add_argument(
        "--patience",
        type=int,
        default=TRIALS,
        metavar="N",
        help=f"published: end a search after N trials in a row that brought nothing better (default: all {TRIALS} trials)",
    )
    parser.add_argument("--networks", type=int, default=2, help="of each kind without symmetry")
    parser.add_argument(
        "--long", type=float, default=300.0, help="seconds of the search that the others are held against"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="what has that in its name")
    parser.add_argument("--again", action="store_true", help="measure what is in results.json, too")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        parts = {
            "cases": lambda: cases(arguments.seeds),
            "published": lambda: published(arguments.seeds, arguments.patience),
            "asymmetric": lambda: without_symmetry(
                arguments.networks, Annealer(folder), results.setdefault("asymmetric", {})
            ),
            "untuned": lambda: without_tuning(Annealer(folder)),
            "large": lambda: many(arguments.long, Annealer(folder)),
            "live": lambda: live(folder),
        }
        for part in arguments.parts:
            jobs = parts[part]()
            bar = progress.add_task(part, total=len(jobs))
            kept = results.setdefault(part, {})
            kept["machine"] = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
            for name, kind, job in jobs:
                if arguments.only not in f"{name}: {kind}" or (kind in kept.get(name, {}) and not arguments.again):
                    progress.advance(bar)
                    continue
                progress.update(bar, description=f"{name}: {kind}")
                row = kept.setdefault(name, {})[kind] = job()
                console.print(f"{name}: {kind}: {row['cost_s']:.4f} s, {row.get('cpu_s', 0.0):.1f} s of CPU")
                if "factor" in row:
                    console.print(
                        f"as long as planned: {row['factor']:.2f} times, {row['predicted_factor']:.2f} predicted"
                    )
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                progress.advance(bar)
            if part == "published":
                console.print(beside_published(kept, arguments.patience))


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
