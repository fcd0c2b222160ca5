"""Does ``simulate fleet``, calibrated on two real fleets, predict four others? See README.md.

``python run.py [--keep FOLDER]``: what FOLDER has of an earlier time is not run again."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from muletrain.cli.actions.opening import save_config
from muletrain.config.costs import Costs
from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.events import Event, EventTail, Note, StepDone
from muletrain.model.spec import ModelSpec
from muletrain.runs.fleet import LocalFleet
from muletrain.sim.fleet.accounts import Outcome
from muletrain.sim.fleet.calibration import calibrated, fit, observe
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import Fidelity, simulate_fleet
from muletrain.sim.fleet.trace import Change
from muletrain.sim.setting import Setting, seat, setting

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402

BAR = 0.1
STEPS, SKIP = 12, 2
"""Of each run; those that are left out: nobody has measured anything yet."""
MICROBATCHES = 32
HOURS = 300 / 3600
"""Simulated: more than the steps take."""
KILL_STEP, KILL_S = 5, 1.0
"""In which step, and how long after it began: the first step of real fleets takes longer than simulated ones, by as
much as it likes."""
SETTINGS = [
    "model.width=128",
    "model.heads=4",
    "model.layers=6",
    "model.context=64",
    "model.vocab=512",
    "train.microbatch=1",
    f"train.batch={MICROBATCHES}",
    f"train.steps={STEPS}",
    "compute.precision=fp32",
    "compute.threads=1",
    "checkpoint.every=0",
    "fleet.trainers=2",
    "fleet.rebalance=off",
    "fleet.trace=true",
    "optimizer.lr=1e-5",
]
"""So small a step that no gradient stands out from those of its replicas, or that would be computed again
(benchmarks/outliers)."""
PACING = "[pacing]\nforward_ms = 120\nbackward_ms = 240\n"
KIND = '[[machines]]\nname = "{}"\ncount = {}\n'
SLOW_LINKS = "up_mbps = 50\ndown_mbps = 50\n[defaults]\nlocal_rtt_ms = 100\n"
UNEQUAL_LINKS = (
    KIND.format("lab", 2)
    + KIND.format("home", 1)
    + 'region = "town"\nup_mbps = 20\ndown_mbps = 50\n'
    + KIND.format("far", 1)
    + 'region = "hills"\nup_mbps = 10\ndown_mbps = 20\n'
    '[[links]]\nbetween = ["here", "town"]\nrtt_ms = 40\n[[links]]\nbetween = ["here", "hills"]\nrtt_ms = 200\n'
    '[[links]]\nbetween = ["town", "hills"]\nrtt_ms = 220\n'
)
SPOT = KIND.format("lab", 1) + KIND.format("spot", 1) + "reliable = false\n" + KIND.format("home", 4)


@dataclass(frozen=True)
class Case:
    """``killed``: the only machine of that name."""

    title: str
    machines: str
    stages: int = 2
    killed: str | None = None


CASES = {
    "plain": Case("2 x 2 peers, links as they are", KIND.format("home", 4)),
    "slow-links": Case("50 Mb/s and 100 ms", KIND.format("home", 4) + SLOW_LINKS),
    "unequal-links": Case("10 to 50 Mb/s, 0 to 220 ms", UNEQUAL_LINKS),
    "slow-peer": Case(
        "one of four at a third of the speed", KIND.format("home", 3) + KIND.format("slow", 1) + f"speed = {1 / 3}\n"
    ),
    "kill": Case("2 x 3 peers, one is killed", SPOT, killed="spot"),
    "three-stages": Case("3 x 2 peers", KIND.format("home", 6), stages=3),
}
CALIBRATED = ("plain", "slow-links")


@dataclass
class Killer:
    """Watches a fleet, and kills one of its peers."""

    victim: str | None
    begin: float | None = None
    killed: list[str] = field(default_factory=list)

    def watch(self, fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == KILL_STEP - 1:
            self.begin = event.t

    def tick(self, fleet: LocalFleet) -> None:
        if self.victim and not self.killed and self.begin is not None and time.time() >= self.begin + KILL_S:
            os.killpg(fleet.pid(self.victim), signal.SIGKILL)
            self.killed.append(self.victim)


def prepared(case: Case, folder: Path) -> tuple[RunConfig, Fleet]:
    profile = folder / "fleet.toml"
    profile.write_text(case.machines + PACING)
    fleet = load_fleet(profile)
    sizes = [f"fleet.stages={case.stages}", f"fleet.peers={len(fleet.peers())}", f"fleet.profile={profile}"]
    return load_config(None, [*SETTINGS, *sizes]), fleet


def seats(scene: Setting) -> tuple[int, ...]:
    """Each peer's stage as the simulator seats them, for the real ones join in any order."""
    serving, stages = [[0] * len(scene.kinds) for _ in scene.cut], []
    for k, kind in enumerate(scene.kinds):
        for _ in range(kind.count):
            stages += seat(scene, [k], serving)
            serving[stages[-1]][k] += 1
    return tuple(stages)


