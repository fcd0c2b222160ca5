"""The end of a run: quality within bounds, and a report whatever cannot be measured."""

from __future__ import annotations

import hashlib
import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from muletrain.cli.actions.train import report
from muletrain.cli.show.console import LiveConsole, plain_line
from muletrain.cli.show.final_report import quality_table
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import RunConfig
from muletrain.data.ngram import spread
from muletrain.data.tokens import TokenCache
from muletrain.errors import CapacityError, DataError, MuletrainError
from muletrain.events import (
    ClientFinished,
    Event,
    Note,
    PeerLeft,
    RunFinished,
    RunStarted,
    StageEmpty,
    StepDone,
    read_events,
)
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage
from muletrain.runs import result
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.fleet import LocalFleet
from muletrain.runs.measure.quality import Quality
from muletrain.runs.session import Limits, Session
from muletrain.runs.view import PeerView
from muletrain.runs.worker_files import EXIT_SKIPPED, LEFT
from tests.whole_model import build_full

STARTED = RunStarted(
    run_id="r", config_digest="d", versions={}, steps=9, stages=1, peers=1, microbatches=1, tokens_per_step=1
)


@pytest.fixture
def trained(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Checkpoint, Stage, TokenCache]:
    """A model that has learnt nothing, and ``request.param`` paragraphs of text."""
    (tmp_path / "a.txt").write_text("\n\n".join(f"Mule {n} carries {n * n} loads." for n in range(request.param)))
    data = {"path": str(tmp_path / "a.txt"), "cache": str(tmp_path / "cache"), "heldout": 0.3}
    config = RunConfig.model_validate(
        {"data": data, "model": {"vocab": 300, "width": 16, "heads": 2, "layers": 2, "context": 16}}
    )
    spec = ModelSpec.from_config(config.model)
    cache = TokenCache.build(config.data, spec.vocab)
    (tmp_path / "tokenizer.json").write_bytes(cache.tokenizer_json)
    tokenizer = {"file": "tokenizer.json", "sha256": hashlib.sha256(cache.tokenizer_json).hexdigest()}
    return (
        Checkpoint(tmp_path, {"step": 1, "parts": [], "files": [tokenizer], "data": cache.digest}, spec, config),
        build_full(spec, seed=0),
        cache,
    )


@pytest.mark.parametrize("trained", [600], indirect=True)
def test_what_is_measured_has_a_bound_and_the_rest_is_told(
    trained: tuple[Checkpoint, Stage, TokenCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = result.quality(*trained)
    assert whole.tokens == whole.heldout == len(trained[2].heldout) - 1
    assert whole.counted == whole.trained == len(trained[2].train)
    monkeypatch.setattr(result, "COUNTED_TOKENS", 4000)
    part = result.quality(*trained, tokens=500)
    assert part.tokens <= 500 < part.heldout
    assert 3900 < part.counted <= 4000 < part.trained
    assert part.loss == pytest.approx(whole.loss, abs=0.2)
    assert part.unigram == pytest.approx(whole.unigram, abs=0.3)


@pytest.mark.parametrize("trained", [40], indirect=True)
def test_too_little_text_to_count_still_gives_the_models_loss(trained: tuple[Checkpoint, Stage, TokenCache]) -> None:
    measured = result.quality(*trained)
    assert measured.loss > 5
    assert (measured.unigram, measured.bigram) == (None, None)
    assert result.evaluated(1, measured).unigram is None


@pytest.mark.parametrize("trained", [600], indirect=True)
def test_a_model_is_measured_on_other_text_by_its_own_tokenizer(
    trained: tuple[Checkpoint, Stage, TokenCache], tmp_path: Path
) -> None:
    checkpoint, model, cache = trained
    (tmp_path / "a.txt").rename(tmp_path / "moved.txt")
    with pytest.raises(DataError, match="no such file"):
        checkpoint.corpus()
    moved = checkpoint.corpus(str(tmp_path / "moved.txt"))
    assert moved.digest == cache.digest
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"{n} ponies." for n in range(100)))
    measured = result.quality(checkpoint, model, checkpoint.corpus(str(other)))
    assert measured.tokens == len(checkpoint.encoder.document(other.read_text())) - 1, "all of it is measured"
    assert (measured.trained, measured.unigram) == (0, None)


