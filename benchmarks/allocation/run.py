"""How much faster than HYBRID's own allocation is ours? See README.md. ``python run.py [--fleets 5]``."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
from rich.console import Console
from rich.table import Table

from muletrain.config.fleet_file import Fleet
from muletrain.config.load import load_config
from muletrain.errors import CapacityError
from muletrain.model.spec import ModelSpec
from muletrain.planning.devices import find_device
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan.question import Question
from muletrain.sim.setting import run_cost, stage_needs
from muletrain.strategies import find
from reproduction import hybrid_allocation as hybrid
from reproduction.hybrid_cost import HubStage, HubTask, evaluate

if TYPE_CHECKING:
    from muletrain.config.plan_file import Prediction

HERE = Path(__file__).parent
KINDS = ("regions", "cities", "one LAN", "unequal speeds", "few unreliable", "many unreliable")
SEARCH_S = 15.0
"""For our search: what 'muletrain plan' gives it by default."""
RUN = ("model.preset=llama-7b", "model.context=512", "train.batch=256", "checkpoint.every=0")


def fleet(kind: str, seed: int) -> Question:
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
    reliable = rng.permutation(count) < servers
    machines = [
        {"name": f"m{d}", "region": f"r{d}", "device": str(name), "reliable": bool(stays)}
        for d, (name, stays) in enumerate(zip(rng.choice(names, count), reliable, strict=True))
    ]
    network = {"rtt_ms": (delay + delay.T).tolist(), "bandwidth_mbps": (1000 * gbps).tolist()}
    matrix = {"regions": [f"r{d}" for d in range(count)], **network}
    run = load_config(None, RUN)
    drawn = Fleet.model_validate({"machines": machines, "matrix": matrix})
    return Question(drawn, run, ModelSpec.from_config(run.model)).asking(find("hub"))


def task_of(question: Question, microbatch: int) -> HubTask:
    """For the paper: each layer's needs as those of a stage of its own."""
    spec, run, peers = question.spec, question.with_microbatch(microbatch), question.fleet.peers()
    cut = spec.cut(spec.layers, [1] * spec.layers)
    cost, needs = run_cost(run, spec, cut), stage_needs(run, spec, cut)
    links = [[question.fleet.between_kinds(a.index, b.index) for b in peers] for a in peers]
    devices = [find_device(peer.device or "") for peer in peers]
    return HubTask(
        np.array([[1000 * link.delay_s for link in row] for row in links]),
        np.array([[8e-9 * link.bandwidth_bytes_per_s for link in row] for row in links]),
        tuple(device.flops for device in devices if device),
        tuple(peer.reliable for peer in peers),
        tuple(3 * stage.forward_flops for stage in cost.stages),
        float(cost.backward_bytes[1]),
        run.microbatches,
        tuple(float(question.offer(peer.name).device) for peer in peers),
        tuple(float(need.on_device) for need in needs),
    )


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
    """Each way's step with its best microbatch [s], and how many stages and idle machines it has."""
    question, papers, levels = fleet(kind, seed), list[dict[str, Any]](), list[dict[str, Any]]()
    for size in question.microbatches():
        task = task_of(question, size)
        edges = hybrid.distances(task)
        every = [hybrid.assemble(task, ordered, edges) for ordered in hybrid.orders(task, edges, seed)]
        if every:
            papers += _timed(question, size, hybrid.allocate(task, seed=seed))
            levels += _timed(question, size, min(every, key=lambda stages: evaluate(task, stages).step_s))
    began_s = time.process_time()
    ours = plan_hub.predict(question, 0, SEARCH_S)
    return {
        "kind": kind,
        "seed": seed,
        "machines": len(question.fleet.peers()),
        "paper": min(papers, key=lambda row: row["step_s"], default=None),
        "paper_best_level": min(levels, key=lambda row: row["step_s"], default=None),
        "ours": None if ours.problem else _row(ours),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def _timed(question: Question, microbatch: int, stages: list[HubStage]) -> list[dict[str, Any]]:
    """Empty: a machine lacks room."""
    peers, cut = question.fleet.peers(), tuple(stage.layers for stage in stages)
    names = tuple(
        (tuple(peers[d].name for d in stage.servers), tuple(peers[d].name for d in stage.clients)) for stage in stages
    )
    try:
        hub = plan_hub.Allocated(question, question.scene(len(cut), microbatch, cut), names)
        return [_row(plan_hub.told(hub.unmixed()))]
    except (CapacityError, KeyError):
        return []


def _row(found: Prediction) -> dict[str, Any]:
    return {"step_s": found.step_s, "stages": len(found.stages), "idle": len(found.spares)}


RATIOS = {
    "paper / ours": ("paper", "ours"),
    "paper's best level / ours": ("paper_best_level", "ours"),
}


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "median (least-most)", "fleets", *RATIOS, "ours is slower", "ours alone", "CPU [s]", title="time of a step"
    )
    for kind in (*KINDS, "all"):
        of = [r for r in rows if kind in (r["kind"], "all")]
        ratios = [[r[a]["step_s"] / r[b]["step_s"] for r in of if r[a] and r[b]] for a, b in RATIOS.values()]
        cells = [f"{statistics.median(r):.2f} ({min(r):.2f}-{max(r):.2f})" if r else "" for r in ratios]
        slower = sum(r < 1 for r in ratios[-1])
        alone = sum(r["ours"] is not None and r["paper"] is None for r in of)
        cpu_s = statistics.median(r["cpu_s"] for r in of)
        table.add_row(kind, str(len(of)), *cells, str(slower), str(alone), f"{cpu_s:.1f}")
    Console(width=140).print(table)


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=5, help="of each kind")
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
