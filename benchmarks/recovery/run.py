"""How soon does a stage go on when one of its peers dies or freezes, and what does a dying fleet still do? See
README.md.

``python run.py [--runs 3] [--only SIGKILL|SIGSTOP|busy]``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from muletrain.config.load import load_config
from muletrain.events import Event, MicrobatchServed, MicrobatchTaken, StepDone
from muletrain.runs.fleet import LocalFleet

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.fleet_run import run_fleet  # noqa: E402

FORWARD_MS, BACKWARD_MS = 60.0, 120.0
SERVICE_S = (FORWARD_MS + BACKWARD_MS) / 1000
MIDDLE_S = 0.5 * SERVICE_S
"""After a microbatch was taken: the fault comes in the middle of its service."""
SMALL = [
    "model.width=32",
    "model.heads=2",
    "model.layers=2",
    "model.context=16",
    "model.vocab=512",
    "train.microbatch=1",
    "compute.precision=fp32",
    "checkpoint.every=0",
    "fleet.trace=true",
]
REPLICAS = 5
STEPS, WARM = 44, 14
"""Steps before the first fault: deadlines are to follow measurements."""


@dataclass
class Faults:
    """Watches a fleet with one microbatch under way at a time, and stops its server of ``stage`` in the middle of it:
    again and again, until one peer is left that was never stopped."""

    stage: int
    signal: signal.Signals
    times: list[tuple[float, str]] = field(default_factory=list)
    victims: set[str] = field(default_factory=set)
    _taken: tuple[float, MicrobatchTaken] | None = None
    _rest_until: int = WARM

    def watch(self, fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, MicrobatchTaken) and event.stage == self.stage and event.step >= self._rest_until:
            self._taken = event.t, event
        elif isinstance(event, MicrobatchServed) and event.stage == self.stage:
            self._taken = None
        elif isinstance(event, StepDone) and event.step == STEPS:
            for victim in self.victims:  # the frozen ones: nothing is left to come back for
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(fleet.pid(victim), signal.SIGKILL)

    def tick(self, fleet: LocalFleet) -> None:
        now = time.time()
        if self._taken is None or now < self._taken[0] + MIDDLE_S:
            return
        event, self._taken = self._taken[1], None
        if event.peer in {*self.victims, "peer-0"} or len(self.victims) == REPLICAS - 1:
            return
        self.victims.add(event.peer)
        os.killpg(fleet.pid(event.peer), self.signal)
        self.times.append((time.time(), event.peer))
        self._rest_until = event.step + 4


def fleet_config(folder: Path, peers: int, batch: int, steps: int, trainers: int) -> Any:
    profile = folder / "fleet.toml"
    pacing = f"[pacing]\nforward_ms = {FORWARD_MS}\nbackward_ms = {BACKWARD_MS}\n"
    profile.write_text(f'[[machines]]\nname = "home"\ncount = {peers}\n{pacing}')
    sizes = [f"train.batch={batch}", f"train.steps={steps}", f"fleet.peers={peers}", f"fleet.trainers={trainers}"]
    return load_config(None, [*SMALL, *sizes, f"fleet.profile={profile}"])


def idle_case(stage: int, kind: signal.Signals, keep: Path | None) -> list[dict[str, float]]:
    """One microbatch at a time, so that nobody else's work hides the loss of the one that is being served."""
    stages = (0, *[stage] * (REPLICAS - (stage == 0)), *([1] if stage == 0 else []))
    faults = Faults(stage, kind)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = fleet_config(folder, len(stages), 1, STEPS, 1)
        events = run(config, keep or folder / "run", stages, faults)
    served = [e for e in events if isinstance(e, MicrobatchServed) and e.stage == stage]
    usual = service_times(events, stage, before=faults.times[0][0])
    rows = []
    for at, victim in faults.times:
        after = [e.t for e in served if e.t > at and e.peer != victim]
        rows.append({"next_s": min(after) - at, "service_s": statistics.median(usual), "service_p95_s": p95(usual)})
    return rows