@pytest.mark.parametrize("trained", [600], indirect=True)
def test_a_run_that_holds_nothing_out_is_measured_on_other_text_alone(
    trained: tuple[Checkpoint, Stage, TokenCache], tmp_path: Path
) -> None:
    checkpoint, model, cache = trained
    config = checkpoint.config.model_copy(update={"data": checkpoint.config.data.model_copy(update={"heldout": 0.0})})
    checkpoint = replace(checkpoint, config=config)
    with pytest.raises(DataError, match=r"data\.heldout: the run holds no text out; .* 'muletrain eval --data PATH'"):
        result.quality(checkpoint, model, checkpoint.corpus())
    (tmp_path / "other.txt").write_text("A mule carries loads.")
    assert result.quality(checkpoint, model, checkpoint.corpus(str(tmp_path / "other.txt"))).tokens > 5
    assert cache.stats.changes() == []


def test_pieces_come_from_all_over() -> None:
    tokens = np.arange(100_000)
    assert spread(tokens, 100_000) is tokens
    part = spread(tokens, 6400)
    assert (len(part), part[0], part[-1]) == (6400, 0, 99_999)
    assert np.diff(part).max() < 2000, "no large part is left out"
    assert len(spread(tokens, 10)) == 10


def test_a_model_beyond_this_machines_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(CapacityError, match=r"\d GiB of weights, and .* free here"):
        result.check_memory(ModelSpec.from_config(ModelConfig(preset="gpt3-175b")).params)
    result.check_memory(ModelSpec.from_config(ModelConfig()).params)


def test_the_end_of_a_run_is_measured_on_what_it_can_afford() -> None:
    small, large = (result.report_tokens(ModelSpec.from_config(m)) for m in (ModelConfig(), ModelConfig(layers=400)))
    assert small > 300_000 > large >= 128


def test_a_checkpoint_that_cannot_be_evaluated_does_not_cost_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session("run", tmp_path, LocalFleet(tmp_path, 1), console=LiveConsole)
    session.checkpoint = tmp_path / "gone"
    report(session)
    session.close()
    out = capsys.readouterr().out
    assert "the model was not evaluated: " in out
    assert "gone: no checkpoint" in out
    assert "0 of 0 steps" in out, "the report follows"
    (note,) = read_events(tmp_path / "result.jsonl")
    assert isinstance(note, Note)


def test_ctrl_c_is_answered_above_the_live_view_and_the_report_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session, screen = Session("run", tmp_path, LocalFleet(tmp_path, 1), console=LiveConsole), io.StringIO()
    session.console = LiveConsole(session.view, Console(file=screen, force_terminal=True, width=200, color_system=None))
    session.view.fold(STARTED)
    with session.interruptible(), session.console:
        os.kill(os.getpid(), signal.SIGINT)
        session.poll()
    assert "stopping after this step; checkpoint and report follow (Ctrl-C again ends at once)" in screen.getvalue()
    session.checkpoint = tmp_path / "gone"
    session.view.fold(RunFinished(steps=0, seconds=1.0, reason="stopped by the user"))
    report(session)
    session.close()
    assert "  stopped" in plain_line(session.view)
    out = capsys.readouterr().out
    assert f"next     muletrain run --resume {tmp_path}   # go on after step 0 of 9\n" in out
    assert "0 of 9 steps, 0 tokens in 0 ms: no step was completed (stopped by the user)" in out
    assert "0 of 9 steps" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_no_person_at_the_keyboard_sent_is_named(tmp_path: Path, number: signal.Signals) -> None:
    session, screen = Session("run", tmp_path, LocalFleet(tmp_path, 1), console=LiveConsole), io.StringIO()
    session.console = LiveConsole(session.view, Console(file=screen, width=200))
    session.view.fold(STARTED)
    with session.interruptible(), session.console:
        os.kill(os.getpid(), number)
        session.poll()
    session.close()
    (line,) = [line for line in screen.getvalue().splitlines() if "stopping" in line]
    who = "" if number == signal.SIGINT else f"{number.name}: "
    assert line == f"{who}stopping after this step; checkpoint and report follow (Ctrl-C again ends at once)"


