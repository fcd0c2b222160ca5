"""What does the dashboard cost? CPU with and without viewers, the speed of a run beside it, and the time to read a day.

python benchmarks/dashboard/run.py            # about 16 minutes; --quick: three
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muletrain import events as ev
from tests.played_events import BEGIN_S, played, written

HERE = Path(__file__).parent
MULETRAIN = (sys.executable, "-m", "muletrain")
STEPS_PER_S = 4.0
"""Of the run that is watched: as many as the default run does on a machine with few cores."""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU time of a process, children aside [s]."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def board(folder: Path) -> Iterator[tuple[int, str]]:
    """A dashboard of ``folder``: process id and address."""
    process = subprocess.Popen([*MULETRAIN, "dashboard", folder, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield process.pid, re.sub(r"\?.*", "", line.split()[1])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@contextmanager
def writer(folder: Path, peers: int, stages: int) -> Iterator[None]:
    """Adds the events of a step to the files, ``STEPS_PER_S`` times a second."""
    over = threading.Event()
    shift = time.time() - BEGIN_S

    def write() -> None:
        files = dict[str, Any]()
        step = 0
        for event in played(peers, stages, 100_000, step_s=1 / STEPS_PER_S):
            if over.is_set():
                break
            if event.peer not in files:
                files[event.peer] = (folder / f"{event.peer}.jsonl").open("a", buffering=1)
            files[event.peer].write(dataclasses.replace(event, t=event.t + shift).to_json() + "\n")
            if isinstance(event, ev.StepDone):
                step += 1
                over.wait(1 / STEPS_PER_S)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def watch(url: str, over: threading.Event) -> None:
    """A viewer: the state, then all changes."""
    with urllib.request.urlopen(f"{url}api/state") as answer:
        first = json.load(answer)["id"]
    with urllib.request.urlopen(f"{url}api/events?after={first}") as answer:
        while not over.is_set() and answer.readline():
            pass


def cpu(peers: int, stages: int, viewers: int, seconds: float) -> float:
    """Share of a core that the dashboard takes."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "run"
        folder.mkdir()
        (folder / "config.toml").write_text("[train]\nsteps = 1\n")
        over = threading.Event()
        with writer(folder, peers, stages):
            time.sleep(2)
            with board(folder) as (pid, url):
                time.sleep(5)
                threads = [threading.Thread(target=watch, args=(url, over), daemon=True) for _ in range(viewers)]
                for thread in threads:
                    thread.start()
                time.sleep(3)
                before, begun = cpu_s(pid), time.monotonic()
                time.sleep(seconds)
                share = (cpu_s(pid) - before) / (time.monotonic() - begun)
                over.set()
    return share


def descendants(pid: int) -> list[int]:
    """A process and all that it started."""
    parent_of = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent_of[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parent_of.items() if parent == one]
    return found


def all_cpu_s(pid: int) -> float:
    """CPU time of a process and all that it started [s]."""
    total = 0.0
    for one in descendants(pid):
        try:
            total += cpu_s(one)
        except OSError:
            continue
    return total


def speed(steps: int, *more: str, viewers: int = 0) -> dict[str, float]:
    """Of the default run, its first ten steps aside: tokens a second; CPU of a step, of the command and of all its
    processes [s]."""
    with tempfile.TemporaryDirectory() as work:
        process = subprocess.Popen(
            [*MULETRAIN, "run", "--json", "--set", "checkpoint.every=0", *more],
            cwd=work,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        done, over, own, whole = list[dict[str, Any]](), threading.Event(), 0.0, 0.0
        for line in process.stdout:
            event = json.loads(line)
            if event["kind"] == "step_done":
                done.append(event)
                if viewers and len(done) == 5:
                    port = more[more.index("--dashboard") + 1]
                    threading.Thread(target=watch, args=(f"http://127.0.0.1:{port}/", over), daemon=True).start()
                if len(done) == 10:
                    own, whole = cpu_s(process.pid), all_cpu_s(process.pid)
                if len(done) >= steps:
                    own, whole = cpu_s(process.pid) - own, all_cpu_s(process.pid) - whole
                    break
        over.set()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(1.5)
        process.kill() if process.poll() is None else None
        process.wait(30)
    count = len(done) - 10
    return {
        "tokens_per_s": sum(e["tokens"] for e in done[10:]) / (done[-1]["t"] - done[9]["t"]),
        "command_cpu_s": own / count,
        "all_cpu_s": whole / count,
    }


def day() -> dict[str, float]:
    """Seconds of CPU and of wall time to read 24 hours of events."""
    from muletrain.dashboard.sources import FolderSource

    with tempfile.TemporaryDirectory() as work:
        folder = written(played(8, 4, 8640, losses=40, checkpoint=200), Path(work) / "day")
        found = []
        for _ in range(3):
            source = FolderSource(folder, lambda: False)
            source.page.loading = True
            source.start()
            begun, before = time.monotonic(), time.process_time()
            while source.page.loading:
                time.sleep(0.01)
            found.append((time.process_time() - before, time.monotonic() - begun))
            source.stop()
        events = source.page.version
    return {"events": events, "cpu_s": min(f[0] for f in found), "wall_s": min(f[1] for f in found)}


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--quick", action="store_true")
    quick = asked.parse_args().quick
    seconds, steps, repeats = (10.0, 30, 1) if quick else (30.0, 60, 5)
    rows = [
        {"peers": peers, "stages": stages, "viewers": viewers, "core": cpu(peers, stages, viewers, seconds)}
        for peers, stages in ((4, 2), (40, 8))
        for viewers in (0, 1, 4)
    ]
    print(*rows, sep="\n", flush=True)
    speeds: dict[str, list[dict[str, float]]] = {"without": [], "no viewer": [], "one viewer": []}
    for k in range(repeats):
        port = str(18265 + k)
        ways: list[tuple[str, tuple[str, ...]]] = [(kind, ("--dashboard", port)) for kind in speeds]
        ways[0] = ("without", ())
        for kind, more in reversed(ways) if k % 2 else ways:
            speeds[kind].append(speed(steps, *more, viewers=int(kind == "one viewer")))
        print(speeds, flush=True)
    medians = {
        kind: {key: statistics.median(f[key] for f in found) for key in found[0]} for kind, found in speeds.items()
    }
    about = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    result = {"cpu": rows, "speeds": speeds, "medians": medians, "day": day(), "about": about}
    print(result)
    if not quick:
        (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
