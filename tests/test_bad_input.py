"""What a run is refused for: one sentence with the place, the field and the remedy, before any peer begins; and no
folder stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from muletrain.cli.actions.opening import Wanted, anchored, opened, prepare
from muletrain.config.schema import RunConfig
from muletrain.data.corpus import absolute
from muletrain.data.tokenizer import train_tokenizer
from muletrain.errors import MuletrainError
from muletrain.events import EventLog
from tests.test_docs import parsed

MY = """\
[model]
vocab = 300
context = 64

[data]
path = "text/*.txt"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "here"
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "a.txt").write_text("\n\n".join(f"Mule {n} carries {n * n} loads." for n in range(200)))
    (folder / "empty").mkdir()
    (folder / "empty" / "a.txt").write_text(" \n\n")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    (folder / "my.toml").write_text(MY)
    monkeypatch.chdir(folder)
    return folder


def refusal(*overrides: str) -> str:
    with (
        pytest.raises(MuletrainError) as refused,
        opened(Wanted(Path("my.toml"), overrides), "run") as (_, config),
    ):
        prepare(config)
    assert not Path("runs").exists(), "nothing was trained: nothing is left"
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.path=empty/*.txt"], ["--set data.path=empty/*.txt: data.path: the corpus '", "has no text; check the"]),
        (["data.path=nothing/*.txt"], ["--set data.path=nothing/*.txt: data.path: no file matches", "check the path"]),
        (["data.path=rows.jsonl"], ["--set data.path=rows.jsonl: data.path: ", "rows.jsonl:2: 'text' is int", "field"]),
        (["model.context=99999"], ["--set model.context=99999: model.context: 99999 needs 100000 tokens", "add text"]),
        (["model.vocab=200"], ["--set model.vocab=200: model.vocab: 200 tokens cannot hold 256 bytes"]),
        (
            ["model.preset=gpt3-1b"],
            ["--set model.preset=gpt3-1b: model.preset: no preset 'gpt3-1b'; did you mean 'gpt3-13b'?"],
        ),
        (["model.preset=llama-7B"], ["model.preset: no preset 'llama-7B'; did you mean 'llama-7b'?"]),
        (["fleet.profile=nope"], ["--set fleet.profile=nope: fleet.profile: nope: no such file", "slow-home"]),
        (["fleet.profile=slow-home", "fleet.peers=400"], ["fleet.profile: ", "machines for fleet.peers = 400"]),
        (["compute.device=cuda:7"], ["--set compute.device=cuda:7: compute.device: no cuda:7 here"]),
        (["data.tokenizer=none.json"], ["--set data.tokenizer=none.json: data.tokenizer: no such file"]),
        (["data.cache=my.toml"], ["--set data.cache=my.toml: data.cache: cannot write", "another folder"]),
        (["model.from=text"], ["--set model.from=text: model.from: ", "config.json"]),
    ],
)
def test_what_is_found_after_loading_names_the_place_the_field_and_the_remedy(
    overrides: list[str], parts: list[str]
) -> None:
    message = refusal(*overrides)
    for part in parts:
        assert part in message


def test_a_tokenizer_that_is_too_large_for_the_vocabulary(here: Path) -> None:
    train_tokenizer(iter(["a mule carries loads and more loads"] * 9), 270).save(str(here / "own.json"))
    message = refusal("data.tokenizer=own.json", "model.vocab=260")
    assert message.startswith("--set data.tokenizer=own.json: data.tokenizer: '")
    assert "has 270 tokens, model.vocab = 260; set model.vocab to at least 270" in message


def test_a_field_of_the_file_is_named_with_its_line(here: Path) -> None:
    (here / "text" / "a.txt").write_text("\n")
    assert refusal().startswith("my.toml:6: data.path: the corpus '")
    (here / "text" / "a.txt").write_text("two\n\nparagraphs\n\n" * 3)
    assert refusal().startswith("my.toml:")


def test_what_is_fine_is_prepared_and_a_resumed_folder_stays(here: Path) -> None:
    with opened(Wanted(Path("my.toml"), []), "run") as (folder, config):
        prepare(config)
        (folder / "peer-0.jsonl").touch()  # a peer began
    assert (folder / "config.toml").is_file()
    (folder / "peer-0.jsonl").unlink()
    (here / "text" / "a.txt").unlink()
    expected = rf"{folder.name}/config.toml:\d+: data.path: "
    with pytest.raises(MuletrainError, match=expected), opened(Wanted(None, [], folder), "run") as (_, config):
        prepare(config)
    assert (folder / "config.toml").is_file()


def test_a_run_that_fails_before_it_begins_leaves_no_folder(here: Path) -> None:
    """An explicit resume of such a folder would begin anew. A log with a traceback is kept."""

    def fails(wrote: str, folders: list[Path]) -> None:
        with opened(Wanted(Path("my.toml"), []), "start") as (folder, _):
            folders.append(folder)
            with EventLog(folder / "one.jsonl", "one") as log:
                log.note("port is taken", "error")
            (folder / "one.log").write_text(wrote)
            raise MuletrainError("port is taken")

    for wrote in ("", "Traceback"):
        folders = list[Path]()
        with pytest.raises(MuletrainError, match="port is taken"):
            fails(wrote, folders)
        assert folders[0].exists() == bool(wrote)


def test_resume_without_a_folder_takes_the_run_that_was_begun_or_resumed_last(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def resumed(*arguments: str) -> Path:
        given = parsed(f"muletrain run {' '.join(arguments)}")
        with opened(Wanted(None, given["overrides"], given["resume"]), "run") as (folder, _):
            return folder

    with pytest.raises(MuletrainError, match=r"^runs: no run folder .*'muletrain run' or 'start' was called"):
        resumed("--resume")
    runs = [here / "runs" / name for name in ("a", "b", "c")]
    for run, age_s in zip(runs, (2, 0, 1), strict=True):
        run.mkdir(parents=True)
        (run / "config.toml").write_text("")
        os.utime(run / "config.toml", (time.time() - age_s,) * 2)
    assert resumed("--resume") == resumed("--resume", "--set", "train.steps=9") == Path("runs/b")
    assert "resuming runs/b, the newest run in runs/" in capsys.readouterr().err
    assert resumed("--resume", "runs/a") == Path("runs/a")
    assert "resuming" not in capsys.readouterr().err
    with pytest.raises(MuletrainError, match=r"^nosuch: no run folder"):
        resumed("--resume", "nosuch")


def test_a_run_goes_on_from_any_working_directory(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(Wanted(Path("my.toml"), ["data.path=text/*.txt, text/a*", "data.cache=kept"]), "run") as (
        folder,
        config,
    ):
        prepare(config)
        (folder / "peer-0.jsonl").touch()
    folder = folder.resolve()
    monkeypatch.chdir(tmp_path)
    with opened(Wanted(None, ["data.heldout=0.1"], folder), "run") as (_, resumed):
        prepare(resumed)
    assert resumed.data.path == f"{here}/text/*.txt, {here}/text/a*"
    assert resumed.data.cache == f"{here}/kept"
    assert list((here / "kept" / "tokens").iterdir())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("pydoc,x.txt", "pydoc, {here}/x.txt"),
        (" a/*.txt , ../b.jsonl,", "{here}/a/*.txt, {up}/b.jsonl"),
        ("hf:name:config,/data/x.parquet", "hf:name:config, /data/x.parquet"),
        ("~/x.txt", "{home}/x.txt"),
    ],
)
def test_paths_of_a_list_become_absolute_one_by_one(given: str, meant: str, here: Path) -> None:
    assert absolute(given) == meant.format(here=here, up=here.parent, home=Path.home())


def test_what_names_no_file_is_left_alone(here: Path) -> None:
    fields = {"data": {"tokenizer": "gpt2"}, "fleet": {"profile": "slow-home"}}
    assert anchored(RunConfig.model_validate(fields)) == RunConfig.model_validate(fields)
    (here / "own.json").touch()
    (here / "own.toml").touch()
    fields = {"data": {"tokenizer": "own.json"}, "fleet": {"profile": "own.toml"}, "model": {"from": "my-llama"}}
    own = anchored(RunConfig.model_validate(fields))
    assert (own.data.tokenizer, own.fleet.profile) == (f"{here}/own.json", f"{here}/own.toml")
    assert own.model.from_ == f"{here}/my-llama"
    assert own.model.model_fields_set == {"from_"}, "the sizes are still the checkpoint's to say"
