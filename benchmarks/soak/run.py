"""Does a fleet under churn stay flat: memory, open files, sockets, threads? See README.md.

``python run.py [--minutes 60] [--seed 0] [--every 10]`` runs ``muletrain run --chaos PLAN`` and looks at its processes
from outside."""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import theilslopes

from muletrain.events import EventTail, FaultInjected, MemberAdmitted, Note, PeerDown, StepDone

BY_CTRL_C = 130
"""The exit code of a command that Ctrl-C ended in order."""
HERE = Path(__file__).parent
STAGES, PEERS = 3, 6
PACING = "[pacing]\nforward_ms = 60.0\nbackward_ms = 120.0\n"
SETTINGS = [
    "model.width=32",
    "model.heads=2",
    "model.layers=3",
    "model.context=16",
    "model.vocab=512",
    "train.microbatch=1",
    "train.batch=8",
    f"fleet.stages={STAGES}",
    f"fleet.peers={PEERS}",
    "fleet.trainers=2",
    "fleet.rebalance_period=20",
    "train.steps=1000000",
    "compute.precision=fp32",
    "compute.threads=1",
    "checkpoint.every=20",
]
BETWEEN_S = {"join": 45.0, "freeze": 40.0, "move": 75.0, "corrupt": 120.0, "partition": 300.0}
"""Mean times between faults of a kind; every newcomer is killed, too, some time after it came."""
WARM = 0.25
"""Share of the time before processes are held to be warm."""
LONG = 0.8
"""Share of the time that a process must have lived to be judged."""


@dataclass(frozen=True)
class Limit:
    """Growth in an hour that still counts as flat: ``share`` of the median, or ``least``, whichever is more."""

    share: float
    least: float


LIMITS = {"rss_mib": Limit(0.03, 8.0), "files": Limit(0.0, 3.0), "sockets": Limit(0.0, 3.0), "threads": Limit(0.0, 1.0)}


@dataclass(frozen=True)
class Sample:
    """One process at one moment. ``role``: 'cli', a peer's name, or the same with '/p2pd' for its network daemon."""

    t_s: float
    role: str
    pid: int
    rss_mib: float
    files: int
    sockets: int
    threads: int
    cpu_s: float


def churn(seed: int, seconds: float) -> str:
    """A plan for ``--chaos``."""
    rng = random.Random(f"soak/{seed}")
    faults: list[tuple[float, str]] = []
    for kind, mean in BETWEEN_S.items():
        at = rng.expovariate(1 / mean)
        while at < seconds - 90:
            faults += one(rng, kind, at)
            at += rng.expovariate(1 / mean)
    return "; ".join(text for at, text in sorted(faults) if at < seconds - 10)


def one(rng: random.Random, kind: str, at: float) -> list[tuple[float, str]]:
    when = f"@{at:.1f}s"
    match kind:
        case "join":
            later = at + 20 + rng.expovariate(1 / 60)
            return [(at, f"join{when}"), (later, f"kill newcomer@{later:.1f}s")]
        case "move":
            return [(at, f"move any to stage{rng.randrange(STAGES)}{when}")]
        case "corrupt":
            return [(at, f"corrupt newcomer{when}")]  # it may be expelled for that
        case "partition":
            return [(at, f"partition {PEERS - 1}|1{when} for {rng.uniform(3, 12):.1f}s")]
        case _:
            return [(at, f"freeze any{when} for {rng.uniform(1, 10):.1f}s")]


# Looking at processes -----------------------------------------------------------------------------------------------------------------


def family(root: int) -> dict[int, int]:
    """``root`` and all its descendants: parent by pid."""
    children = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                children[int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])].append(int(entry))
            except OSError:
                continue
    found = {root: 0}
    queue = [root]
    for pid in queue:
        for child in children[pid]:
            found[child] = pid
            queue.append(child)
    return found


def role(pid: int, parents: dict[int, int], root: int) -> str:
    """Raises OSError where the process has gone."""
    if pid == root:
        return "cli"
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    if b"muletrain.runs.worker" in command:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    if b"p2pd" in command:
        return f"{role(parents[pid], parents, root)}/p2pd"
    return "other"


def look(t_s: float, pid: int, role_: str) -> Sample:
    """Raises OSError where the process has gone."""
    proc = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
    if "VmRSS" not in status:
        raise ProcessLookupError(f"{pid} has ended")
    links = []
    for file in os.listdir(proc / "fd"):
        try:
            links.append(os.readlink(proc / "fd" / file))
        except FileNotFoundError:
            continue  # closed meanwhile
    times = (proc / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return Sample(
        t_s=round(t_s, 1),
        role=role_,
        pid=pid,
        rss_mib=round(int(status["VmRSS"].split()[0]) / 1024, 2),
        files=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        threads=int(status["Threads"]),
        cpu_s=sum(map(int, times)) / os.sysconf("SC_CLK_TCK"),
    )


def look_at_all(t_s: float, root: int) -> list[Sample]:
    parents, samples = family(root), []
    for pid in parents:
        try:
            samples.append(look(t_s, pid, role(pid, parents, root)))
        except OSError:
            continue
    return samples


# The run --------------------------------------------------------------------------------------------------------------------------------


def soak(folder: Path, minutes: float, seed: int, every_s: float) -> tuple[list[Sample], int]:
    """Samples, and the exit code of ``muletrain run``."""
    profile = folder / "fleet.toml"
    profile.write_text(f'[[machines]]\nname = "home"\ncount = {PEERS}\n{PACING}')
    settings = [
        *SETTINGS,
        f"fleet.profile={profile}",
        f"train.time_limit={60 * minutes}",
        f"data.cache={folder / 'cache'}",
    ]
    command = [
        sys.executable,
        "-m",
        "muletrain.cli.main",
        "run",
        "--chaos",
        churn(seed, 60 * minutes),
        "--seed",
        str(seed),
    ]
    command += [word for s in settings for word in ("--set", s)]
    samples: list[Sample] = []
    with (folder / "out.txt").open("w") as out, (folder / "samples.csv").open("w") as table:
        rows = csv.DictWriter(table, list(Sample.__dataclass_fields__))
        rows.writeheader()
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        begin = time.monotonic()
        try:
            while process.poll() is None and time.monotonic() - begin < 60 * minutes + 300:
                samples += (now := look_at_all(time.monotonic() - begin, process.pid))
                rows.writerows(map(asdict, now))
                table.flush()
                time.sleep(every_s)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            code = ended(process)
    return samples, code


def ended(process: subprocess.Popen[bytes], patience_s: float = 300.0) -> int:
    """Its exit code; killed after ``patience_s``."""
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()  # its peers go with it
        return process.wait()


def histories(samples: list[Sample]) -> dict[str, list[Sample]]:
    """Of the processes that lived long enough, after they got warm, as long as the run trained."""
    length = max(s.t_s for s in samples if s.role == "peer-0")
    samples = [s for s in samples if s.t_s <= length]
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.role, sample.pid].append(sample)
    return {
        role_: [s for s in life if s.t_s - life[0].t_s > WARM * length]
        for (role_, _), life in sorted(lives.items())
        if life[-1].t_s - life[0].t_s > LONG * length
    }


