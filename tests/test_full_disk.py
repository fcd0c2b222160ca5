"""On a full disk checkpoints fail, events wait, and training goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muletrain.errors import CapacityError
from muletrain.events import (
    CheckpointFailed,
    EventLog,
    Note,
    StepDone,
    read_events,
)
from muletrain.runs.tensorboard import TensorBoardSink
from muletrain.runtime.checkpoint.store import Key
from tests.checkpoint_stages import LINEAGE, Stages, held_up, names, play
from tests.connected import trained, wait_for
from tests.small_disks import fill, mounted_in, shrink
from tests.test_cli import start
from tests.test_equivalence import EXACT
from tests.test_swap_fleet import GIB

pytestmark = pytest.mark.timeout(360)


small_disk = pytest.fixture(mounted_in)


def test_on_a_full_disk_a_checkpoint_fails_and_with_room_again_the_next_is_written(
    small_disk: Callable[[str, str], Path],
) -> None:
    disk = small_disk("disk", "7m")  # one checkpoint of two parts of 2 MiB fits, two don't

    async def scenario() -> None:
        stages = Stages(disk / "checkpoints", keep=1, sharing="one other")
        assert await stages.checkpoint(4)
        assert not await stages.checkpoint(8)
        failed = stages.of(CheckpointFailed)[0]
        assert failed.step == 8
        assert "No space left on device" in failed.reason
        assert "free some space" in failed.reason
        await stages.only(disk / "checkpoints", "step-00000004")  # no half of one is left
        assert not stages.refused
        shutil.rmtree(disk / "checkpoints" / "step-00000004")
        assert await stages.checkpoint(12)
        await stages.close()

    play(scenario)


def test_a_part_that_is_written_when_its_checkpoint_has_failed_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        stages = Stages(tmp_path / "run", sharing="one other")
        writer = next(n for n, c in stages.checkpoints.items() if c.roles.is_writer() and n != "coordinator")
        begun, go_on = held_up(monkeypatch, stages.places[writer])
        writing = asyncio.create_task(stages.write(4, "coordinator", writer))
        await asyncio.to_thread(begun.wait, 20)
        stages.checkpoints["coordinator"].fail(Key(4, LINEAGE), "the disk is full")
        assert not await asyncio.wait_for(stages.checkpoints[writer].ended(Key(4, LINEAGE)), 20)
        await stages.only(tmp_path / "run")
        go_on.set()
        await writing
        assert not names(tmp_path / "run")
        await stages.close()

    play(scenario)


def test_a_copy_of_the_state_that_finds_no_room_costs_a_checkpoint_and_no_training(tmp_path: Path) -> None:
    async def scenario() -> None:
        stages, key = Stages(tmp_path / "run", sharing="one other"), Key(4, LINEAGE)

        async def full() -> dict[str, Any]:
            raise CapacityError("the disk is full")

        for name, made in stages.checkpoints.items():
            ctx = stages.contexts[name]
            ctx.compute.state, ctx.compute.lends = full, False  # type: ignore[method-assign, misc]
            await made.due(key, last=True)
        assert not await asyncio.wait_for(stages.checkpoints["coordinator"].ended(key), 20)
        assert {e.reason for e in stages.of(CheckpointFailed)} == {"left out: the disk is full"}
        assert not any(ctx.tasks.failure.done() for ctx in stages.contexts.values())
        assert await stages.checkpoint(8)
        await stages.close()

    play(scenario)


def test_events_wait_for_room_on_a_full_disk(small_disk: Callable[[str, str], Path]) -> None:
    disk = small_disk("disk", "256k")
    with EventLog(disk / "a.jsonl", "a") as log:
        log.note("first")
        ballast = fill(disk)
        for n in range(100):
            log.note(f"{n} {'x' * 100}")
        lost = read_messages(disk)
        assert len(lost) < 101
        ballast.unlink()
        log.note("last")
    messages = read_messages(disk)
    assert messages == ["first", *(f"{n} {'x' * 100}" for n in range(100)), "last"]
    assert log.dropped == 0


def test_tensorboard_files_stay_whole_on_a_full_disk(small_disk: Callable[[str, str], Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    disk = small_disk("disk", "64k")
    sink = TensorBoardSink(disk / "tensorboard")

    def steps(first: int, last: int) -> None:
        for n in range(first, last):
            sink(StepDone(step=n, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, duration_s=1.0, lineage="", t=float(n)))

    steps(1, 11)
    ballast = fill(disk)
    steps(11, 200)
    ballast.unlink()
    steps(200, 211)
    sink.close()
    read = {s.step for s in EventAccumulator(str(disk / "tensorboard")).Reload().Scalars("train/loss")}
    assert {*range(1, 11), *range(200, 211)} <= read
    assert len(read) < 210, "the disk was full"


def read_messages(disk: Path) -> list[str]:
    return [e.message for e in read_events(disk / "a.jsonl") if isinstance(e, Note)]


class Command:
    """A muletrain command with --json, in a folder; its events as they come."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muletrain.cli.main", *arguments, "--json"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["kind"] == kind and fields.items() <= e.items()]

    def until(self, condition: Callable[[], object], timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.events[-5:]
            assert self._process.poll() is None, self.end()
            time.sleep(0.05)

    def says(self, text: str) -> bool:
        return any(text in e["message"] for e in self.of("note"))

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code and what was said on standard error."""
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            said = stderr.read()
        code = self._process.wait(60)
        self._reader.join(10)
        return code, said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)


@pytest.mark.slow
def test_a_fleet_whose_disks_are_full_trains_on_and_says_so(small_disk: Callable[[str, str], Path]) -> None:
    ours, theirs = small_disk("ours", "32m"), small_disk("theirs", "1m")
    settings = ["model.width=64", "model.heads=2", "model.context=32", "fleet.peers=2", "checkpoint.every=3"]
    options = [part for s in (*settings, "train.steps=100000") for part in ("--set", s)]
    start = Command(ours, "start", "--listen", "127.0.0.1", *options)
    commands = [start]
    try:
        start.until(lambda: start.of("ticket"))
        join = Command(theirs, "join", start.of("ticket")[0]["ticket"], "--listen", "127.0.0.1")
        commands.append(join)
        join.until(lambda: list(theirs.glob("runs/*/ticket")))
        fill(theirs)
        start.until(lambda: start.of("checkpoint_written"))
        ballast = fill(ours)
        start.until(lambda: start.says("the disk is full"))
        said = -1
        for _ in range(20):  # a checkpoint that failed, or that is old, gives its room back
            ballast = fill(ours)
            time.sleep(3)  # several checkpoints are tried
            if said == (said := len(start.of("step_done"))):
                break
        else:
            raise AssertionError("something still reaches the console, so the test tests nothing")
        ballast.unlink()
        start.until(lambda: start.of("checkpoint_failed"))
        failed = start.of("checkpoint_failed")[0]
        assert "No space left on device" in failed["reason"]
        start.until(lambda: any(e["step"] > failed["step"] for e in start.of("checkpoint_written")))
        steps = [e["step"] for e in start.of("step_done")]
        assert steps == list(range(1, len(steps) + 1)), "no event is lost"
        fill(ours)
        start.interrupt()
        code, said = start.end()
        assert code == 2
        assert "the final checkpoint could not be written, and the newest is" in said
        code, said = join.end()
        assert (code, said.replace("preparing to join the run ...\n", "")) == (0, ""), (
            "progress alone, on a busy machine"
        )
        assert join.says("the disk is full")
    finally:
        for command in commands:
            command.kill()


@pytest.mark.slow
def test_a_swapping_run_trains_on_and_its_report_says_that_the_disk_is_full(
    small_disk: Callable[[str, str], Path],
) -> None:
    disk, steps = small_disk("disk", "1100m"), 60  # a stage that swaps leaves 1 GiB
    settings = [*EXACT, f"train.steps={steps}", "compute.threads=1", f"compute.memory={GIB}", "checkpoint.every=5"]
    options = [part for setting in settings for part in ("--set", setting)]
    run = start("run", "--strategy", "swap", "--verbose", *options, cwd=disk)
    try:
        wait_for(lambda: trained(disk, "peer-0") or run.poll() is not None)
        shrink(disk)
        while run.poll() is None:  # a checkpoint that failed gives its room back
            fill(disk)
            time.sleep(0.1)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 2, out + err
    assert "the disk is full. Training goes on" in out
    assert f"{steps} of {steps} steps" in out
    assert "Swapped stages" in out
    assert "the final checkpoint could not be written" in err
    assert "Traceback" not in out + err
    assert "No space left on device" in out
