"""What do 50 Mb/s and 100 ms cost, and from which batch on does averaging not matter? See README.md. ``python run.py``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from muletrain.config.load import load_config
from muletrain.events import StepApplied, StepDone
from muletrain.runs.assemble import RunFacts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402

STEPS, SKIP = 5, 1
NAMED = {"width": 256, "microbatches": 128, "forward_ms": 60.0}
"""The named configuration: 2 stages x 2 peers, width 256, 128 microbatches of 1 x 128 tokens, 60 + 120 ms a stage."""
DEVICE_FLOPS = 1e11
"""Effective FLOP/s of the emulated devices of the square-cube table: a few CPU cores."""


def measure(width: int, microbatches: int, forward_ms: float, *, shaped: bool, context: int = 128) -> dict[str, float]:
    """Medians over the steps after the first: step and averaging time [s], share of idle time of the peers."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "fleet.toml"
        links = "up_mbps = 50.0\ndown_mbps = 50.0\n" if shaped else ""
        rtt = "[defaults]\nlocal_rtt_ms = 100.0\nrtt_ms = 100.0\n" if shaped else ""
        pacing = f"[pacing]\nforward_ms = {forward_ms}\nbackward_ms = {2 * forward_ms}\n"
        profile.write_text(f'[[machines]]\nname = "home"\ncount = 4\n{links}{rtt}{pacing}')
        config = load_config(
            None,
            [
                f"model.width={width}",
                f"model.heads={width // 32}",
                "model.layers=2",
                f"model.context={context}",
                "model.vocab=512",
                "train.microbatch=1",
                f"train.batch={microbatches}",
                f"train.steps={STEPS}",
                "compute.checkpointing=never",
                "model.dropout=0.0",
                f"fleet.profile={profile}",
                "wire.gradients=fp16",
            ],
        )
        events = run_fleet(config, Path(folder) / "run", stages=(0, 0, 1, 1), timeout_s=400)
    steps = [e.duration_s for e in events if isinstance(e, StepDone) and e.step > SKIP]
    applied = [e for e in events if isinstance(e, StepApplied) and e.step > SKIP]
    total = sum(e.forward_s + e.backward_s + e.averaging_s + e.apply_s + e.wait_s for e in applied)
    return {
        "step_s": statistics.median(steps),
        "averaging_s": statistics.median(e.averaging_s for e in applied),
        "busy": sum(e.forward_s + e.backward_s for e in applied) / total,
    }


def service_ms(width: int, context: int) -> float:
    """Forward of one sequence in one stage on the declared device [ms]."""
    facts = RunFacts.of(
        load_config(None, [f"model.width={width}", f"model.heads={width // 32}", "model.layers=2", "model.vocab=512"])
    )
    return 1000 * facts.spec.stage_flops(facts.cut, 0, context) * context / DEVICE_FLOPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs, console = parser.parse_args().runs, Console()
    results: dict[str, Any] = {"named": NAMED, "pairs": [], "sweep": [], "square_cube": []}
    for _ in range(runs):
        pair = {k: measure(**NAMED, shaped=k == "shaped") for k in ("unshaped", "shaped")}  # type: ignore[arg-type]
        results["pairs"].append(pair)
    kept = statistics.median(p["unshaped"]["step_s"] / p["shaped"]["step_s"] for p in results["pairs"])
    ratio = statistics.median(p["shaped"]["step_s"] / p["shaped"]["averaging_s"] for p in results["pairs"])
    results |= {"kept": kept, "step_over_averaging": ratio}
    console.print(
        f"named configuration {NAMED}: step / averaging {ratio:.1f}, keeps {kept:.3f} of its unshaped throughput"
    )
    table = Table("microbatches a step", "step [s]", "averaging [s]", "averaging's share", title="50 Mb/s, 100 ms")
    for count in (4, 8, 16, 32, 64):
        row = {"microbatches": count, **measure(256, count, 60.0, shaped=True)}
        results["sweep"].append(row)
        table.add_row(
            str(count), f"{row['step_s']:.2f}", f"{row['averaging_s']:.2f}", f"{row['averaging_s'] / row['step_s']:.0%}"
        )
    console.print(table)
    dominated = [r["microbatches"] for r in results["sweep"] if r["averaging_s"] > r["step_s"] / 2]
    console.print(
        f"averaging dominates (more than half the step) up to a batch of {max(dominated, default=0)} sequences"
    )
    table = Table(
        "width", "service time [ms]", "idle", title="square-cube law: 16 microbatches of 1 x 128 tokens a step"
    )
    for width in (128, 256, 512, 1024):
        row = {"width": width, "forward_ms": service_ms(width, 128)}
        row |= measure(width, 16, row["forward_ms"], shaped=True)
        results["square_cube"].append(row)
        table.add_row(str(width), f"{3 * row['forward_ms']:.1f}", f"{1 - row['busy']:.0%}")
    console.print(table)
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
