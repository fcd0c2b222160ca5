"""What do 50 Mb/s and 100 ms cost, and from which batch on does averaging not matter? See README.md. ``python run.py
[--runs 3]``."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.events import StepApplied, StepDone
from muletrain.runs.assemble import RunFacts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402

PEERS_PER_STAGE = 2
STEPS, SKIP = 3, 1
FORWARD_MS = 60.0
"""Of the named configuration and the sweep; a backward takes twice as long."""
NAMED = {"width": 256, "context": 64, "microbatches": 192}
SWEEP = (2, 4, 8, 16, 32)
WIDTHS = (128, 256, 512, 1024)
SQUARE_CUBE = {"context": 32, "microbatches": 32}
DEVICE_FLOPS = 1e10
"""Effective FLOP/s of the emulated devices of the square-cube table: low, so that two cores can really compute width
1024 meanwhile."""
SHAPED = "up_mbps = 50.0\ndown_mbps = 50.0\n[defaults]\nlocal_rtt_ms = 100.0\nrtt_ms = 100.0\n"
BYTES_PER_S = 50e6 / 8


def configured(width: int, context: int, microbatches: int) -> RunConfig:
    """2 stages x 2 peers, one sequence a microbatch."""
    return load_config(
        None,
        [
            f"model.width={width}",
            f"model.heads={width // 32}",
            "model.layers=2",
            f"model.context={context}",
            "model.vocab=512",
            "model.dropout=0.0",
            "train.microbatch=1",
            f"train.batch={microbatches}",
            f"train.steps={STEPS}",
            "compute.checkpointing=never",
            "compute.precision=fp32",
            "wire.gradients=fp16",
        ],
    )


def measure(config: RunConfig, forward_ms: float, *, shaped: bool) -> dict[str, float]:
    """Medians over the steps after the first [s]; ``idle``: share of the time outside averaging that no declared work
    fills."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "fleet.toml"
        pacing = f"[pacing]\nforward_ms = {forward_ms}\nbackward_ms = {2 * forward_ms}\n"
        profile.write_text(f'[[machines]]\nname = "home"\ncount = 4\n{SHAPED if shaped else ""}{pacing}')
        fleet = config.fleet.model_copy(update={"profile": str(profile)})
        config = config.model_copy(update={"fleet": fleet})
        events = run_fleet(config, Path(folder) / "run", stages=(0, 0, 1, 1), timeout_s=900)
    step_s = statistics.median(e.duration_s for e in events if isinstance(e, StepDone) and e.step > SKIP)
    applied = [e for e in events if isinstance(e, StepApplied) and e.step > SKIP]
    averaging_s = statistics.median(e.averaging_s for e in applied)
    apply_s = statistics.median(e.apply_s for e in applied)
    work_s = config.microbatches / PEERS_PER_STAGE * 3 * forward_ms / 1000
    return {
        "step_s": step_s,
        "averaging_s": averaging_s,
        "apply_s": apply_s,
        "work_s": work_s,
        "idle": 1 - work_s / (step_s - averaging_s - apply_s),
    }


def named_pairs(runs: int) -> list[dict[str, dict[str, float]]]:
    """Unshaped and shaped in turn, so that what else the machine does meets both."""
    return [
        {k: measure(configured(**NAMED), FORWARD_MS, shaped=k == "shaped") for k in ("unshaped", "shaped")}
        for _ in range(runs)
    ]


def sweep(named: dict[str, float]) -> list[dict[str, float]]:
    rows = [
        {"microbatches": n, **measure(configured(**{**NAMED, "microbatches": n}), FORWARD_MS, shaped=True)}
        for n in SWEEP
    ]
    return [*rows, {"microbatches": NAMED["microbatches"], **named}]


def square_cube() -> list[dict[str, float]]:
    rows = []
    for width in WIDTHS:
        config = configured(width, **SQUARE_CUBE)
        facts = RunFacts.of(config)
        tokens = config.model.context
        forward_ms = 1000 * facts.spec.stage_flops(facts.cut, 0, tokens) * tokens / DEVICE_FLOPS
        transfer_ms = 1000 * 2 * width * tokens / BYTES_PER_S  # int8, an activation and its gradient
        row = {"width": width, "service_ms": 3 * forward_ms, "transfer_ms": transfer_ms}
        rows.append(row | measure(config, forward_ms, shaped=True))
    return rows


def show(results: dict[str, Any], console: Console) -> None:
    kept, ratio = results["kept"], results["step_over_averaging"]
    console.print(f"named: step {ratio:.1f} x averaging (>= 1.5), keeps {kept:.3f} of its unshaped throughput (>= 0.9)")
    table = Table("microbatches a step", "step [s]", "averaging [s]", "averaging's share", title="50 Mb/s, 100 ms")
    for r in results["sweep"]:
        share = r["averaging_s"] / r["step_s"]
        table.add_row(str(r["microbatches"]), f"{r['step_s']:.2f}", f"{r['averaging_s']:.2f}", f"{share:.0%}")
    console.print(table)
    console.print(f"averaging is more than half the step at {results['dominated_at']} microbatches and fewer")
    table = Table("width", "service [ms]", "transfer [ms]", "service / transfer", "idle", title="square-cube law")
    for r in results["square_cube"]:
        ratio = r["service_ms"] / r["transfer_ms"]
        table.add_row(
            str(r["width"]), f"{r['service_ms']:.1f}", f"{r['transfer_ms']:.1f}", f"{ratio:.0f}", f"{r['idle']:.0%}"
        )
    console.print(table)


def plot(results: dict[str, Any], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    counts = [r["microbatches"] for r in results["sweep"]]
    left.plot(counts, [100 * r["averaging_s"] / r["step_s"] for r in results["sweep"]], marker="o")
    left.axhline(50, color="grey", linestyle="--", linewidth=1)
    left.set(
        xscale="log",
        ylim=(0, 100),
        xlabel="microbatches a step",
        ylabel="share of the step [%]",
        title=f"Averaging, width {NAMED['width']}",
    )
    left.set_xticks(counts, [str(n) for n in counts])
    left.minorticks_off()
    widths = [r["width"] for r in results["square_cube"]]
    right.plot(widths, [100 * r["idle"] for r in results["square_cube"]], marker="o", color="tab:orange")
    right.set(
        xscale="log",
        ylim=(0, 100),
        xlabel="width",
        ylabel="idle outside averaging [%]",
        title=f"Square-cube law, devices of {DEVICE_FLOPS / 1e9:.0f} GFLOP/s",
    )
    right.set_xticks(widths, [str(w) for w in widths])
    right.minorticks_off()
    figure.suptitle("2 stages x 2 peers, 50 Mb/s and 100 ms round trip between all")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    pairs = named_pairs(parser.parse_args().runs)
    middle = {k: statistics.median(p["shaped"][k] for p in pairs) for k in pairs[0]["shaped"]}
    results: dict[str, Any] = {
        "named": NAMED | {"forward_ms": FORWARD_MS},
        "pairs": pairs,
        "kept": statistics.median(p["unshaped"]["step_s"] / p["shaped"]["step_s"] for p in pairs),
        "step_over_averaging": statistics.median(p["shaped"]["step_s"] / p["shaped"]["averaging_s"] for p in pairs),
        "sweep": sweep(middle),
        "square_cube": square_cube(),
    }
    dominated = [r["microbatches"] for r in results["sweep"] if r["averaging_s"] > r["step_s"] / 2]
    results["dominated_at"] = max(dominated, default=0)
    show(results, Console())
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, HERE / "plot.png")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
