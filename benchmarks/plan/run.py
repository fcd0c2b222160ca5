"""Predicted against simulated: random fleets, every number of stages, each played with all messages of the production code.

python benchmarks/plan/run.py [FLEETS]        # default: 20
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from muletrain.config.fleet import Fleet, load_fleet
from muletrain.config.load import load_config
from muletrain.errors import CapacityError
from muletrain.model.spec import ModelSpec
from muletrain.sim.plan_swarm import Settled, chosen, played_step_s, settled
from muletrain.sim.question import Question

RUN = (
    "model.width=256", "model.heads=4", "model.layers=8", "model.context=512", "model.vocab=512", "train.batch=48", "train.microbatch=1",
    "fleet.rebalance_period=20", "checkpoint.every=0", "fleet.trainers=2",
)  # fmt: skip


def draw(seed: int) -> str:
    """Two or three kinds of machines, 4 to 9 in all, whose speeds differ by up to 4, in one to three regions."""
    rng = random.Random(f"plan/{seed}")
    regions = ["x", "y", "z"][: rng.randint(1, 3)]
    lines = []
    for name in ("a", "b", "c")[: rng.randint(2, 3)]:
        lines += [
            "[[machines]]", f'name = "{name}"', f"count = {rng.randint(2, 3)}", f'region = "{rng.choice(regions)}"',
            f"tflops = {0.01 * 4 ** rng.random():.4f}", f"memory_gib = {rng.choice([0.12, 0.2, 1.0, 1.0])}",
        ]  # fmt: skip
        if rng.random() < 0.7:
            width = 10 ** rng.uniform(1.5, 3.0)
            lines += [f"up_mbps = {width:.0f}", f"down_mbps = {width:.0f}"]
    return "\n".join([
        *lines, "[defaults]", f"rtt_ms = {rng.uniform(20, 200):.0f}", f"bandwidth_mbps = {10 ** rng.uniform(1.5, 2.7):.0f}",
        f"local_rtt_ms = {rng.uniform(1, 20):.0f}", "local_bandwidth_mbps = 1000",
    ])  # fmt: skip


def candidates(fleet: Fleet) -> list[Settled]:
    run = load_config(None, RUN)
    question = Question(fleet, run, ModelSpec.from_config(run.model), microbatch=1)
    found = []
    for stages in question.stage_counts():
        try:
            found.append(settled(question.scene(stages, 1)))
        except CapacityError:
            continue
    return found


def compared(seed: int) -> dict[str, Any]:
    """One fleet: by stages what was predicted and what was played [s], and how the recommended one fared."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fleet.toml").write_text(draw(seed))
        fleet = load_fleet(Path(folder) / "fleet.toml")
    found = candidates(fleet)
    steps_s = {len(s.serving): (s.step_s, played_step_s(s.scene, s.step_s)) for s in found}
    best = len(chosen(found).serving)
    predicted_s, played_s = steps_s[best]
    fastest_s = min(played for _, played in steps_s.values())
    return {
        "seed": seed, "machines": len(fleet.peers()), "stages": {k: [round(x, 3) for x in v] for k, v in steps_s.items()},
        "recommended": best, "error": round(predicted_s / played_s - 1, 4), "behind": round(played_s / fastest_s - 1, 4),
    }  # fmt: skip


def main(fleets: int) -> None:
    rows, begun = list[dict[str, Any]](), time.monotonic()
    for seed in range(fleets):
        rows.append(compared(seed))
        print(json.dumps(rows[-1]), flush=True)
    errors = [abs(row["error"]) for row in rows]
    every = [abs(predicted / played - 1) for row in rows for predicted, played in row["stages"].values()]
    summary = {
        "fleets": fleets, "recommended: largest error": max(errors), "recommended: within 10 %": sum(e <= 0.1 for e in errors),
        "all layouts": len(every), "all layouts: largest error": round(max(every), 4),
        "all layouts: within 10 %": sum(e <= 0.1 for e in every), "best or within 5 %": sum(row["behind"] <= 0.05 for row in rows),
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }  # fmt: skip
    print(json.dumps(summary))
    (Path(__file__).parent / "results.json").write_text(
        json.dumps({"summary": summary, "fleets": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