@pytest.mark.parametrize("code", [0, EXIT_SKIPPED])
def test_a_run_that_learned_nothing_gives_no_advice_as_after_a_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    session = Session("run", tmp_path, LocalFleet(tmp_path, 1), console=LiveConsole)
    session.view.fold(STARTED)
    session.checkpoint = tmp_path / "gone"
    monkeypatch.setattr(session.fleet, "exit_codes", lambda: {"peer-0": code})
    report(session)
    if code:
        with pytest.raises(MuletrainError, match="the run learned nothing at its end"):
            session.check()
    else:
        session.check()
    session.close()
    out = capsys.readouterr().out
    assert f"files    {tmp_path}: gone, report.txt" in out
    for advice in ("muletrain generate", "muletrain export", "--resume"):
        assert (advice in out) == (code == 0)


@pytest.mark.parametrize(
    ("trained", "unigram", "told"),
    [(0, None, []), (9, None, ["-", "-", "-"]), (9, 4.0, ["4.000", "54.6", "better by 1.000 nats"])],
)
def test_models_of_counts_are_shown_beside_a_model_that_was_trained(
    trained: int, unigram: float | None, told: list[str]
) -> None:
    """'muletrain eval --data' holds out all of its text: there is none to count."""
    quality = Quality(3.0, unigram, unigram, tokens=8, heldout=8, counted=trained, trained=trained, before=3.5)
    screen = io.StringIO()
    Console(file=screen, width=100).print(quality_table(quality))
    rows = [line for line in screen.getvalue().splitlines() if "gram" in line and "training tokens" not in line]
    assert [" ".join(row.split()) for row in rows] == [
        " ".join([name, *told]) for name in ("interpolated bigram", "unigram") if told
    ]
    few = "too few training tokens for a unigram or bigram"
    assert (few in screen.getvalue()) == (trained > 0 and unigram is None)


def test_a_second_ctrl_c_says_what_is_left(tmp_path: Path) -> None:
    session, screen = Session("run", tmp_path, LocalFleet(tmp_path, 1), console=LiveConsole), io.StringIO()
    session.console = LiveConsole(session.view, Console(file=screen, width=200))
    with pytest.raises(SystemExit, match="130"), session.interruptible(), session.console:
        raise KeyboardInterrupt
    assert screen.getvalue().endswith("stopped by the user before the first step\n")
    session.view.fold(STARTED)
    with pytest.raises(SystemExit, match="130"), session.interruptible(), session.console:
        raise KeyboardInterrupt
    session.close()
    assert "stopped by the user at step 0 of 9, without a last checkpoint\n" in screen.getvalue()
    assert screen.getvalue().endswith(f"muletrain run --resume {tmp_path}   # go on from the newest one\n")


def test_a_killed_process_is_told_of_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalFleet(tmp_path, 1) as fleet:
        session = Session("run", tmp_path, fleet, console=LiveConsole)
        fleet.spawn(["peer-0"])
        os.kill(fleet.pid("peer-0"), signal.SIGKILL)
        with pytest.raises(MuletrainError, match=r"peer-0 was killed by signal 9 .*peer-0\.log$"):
            session.watch()
        session.close()
    told = capsys.readouterr().out
    assert "killed by signal 9 (Killed): out of memory?" in told
    assert f"{tmp_path}/peer-0.log" in told