def run(config: Any, folder: Path, stages: tuple[int, ...], faults: Faults | Deaths) -> list[Event]:
    return run_fleet(
        config, folder, stages=stages, watch=faults.watch, tick=faults.tick, lost=faults.victims, timeout_s=500
    )


def service_times(events: list[Event], stage: int, before: float) -> list[float]:
    """From taken to served, at any peer of ``stage`` [s]; each one's first, in which everything is done for the first
    time, apart."""
    taken: dict[tuple[str, int, int], float] = {}
    times: dict[str, list[float]] = defaultdict(list)
    for e in sorted(events, key=lambda e: e.t):
        if isinstance(e, MicrobatchTaken) and e.stage == stage:
            taken[e.peer, e.step, e.index] = e.t
        elif isinstance(e, MicrobatchServed) and (e.peer, e.step, e.index) in taken and e.t < before:
            times[e.peer].append(e.t - taken[e.peer, e.step, e.index])
    return [t for own in times.values() for t in own[1:]]


def p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


@dataclass
class Deaths:
    """Kills every peer but one of each stage, one after the other, ``every_s`` apart."""

    victims: list[str]
    every_s: float
    times: list[tuple[float, str]] = field(default_factory=list)
    _next: float = math.inf

    def watch(self, fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 1:
            self._next = event.t + 0.5 * self.every_s

    def tick(self, fleet: LocalFleet) -> None:
        if len(self.times) < len(self.victims) and time.time() >= self._next:
            victim = self.victims[len(self.times)]
            os.killpg(fleet.pid(victim), signal.SIGKILL)
            self.times.append((time.time(), victim))
            self._next += self.every_s


BATCH, DYING = 48, ["peer-4", "peer-1", "peer-5", "peer-2"]
BETWEEN = {30.0: 25, 13.0: 14}
"""Seconds between two deaths: steps of the run."""
SIZES = [(3, 3), (3, 2), (2, 2), (2, 1), (1, 1)]
"""Of the fleet, on its way from 3 + 3 to 1 + 1."""


def undisturbed_s(keep: Path | None) -> dict[tuple[int, int], float]:
    """What a step takes fleets of ``SIZES`` in which nobody dies [s]: a median, without the first."""
    taken = {}
    for size in SIZES:
        stages = tuple(s for s, peers in enumerate(size) for _ in range(peers))
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            config = fleet_config(folder, len(stages), BATCH, 5, min(2, size[0]))
            kept = keep.with_name(f"undisturbed-{size[0]}-{size[1]}") if keep else folder / "run"
            events = run(config, kept, stages, Deaths([], math.inf))
        done = {e.step: e.t for e in events if isinstance(e, StepDone)}
        taken[size] = statistics.median(done[s] - done[s - 1] for s in range(2, 6))
    return taken


def busy_case(every_s: float, step_s: dict[tuple[int, int], float], keep: Path | None) -> dict[str, Any]:
    """3 + 3 peers, saturated, become 1 + 1, a death every ``every_s``: throughput from the end of step 1 on, over what
    those that live could do by their declared service times, and over what fleets of as many do that nobody leaves
    (``step_s``)."""
    stages, steps = (0, 0, 0, 1, 1, 1), BETWEEN[every_s]
    deaths = Deaths(DYING, every_s)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = fleet_config(folder, 6, BATCH, steps, 2)
        events = run(config, keep or folder / "run", stages, deaths)
    done = {e.step: e.t for e in events if isinstance(e, StepDone)}
    begin, end = done[1], done[steps]
    stage_of = {f"peer-{k}": s for k, s in enumerate(stages)}
    nominal, undisturbed, t = 0.0, 0.0, begin
    alive = [stages.count(0), stages.count(1)]
    for at, victim in [*sorted(deaths.times), (end, "")]:
        nominal += (min(at, end) - t) * min(alive) / SERVICE_S
        undisturbed += (min(at, end) - t) * BATCH / step_s[alive[0], alive[1]]
        t = min(at, end)
        if victim:
            alive[stage_of[victim]] -= 1
    rows = [loss(events, at, victim, stage_of[victim]) for at, victim in deaths.times]
    return {
        "of_nominal": BATCH * (steps - 1) / nominal,
        "of_undisturbed": BATCH * (steps - 1) / undisturbed,
        "killed": len(deaths.times),
        "last_kill_share": (deaths.times[-1][0] - begin) / (end - begin),
        "rows": rows,
        "step_s": [done[s] - done[s - 1] for s in range(2, steps + 1)],
    }


def loss(events: list[Event], at: float, victim: str, stage: int) -> dict[str, float]:
    """What a kill cost: until the stage's next microbatch, and until the last of those the victim held was served by
    another."""
    held: dict[tuple[int, int], float] = {}
    served: dict[tuple[int, int], list[float]] = defaultdict(list)
    following = math.inf
    for e in events:
        if isinstance(e, MicrobatchTaken) and e.peer == victim:
            held[e.step, e.index] = e.t
        elif isinstance(e, MicrobatchServed) and e.stage == stage:
            if e.peer == victim:
                held.pop((e.step, e.index), None)
            else:
                served[e.step, e.index].append(e.t)
                following = min(following, e.t - at) if e.t > at else following
    redone = [min((t for t in served[key] if t > at), default=math.nan) - at for key in held]
    return {"held": len(held), "next_s": following, "redone_s": max(redone, default=0.0)}


def case(name: str, work: Callable[[Path | None], Any], runs: int, keep: Path | None) -> list[Any]:
    rows = []
    for k in range(runs):
        rows.append(work(keep and keep / f"{name}-{k}"))
        print(name, rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("SIGKILL", "SIGSTOP", "busy"))
    parser.add_argument("--keep", type=Path, help="folder for the runs' events")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    table = Table(
        "fault", "stage", "faults", "median [s]", "worst [s]", "target (median) [s]", title="to the next microbatch"
    )
    for kind in (signal.SIGKILL, signal.SIGSTOP):
        if options.only not in (None, kind.name):
            continue
        for stage in (1, 0):
            name = f"{kind.name}-stage{stage}"
            runs = case(name, lambda keep, s=stage, k=kind: idle_case(s, k, keep), options.runs, options.keep)
            rows = [row for rows in runs for row in rows]
            kill = statistics.median(r["service_s"] for r in rows) + 0.5
            stop = 3 * statistics.median(r["service_p95_s"] for r in rows) + 1.0
            times = [r["next_s"] for r in rows]
            target = kill if kind == signal.SIGKILL else stop
            results[name] = {
                "median_s": statistics.median(times),
                "worst_s": max(times),
                "target_s": target,
                "rows": rows,
            }
            table.add_row(
                kind.name,
                str(stage),
                str(len(rows)),
                f"{statistics.median(times):.2f}",
                f"{max(times):.2f}",
                f"{target:.2f}",
            )
    if table.rows:
        Console().print(table)
    if options.only in (None, "busy"):
        step_s = undisturbed_s(options.keep)
        results["undisturbed_s"] = {f"{a}+{b}": s for (a, b), s in step_s.items()}
        for every_s in BETWEEN:
            runs = case(
                f"busy-{every_s:.0f}", lambda keep, s=every_s: busy_case(s, step_s, keep), options.runs, options.keep
            )
            busy = {kind: statistics.median(r[kind] for r in runs) for kind in ("of_nominal", "of_undisturbed")}
            results[f"busy-{every_s:.0f}"] = {**busy, "runs": runs}
            Console().print(
                f"3 + 3 peers down to 1 + 1, a death every {every_s:.0f} s: {busy['of_undisturbed']:.3f} of what fleets of as many do "
                f"that nobody leaves (>= 0.9), {busy['of_nominal']:.3f} of what the living could do without fill, drain and averaging"
            )
    path = HERE / "results.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
