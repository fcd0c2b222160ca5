"""Predicted against simulated: random fleets, every number of stages of the strategies 'swarm' and 'pipeline' (GPipe
and 1F1B), each played with all messages of the production code.

python benchmarks/plan/run.py                                     # fleets 0 to 19, and writes results.json
python benchmarks/plan/run.py --fleets 5-9 --keep FOLDER          # a part; what was played is kept there, and not played again
python benchmarks/plan/run.py --fleets 0-4 --keep FOLDER --played # predictions only, held against what was played before
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.config.load import load_config
from muletrain.errors import CapacityError
from muletrain.model.spec import ModelSpec
from muletrain.planning.splits import recommend, title
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan.question import Question
from muletrain.sim.plan.swarm import NoSteps, chosen, played_step_s, promising, settled_on, told

if TYPE_CHECKING:
    from muletrain.config.plan_file import Prediction

RUN = (
    "model.width=256",
    "model.heads=4",
    "model.layers=8",
    "model.context=512",
    "model.vocab=512",
    "train.batch=48",
    "train.microbatch=1",
    "fleet.rebalance_period=20",
    "checkpoint.every=0",
    "fleet.trainers=2",
)
SEARCH_S = 4.0
"""For the placement of each number of stages: what is left of the half minute that 'muletrain plan' takes by
default."""
NEAR, CLOSE = 0.10, 0.05
"""Of a step time that was predicted, and of a layout that is nearly the fastest."""
PLAYED_TO = 1.3
"""Layouts are played that are predicted to take no more than so many times as long as the recommended one."""


def draw(seed: int) -> str:
    """Two or three kinds of machines, 4 to 9 in all, whose speeds differ by up to 4, in one to three regions."""
    rng = random.Random(f"plan/{seed}")
    regions = ["x", "y", "z"][: rng.randint(1, 3)]
    lines = []
    for name in ("a", "b", "c")[: rng.randint(2, 3)]:
        lines += [
            "[[machines]]",
            f'name = "{name}"',
            f"count = {rng.randint(2, 3)}",
            f'region = "{rng.choice(regions)}"',
            f"tflops = {0.01 * 4 ** rng.random():.4f}",
            f"memory_gib = {rng.choice([0.12, 0.2, 1.0, 1.0])}",
        ]
        if rng.random() < 0.7:
            width = 10 ** rng.uniform(1.5, 3.0)
            lines += [f"up_mbps = {width:.0f}", f"down_mbps = {width:.0f}"]
    return "\n".join(
        [
            *lines,
            "[defaults]",
            f"rtt_ms = {rng.uniform(20, 200):.0f}",
            f"bandwidth_mbps = {10 ** rng.uniform(1.5, 2.7):.0f}",
            f"local_rtt_ms = {rng.uniform(1, 20):.0f}",
            "local_bandwidth_mbps = 1000",
        ]
    )


def drawn(seed: int) -> Fleet:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fleet.toml").write_text(draw(seed))
        return load_fleet(Path(folder) / "fleet.toml")


def asked(fleet: Fleet, stages: int | None = None) -> Question:
    run = load_config(None, RUN)
    return Question(fleet, run, ModelSpec.from_config(run.model), stages=stages, microbatch=1)


def candidates(fleet: Fleet) -> tuple[list[Prediction], Prediction]:
    """All that are possible, and the one that is recommended, chosen as 'muletrain plan' does."""
    question, layouts = asked(fleet), []
    pipelines: list[Prediction] = []
    for stages in question.stage_counts():
        found = plan_pipeline.predict(asked(fleet, stages), seed=0, time_limit_s=SEARCH_S)
        pipelines += [
            p for p in found if not p.problem and (stages > 1 or p.schedule == "1f1b")
        ]  # of one stage both are the same
    best = [
        min((p for p in pipelines if p.schedule == schedule), key=lambda p: p.step_s)
        for schedule in plan_pipeline.SCHEDULES
        if any(p.schedule == schedule for p in pipelines)
    ]
    ways = [(stages, None) for stages in question.stage_counts()]
    for stages, cut in [*ways, *((len(cut), cut) for cut in plan_pipeline.uneven(question, best))]:
        with contextlib.suppress(CapacityError):
            layouts.append(settled_on(question, stages, 1, cut))
    swarms = [told(question, found) for found in layouts]
    if layouts:
        best.append(swarms[layouts.index(chosen(promising(layouts)))])
    recommended, _ = recommend(best)
    assert recommended is not None
    return swarms + pipelines, best[recommended]


def layout(p: Prediction) -> str:
    """What is played, as text: the same is not played again."""
    who = ", ".join("+".join(stage.machines) for stage in p.stages) if p.strategy == "pipeline" else ""
    layers = "+".join(str(end - first) for first, end in (stage.layers for stage in p.stages))
    return f"{title(p)}, {len(p.stages)} stages of {layers} layers" + (f": {who}; {p.microbatches}" if who else "")


def played(fleet: Fleet, p: Prediction) -> float | None:
    """What a step of ``p`` takes [s], as 'muletrain plan --confirm' finds it. None: hardly any comes to its end."""
    question = asked(fleet)
    scene, planned = question.scene_of(p), None
    if p.schedule:
        scene = plan_pipeline.scheduled(question, scene, p.schedule, len(p.microbatches))
        planned = plan_pipeline.membership(question, scene, p)
    try:
        return played_step_s(scene, p.step_s, planned=planned)
    except NoSteps:
        return None


def compared(seed: int, kept: Path | None = None, *, only_predict: bool = False) -> dict[str, Any]:
    """One fleet: by layout what was predicted and what was played [s], and how the recommended one fared."""
    fleet = drawn(seed)
    found, recommended = candidates(fleet)
    file = None if kept is None else kept / f"fleet-{seed}.json"
    times_s: dict[str, float | None] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    rows = []
    for p in (p for p in found if p.step_s <= PLAYED_TO * recommended.step_s):
        name = layout(p)
        if name not in times_s:
            if only_predict:
                continue
            times_s[name] = played(fleet, p)
            if file is not None:
                file.write_text(json.dumps(times_s, indent=1) + "\n")
        took_s = times_s[name] or math.inf
        rows.append(
            {
                "layout": name,
                "predicted_s": round(p.step_s, 3),
                "played_s": None if math.isinf(took_s) else round(took_s, 3),
                "error": round(p.step_s / took_s - 1, 4),
            }
        )
    fastest_s = min(row["played_s"] or math.inf for row in rows)
    own = next(row for row in rows if row["layout"] == layout(recommended))
    return {
        "seed": seed,
        "machines": len(fleet.peers()),
        "recommended": own["layout"],
        "error": own["error"],
        "behind": round(own["played_s"] / fastest_s - 1, 4) if own["played_s"] else None,
        "layouts": rows,
    }


def summed_up(fleets: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "fleets": len(fleets),
        "recommended: fastest played, or within 5 %": sum(
            row["behind"] is not None and row["behind"] <= CLOSE for row in fleets
        ),
        "recommended: most behind": max(row["behind"] or 0.0 for row in fleets),
        "recommended: a pipeline": sum(row["recommended"].startswith("pipeline") for row in fleets),
    }
    every = [row for fleet in fleets for row in fleet["layouts"]]
    summary["layouts of which hardly a step comes to its end"] = sum(row["played_s"] is None for row in every)
    groups = {"recommended": fleets} | {
        f"all '{name}'": [row for row in every if row["layout"].startswith(name)] for name in ("swarm", "pipeline")
    }
    for name, rows in groups.items():
        errors = [abs(row["error"]) for row in rows if row.get("played_s", 1)]
        summary[f"{name}: layouts"] = len(rows)
        summary[f"{name}: within 10 %"] = sum(e <= NEAR for e in errors)
        summary[f"{name}: largest error"] = max(errors, default=0.0)
    return summary


def main() -> None:
    of = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    of.add_argument("--fleets", default="0-19", help="FIRST-LAST, seeds")
    of.add_argument("--keep", type=Path, help="folder for what was played")
    of.add_argument("--played", action="store_true", help="play nothing more: only what is kept")
    of.add_argument("--out", type=Path, help="default for all fleets, 0-19: results.json")
    args = of.parse_args()
    first, last = map(int, args.fleets.split("-"))
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    fleets = list[dict[str, Any]]()
    for seed in range(first, last + 1):
        fleets.append(compared(seed, args.keep, only_predict=args.played))
        print(json.dumps(fleets[-1], indent=1), flush=True)
    summary = summed_up(fleets) | {"minutes of CPU": round(time.process_time() / 60, 1)}
    print(json.dumps(summary, indent=1))
    out = args.out or (Path(__file__).parent / "results.json" if args.fleets == "0-19" else None)
    if out is not None:
        out.write_text(json.dumps({"summary": summary, "fleets": fleets}, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
