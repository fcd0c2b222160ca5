"""What do faults cost that nobody reports? See README.md. ``python run.py [--case NAME] [--keep FOLDER]`` as root."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    MicrobatchRerouted,
    PeerDown,
    StepApplied,
    StepDone,
)
from muletrain.runs.assemble import RunFacts
from muletrain.runs.fleet import LocalFleet

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1])]
from tests.fleet_run import run_fleet  # noqa: E402
from tests.namespaces import Switch  # noqa: E402

SMALL_PACKET = 600
"""Bytes; what is longer does not pass a black hole. Probes and seals fit."""
COMMON = [
    "model.dropout=0.0",
    "train.microbatch=1",
    "compute.precision=fp32",
    "compute.threads=1",
    "fleet.rebalance=off",
    "optimizer.lr=1e-5",
    "network.listen=0.0.0.0",
]


@dataclass(frozen=True)
class Case:
    """``fault`` is entered when step ``begin`` is done, and left when step ``end`` is."""

    title: str
    settings: tuple[str, ...]
    stages: tuple[int, ...]
    fault: Callable[[Switch | None, Path], AbstractContextManager[None]] = lambda switch, folder: nullcontext()
    begin: int = 0
    end: int = 0
    apart: bool = False
    """Each peer in a network namespace of its own."""
    disk_mb: int = 0
    """Checkpoints go to a file system of their own, of this size."""


@contextmanager
def black_hole(switch: Switch | None, folder: Path) -> Iterator[None]:
    """Nothing long passes from peer-2 to peer-4, two replicas of a stage, as behind a router with a smaller MTU that
    says nothing."""
    assert switch is not None
    nft = [*switch.inside("peer-4"), "nft"]
    rule = f"ip saddr {switch.address('peer-2')} meta length > {SMALL_PACKET} drop"
    for command in (
        "add table ip hole",
        "add chain ip hole in { type filter hook input priority 0; }",
        f"add rule ip hole in {rule}",
    ):
        subprocess.run([*nft, command], check=True)
    try:
        yield
    finally:
        subprocess.run([*nft, "delete table ip hole"], check=False)


@contextmanager
def frozen_disk(switch: Switch | None, folder: Path) -> Iterator[None]:
    """Writes to the checkpoints' file system do not return."""
    subprocess.run(["fsfreeze", "-f", str(folder / "disk")], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(folder / "disk")], check=False)


@contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[None]:
    image, mount = folder / "image", folder / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(mount)], check=True)
        image.unlink()


PACED = (
    "fleet.stages=2",
    "fleet.peers=6",
    "model.heads=8",
    "model.width=384",
    "model.layers=4",
    "model.context=32",
    "train.batch=24",
)
CASES = {
    "large_stage": Case(
        "a stage of 150 M parameters through ten checkpoints",
        (
            "fleet.stages=1",
            "fleet.peers=2",
            "model.heads=16",
            "model.width=2048",
            "model.layers=3",
            "model.context=16",
            "train.batch=4",
            "train.steps=20",
            "checkpoint.every=2",
            "checkpoint.keep=2",
        ),
        (0, 0),
    ),
    "black_hole": Case(
        "between two of three replicas nothing long passes, in one direction, for ten steps",
        (*PACED, "train.steps=26", "checkpoint.every=0"),
        (0, 1, 0, 1, 0, 1),
        black_hole,
        8,
        18,
        apart=True,
    ),
    "frozen_disk": Case(
        "the disk that checkpoints go to stands still for ten steps",
        (*PACED, "train.steps=26", "checkpoint.every=2"),
        (0, 1, 0, 1, 0, 1),
        frozen_disk,
        8,
        18,
        apart=True,
        disk_mb=2048,
    ),
}


@dataclass
class Watched:
    case: Case
    hurt: Callable[[], AbstractContextManager[None]]
    ends: dict[int, float] = field(default_factory=dict)
    fault: AbstractContextManager[None] | None = None
    when: list[float] = field(default_factory=list)
    """When the fault began and ended."""

    def watch(self, fleet: LocalFleet, event: Event) -> None:
        if not isinstance(event, StepDone) or event.step in self.ends:
            return
        self.ends[event.step] = event.t
        print(f"step {event.step}: {event.duration_s:.1f} s", file=sys.stderr, flush=True)
        if event.step == self.case.begin:
            self.fault = self.hurt()
            self.fault.__enter__()
            self.when.append(event.t)
        elif event.step == self.case.end:
            self.heal()
            self.when.append(event.t)

    def heal(self) -> None:
        if self.fault is not None:
            self.fault.__exit__(None, None, None)
            self.fault = None


def play(case: Case, folder: Path) -> dict[str, Any]:
    place = {"place": str(folder / "disk")} if case.disk_mb else {}
    profile = folder / "fleet.toml"
    profile.write_text(
        f'[[machines]]\nname = "home"\ncount = {len(case.stages)}\n[pacing]\nforward_ms = 60\nbackward_ms = 120\n'
    )
    paced = (f"fleet.profile={profile}",) if case.apart else ()
    config = load_config(None, [*COMMON, *case.settings, *(f"checkpoint.{k}={v}" for k, v in place.items()), *paced])
    TokenCache.build(config.data, config.model.vocab)
    names = [f"peer-{k}" for k in range(len(case.stages))]
    with (
        disk(folder, case.disk_mb) if case.disk_mb else nullcontext(),
        Switch(names) if case.apart else nullcontext() as switch,
    ):
        watched = Watched(case, lambda: case.fault(switch, folder))
        try:
            events = run_fleet(
                config,
                folder / "run",
                stages=case.stages,
                watch=watched.watch,
                timeout_s=1500.0,
                wrap=(lambda name: []) if switch is None else switch.inside,
                each=lambda name: place,
            )
        finally:
            watched.heal()
    return measured(case, events, watched, RunFacts.of(config))


def measured(case: Case, events: list[Event], watched: Watched, facts: RunFacts) -> dict[str, Any]:
    ends = watched.ends
    took = {s: ends[s] - ends[s - 1] for s in sorted(ends) if s - 1 in ends and s > 2}
    hurt = {s: t for s, t in took.items() if case.begin < s <= case.end}
    sound = [t for s, t in took.items() if s not in hurt and s != case.end + 1]
    undisturbed_s = statistics.median(sound)
    during = [e for e in events if watched.when and e.t >= watched.when[0]]
    return {
        "title": case.title,
        "params_a_stage": facts.spec.stage_params(facts.cut, 0),
        "steps": len(ends),
        "undisturbed_s": round(undisturbed_s, 2),
        "hurt_over_undisturbed": [round(t / undisturbed_s, 2) for t in hurt.values()],
        "checkpoints": sorted({e.step for e in events if isinstance(e, CheckpointWritten)}),
        "left_out": sorted({(e.step, e.reason) for e in events if isinstance(e, CheckpointFailed)}),
        "suspected": sum(isinstance(e, PeerDown) for e in during),
        "rerouted": sum(isinstance(e, MicrobatchRerouted) for e in during),
        "recomputed": sum(e.recomputed for e in during if isinstance(e, StepApplied)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    arguments = parser.parse_args()
    results = HERE / "results.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    for name in arguments.case or CASES:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            folder = (arguments.keep or Path(temporary)) / name
            folder.mkdir(parents=True)
            found[name] = play(CASES[name], folder)
        results.write_text(json.dumps(found, indent=1) + "\n")
        Console().print_json(data=found[name])


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
