"""Do real peers finish their steps on full links with deep queues? See README.md. ``python run.py --case NAME [--keep
FOLDER]`` as root."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.events import (
    Event,
    EventTail,
    MicrobatchRerouted,
    MicrobatchServed,
    Note,
    PeerDown,
    PeerJoined,
    SlotWorked,
    StepApplied,
    StepDone,
)
from muletrain.runs.assemble import RunFacts
from muletrain.runs.fleet import LocalFleet

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
from timed import Call  # noqa: E402

from tests.fleet_run import run_fleet  # noqa: E402
from tests.namespaces import Switch, Traffic  # noqa: E402

MBPS = 1e6 / 8
SAMPLE_S = 0.5
BYTES = {"fp16": 2, "int8": 1}
FAULT_STEP, FAULT_AFTER_S = 3, 3.0
"""The step (from 1) in whose averaging a peer is hit, and how long after its stage served the last microbatch."""
VICTIM, WATCHED_S = "peer-1", 45.0
"""How long after the fault false suspicions are looked for."""
COMMON = [
    "model.heads=8",
    "model.dropout=0.0",
    "train.microbatch=1",
    "compute.precision=fp32",
    "compute.threads=1",
    "checkpoint.every=0",
    "fleet.rebalance=off",
    "fleet.trace=true",
    "network.listen=0.0.0.0",
    "optimizer.lr=1e-5",
]


@dataclass(frozen=True)
class Case:
    """``stages`` x ``replicas`` machines, each behind a router with these rates [Mb/s] and so much of a queue in each
    direction."""

    title: str
    stages: int = 2
    replicas: int = 3
    up: float = 20.0
    down: float = 20.0
    queue_s: float = 2.0
    width: int = 640
    layers: int = 6
    context: int = 32
    gradients: str = "int8"
    microbatches: int = 24
    forward_ms: float = 250.0
    steps: int = 6
    """After the first, in which everything is done for the first time."""
    fault: signal.Signals | None = None
    timeout_s: float = 900.0

    @property
    def peers(self) -> int:
        return self.stages * self.replicas

    @property
    def shared_mbps(self) -> float:
        """What a replica sends it also receives."""
        return min(self.up, self.down)

    def config(self, folder: Path) -> RunConfig:
        profile = folder / "fleet.toml"
        pacing = f"[pacing]\nforward_ms = {self.forward_ms}\nbackward_ms = {2 * self.forward_ms}\n"
        profile.write_text(f'[[machines]]\nname = "home"\ncount = {self.peers}\n{pacing}')
        sizes = [
            f"model.width={self.width}",
            f"model.layers={self.layers}",
            f"model.context={self.context}",
            f"wire.gradients={self.gradients}",
            f"train.batch={self.microbatches}",
            f"train.steps={self.steps + 2}",
            f"fleet.stages={self.stages}",
            f"fleet.peers={self.peers}",
            f"fleet.profile={profile}",
        ]
        return load_config(None, [*COMMON, *sizes])


CASES = {
    "home": Case("six peers at home: 20 Mb/s both ways"),
    "large": Case(
        "six peers of large stages: 100 Mb/s both ways",
        up=100.0,
        down=100.0,
        width=1344,
        layers=6,
        context=16,
        gradients="fp16",
        microbatches=9,
        forward_ms=1000.0,
        steps=10,
        timeout_s=1500.0,
    ),
    "asymmetric": Case("six peers: 10 Mb/s up, 50 down", up=10.0, down=50.0),
    "incast": Case(
        "nine peers of one stage, each receives from eight: 100 Mb/s up, 20 down",
        stages=1,
        replicas=9,
        up=100.0,
        width=384,
        layers=4,
        microbatches=27,
    ),
    "die": Case("a peer of 'home' is killed while it averages", fault=signal.SIGKILL, steps=4),
    "freeze": Case("a peer of 'home' is frozen while it averages", fault=signal.SIGSTOP, steps=4),
}


@dataclass
class Sample:
    t: float
    traffic: dict[str, Traffic]
    used_bytes: int
    """Of the machine's memory, beyond what was used before."""
    busy_s: float
    """CPU time of the whole machine, so far,"""
    own_s: float
    """and of the fleet's processes and their daemons."""


