"""How much of averaging do delayed parameter updates hide? See README.md. ``python run.py [--runs 3]``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from muletrain.config.load import load_config
from muletrain.events import StepApplied, StepDone

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402

STEPS = 8
MEASURED = range(3, STEPS)
"""Steps: the first ones warm up, the last has no next step to overlap with."""
BATCHES = (8, 16, 32)
"""Microbatches a step."""
PROFILE = """
machines = [{ name = "home", count = 4, up_mbps = 50.0, down_mbps = 50.0 }]
pacing = { forward_ms = 60.0, backward_ms = 120.0 }
defaults = { local_rtt_ms = 100.0, rtt_ms = 100.0 }
"""
SMALL = [
    "model.width=256",
    "model.heads=8",
    "model.layers=2",
    "model.context=32",
    "model.vocab=512",
    "model.dropout=0.0",
    "train.microbatch=1",
    f"train.steps={STEPS}",
    "compute.checkpointing=never",
    "compute.precision=fp32",
    "wire.gradients=fp16",
    "fleet.rebalance=off",
    "checkpoint.every=0",
]


def measure(microbatches: int, *, delayed: bool) -> dict[str, float]:
    """2 stages x 2 peers. Medians over the measured steps [s]."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "fleet.toml"
        profile.write_text(PROFILE)
        config = load_config(
            None,
            [
                *SMALL,
                f"train.batch={microbatches}",
                f"fleet.profile={profile}",
                f"optimizer.delayed={str(delayed).lower()}",
            ],
        )
        events = run_fleet(config, Path(folder) / "run", stages=(0, 0, 1, 1), timeout_s=600)
    applied = [e for e in events if isinstance(e, StepApplied) and e.step in MEASURED]
    return {
        "step_s": statistics.median(e.duration_s for e in events if isinstance(e, StepDone) and e.step in MEASURED),
        "averaging_s": statistics.median(e.averaging_s for e in applied),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    table = Table("microbatches a step", "at once [s]", "of it averaging [s]", "delayed [s]", "faster by")
    results = []
    for microbatches in BATCHES:  # in turn, so that what else the machine does meets both
        pairs = [
            {d: measure(microbatches, delayed=d == "delayed") for d in ("at once", "delayed")} for _ in range(runs)
        ]
        step = {d: statistics.median(p[d]["step_s"] for p in pairs) for d in pairs[0]}
        averaging = statistics.median(p["at once"]["averaging_s"] for p in pairs)
        ratio = statistics.median(p["at once"]["step_s"] / p["delayed"]["step_s"] for p in pairs)
        results.append({"microbatches": microbatches, "ratio": ratio, "pairs": pairs})
        table.add_row(
            str(microbatches), f"{step['at once']:.2f}", f"{averaging:.2f}", f"{step['delayed']:.2f}", f"{ratio:.2f}"
        )
    Console().print(table)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