def run(case: Case, folder: Path) -> None:
    """A real fleet, to its end."""
    folder.mkdir(parents=True)
    config, fleet = prepared(case, folder)
    scene = setting(fleet, config, ModelSpec.from_config(config.model))
    names = [peer.name for peer in fleet.peers()]
    killer = Killer(None if case.killed is None else f"peer-{names.index(case.killed)}")
    save_config(folder, config)
    run_fleet(
        config, folder, stages=seats(scene), watch=killer.watch, tick=killer.tick, lost=killer.killed, timeout_s=400
    )


def measured(folder: Path) -> float:
    """Microbatches/s after the first steps."""
    done = {e.step: e.t for e in EventTail(folder).poll() if isinstance(e, StepDone)}
    return MICROBATCHES * (STEPS - SKIP) / (done[STEPS] - done[SKIP])


def trials(folder: Path) -> int:
    """Gradients that were computed again because they stood out."""
    notes = [e for e in EventTail(folder).poll() if isinstance(e, Note) and "stands out" in e.message]
    return len({e.message for e in notes})


def predicted(case: Case, folder: Path, costs: Costs, fidelity: Fidelity) -> float:
    """Microbatches/s in the same steps."""
    config, fleet = prepared(case, folder)
    scene = calibrated(setting(fleet, config, ModelSpec.from_config(config.model)), costs)
    outcome = simulate_fleet(scene, config, Weather(), hours=HOURS, fidelity=fidelity)
    if case.killed:
        weather = Weather(trace=(Change(reached_s(outcome, KILL_STEP - 1) + KILL_S, -1),))
        outcome = simulate_fleet(scene, config, weather, hours=HOURS, fidelity=fidelity)
    return MICROBATCHES * (STEPS - SKIP) / (reached_s(outcome, STEPS) - reached_s(outcome, SKIP))


def reached_s(outcome: Outcome, steps: int) -> float:
    """When so many steps are done."""
    now, left = 0.0, float(steps * MICROBATCHES)
    for point in outcome.curve:
        passed_s = point.time_s - now
        if point.throughput * passed_s >= left - 1e-6:
            return now + left / point.throughput
        left -= point.throughput * passed_s
        now = point.time_s
    raise AssertionError(f"{steps} steps take longer than was simulated")


def row(name: str, folder: Path, costs: Costs) -> dict[str, Any]:
    case, real = CASES[name], measured(folder)
    found: dict[str, Any] = {"measured": real, "trials": trials(folder)}
    for fidelity in ("flow", "protocol"):
        found[fidelity] = predicted(case, folder, costs, fidelity)
        found[f"{fidelity}_error"] = found[fidelity] / real - 1
        found[f"{fidelity}_uncalibrated"] = predicted(case, folder, Costs(), fidelity)
    return found


def show(rows: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("fleet", "", title="microbatches/s", title_justify="left")
    for heading in ("measured", "flow", "off by", "protocol", "off by", "uncalibrated (flow)"):
        table.add_column(heading, justify="right")
    for name, r in rows.items():
        about = "measured in" if name in CALIBRATED else CASES[name].title
        errors = (r["flow_error"], r["protocol_error"], r["flow_uncalibrated"] / r["measured"] - 1)
        flow, protocol, uncalibrated = (f"{error:+.1%}" for error in errors)
        speeds = [f"{r[key]:.2f}" for key in ("measured", "flow", "protocol")]
        table.add_row(name, about, *speeds[:2], flow, speeds[2], protocol, uncalibrated)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, help="folder for the runs; what is in it is not run again")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as scratch:
        folder = (keep or Path(scratch)).resolve()
        for name, case in CASES.items():
            if not (folder / name).exists():
                run(case, folder / name)
                print(f"{name}: {measured(folder / name):.2f} microbatches/s", file=sys.stderr, flush=True)
        found = fit([observe(folder / name) for name in CALIBRATED])
        rows = {name: row(name, folder / name, found.costs) for name in CASES}
    console = Console()
    console.print(found.costs.model_dump(exclude={"runs"}), found.counts)
    show(rows, console)
    worst = {f: max(abs(rows[n][f"{f}_error"]) for n in CASES if n not in CALIBRATED) for f in ("flow", "protocol")}
    console.print(
        ", ".join(f"{f}: off by {w:.1%} at most" for f, w in worst.items()), f"(bar: {BAR:.0%}, for protocol)"
    )
    results = {"costs": found.costs.model_dump(exclude={"runs"}), "counts": found.counts, "rows": rows, "worst": worst}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    if worst["protocol"] > BAR:
        raise SystemExit("a prediction is further off than the bar")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
