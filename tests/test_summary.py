"""Before the first step people see what a run is about to do."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from muletrain.cli.actions.opening import Wanted, prepare, tell_of
from muletrain.cli.actions.train import dry_run, local_session
from muletrain.cli.show.console import LiveConsole
from muletrain.cli.show.summary import Example, summary_table
from muletrain.compute.probe import pick_device
from muletrain.config.load import load_config
from muletrain.data.samples import SampleData
from muletrain.errors import CapacityError
from muletrain.events import RunPrepared, read_events
from muletrain.events.event import parse
from muletrain.runs.summary import summary_of
from muletrain.runs.view import RunView

from .chats import LLAMA_3, SMOLLM_3, chat_tokenizer, chats, write_rows

SMALL = ("model.layers=2", "model.width=32", "model.heads=2", "model.vocab=300", "model.context=16", "train.batch=4")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"text": f"Row {k} says that {k} times seven is {7 * k}, and nothing else of any interest."} for k in range(200)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def told(e: RunPrepared) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(summary_table(e))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def summary(text: Path, *overrides: str) -> RunPrepared:
    prepared = prepare(load_config(None, [f"data.path={text}", *SMALL, *overrides]).local())
    return summary_of(prepared.facts, prepared.data, ["cpu"])


def test_a_text_is_told_in_documents_tokens_and_epochs(text: Path) -> None:
    found = summary(text, "train.steps=20")
    assert found.documents["documents"] + found.documents["heldout_documents"] == 200
    assert found.taken == 20 * 4 * 16
    assert found.epochs == pytest.approx(20 * 4 * 16 / found.train)
    said = told(found)
    for part in (f"{found.train:,} tokens to train on", f"{found.heldout:,} tokens", "20 steps of 4 x 16 = 64 tokens"):
        assert part in said
    assert f"all 20 steps take 1,280 tokens: {found.epochs:.1f} epochs of the data" in said
    long = dataclasses.replace(found, documents=found.documents | {"heldout_documents": 1, "ends": 7})
    assert f"held out: {found.heldout:,} tokens (1 document and the ends of 7 long documents)" in told(long)
    assert "all trained" in said
    assert "learning rate 0.003 after 2 steps of warm-up, cosine decay to 0" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(("warmup", "rate"), [(20, "0.003"), (1000, "6e-05")])
def test_a_warm_up_as_long_as_the_run_is_told_with_the_rate_that_it_reaches(text: Path, warmup: int, rate: str) -> None:
    said = " ".join(told(summary(text, "train.steps=20", f"optimizer.warmup={warmup}")).split())
    assert f"learning rate rises to {rate} at the last step: the warm-up to 0.003 takes" in said
    assert "decay" not in said


def test_what_was_left_out_is_said_with_its_number(text: Path) -> None:
    rows = text.read_text()
    text.write_text(rows + "".join(rows.splitlines(keepends=True)[:3]) + json.dumps({"text": " "}) + "\n")
    said = told(summary(text, "data.deduplicate=documents"))
    assert "3 documents left out that equal an earlier one (data.deduplicate)" in said
    assert "1 document without text left out" in said


def conversations(tmp_path: Path, template: str, *overrides: str) -> RunPrepared:
    chat_tokenizer(tmp_path / "model", template)
    rows = write_rows(tmp_path / "chat.jsonl", chats(40))
    own = ("model.vocab=400", "model.context=192", f"data.tokenizer={tmp_path / 'model'}", *overrides)
    return summary(Path(rows), *own)


def test_conversations_are_told_with_what_counts_and_examples(tmp_path: Path) -> None:
    found = conversations(tmp_path, SMOLLM_3)
    said = told(found)
    assert "conversations, " in said
    assert f"conversations, {found.documents['counted']:,} tokens count towards the loss" in said
    assert "to train on" not in said, "padding is nothing to train on"
    assert f"their sequences have {found.train:,} tokens, " in said
    assert "% of them padding" in said
    assert "today's date" not in said
    assert len(found.examples) == 3
    assert parse(found.to_json()) == found, "also from the command to Python"
    terminal, pipe = io.StringIO(), io.StringIO()
    for file, console in (
        (terminal, Console(file=terminal, width=80, force_terminal=True)),
        (pipe, Console(file=pipe, width=80)),
    ):
        LiveConsole(RunView(whole=True), console)(found)
        assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", file.getvalue()).splitlines())) <= 80
    assert "What is" not in pipe.getvalue(), "short in pipes"
    learned = re.findall(r"\x1b\[32m(.+?)\x1b\[0m", terminal.getvalue())
    assert any(text.startswith("It is") for text in learned)
    assert not any("What is" in text for text in learned)
    assert "[[" not in terminal.getvalue()
    for plain in (Console(file=io.StringIO()), Console(file=io.StringIO(), force_terminal=True, no_color=True)):
        plain.width = 200
        with plain.capture() as captured:
            plain.print(Example(found.examples[0]))
        legend, _, text = captured.get().lstrip().partition("\n")
        assert "between [[ and ]]" in legend
        marked = re.findall(r"\[\[(.+?)\]\]", text, re.DOTALL)
        assert [text.strip() for text in marked] == [text.strip() for text in found.examples[0][2::2]]


def test_a_date_in_the_template_is_told(tmp_path: Path) -> None:
    found = conversations(tmp_path, LLAMA_3, "data.date=2025-03-01")
    assert "the chat template prints today's date: always 2025-03-01 here (data.date)" in told(found)
    assert any("01 Mar 2025" in piece for piece in found.examples[0])


def test_documents_that_are_trained_and_held_out_are_counted(text: Path, tmp_path: Path) -> None:
    rows = text.read_text().splitlines(keepends=True)
    validation = tmp_path / "validation.jsonl"
    validation.write_text("".join(rows[:4]) + json.dumps({"text": "Another row, that nobody trains."}) + "\n")
    said = " ".join(told(summary(text, f"data.validation={validation}")).split())
    assert "4 documents to train on, also in data.validation: the held-out loss is too low" in said
    assert "also in data.validation" not in told(summary(text))


def test_frozen_parameters_are_not_trained() -> None:
    names = ["model.factory=tests.own_models:partly_frozen", "data.factory=tests.own_models:images_with_numbers"]
    prepared = prepare(load_config(None, [*names, "train.batch=4", "train.microbatch=2", "train.steps=10"]).local())
    found = summary_of(prepared.facts, prepared.data, ["cpu"])
    assert 0 < found.trained_params < found.params
    assert "of them trained" in told(found)


def test_growing_sequences_count_as_long_as_they_are(text: Path) -> None:
    found = summary(text, "train.steps=20", "train.sequence_start=8", "train.sequence_warmup=10")
    assert found.taken == 4 * (10 * 8 + 10 * 16)


def test_shared_layers_count_once(text: Path) -> None:
    assert summary(text, "model.share_layers=true", "fleet.stages=1").params < summary(text, "fleet.stages=1").params


def test_samples_are_told_as_samples() -> None:
    config = load_config(
        None,
        [
            "model.factory=tests.own_models:regression",
            "data.factory=tests.own_models:images_with_numbers",
            "train.batch=4",
            "train.microbatch=2",
            "train.steps=10",
        ],
    ).local()
    prepared = prepare(config)
    assert isinstance(prepared.data, SampleData)
    found = summary_of(prepared.facts, prepared.data, ["cpu"])
    assert (found.unit, found.taken) == ("samples", 40)
    said = told(found)
    assert f"{len(prepared.data.train):,} samples to train on" in said
    assert "10 steps of 4 samples, in microbatches of 2" in said


def test_a_resumed_run_says_what_is_left(text: Path, tmp_path: Path) -> None:
    prepared = prepare(load_config(None, [f"data.path={text}", *SMALL, "train.steps=20"]).local())
    tell_of(prepared, tmp_path, ["cpu"], first_step=8)
    event = json.loads((tmp_path / "summary.jsonl").read_text())
    assert event["kind"] == "run_prepared"
    assert (event["steps"], event["first_step"]) == (20, 8)
    prepared_event = summary_of(prepared.facts, prepared.data, ["cpu"], 8)
    assert "12 more, to step 20, of 4 x 16" in told(prepared_event)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "auto"])
def test_the_precision_and_the_devices_of_this_machine_are_told(text: Path, precision: str) -> None:
    config = load_config(None, [f"data.path={text}", *SMALL, f"compute.precision={precision}", "fleet.peers=4"])
    prepared = prepare(config.local())
    said = " ".join(told(summary_of(prepared.facts, prepared.data, ["cuda:0", "cuda:1", "cuda:0"])).split())
    arithmetic = "precision: each machine's fastest" if precision == "auto" else precision
    assert "where 2 stages, 4 peers, strategy swarm" in said
    assert f"this machine: 2 processes on cuda:0, 1 process on cuda:1, {arithmetic}" in said


@pytest.mark.parametrize("asked", ["cpu", "auto"])
def test_a_run_tells_where_its_own_processes_compute(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """With the device that the run takes, before anything is trained."""
    monkeypatch.chdir(tmp_path)
    settings = [
        f"data.path={text}",
        *SMALL,
        f"compute.device={asked}",
        "compute.precision=bf16",
        "fleet.stages=1",
        "fleet.peers=1",
    ]
    with local_session(Wanted(None, settings)) as session:
        (event,) = read_events(session.folder / "summary.jsonl")
    assert isinstance(event, RunPrepared)
    assert (event.precision, event.devices, event.peers) == ("bf16", [str(pick_device(asked))], 1)


@pytest.mark.parametrize("command", ["run", "start"])
def test_a_dry_run_shows_the_run_its_stages_and_data_and_starts_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = Wanted(None, [f"data.path={text}", *SMALL, "fleet.stages=2", "train.steps=7", "compute.memory=0.5"])
    dry_run(asked, command, json=False)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert "steps  7 steps of 4 x 16 = 64 tokens, in microbatches of 4" in lines
    assert "Stages (a peer here may use 512 MiB)" in lines
    for stage, blocks in (("0", "1"), ("1", "2")):
        assert [[*row[:4], row[-1]] for row in rows if row[:2] == [stage, blocks]] == [
            [stage, blocks, "to", blocks, "fits"]
        ]
    assert any(row[:2] == ["sequences", "of"] for row in rows)
    assert lines[-1].startswith("a dry run: nothing was started")
    assert not (tmp_path / "runs").exists()
    dry_run(asked, command, json=True)  # type: ignore[arg-type]
    event = parse(capsys.readouterr().out)
    assert isinstance(event, RunPrepared)
    assert (event.steps, event.command) == (7, command)


def test_a_dry_run_fails_where_the_run_would(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CapacityError, match=r"Nothing was started.*If other machines are to serve, take 'muletrain start'"
    ):
        dry_run(Wanted(None, [f"data.path={text}", *SMALL, "compute.memory=0.0001"]), "run", json=False)
    assert not (tmp_path / "runs").exists()
