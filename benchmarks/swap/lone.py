"""How fast does ``muletrain run --strategy swap`` train on one machine, beside its executor alone (gpu.py)? See README.md.

``python lone.py``: 1.22 B parameters through 8 GiB of a GPU, eight steps; ``--tiny`` on any machine, through a file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
LARGE = {"model.layers": 24, "model.width": 2048, "model.heads": 16, "model.context": 2048, "train.batch": 32,
         "train.microbatch": 2, "compute.memory": 8}  # fmt: skip
TINY = {"model.layers": 4, "model.width": 128, "model.heads": 4, "model.context": 128, "train.batch": 16, "train.microbatch": 2,
        "compute.memory": 0.012}  # fmt: skip
LONGEST_S = 300


def events(folder: Path) -> list[dict[str, Any]]:
    """What the run has written so far, whole lines."""
    return [
        json.loads(line)
        for path in folder.glob("runs/*/peer-0.jsonl")
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def run(settings: dict[str, object], steps: int) -> list[dict[str, Any]]:
    """Begin a run, and return the events of its first ``steps``. Then kill it: it would write a checkpoint of 15 GB next."""
    given = settings | {"train.steps": steps, "fleet.trace": "true"}
    command = [sys.executable, "-m", "muletrain.cli.main", "run", "--strategy", "swap"]
    for key, value in given.items():
        command += ["--set", f"{key}={value}"]
    with tempfile.TemporaryDirectory(dir=HERE, prefix="lone-") as name, Path(name, "out").open("w") as out:
        process = subprocess.Popen(command, cwd=name, stdout=out, stderr=subprocess.STDOUT)
        until = time.monotonic() + LONGEST_S
        while process.poll() is None and time.monotonic() < until and len(done(events(Path(name)))) < steps:
            time.sleep(0.5)
        process.kill()
        process.wait()
        found = events(Path(name))
        if len(done(found)) < steps:
            raise SystemExit(f"after {LONGEST_S} s, or at its end, the run says:\n{Path(name, 'out').read_text()}")
        return found


def done(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in found if event["kind"] == "step_done"]


def measured(found: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the steps after the second: seconds of a step, and of what its end takes."""
    ends = done(found)

    def took(what: str) -> float:
        return median(e["seconds"] for e in found if e["kind"] == "slot_worked" and e["what"] == what and e["step"] > 2)

    step_s = median(event["duration_s"] for event in ends[2:])
    mean_s, apply_s = took("reduce"), took("apply")
    return {"step": step_s, "microbatches": step_s - mean_s - apply_s, "mean and norm": mean_s, "update": apply_s,
            "tokens/s": ends[-1]["tokens"] / step_s}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=8, help="at least 4: the first two do not count")
    parser.add_argument("--together", type=int, help="swap.together")
    parser.add_argument("--label", default="now", help="name of the row in the file")
    parser.add_argument("--out", type=Path, default=HERE / "lone.json", help="the row is added there")
    given = parser.parse_args()
    given.steps = max(4, given.steps)
    settings = TINY if given.tiny else LARGE
    found = run(settings | ({"swap.together": given.together} if given.together else {}), given.steps)
    joined = next(event for event in found if event["kind"] == "peer_joined")
    row = {"device": joined["device"], "parts": joined["swapped"]} | measured(found)
    table = Table(title=f"One step, {joined['device']}", box=None)
    table.add_column("what")
    table.add_column("seconds", justify="right")
    for what in ("step", "microbatches", "mean and norm", "update"):
        table.add_row(what, f"{row[what]:.3f}")
    Console().print(table, f"{row['tokens/s']:,.0f} tokens/s")
    kept = json.loads(given.out.read_text()) if given.out.exists() else {}
    given.out.write_text(json.dumps(kept | {given.label: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
