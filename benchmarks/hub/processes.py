"""Strategies on real processes whose unreliable machines freeze and come back: seconds of a step. See README.md.
``python processes.py [--seconds 240] [--machines 6] [--shares 0.6] [--rates 0.9]``
writes processes.json."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

from muletrain.events import EventTail, StepDone

HERE = Path(__file__).parent
FORWARD_S, SLOWER = 1.0, 1.55
"""Of a microbatch at one stage on the faster machines, and how much longer the others take; a backward takes twice as
long."""
SHARES, RATES = (0.6, 0.3), (0.9, 0.1)
"""Unreliable machines, slow ones first, and how often they leave."""


@dataclass(frozen=True)
class Machines:
    """``slow``: of the ``count``, the last ones."""

    count: int
    slow: int
    stages: int
    microbatches: int

    @property
    def step_s(self) -> float:
        """A step in which nobody waits. An unreliable machine leaves ``rate`` times in it, for half of it on average."""
        return self.microbatches * 3 * FORWARD_S * self.stages / (self.count - self.slow + self.slow / SLOWER)


FLEETS = {6: Machines(6, 0, 2, 16), 16: Machines(16, 10, 3, 32)}
"""Equal ones; and as in figure 2, six V100 and ten RTX 2080."""
SETTINGS = (
    "model.width=32",
    "model.heads=2",
    "model.layers=4",
    "model.context=16",
    "model.vocab=512",
    "train.microbatch=12",
    "fleet.trainers=1",
    "train.steps=1000000",
    "compute.precision=fp32",
    "compute.threads=1",
    "checkpoint.every=0",
)


def absences(names: list[str], rate: float, step_s: float, seconds: float) -> str:
    """A plan for ``--chaos``. The machines leave at the same times under each strategy."""
    faults = []
    for number, name in enumerate(names):
        rng, at = random.Random(f"absences/{number}"), 0.0
        while (at := at + rng.expovariate(rate / step_s)) < seconds - 10:
            away_s = 1 + rng.expovariate(2 / step_s)
            faults.append((at, f"freeze {name}@{at:.1f}s for {away_s:.1f}s"))
            at += away_s
    return "; ".join(text for _, text in sorted(faults))


def measured(machines: Machines, strategy: str, unreliable: int, rate: float, seconds: float) -> dict[str, Any]:
    """One run of ``muletrain run``."""
    hub, stages = strategy == "hub", machines.stages
    used = machines.count // stages * stages if strategy == "1f1b" else machines.count
    peers = used - unreliable if hub else used
    names = [f"client-{k}" if hub else f"peer-{used - 1 - k}" for k in range(unreliable)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        profile = folder / "fleet.toml"
        speeds = [1.0] * (machines.count - machines.slow) + [1 / SLOWER] * machines.slow
        rows = "".join(f'[[machines]]\nname = "peer-{n}"\nspeed = {s}\n' for n, s in enumerate(speeds))
        profile.write_text(f"{rows}[pacing]\nforward_ms = {1000 * FORWARD_S}\nbackward_ms = {2000 * FORWARD_S}\n")
        own = [f"fleet.peers={peers}", f"fleet.profile={profile}", f"train.time_limit={seconds}"]
        own += [f"data.cache={folder / 'cache'}", *([f"hub.clients={unreliable}"] if hub else [])]
        own += [f"fleet.stages={stages}", f"train.batch={12 * machines.microbatches}"]
        if strategy == "1f1b":  # pipelines of a machine for each stage; of 16 machines a slow one is left over
            seats = json.dumps([[f"peer-{n}" for n in range(stage, used, stages)] for stage in range(stages)])
            own += [f"pipeline.seats={seats}", 'pipeline.schedule="1f1b"']
        chosen = [] if strategy == "1f1b" else ["--strategy", strategy]
        command = [sys.executable, "-m", "muletrain.cli.main", "run", *chosen]
        command += ["--chaos", absences(names, rate, machines.step_s, seconds)]
        command += [word for s in (*SETTINGS, *own) for word in ("--set", s)]
        with (folder / "out.txt").open("w") as out:
            code = subprocess.run(command, cwd=folder, stdout=out, stderr=out, timeout=seconds + 400).returncode
        runs = list((folder / "runs").glob("*"))
        first: dict[int, float] = {}
        for event in EventTail(runs[0]).poll() if runs else ():
            if isinstance(event, StepDone):
                first[event.step] = min(event.t, first.get(event.step, event.t))
        ends = sorted(first.values())[1:]  # in the first step speeds are unknown
        row: dict[str, Any] = {"strategy": strategy, "unreliable": unreliable, "rate": rate, "steps": len(first)}
        if len(ends) > 1:
            row["step_s"] = round(fmean(b - a for a, b in pairwise(ends)), 1)
        if code:
            row["last words"] = (folder / "out.txt").read_text()[-600:]
        return row | {"exit code": code}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--machines", type=int, choices=FLEETS, default=16)
    parser.add_argument("--strategies", nargs="*", default=["hub", "swarm", "1f1b"])
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--into", default="processes.json")
    arguments = parser.parse_args()
    rows = []
    for share, rate in product(arguments.shares, arguments.rates):
        for strategy in arguments.strategies:
            fleet = FLEETS[arguments.machines]
            rows.append(measured(fleet, strategy, round(share * fleet.count), rate, arguments.seconds))
            print(json.dumps(rows[-1]), flush=True)
            (HERE / arguments.into).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
