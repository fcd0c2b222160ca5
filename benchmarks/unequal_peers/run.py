"""Does a slow replica get its share, and no more? See README.md. ``python run.py [--runs 5]``."""

from __future__ import annotations

import argparse
import json
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

FORWARD_MS, BACKWARD_MS = 20.0, 40.0
PROFILE = f"""
name = "one-third"
machines = [
    {{ name = "front", speed = 4.0 }},
    {{ name = "quick" }},
    {{ name = "third", speed = {1 / 3} }},
]
pacing = {{ forward_ms = {FORWARD_MS}, backward_ms = {BACKWARD_MS} }}
"""
MICROBATCHES, STEPS, SKIP = 64, 8, 2
SMALL = [
    "model.width=32",
    "model.heads=2",
    "model.layers=2",
    "model.context=16",
    "model.vocab=512",
    "train.microbatch=1",
]


def one_run() -> tuple[float, float]:
    """(share of the slow replica, throughput over what the two can do) in the steps after the first ``SKIP``."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "fleet.toml"
        profile.write_text(PROFILE)
        overrides = [*SMALL, f"train.batch={MICROBATCHES}", f"train.steps={STEPS}", "fleet.peers=3", "fleet.trainers=1"]
        config = load_config(None, [*overrides, f"fleet.profile={profile}"])
        events = run_fleet(config, Path(folder) / "run", stages=(0, 1, 1))
    counted = [e for e in events if isinstance(e, StepApplied) and e.stage == 1 and e.step > SKIP]
    slow = sum(e.microbatches for e in counted if e.peer == "peer-2")
    done = {e.step: e.t for e in events if isinstance(e, StepDone)}
    seconds = done[STEPS] - done[SKIP]
    capacity = 1000 / (FORWARD_MS + BACKWARD_MS) * (1 + 1 / 3)
    return slow / sum(e.microbatches for e in counted), MICROBATCHES * (STEPS - SKIP) / seconds / capacity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = [one_run() for _ in range(parser.parse_args().runs)]
    share, throughput = (statistics.median(r[k] for r in runs) for k in (0, 1))
    (HERE / "results.json").write_text(
        json.dumps({"runs": runs, "share": share, "throughput": throughput}, indent=1) + "\n"
    )
    table = Table("", "median", "target", title=f"one of two replicas at a third of the speed, {len(runs)} runs")
    table.add_row("its share of the microbatches", f"{share:.3f}", "0.25 +- 0.05")
    table.add_row("throughput over the sum of the two", f"{throughput:.3f}", ">= 0.9")
    Console().print(table)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
