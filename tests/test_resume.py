"""A run that lost everything but its folder goes on to the weights it would have had."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.events import CheckpointWritten, StepDone, read_events
from muletrain.runs.assemble import RunFacts
from muletrain.runs.folder import latest_checkpoint
from tests.fleet_run import checkpoint_weights
from tests.reference import train_plainly
from tests.test_equivalence import relative_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(1200)

STEPS = 24
SMALL = [
    "model.width=64",
    "model.heads=2",
    "model.layers=4",
    "model.context=64",
    "model.vocab=512",
    "train.batch=16",
    "train.microbatch=2",
    f"train.steps={STEPS}",
    "compute.precision=fp32",
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "checkpoint.every=4",
    "optimizer.warmup=4",
    "optimizer.eps=1e-6",
]


class Run:
    """``muletrain run`` (or ``start``) in a folder, as typed; what it starts dies with it."""

    def __init__(self, folder: Path, command: str = "run") -> None:
        self.folder, self._command = folder, command
        self._process: subprocess.Popen[str] | None = None

    @property
    def run_folder(self) -> Path:
        return next((self.folder / "runs").iterdir())

    def start(self, *arguments: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "muletrain.cli.main", self._command, *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def resume(self, *overrides: str) -> None:
        self.start("--resume", str(self.run_folder.relative_to(self.folder)), *overrides)

    def wait(self, code: int = 0) -> str:
        assert self._process is not None
        out, _ = self._process.communicate(timeout=600)
        assert self._process.returncode == code, out
        return out

    def ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def steps(self) -> list[int]:
        return [e.step for e in self.events() if isinstance(e, StepDone)]

    def events(self) -> Iterator[object]:
        names = "peer-0" if self._command == "run" else "*"
        for file in self.folder.glob(f"runs/*/{names}.jsonl"):
            yield from read_events(file)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < deadline
            assert not self.ended(), self.wait(code=-1)
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Ctrl-C: the run ends in order."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self.wait(code=130)

    def kill(self) -> None:
        """SIGKILL to everything at once."""
        self._kill(self._everything())

    def close(self) -> None:
        if self._process is not None and not self.ended():
            self.kill()

    def kill_while_a_checkpoint_is_written(self, after_s: float) -> bool:
        """So long after it was begun. Whether that is what remains of it."""
        folder, victims = self.run_folder / "checkpoints", self._everything()
        deadline = time.monotonic() + 120
        while not any(folder.glob(".step-*.partial")):
            assert time.monotonic() < deadline
            time.sleep(0.0002)
        time.sleep(after_s)
        self._kill(victims)
        return any(folder.glob(".step-*.partial"))

    def _everything(self) -> list[int]:
        """The command, its peers and their daemons."""
        assert self._process is not None
        victims = [self._process.pid]
        for pid in victims:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                victims += map(int, children.read_text().split())
        return victims

    def _kill(self, victims: list[int]) -> None:
        assert self._process is not None
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "here")
    yield run
    run.close()


def settings() -> list[str]:
    return [part for override in SMALL for part in ("--set", override)]


def assert_undisturbed(run: Run, *overrides: str) -> None:
    facts = RunFacts.of(load_config(None, [*SMALL, *overrides]))
    expected, _ = train_plainly(facts, facts.source(TokenCache.build(facts.config.data, facts.spec.vocab)))
    assert latest_checkpoint(run.run_folder).name == f"step-{STEPS:08d}"
    assert relative_difference(checkpoint_weights(run.run_folder), expected) <= 1e-5


def written(run: Run, step: int) -> Callable[[], bool]:
    return lambda: any(isinstance(e, CheckpointWritten) and e.step >= step for e in run.events())


@pytest.mark.slow
def test_killed_twice_with_a_damaged_and_a_torn_checkpoint_it_ends_with_the_same_weights(run: Run) -> None:
    run.start(*settings(), "--set", "fleet.peers=3")  # one stage has a replica, one has none
    run.until(written(run, 8))
    run.kill()
    newest = latest_checkpoint(run.run_folder)
    part = newest / "stage-1.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    torn = newest.parent / ".step-00000099.partial"
    torn.mkdir()
    (torn / "stage-0.safetensors").write_bytes(b"half")
    before = newest.name
    run.resume()
    run.until(lambda: run.steps().count(int(before[5:]) + 1) > 0 and written(run, int(before[5:]) + 4)())
    run.kill()
    run.resume()
    out = run.wait()
    assert "after step" in out
    assert_undisturbed(run)
    assert not torn.exists()
    assert len(run.steps()) > STEPS, "some steps were done twice: the damaged checkpoint was not used"
    assert "all 24 steps are done" in (over := _refused(run))
    assert "train.steps" in over


@pytest.mark.slow
def test_what_would_be_another_run_is_refused_and_so_is_a_folder_in_use(run: Run, tmp_path: Path) -> None:
    run.start(*settings(), "--set", "train.steps=100000")
    run.until(written(run, 4))
    assert "another process" in _refused(run)
    run.kill()
    refused = _refused(run, "--set", "model.width=32")
    assert "model.width (64 before, 32 now)" in refused
    other = Run(tmp_path / "here")
    other.start("--resume", str(tmp_path))
    assert "no run folder" in other.wait(code=2)


@pytest.mark.slow
def test_killed_before_the_first_checkpoint_it_begins_again(run: Run) -> None:
    run.start(*settings(), "--set", "checkpoint.every=0")
    run.until(lambda: 2 in run.steps())
    run.kill()
    run.resume()
    assert "no complete checkpoint" in run.wait()
    assert_undisturbed(run)


@pytest.mark.slow
def test_delayed_updates_stopped_in_order_and_killed_go_on_with_both_weights(run: Run) -> None:
    delayed = ["--set", "optimizer.delayed=true"]
    run.start(*settings(), *delayed)
    run.until(lambda: 6 in run.steps())
    run.interrupt()
    run.resume()
    run.until(written(run, 16))
    run.kill()
    run.resume()
    assert "after step" in run.wait()
    assert_undisturbed(run, "optimizer.delayed=true")
    assert len(run.steps()) < 2 * STEPS, "not from the beginning"


@pytest.mark.slow
def test_a_run_on_several_machines_goes_on_with_start(tmp_path: Path) -> None:
    """One machine is enough where there is one stage."""
    run, alone = Run(tmp_path / "here", "start"), ["fleet.stages=1", "fleet.peers=1"]
    listen = ["--listen", "127.0.0.1"]
    try:
        run.start(*listen, *settings(), *(part for s in alone for part in ("--set", s)))
        run.until(written(run, 8))
        run.kill()
        run.resume(*listen)
        out = run.wait()
    finally:
        if not run.ended():
            run.kill()
    assert "after step" in out
    assert_undisturbed(run, *alone)
    assert len(run.steps()) < 2 * STEPS, "not from the beginning"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_killed_at_ten_random_moments(run: Run) -> None:
    """While peers start and gather, in the middle of steps, and in the middle of writing checkpoints; the last three
    count from the beginning of a resumed run."""
    rng = random.Random(7)
    moments = rng.sample(["begun", "step", "checkpoint"] * 3 + ["checkpoint"], 10)
    run.start(*settings(), "--set", "checkpoint.every=1")
    torn = 0
    for moment in moments:
        run.until(lambda: (run.folder / "runs").is_dir() and any((run.folder / "runs").iterdir()))
        done = len(run.steps())
        due_s = time.monotonic() + rng.uniform(0, 15) if moment == "begun" else math.inf
        run.until(lambda before=done, due_s=due_s: len(run.steps()) > before or time.monotonic() >= due_s)  # type: ignore[misc]
        if moment == "begun":
            run.kill()
        else:
            time.sleep(rng.uniform(0, 1))
            if moment == "step":
                run.kill()
            else:
                torn += run.kill_while_a_checkpoint_is_written(rng.uniform(0, 0.01))
        assert STEPS not in run.steps(), "too fast a machine for this test: lengthen the run"
        run.resume()
    run.wait()
    assert torn, "no checkpoint was torn"
    assert_undisturbed(run)


def _refused(run: Run, *overrides: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", "muletrain.cli.main", "run", "--resume", str(run.run_folder), *overrides],
        cwd=run.folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 2, process.stdout + process.stderr
    return process.stdout + process.stderr
