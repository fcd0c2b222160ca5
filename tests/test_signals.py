"""However a command is asked to end, a run ends in order, with a checkpoint, and the exit code tells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from muletrain.events import CheckpointWritten, read_events
from muletrain.runs import asked
from muletrain.runs.asked import Asked, Outlet
from tests.test_cli import SMALL, TWO, peers_left, start

LONG = [*SMALL, "--set", "train.steps=100000", "--set", "compute.threads=1"]
ALONE = ["--strategy", "swap"]
"""One peer, in the command's own process: it starts sooner."""


def trains(folder: Path) -> None:
    """Returns once a step is done."""
    deadline = time.monotonic() + 200
    while not any("step_done" in log.read_text() for log in folder.glob("runs/*/peer-0.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def checkpoints(folder: Path) -> list[int]:
    (log,) = folder.glob("runs/*/peer-0.jsonl")
    return [e.step for e in read_events(log) if isinstance(e, CheckpointWritten)]


def descendants(pid: int) -> list[int]:
    """The process and all below it, its peers' daemons among them."""
    found = [pid]
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [each for child in thread.read_text().split() for each in descendants(int(child))]
    return found


def test_two_signals_at_once_are_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(asked.time, "monotonic", lambda: now[0])
    wish = Asked()
    for _ in range(3):
        wish.hear(signal.SIGTERM)
        now[0] += 0.02
    wish.hear(signal.SIGHUP)
    assert wish.number == signal.SIGTERM
    now[0] += 1.0
    with pytest.raises(KeyboardInterrupt):
        wish.hear(signal.SIGTERM)
    leaving = Asked()
    leaving.at_once = (signal.SIGINT,)
    with pytest.raises(KeyboardInterrupt):
        leaving.hear(signal.SIGINT)
    leaving = Asked()
    leaving.at_once = (signal.SIGINT,)
    leaving.hear(signal.SIGTERM)
    assert leaving.number == signal.SIGTERM


def test_a_closed_output_is_a_wish_and_no_error() -> None:
    wish, (reader, writer) = Asked(), os.pipe()
    with open(writer, "w", encoding="utf-8", buffering=1) as stream:
        outlet = Outlet(stream, wish.closed)
        assert not outlet.isatty()
        os.close(reader)
        outlet.write("nobody reads this\n")
        outlet.write("nor this\n")
        outlet.flush()
    assert wish.number == signal.SIGPIPE


def test_a_signal_to_every_process_of_the_job_twice_ends_the_run_in_order(tmp_path: Path) -> None:
    """As systemd and Slurm send it. Peers leave it to the command, and their daemons do not hear it."""
    process = start("run", *LONG, *TWO, cwd=tmp_path)
    trains(tmp_path)
    everyone = descendants(process.pid)
    assert len(everyone) >= 5, "the command, two peers, two daemons"
    for _ in range(2):
        for pid in everyone:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert len(checkpoints(tmp_path)) == 1
    assert "Traceback" not in out + err
    assert "measuring the model" not in out, "who takes the machine does not wait for that"
    assert peers_left(tmp_path) == []
    logs = "".join(log.read_text() for log in tmp_path.glob("runs/*/*.log"))
    assert logs == ""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_a_warning_end_the_run_in_order(tmp_path: Path, number: signal.Signals) -> None:
    process = start("run", *LONG, *ALONE, cwd=tmp_path)
    trains(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 128 + number, out + err
    assert len(checkpoints(tmp_path)) == 1


def test_a_closed_pipe_ends_the_run_in_order(tmp_path: Path) -> None:
    """muletrain run | head -3"""
    command = [sys.executable, "-m", "muletrain", "run", *LONG, *ALONE]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(3):
        process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(180) == 128 + signal.SIGPIPE, err
    assert "Traceback" not in err
    assert "pipe" not in err
    assert checkpoints(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anything_runs_leaves_nothing_behind(number: signal.Signals) -> None:
    made = list[str]()

    def begin() -> None:
        with asked.cleaned_up(), tempfile.TemporaryDirectory() as folder:
            made.append(folder)
            os.kill(os.getpid(), number)
            time.sleep(5.0)

    with pytest.raises(SystemExit, match=str(128 + number)):
        begin()
    assert not Path(made[0]).exists()
    assert signal.getsignal(number) is signal.SIG_DFL
