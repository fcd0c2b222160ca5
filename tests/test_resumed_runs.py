"""Runs that go on from their checkpoint, changed: cut into other stages, with another batch, on another machine. A refused
resume leaves the folder as it was."""

from __future__ import annotations

import re
import shutil
import socket
from contextlib import closing
from pathlib import Path

import pytest
import torch

from muletrain.cli.actions.opening import Wanted, opened, ready
from muletrain.cli.actions.train import local_session, run_local, start_run
from muletrain.cli.actions.visit import show_status
from muletrain.config.load import load_config
from muletrain.errors import MuletrainError
from muletrain.events import EventLog, StepDone, SteppedBack, events_in
from muletrain.runs.assemble import RunFacts
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.folder import ROOT, run_folder
from muletrain.runs.own_peers import Listening
from muletrain.runs.parts import fitting

SMALL = [
    "model.width=32",
    "model.heads=2",
    "model.layers=4",
    "model.context=32",
    "model.vocab=300",
    "train.batch=8",
    "train.microbatch=2",
    "train.steps=6",
    "data.path=text.txt",
    "data.cache=cache",
    "compute.precision=fp32",
    "fleet.stages=1",
    "fleet.peers=1",
]
TEXT = "".join(f"mule {n} carries {n * n % 97} loads over {n * 7 % 31} hills\n\n" for n in range(900))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps, in a working folder of its own."""
    here = tmp_path_factory.mktemp("here")
    (here / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        run_local(Wanted(None, SMALL), json=True)
    return here / run_folder(here / ROOT)


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run's folder, in the run's own working folder."""
    folder = shutil.copytree(trained, tmp_path / "run")
    monkeypatch.chdir(trained.parent.parent)
    return folder


def steps(folder: Path) -> list[int]:
    return [event.step for event in events_in(folder, StepDone) if isinstance(event, StepDone)]


def test_a_refused_resume_leaves_the_folder_as_it_was(run: Path, tmp_path: Path) -> None:
    before = (run / "config.toml").read_bytes()
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    for overrides in (
        ["train.steps=9", "model.layers=2"],
        ["train.steps=9", "data.path=nowhere.txt"],
        ["train.steps=6"],
        ["train.steps=9", "compute.memory=0.0001"],
        ["train.steps=9", "optimizer.lr=-1"],
    ):
        with pytest.raises(MuletrainError):
            run_local(Wanted(None, overrides, run), json=True)
        assert (run / "config.toml").read_bytes() == before
    (run / "owner.key").mkdir()  # so that the founder cannot begin, as with a busy port
    with pytest.raises((MuletrainError, OSError)):
        run_local(Wanted(None, ["train.steps=9"], run), json=True)
    assert (run / "config.toml").read_bytes() == before
    shutil.rmtree(run / "owner.key")
    run_local(Wanted(None, ["train.steps=8"], run), json=True)
    assert steps(run) == list(range(1, 9))
    assert load_config(run / "config.toml").train.steps == 8


