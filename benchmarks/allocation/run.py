"""How much faster than HYBRID's own allocation is ours? See README.md. ``python run.py [--fleets 10]``."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from rich.console import Console
from rich.table import Table

from muletrain.planning import hub_clustering
from muletrain.planning.allocate import Allocation, allocate
from muletrain.planning.devices import find_device
from muletrain.planning.hub_task import HubTask, evaluate
from muletrain.planning.partition import Chain

HERE = Path(__file__).parent
KINDS = ("regions", "cities", "one LAN", "unequal speeds", "few unreliable", "many unreliable")
NO_LIMIT_S = 1e6
# Llama 7B: 32 layers of 4096 x (4 x 4096 + 3 x 11008) weights, vocabulary of 32,000; one sequence of 2,048 tokens a
# microbatch; weights, gradients and AdamW's state take 16 bytes a weight; activations are recomputed, what goes into
# each layer is kept in 16 bits
LAYERS, WIDTH, FFN, VOCAB, TOKENS = 32, 4096, 11008, 32000, 2048
MICROBATCHES = 64


def model() -> Chain:
    weights = [WIDTH * (4 * WIDTH + 3 * FFN)] * LAYERS
    work = [3 * TOKENS * (2 * w + 2 * TOKENS * WIDTH) for w in weights]
    work[-1] += 3 * TOKENS * 2 * WIDTH * VOCAB
    weights[0] += WIDTH * VOCAB
    weights[-1] += WIDTH * VOCAB
    return Chain(tuple(map(float, work)), tuple(16.0 * w for w in weights), (2.0 * TOKENS * WIDTH,) * LAYERS)


def fleet(kind: str, seed: int) -> HubTask:
    """8 to 12 reliable machines and half as many to as many that are not; other numbers in the last two kinds."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    servers = int(rng.integers(8, 13))
    share = {"few unreliable": (0.1, 0.25), "many unreliable": (1.5, 2.0)}.get(kind, (0.5, 1.0))
    count = servers + max(1, round(servers * rng.uniform(*share)))
    if kind == "one LAN":
        delay, gbps = np.full((count, count), 0.5), np.full((count, count), 1.0)
    else:
        delay, gbps = _cities(rng, count) if kind == "cities" else _regions(rng, count)
        delay, gbps = (m * rng.uniform(0.8, 1.2, (count, count)) for m in (delay, gbps))
    names = ("V100",) if kind in ("regions", "cities") else ("T4", "V100", "RTX 3090", "A100")
    machines = [find_device(str(name)) for name in rng.choice(names, count)]
    flops = tuple(m.flops for m in machines if m)
    memory = tuple(float(m.memory_bytes) for m in machines if m)
    reliable = rng.permutation(count) < servers
    return HubTask(delay, gbps, flops, tuple(reliable.tolist()), model(), 2.0 * TOKENS * WIDTH, MICROBATCHES, memory)


def _regions(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Three to five of unequal size: 2 ms and 5 Gbit/s inside, 20 to 150 ms and 0.3 to 1.5 Gbit/s between two."""
    regions = int(rng.integers(3, 6))
    where = rng.choice(regions, count, p=rng.dirichlet(np.full(regions, 1.5)))
    delay, gbps = (np.triu(rng.uniform(*bounds, (regions, regions)), 1) for bounds in ((20, 150), (0.3, 1.5)))
    delay, gbps = delay + delay.T + 2 * np.eye(regions), gbps + gbps.T + 5 * np.eye(regions)
    return delay[np.ix_(where, where)], gbps[np.ix_(where, where)]


def _cities(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten at random in a square of 100 ms; bandwidth falls with the distance, and each machine has a limit of its
    own."""
    places = rng.uniform(0, 100, (10, 2))[rng.integers(10, size=count)]
    delay = 1 + np.linalg.norm(places[:, None] - places[None], axis=2)
    own = rng.uniform(0.5, 2, count)
    return delay, np.minimum(np.minimum(own[:, None], own[None]), 30 / delay)


def compare(kind: str, seed: int) -> dict[str, Any]:
    task = fleet(kind, seed)
    paper = allocate(task, "hybrid", seed=seed)
    edges = hub_clustering.distances(task)
    levels = [hub_clustering.assemble(task, ordered, edges) for ordered in hub_clustering.orders(task, edges, seed)]
    best_level = min((evaluate(task, stages).step_s, len(stages)) for stages in levels)
    start = time.process_time()
    same = allocate(task, seed=seed, stages=len(paper.stages), time_limit_s=NO_LIMIT_S)
    middle = time.process_time()
    ours = allocate(task, seed=seed, time_limit_s=NO_LIMIT_S)
    cpu_s = (middle - start, time.process_time() - middle)
    return {
        "kind": kind,
        "seed": seed,
        "reliable": sum(task.reliable),
        "unreliable": len(task.flops) - sum(task.reliable),
        "lower_bound_s": ours.lower_bound_s,
        "paper": _row(paper),
        "paper_best_level": dict(zip(("step_s", "stages"), best_level, strict=True)),
        "same_stages": _row(same) | {"cpu_s": cpu_s[0]},
        "ours": _row(ours) | {"cpu_s": cpu_s[1]},
    }


def _row(found: Allocation) -> dict[str, Any]:
    return {"step_s": found.cost.step_s, "stages": len(found.stages), "idle": len(found.idle), "tried": found.tried}


RATIOS = {
    "paper / ours, same stages": ("paper", "same_stages"),
    "paper / ours": ("paper", "ours"),
    "paper's best level / ours": ("paper_best_level", "ours"),
}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("median (least-most)", "fleets", *RATIOS, "slower", "idle", "CPU [s]", title="time of a step (eq. 2)")
    for kind in (*KINDS, "all"):
        of = [r for r in rows if kind in (r["kind"], "all")]
        ratios = [[r[a]["step_s"] / r[b]["step_s"] for r in of] for a, b in RATIOS.values()]
        cells = [f"{statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f})" for r in ratios]
        slower = sum(min(each) < 1 for each in zip(*ratios, strict=True))
        idle = statistics.mean(r["ours"]["idle"] / (r["reliable"] + r["unreliable"]) for r in of)
        cpu_s = statistics.median(r["ours"]["cpu_s"] for r in of)
        table.add_row(kind, str(len(of)), *cells, str(slower), f"{idle:.0%}", f"{cpu_s:.1f}")
    Console(width=140).print(table)


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=9, help="of each kind")
    count = parser.parse_args().fleets
    rows = []
    for kind, seed in ((kind, seed) for seed in range(count) for kind in KINDS):
        rows.append(compare(kind, seed))
        print(json.dumps(rows[-1]), flush=True)
    about = {
        "command": f"python benchmarks/allocation/run.py --fleets {count}",
        "hardware": f"one core of {_processor()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    (HERE / "results.json").write_text(json.dumps(about | {"fleets": rows}, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
