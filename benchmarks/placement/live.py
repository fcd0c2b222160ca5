"""Part ``live``: real processes with paced compute on shaped links of two regions: a planned pipeline against random
placements."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.plan_file import Plan, Prediction
from muletrain.model.spec import ModelSpec
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan.question import Question

STAGES, STEPS, SKIP = 3, 6, 2
FLEET = """
[[machines]]
name = "east"
count = 3
region = "eastern"
[[machines]]
name = "west"
count = 3
region = "western"
[defaults]
rtt_ms = 60
bandwidth_mbps = 3
local_rtt_ms = 2
local_bandwidth_mbps = 1000
[pacing]
forward_ms = 60
backward_ms = 120
"""
RUN = (
    "model.width=64",
    "model.heads=2",
    "model.layers=3",
    "model.context=64",
    "model.vocab=512",
    "train.batch=128",
    "train.microbatch=4",
    "wire.activations=fp32",
    "compute.precision=fp32",
    "checkpoint.every=0",
)
Row = dict[str, Any]


class Live:
    """The plan of one fleet, and runs of it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._fleet = self._folder / "fleet.toml"
        self._fleet.write_text(FLEET)
        run = load_config(None, RUN)
        self._question = Question(
            load_fleet(self._fleet), run, ModelSpec.from_config(run.model), STAGES, run.train.microbatch
        )
        scene = self._question.scene(STAGES, run.train.microbatch)
        self._planned = plan_pipeline.found(self._question, scene, seed=0, time_limit_s=1.0)
        self._first: Row | None = None

    def prediction(self, seed: int | None) -> Prediction:
        """Of the planned placement, or of one drawn from ``seed``."""
        found = self._planned
        if seed is not None:
            machines = list(range(len(found.names)))
            random.Random(f"live/{seed}").shuffle(machines)
            size = len(machines) // STAGES
            found = replace(found, assignment=tuple(tuple(machines[s * size : (s + 1) * size]) for s in range(STAGES)))
        return plan_pipeline.told(self._question, found, "1f1b")

    def run(self, seed: int | None) -> Row:
        """Medians over the steps after the first ones [s]; of a drawn placement also how many times as long as planned
        a step is."""
        if seed is not None and self._first is None:
            self.run(None)
        chosen, spec = self.prediction(seed), self._question.spec
        plan = Plan(
            fleet="two regions",
            model="model",
            params=spec.params,
            batch=self._question.run.train.batch,
            context=spec.context,
            strategies=(chosen,),
            recommended=0,
            why="drawn" if seed is not None else "planned",
        )
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            (path := Path(folder) / "plan.json").write_text(plan.model_dump_json())
            sets = [x for s in (*RUN, f"train.steps={STEPS}", f"fleet.profile={self._fleet}") for x in ("--set", s)]
            command = [sys.executable, "-m", "muletrain.cli.main", "run", "--plan", str(path), "--json", *sets]
            out = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
        events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        done = [e["duration_s"] for e in events if e.get("kind") == "step_done" and e["step"] > SKIP]
        row: Row = {
            "cost_s": median(done),
            "predicted_s": chosen.step_s,
            "steps_s": done,
            "stages": [list(stage.machines) for stage in chosen.stages],
        }
        if seed is None:
            self._first = row
        elif self._first is not None:
            row["factor"] = row["cost_s"] / self._first["cost_s"]
            row["predicted_factor"] = row["predicted_s"] / self._first["predicted_s"]
        return row