def test_a_run_that_waits_for_a_peer_that_nobody_can_bring_ends(tmp_path: Path) -> None:
    """It waited for 15 minutes, though no other machine can join it. (The module's own operation failed in one stage.)"""
    with LocalFleet(tmp_path, 1) as fleet:
        session = Session("run", tmp_path, fleet)
        fleet.spawn(["peer-0", "peer-1"])
        session.view.fold(replace(STARTED, stages=2, peers=2))
        for stage, name in enumerate(("peer-0", "peer-1")):
            session.view.peers[name] = PeerView(name, stage=stage)
        session.show(Note(level="error", message="its matrix is singular", peer="peer-1"))
        session.show(StageEmpty(stages="stage 1", lacks="and there is no checkpoint", minutes=15))
        assert not session._stranded(["peer-0", "peer-1"]), "it may answer again"
        assert session._stranded(["peer-0"])
        session.role = "start"
        assert not session._stranded(["peer-0"]), "another machine may join"
        session.role = "run"
        session.show(StepDone(step=1, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, duration_s=1.0, lineage=""))
        assert not session._stranded(["peer-0"]), "the run goes on"
        session.show(StageEmpty(stages="stage 1", lacks="and there is no checkpoint", minutes=15))
        os.kill(fleet.pid("peer-1"), signal.SIGKILL)
        with pytest.raises(MuletrainError, match=r"^peer-1: its matrix is singular; logs: "):
            session.watch()
        assert not fleet.alive()
        session.close()


def test_what_all_peers_say_is_said_once(tmp_path: Path) -> None:
    with LocalFleet(tmp_path, 1) as fleet:
        session = Session("run", tmp_path, fleet)
        for name in ("a", "b"):
            session.show(Note(level="error", message="no cuda:1 here", peer=name))
        with pytest.raises(MuletrainError, match=r"^a, b: no cuda:1 here$"):
            session.watch()
        session.close()


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "the run has ended"),
        ([STARTED, PeerLeft("x", "other", 3), RunFinished(9, 1.0, "all steps done")], "the run has ended"),
        ([STARTED, PeerLeft("x", "own", 4), RunFinished(4, 1.0, LEFT)], "left the run in order after step 4"),
        ([ClientFinished(1.0, LEFT), ClientFinished(1.0, LEFT)], "left in order"),
    ],
)
def test_a_machine_that_joined_says_how_its_own_part_ended(tmp_path: Path, events: list[Event], said: str) -> None:
    session = Session("join", tmp_path, LocalFleet(tmp_path, 1))
    for event in events:
        session.show(event)
    assert (session.goodbye(), session.comes_back, session.exit_code()) == (said, False, 0)
    session.close()


def test_a_machine_that_joined_leaves_at_its_owners_limit_and_at_once_if_asked_again(tmp_path: Path) -> None:
    screen, mine = io.StringIO(), tmp_path / "mine"
    session = Session(
        "join",
        tmp_path,
        LocalFleet(tmp_path, 1),
        console=lambda view: LiveConsole(view, Console(file=screen, width=200)),
        limits=Limits(pause_file=mine),
    )
    session.poll()
    assert screen.getvalue() == ""
    mine.touch()
    session.poll()
    session.poll()
    assert screen.getvalue() == f"{mine} exists: leaving before the run begins; Ctrl-C leaves at once\n"
    assert (session.goodbye(), session.comes_back) == ("left before the run began", True)
    with pytest.raises(SystemExit, match="130"), session.interruptible():
        os.kill(os.getpid(), signal.SIGINT)
    session.close()


@pytest.mark.parametrize(("steps", "code"), [(STARTED.steps, None), (STARTED.steps - 1, 130)])
def test_a_ctrl_c_in_the_report_does_not_turn_a_run_whose_steps_are_done_into_one_that_was_ended(
    tmp_path: Path, steps: int, code: int | None
) -> None:
    session, ended_with = Session("run", tmp_path, LocalFleet(tmp_path, 1)), None
    session.show(STARTED)
    session.show(RunFinished(steps, 1.0, "all steps done"))
    session.asked.at_once = (signal.SIGINT,)  # as in the report
    try:
        with session.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as e:
        ended_with = e.code
    assert ended_with == code
    session.close()


def test_a_resumed_run_that_is_stopped_before_its_first_step_names_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A user who reads that there is none might delete the folder."""
    with LocalFleet(tmp_path, 1) as fleet:
        session = Session("run", tmp_path, fleet)
        assert (session.newest, session.go_on()) == (None, "")
        kept = tmp_path / "checkpoints" / "step-00000020"
        kept.mkdir(parents=True)
        (kept / "manifest.json").touch()
        assert session.newest == kept
        assert f"--resume {tmp_path}" in session.go_on()
        session.close()
