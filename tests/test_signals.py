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

from muletrain.events import CheckpointWritten, RunFinished, read_events
from muletrain.runs import asked
from muletrain.runs.asked import Asked, Outlet
from muletrain.runs.join.ticket import Ticket
from tests.connected import ticket_in, trained, wait_for
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


def twice(process: subprocess.Popen[str], number: signal.Signals) -> tuple[str, str]:
    """The output of a command whose processes all get the signal, twice within 20 ms."""
    everyone = descendants(process.pid)
    for _ in range(2):
        for pid in everyone:
            os.kill(pid, number)
        time.sleep(0.01)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 128 + number, out + err
    assert "Traceback" not in out + err
    return out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_start_and_join_end_in_order_whatever_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The machine that joined leaves, and the founder trains on until its own signal, and has a checkpoint then."""
    for name in ("founder", "guest"):
        (tmp_path / name).mkdir()
    own = ["--set", "fleet.stages=1", "--set", "train.batch=4", "--listen", "127.0.0.1", "--name", "founder"]
    founder = start("start", *LONG, *own, cwd=tmp_path / "founder")
    try:
        ticket = ticket_in(tmp_path / "founder")
        own = ["--name", "guest", "--threads", "1", "--listen", "127.0.0.1"]
        guest = start("join", ticket, *own, cwd=tmp_path / "guest")
        try:
            wait_for(lambda: trained(tmp_path / "guest", "guest") > 0)
            out, _ = twice(guest, number)
        finally:
            guest.kill()
        assert f"{number.name}: leaving after this step" in out
        assert "left the run in order" in out
        here = trained(tmp_path / "founder", "founder")
        wait_for(lambda: trained(tmp_path / "founder", "founder") > here)
        out, _ = twice(founder, number)
    finally:
        founder.kill()
    assert f"{number.name}: stopping after this step" in out
    events = read_events(next(tmp_path.glob("founder/runs/*/founder.jsonl")))
    (ended,) = [e.steps for e in events if isinstance(e, RunFinished) and e.peer == "founder"]
    assert [p.name for p in tmp_path.glob(f"founder/runs/*/checkpoints/step-{ended:08d}/manifest.json")]
    assert peers_left(tmp_path / "founder") == peers_left(tmp_path / "guest") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_machine_whose_owner_pauses_it_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "mine").touch()
    ticket = str(Ticket.new_run(tmp_path))
    process = start("join", ticket, "--pause-file", "mine", cwd=tmp_path)
    assert process.stderr is not None
    assert any("paused" in line for line in process.stderr)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert not (tmp_path / "runs").exists()


def test_a_command_under_nohup_does_not_hear_the_end_of_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        wish = Asked()
        with wish.heard(), asked.cleaned_up():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert wish.number == 0
            os.kill(os.getpid(), signal.SIGUSR1)
            assert wish.number == signal.SIGUSR1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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