def test_a_program_trains_without_a_console(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with local_session(Wanted(None, ["train.steps=8"], run)) as session, closing(session):
        session.begin()
        session.watch()
        session.check()
        evaluation, texts = session.evaluate()
    assert (session.view.step, session.exit_code(), session.go_on()) == (8, 0, "")
    assert session.checkpoint == run / "checkpoints" / "step-00000008"
    assert evaluation is not None
    assert texts
    assert capsys.readouterr().out == ""


def test_batch_context_rate_and_data_change_from_the_checkpoint_on_and_it_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text(TEXT.replace("mule", "donkey"))
    changed = ["train.steps=9", "train.batch=4", "model.context=16", "optimizer.lr=0.001"]
    run_local(Wanted(None, [*changed, f"data.path={tmp_path}/other.txt"], run), json=True)
    said = capsys.readouterr().err
    for line in (
        "train.batch: 8 before, 4 from step 6 on",
        "model.context: 32 before, 16 from step 6 on",
        "optimizer.lr: 0.003 before, 0.001 from step 6 on",
        "data: another corpus from step 6 on",
    ):
        assert line in said
    assert steps(run) == list(range(1, 10))
    checkpoint = Checkpoint.open(run)
    assert checkpoint.config.train.data_offset + 6 * 4 == 0, "the first sequence of the new text comes first"
    assert checkpoint.tokenizer_json == Checkpoint.open(run / "checkpoints" / "step-00000006").tokenizer_json
    run_local(Wanted(None, ["train.steps=10"], run), json=True)
    assert "from step 9 on" in (said := capsys.readouterr().err)
    assert "train.batch" not in said
    assert steps(run) == list(range(1, 11))


@pytest.mark.parametrize("cut", [[2, 2], [1, 1, 2]])
def test_a_checkpoint_is_cut_into_other_stages_and_back_without_a_change(run: Path, cut: list[int]) -> None:
    checkpoint = Checkpoint.open(run)
    other = load_config(run / "config.toml", [f"fleet.layers={cut}", f"fleet.stages={len(cut)}", "fleet.peers=4"])
    parts = fitting(checkpoint, RunFacts.of(other), lambda done: None)
    assert [len(list(c)) for c in parts.manifest["cut"]] == [2] * len(cut)
    assert len(parts.parts) == len(cut)
    back = fitting(parts, RunFacts.of(load_config(run / "config.toml")), lambda done: None)
    assert back.folder not in (parts.folder, checkpoint.folder)
    (one,), (other_one,) = checkpoint.parts, back.parts
    import safetensors.torch

    first, last = (safetensors.torch.load_file(p) for p in (one, other_one))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert any(name.startswith("moment2/") for name in first)


def test_the_folder_of_a_member_goes_on_when_the_founder_and_its_files_are_gone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member that collected the last checkpoint has no config.toml, and its text lies elsewhere."""
    (run / "config.toml").unlink()
    text = shutil.copy("text.txt", tmp_path / "my-copy.txt")
    run_local(Wanted(None, ["train.steps=8", f"data.path={text}"], run), json=True)
    assert steps(run) == list(range(1, 9))
    assert "another corpus" not in capsys.readouterr().err
    assert load_config(run / "config.toml").data.path == str(text)


def test_resume_takes_the_newest_folder_in_which_a_step_was_done(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start after it failed, for example since its port was busy."""
    failed = tmp_path / "runs" / "20991231-start"
    failed.mkdir(parents=True)
    (failed / "config.toml").write_text("")
    (failed / "peer-0.jsonl").write_text("")
    shutil.move(run, tmp_path / "runs" / "good")
    with opened(Wanted(None, ["train.steps=8"], tmp_path / "runs"), "run") as (folder, config):
        assert folder.name == "good"
        found = ready(folder, config, Wanted(resume=tmp_path / "runs"))
    assert found.checkpoint is not None
    said = capsys.readouterr().err
    assert "20991231-start: no step was done there; passed over" in said.replace("\n", "")


def test_a_resume_says_how_many_steps_a_crash_cost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(run / "peer-0.jsonl", "peer-0") as log:
        for step in (7, 8):
            log.emit(StepDone(step, 5.0, 1.0, 0.003, 2000, 1.0, "lost"))
    with opened(Wanted(None, ["train.steps=9"], run), "run") as (folder, config):
        ready(folder, config, Wanted(resume=run))
    assert "steps 7 to 8 are computed again (2 steps)" in capsys.readouterr().err.replace("\n", "")


def test_start_keeps_name_and_port_for_the_resume_and_status_names_the_command(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained.parent.parent / "text.txt", tmp_path)
    listening = Listening("127.0.0.1", 0, ())

    def start(steps: int, resume: Path | None = None) -> tuple[Path, str]:
        short = [*SMALL, f"train.steps={steps}"] if resume is None else [f"train.steps={steps}"]
        start_run(Wanted(None, short, resume), listening=listening, json=True, name=None if resume else "first")
        return run_folder(ROOT), capsys.readouterr().err

    folder, _ = start(1)
    first = load_config(folder / "config.toml").network
    assert (first.name, first.port > 0) == ("first", True)
    _, said = start(2, folder)
    assert load_config(folder / "config.toml").network == first
    assert "is taken" not in said
    with socket.create_server(("127.0.0.1", first.port)):
        _, said = start(3, folder)
    assert f"port {first.port} is taken" in said
    assert {path.name for path in folder.glob("*.log")} == {"first.log"}
    with pytest.raises(MuletrainError, match="no running run") as over:
        show_status(None, json=False)
    assert "--resume" not in str(over.value), "all its steps are done"
    with EventLog(folder / "first.jsonl", "first") as log:
        log.emit(SteppedBack(step=3, to=2, lost=[0], moves=[], lineage="x"))
    with pytest.raises(MuletrainError, match=re.escape(f"at step 2 of 3; go on: muletrain start --resume {folder}")):
        show_status(None, json=False)


def test_the_counts_of_a_local_fleet_are_derived_anew_at_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two peers both are trainers by default; that is no setting that one peer could contradict."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    run_local(Wanted(None, [*SMALL[:-1], "fleet.stages=1"]), json=True)
    folder = run_folder(tmp_path / ROOT)
    kept = load_config(folder / "config.toml").fleet
    assert (kept.peers, kept.trainers, kept.stages) == (None, None, 1)
    assert Checkpoint.open(folder).config.fleet.peers == 2
    run_local(Wanted(None, ["train.steps=8", "fleet.peers=1"], folder), json=True)
    assert steps(folder) == list(range(1, 9))
    assert Checkpoint.open(folder).config.fleet.trainers == 1
