"""Text that the model writes while it trains."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from muletrain.config.load import load_config
from muletrain.events import Note, Sampled
from muletrain.events.log import EventTail
from muletrain.runs import sampling
from muletrain.runs.folder import latest_checkpoint
from muletrain.runs.sampling import FILE, Sampling

from .test_survival import command

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.events import Event

SETTINGS = ["model.width=16", "model.heads=2", "model.layers=2", "model.context=16", "model.vocab=300"]
SETTINGS += ["train.steps=2", "train.batch=2", "train.microbatch=1", "fleet.stages=1", "fleet.peers=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended."""
    folder = tmp_path_factory.mktemp("sampling")
    done = subprocess.run(command("run", settings=SETTINGS), cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("runs/*-run")
    return found


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "SHARE", 1e9)


def after(work: Sampling, checkpoint: Path, folder: Path, seconds: float = 60) -> list[Event]:
    """The events of the process that ``work`` begins."""
    tail = EventTail(folder, from_now=True)
    work.look(checkpoint)
    assert work._process is not None
    process = work._process
    process.wait(seconds)
    work.look(checkpoint)
    assert work._process is None, "no second text of the same checkpoint"
    return tail.poll()


@pytest.mark.usefixtures("always")
def test_each_newer_checkpoint_is_heard(run: Path, tmp_path: Path) -> None:
    newest = latest_checkpoint(run)
    work = Sampling(tmp_path, load_config(None, []))
    work.look(None)
    work.look(newest.with_name("step-00000009"))
    assert work._process is None, "there is none here"
    (event,) = after(work, newest, tmp_path)
    assert isinstance(event, Sampled)
    assert event.step == 2
    assert len(event.texts) == 3
    assert all(event.texts)
    work.look(newest)
    assert work._process is None


def test_it_takes_a_hundredth_of_the_time(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, now = Sampling(tmp_path, load_config(None, [])), time.monotonic()
    assert work._due_s == pytest.approx(now + 500, abs=5)
    work.look(latest_checkpoint(run))
    assert work._process is None
    work._due_s = now
    assert [type(event) for event in after(work, latest_checkpoint(run), tmp_path)] == [Sampled]
    ended = time.monotonic()
    assert work._due_s - ended == pytest.approx(100 * (ended - work._began_s), rel=0.1)


@pytest.mark.usefixtures("always")
def test_an_error_is_said_once(run: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    work = Sampling(tmp_path, load_config(None, []))
    (event,) = after(work, tmp_path / "step-00000001", tmp_path)
    assert isinstance(event, Note)
    assert event.message.startswith("no text is written while the run trains: ")
    assert work._due_s == math.inf


@pytest.mark.usefixtures("always")
def test_it_ends_with_the_session_and_with_its_process(run: Path, tmp_path: Path) -> None:
    work = Sampling(tmp_path, load_config(None, []))
    work.look(latest_checkpoint(run))
    assert work._process is not None
    process = work._process
    work.close()
    assert process.poll() is not None
    words = [sys.executable, "-P", "-m", sampling.__name__, str(latest_checkpoint(run)), str(tmp_path / FILE)]
    orphan = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert orphan.stdin is not None
    orphan.stdin.close()
    assert orphan.wait(20) == 1


def test_another_owners_run_and_a_module_write_none(tmp_path: Path) -> None:
    assert Sampling(tmp_path, None)._due_s == math.inf
    module = load_config(None, ["model.factory=mine:build", "data.factory=mine:data"])
    assert Sampling(tmp_path, module)._due_s == math.inf


@pytest.mark.usefixtures("always")
def test_where_no_process_can_begin_it_is_said_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", full)
    work = Sampling(tmp_path, load_config(None, []))
    with pytest.raises(OSError, match="Cannot allocate"):
        work.look(latest_checkpoint(run))
    work.look(latest_checkpoint(run))
    work.look(tmp_path)