def judge(samples: list[Sample]) -> dict[str, dict[str, dict[str, float | bool]]]:
    """Of each long life and each quantity: the median, the growth in an hour (Theil-Sen), and whether that is flat."""
    verdicts: dict[str, dict[str, dict[str, float | bool]]] = {}
    for role_, life in histories(samples).items():
        verdicts[role_] = {}
        for name, limit in LIMITS.items():
            values = np.array([getattr(s, name) for s in life])
            growth = 3600 * float(theilslopes(values, [s.t_s for s in life]).slope)
            median = float(np.median(values))
            flat = growth <= max(limit.share * median, limit.least)
            verdicts[role_][name] = {"median": median, "growth_per_h": round(growth, 2), "flat": bool(flat)}
    return verdicts


def counted(folder: Path) -> dict[str, object]:
    """What the run says of itself."""
    (run,) = (folder / "runs").iterdir()
    events = EventTail(run).poll()
    faults: dict[str, int] = defaultdict(int)
    for e in events:
        if isinstance(e, FaultInjected):
            faults[e.what] += 1
    steps = [e.step for e in events if isinstance(e, StepDone)]
    return {
        "steps": max(steps, default=0),
        "faults": dict(faults),
        "admitted": sum(isinstance(e, MemberAdmitted) and e.peer == "peer-0" for e in events),
        "suspected": sum(isinstance(e, PeerDown) and e.peer == "peer-0" for e in events),
        "errors": [f"{e.peer}: {e.message}" for e in events if isinstance(e, Note) and e.level == "error"],
    }


def show(verdicts: dict[str, dict[str, dict[str, float | bool]]]) -> None:
    table = Table(title="median, and growth in an hour")
    for column in ("process", *LIMITS):
        table.add_column(column)
    for role_, of in verdicts.items():
        cells = [f"{v['median']:.0f}  {v['growth_per_h']:+.1f}" for v in of.values()]
        marked = [c if v["flat"] else f"[red]{c} GROWS[/]" for c, v in zip(cells, of.values(), strict=True)]
        table.add_row(role_, *marked)
    Console().print(table)


def draw(samples: list[Sample], path: Path) -> None:
    """Every process' life, a panel a quantity, those that lived long in colour."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.role, sample.pid].append(sample)
    long = histories(samples)
    figure, axes = plt.subplots(len(LIMITS), 2, figsize=(12, 12), sharex=True, layout="constrained")
    for row, name in zip(axes, LIMITS, strict=True):
        for (role_, _), life in lives.items():
            axis = row[int(role_.endswith("p2pd"))]
            style = {"label": role_, "lw": 1.2} if role_ in long else {"color": "0.8", "lw": 0.6}
            axis.plot([s.t_s / 60 for s in life], [getattr(s, name) for s in life], **style)
        row[0].set_ylabel(name)
    axes[0][0].set_title("muletrain's processes")
    axes[0][1].set_title("their network daemons")
    axes[0][0].legend(fontsize="small")
    for axis in axes[-1]:
        axis.set_xlabel("minutes (grey: lived shortly)")
    figure.savefig(path, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--folder", type=Path, default=None, help="where the run goes; default: soak-SEED here")
    given = parser.parse_args()
    folder = (given.folder or HERE / f"soak-{given.seed}").absolute()
    folder.mkdir(parents=True)
    samples, code = soak(folder, given.minutes, given.seed, given.every)
    verdicts = judge(samples)
    facts = counted(folder)
    flat = all(v["flat"] for of in verdicts.values() for v in of.values())
    result = {
        "minutes": given.minutes,
        "seed": given.seed,
        "exit_code": code,
        "flat": flat,
        **facts,
        "limits": {k: asdict(v) for k, v in LIMITS.items()},
        "processes": verdicts,
    }
    (folder / "results.json").write_text(json.dumps(result, indent=1))
    draw(samples, folder / "soak.png")
    show(verdicts)
    print(json.dumps(facts))
    print("flat" if flat and code == BY_CTRL_C else f"NOT FLAT, or ended with {code}; see {folder}")
    return 0 if flat and code == BY_CTRL_C else 1


if __name__ == "__main__":
    sys.exit(main())