@dataclass
class Fleet:
    """Watches a fleet of ``case``: samples its links, hits its victim, and ends it after its last step."""

    case: Case
    switch: Switch
    samples: list[Sample] = field(default_factory=list)
    ends: dict[int, Sample] = field(default_factory=dict)
    """Of each step."""
    fault: float | None = None
    lost: set[str] = field(default_factory=set)
    peak: dict[str, int] = field(default_factory=dict)
    """Resident memory of a peer's own process [bytes]."""
    _served: float | None = None
    _last: int = 0
    _free: int = field(default_factory=lambda: meminfo()["MemAvailable"])
    over: float | None = None
    """When it is to end, its last step done."""
    ended: bool = False
    _applied: dict[str, int] = field(default_factory=dict)

    def watch(self, fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone):
            self.ends[event.step] = self.sample(fleet)
            print(f"step {event.step}: {event.duration_s:.1f} s, loss {event.loss:.3f}", file=sys.stderr, flush=True)
            if event.step == self.case.steps + 1:
                self.over = time.time() + 3.0
        elif isinstance(event, MicrobatchServed) and event.step == FAULT_STEP - 1 and event.stage == 0:
            self._last += 1
            if self._last == self.case.microbatches:
                self._served = event.t
        elif isinstance(event, PeerDown) or (isinstance(event, Note) and event.level != "info"):
            print(f"  {event.t:.1f} {event.peer}: {event}", file=sys.stderr, flush=True)

    def tick(self, fleet: LocalFleet) -> None:
        now = time.time()
        if not self.samples or now > self.samples[-1].t + SAMPLE_S:
            self.samples.append(self.sample(fleet))
            for name in fleet.alive():
                self.peak[name] = max(self.peak.get(name, 0), resident(fleet.pid(name)))
        hit = self.case.fault is not None and self.fault is None and self._served is not None
        if hit and self._served is not None and now >= self._served + FAULT_AFTER_S:
            assert self.case.fault is not None
            self.lost.add(VICTIM)
            self.fault = time.time()
            fleet.signal(VICTIM, self.case.fault)
        if self.over is not None and now >= self.over and not self.ended:
            self.ended = True
            self.lost.update(f"peer-{k}" for k in range(self.case.peers))
            fleet.kill()

    def sample(self, fleet: LocalFleet) -> Sample:
        own = {fleet.pid(name) for name in fleet.alive()}
        return Sample(time.time(), self.switch.traffic(), self._free - meminfo()["MemAvailable"], busy_s(), cpu_s(own))


def meminfo() -> dict[str, int]:
    """[bytes]"""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {key[:-1]: 1024 * int(value) for key, value, *_ in lines}


def resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def busy_s() -> float:
    user, nice, system, _, _, irq, soft, *_ = (
        int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def cpu_s(groups: set[int]) -> float:
    """CPU time of the process groups of these leaders."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:13])) if int(fields[2]) in groups else 0
    return total / os.sysconf("SC_CLK_TCK")


def play(case: Case, folder: Path) -> dict[str, Any]:
    """A real fleet, to its end, and what was measured."""
    config = case.config(folder)
    TokenCache.build(config.data, config.model.vocab)  # once: not six times at once
    names = [f"peer-{k}" for k in range(case.peers)]
    stages = tuple(k % case.stages for k in range(case.peers))
    with Switch(names) as switch:
        for name in names:
            switch.shape(name, up_bytes_per_s=case.up * MBPS, down_bytes_per_s=case.down * MBPS, queue_s=case.queue_s)
        watched = Fleet(case, switch)
        failed = ""  # what gave up, in a run that did not come to its end
        try:
            run_fleet(
                config,
                folder / "run",
                stages=stages,
                watch=watched.watch,
                tick=watched.tick,
                lost=watched.lost,
                timeout_s=case.timeout_s,
                wrap=lambda name: [*switch.inside(name), sys.executable, str(HERE / "peer.py")],
            )
        except AssertionError as e:
            failed = "" if watched.ended else str(e)[:500]
    (folder / "samples.json").write_text(json.dumps([asdict(s) for s in watched.samples]))
    events = EventTail(folder / "run").poll()
    told = [
        e for e in events if (case.fault is None or e.peer != VICTIM) and (watched.over is None or e.t < watched.over)
    ]
    reported = [f"{e.peer}: {e.message}" for e in told if isinstance(e, Note) and e.level == "error"]
    failed = "; ".join([failed, *reported]).strip("; ")
    return {**measured(case, config, events, calls(folder / "run"), watched), "failed": failed}


def calls(folder: Path) -> dict[str, list[Call]]:
    """By caller's name."""
    return {
        path.stem: [Call(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}")]
        for path in sorted(folder.glob("*.calls"))
    }


# What is made of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """In which a stage averaged a step (from 1)."""

    step: int
    stage: int
    begin: float
    """The step's last microbatch was served, or the stage did not wait for that."""
    end: float
    """Its last replica had all of it."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def windows(events: Iterable[Event], steps: int) -> list[Window]:
    """Of the steps from the second on."""
    stage_of = {e.peer: e.stage for e in events if isinstance(e, StepApplied)}
    served: dict[int, float] = {}
    begun: dict[tuple[int, int], float] = {}
    reduced: dict[tuple[int, int], float] = {}
    for e in events:
        if isinstance(e, MicrobatchServed):
            served[e.step + 1] = e.t
        elif isinstance(e, SlotWorked) and e.slot == "average":
            key = e.step + 1, stage_of[e.peer]
            begun[key] = min(begun.get(key, e.t), e.t - e.seconds)
            reduced[key] = e.t
    found = (Window(*key, min(served[key[0]], begun[key]), reduced[key]) for key in sorted(reduced))
    return [w for w in found if 1 < w.step <= steps + 1]


def measured(
    case: Case, config: RunConfig, events: list[Event], timed: dict[str, list[Call]], watched: Fleet
) -> dict[str, Any]:
    events = [e for e in events if e.t <= (watched.samples[-1].t if watched.samples else 0)]
    names = {e.peer_id: e.name for e in events if isinstance(e, PeerJoined)}
    facts = RunFacts.of(config)
    params = [facts.spec.stage_params(facts.cut, s) for s in range(case.stages)]
    n = case.replicas
    averaged = [2 * (n - 1) / n * p * BYTES[case.gradients] for p in params]
    ends = {e.step: e.t for e in events if isinstance(e, StepDone)}
    took = [ends[s] - ends[s - 1] for s in sorted(ends) if s - 1 in ends]
    averagings = [w for w in windows(events, case.steps) if watched.fault is None or w.end < watched.fault]
    ratios = [w.seconds / (averaged[w.stage] / (case.shared_mbps * MBPS)) for w in averagings]
    suspected = [
        {
            "t": round(e.t - min(ends.values(), default=e.t), 2),
            "by": e.peer,
            "whom": names.get(e.peer_id, e.peer_id),
            "why": e.reason,
        }
        for e in events
        if isinstance(e, PeerDown)
    ]
    attempts: dict[tuple[int, int, str], int] = defaultdict(int)
    for e in events:
        if isinstance(e, Note) and e.message.startswith("averaging step") and ", attempt " in e.message:
            attempts[(*_numbers(e.message), "")] += 1
    tries: dict[int, int] = defaultdict(lambda: 1)
    for step, attempt, _ in attempts:
        tries[step] = max(tries[step], attempt + 2)
    applied = [e for e in events if isinstance(e, StepApplied)]
    own, needed = sent(applied, case, averaged)
    result: dict[str, Any] = {
        "title": case.title,
        "params_a_stage": params,
        "steps_s": took,
        "step_median_s": median(took),
        "step_worst_over_median": max(took, default=0) / (median(took) or 1),
        "averaging_s": [round(w.seconds, 2) for w in averagings],
        "averaging_ideal_s": [round(a / (case.shared_mbps * MBPS), 2) for a in averaged],
        "averaging_over_ideal": median(ratios),
        "averaging_over_ideal_worst": max(ratios, default=0),
        "attempts_a_step_worst": max(tries.values(), default=1),
        "failed_attempts": sum(attempts.values()),
        "suspected": suspected,
        "rerouted": sum(isinstance(e, MicrobatchRerouted) for e in events),
        "recomputed": sum(e.recomputed for e in applied),
        "sent_mb_a_step": _range([v / 1e6 for v in kernel_sent(case, watched)]),
        "counted_mb_a_step": _range([v / 1e6 for v in own]),
        "needed_mb_a_step": _range([v / 1e6 for v in needed]),
        "packets_lost": sum(t.lost for t in watched.samples[-1].traffic.values()) if watched.samples else 0,
        "queue_s": queues(case, watched.samples, averagings),
        "calls": longest(timed, averagings, watched.fault),
        "memory_gib": max((s.used_bytes for s in watched.samples), default=0) / 2**30,
        "peer_memory_gib": max(watched.peak.values(), default=0) / 2**30,
        "cores": cores(watched),
        "notes": _counted(e.message for e in events if isinstance(e, Note) and e.level != "info"),
    }
    if watched.fault is not None:
        result["fault"] = found(events, names, watched.fault)
    return result


def _numbers(message: str) -> tuple[int, int]:
    """'averaging step S, attempt A: ...'"""
    head = message.split(":", 1)[0].split()
    return int(head[2].rstrip(",")), int(head[4])


def sent(applied: list[StepApplied], case: Case, averaged: list[float]) -> tuple[list[float], list[float]]:
    """[bytes] of each peer and step from the second on: as its own count has it, and what would have done: its part of
    averaging, and the activations and gradients it sent."""
    own, needed = [], []
    for e in applied:
        if 1 < e.step <= case.steps + 1:
            classes = [kinds for kinds in e.sent.values()]
            activations = sum(kinds.get("activation", 0) + kinds.get("gradient", 0) for kinds in classes)
            own.append(float(sum(sum(kinds.values()) for kinds in classes)))
            needed.append(activations + averaged[e.stage])
    return own, needed


def kernel_sent(case: Case, watched: Fleet) -> list[float]:
    """Of each machine and step from the second on, behind its router."""
    steps = [(watched.ends[s - 1], watched.ends[s]) for s in sorted(watched.ends) if s - 1 in watched.ends]
    return [float(b.traffic[m].sent - a.traffic[m].sent) for a, b in steps for m in b.traffic]


def queues(case: Case, samples: list[Sample], averagings: list[Window]) -> dict[str, float]:
    """How long the longest queue was, while averaging [s]."""
    inside = [s for s in samples if any(w.begin <= s.t <= w.end for w in averagings)]
    up = [t.up_queue / (case.up * MBPS) for s in inside for t in s.traffic.values()]
    down = [t.down_queue / (case.down * MBPS) for s in inside for t in s.traffic.values()]
    return {
        "up_longest": max(up, default=0),
        "up_median": median(up),
        "down_longest": max(down, default=0),
        "down_median": median(down),
    }


def longest(timed: dict[str, list[Call]], averagings: list[Window], fault: float | None) -> dict[str, Any]:
    """Of the calls that were under way while a stage averaged. After a fault those to its victim are left out."""
    inside = [
        (call, name)
        for name, own in timed.items()
        for call in own
        if any(call.begin <= w.end and call.begin + call.seconds >= w.begin for w in averagings)
        and (fault is None or call.begin < fault)
    ]
    seconds = sorted(c.seconds for c, _ in inside)
    worst = max(inside, key=lambda c: c[0].seconds, default=None)
    return {
        "count": len(inside),
        "longest_s": seconds[-1] if seconds else 0,
        "p99_s": _share(seconds, 0.99),
        "median_s": _share(seconds, 0.5),
        "failed": sum(bool(c.failed) for c, _ in inside),
        "longest_own_s": max((c.seconds for c, _ in inside if c.method != "benchmark/echo"), default=0),
        "worst": None if worst is None else {**asdict(worst[0]), "by": worst[1]},
    }


def found(events: list[Event], names: dict[str, str], fault: float) -> dict[str, Any]:
    """When each living peer took the victim for dead [s], and whom else."""
    suspicions = [e for e in events if isinstance(e, PeerDown) and e.peer != VICTIM and e.t <= fault + WATCHED_S]
    first: dict[str, float] = {}
    for e in suspicions:
        if names[e.peer_id] == VICTIM and e.t >= fault:
            first.setdefault(e.peer, round(e.t - fault, 2))
    living = set(names.values()) - {VICTIM}
    ends = sorted(e.t for e in events if isinstance(e, StepDone) and e.t > fault)
    return {
        "found_s": first,
        "not_found_by": sorted(living - first.keys()),
        "slowest_s": max(first.values(), default=None),
        "others_suspected": [
            {"by": e.peer, "whom": names[e.peer_id], "why": e.reason} for e in suspicions if names[e.peer_id] != VICTIM
        ],
        "next_step_after_s": round(ends[0] - fault, 1) if ends else None,
    }


def cores(watched: Fleet) -> dict[str, float]:
    """Busy on average from the first step's end to the last one's: with the fleet, and with everything."""
    steps = sorted(watched.ends)
    if len(steps) < 2:
        return {}
    a, b = watched.ends[steps[0]], watched.ends[steps[-1]]
    return {"fleet": (b.own_s - a.own_s) / (b.t - a.t), "all": (b.busy_s - a.busy_s) / (b.t - a.t)}


def _counted(texts: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for text in texts:
        counts[text[:300]] += 1
    return dict(counts)


def median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _range(values: list[float]) -> list[float]:
    """Smallest, median, largest."""
    return [round(f(values), 2) for f in (min, statistics.median, max)] if values else []


def row(name: str, r: dict[str, Any]) -> str:
    s, c = r["sent_mb_a_step"], r["calls"]
    cells = (
        name,
        f"{r['step_median_s']:.1f} s, at most {r['step_worst_over_median']:.2f}x",
        f"{median(r['averaging_s']):.1f} s = {r['averaging_over_ideal']:.2f}x, at most {r['averaging_over_ideal_worst']:.2f}x",
        f"{s[0]:.0f} to {s[2]:.0f}, {r['needed_mb_a_step'][1]:.0f} would do" if s else "-",
        str(r["attempts_a_step_worst"]),
        str(len(r["suspected"])),
        f"{r['rerouted']} + {r['recomputed']}",
        f"{c['longest_s']:.2f} s (99 %: {c['p99_s']:.2f} s)",
    )
    return "| " + " | ".join(cells) + " |"


FAULT_HEADINGS = ("fault", "found after, by all others", "others suspected", "computed again", "the step ends after")
HEADINGS = (
    "case",
    "step, median and worst over it",
    "averaging, over bytes / bandwidth",
    "MB sent a step",
    "attempts",
    "suspected",
    "sent + computed again",
    "longest call while averaging",
)


def fault_row(name: str, r: dict[str, Any]) -> str:
    fault = r["fault"]
    times = sorted(fault["found_s"].values())
    missed = fault["not_found_by"]
    cells = (
        name,
        (f"{times[0]:.1f} to {times[-1]:.1f} s" if times else "-")
        + (f", not by {', '.join(missed)}" if missed else ""),
        str(len(fault["others_suspected"])),
        str(r["recomputed"]),
        f"{fault['next_step_after_s']} s",
    )
    return "| " + " | ".join(cells) + " |"


def show(results: dict[str, Any], console: Console) -> None:
    console.print("| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|", sep="\n")
    for name, r in results.items():
        if "fault" not in r:
            console.print(row(name, r))
    console.print("", "| " + " | ".join(FAULT_HEADINGS) + " |", "|---" * len(FAULT_HEADINGS) + "|", sep="\n")
    for name, r in results.items():
        if "fault" in r:
            console.print(fault_row(name, r))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument(
        "--as", dest="label", default="", help="a name for these results beside the others, e.g. 'before'"
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--keep", type=Path, help="folder for the runs' events")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was begun is ended
    path = HERE / "results.json"
    for name in options.case or CASES:
        case = CASES[name]
        if options.steps:
            case = Case(**{**vars(case), "steps": options.steps})
        with tempfile.TemporaryDirectory(prefix="mule-") as scratch:
            folder = Path(scratch) if options.keep is None else options.keep.resolve() / f"{name}-{options.label}"
            folder.mkdir(parents=True, exist_ok=True)
            result = play(case, folder)
        known = json.loads(path.read_text()) if path.exists() else {}
        known[f"{name}, {options.label}" if options.label else name] = result
        path.write_text(json.dumps(known, indent=1) + "\n")
        show(known, Console(width=240))
        if result["failed"]:
            raise SystemExit(f"{name}: {result['failed']}")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
