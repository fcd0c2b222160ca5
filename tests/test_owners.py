"""What touches a joiner's disk or credentials is the choice of that machine's owner, whatever the founder's
configuration says."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from muletrain.cli import main
from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.data.tokens import TokenCache
from muletrain.errors import AdmissionError, ConfigError
from muletrain.runs.assemble import RunFacts, build_compute
from muletrain.runs.corpus import own_data
from muletrain.runs.host import place_of
from muletrain.runs.join.ticket import read_ticket
from muletrain.runs.spec import WorkerSpec
from muletrain.runtime.checkpoint.store import Folder, Key, open_place
from tests.runners import TICKET, host_of

REFUSED = [
    "reference::memory://x.json",
    "simplecache::s3://bucket/runs",
    "filecache::file:///tmp/x",
    "file:///tmp/x::memory://y",
    "github://org:repo@/x",
    "http://example.org/x",
    "libarchive://x",
]


def told_to_write(place: str) -> RunConfig:
    return load_config(None, [f"checkpoint.place={place}", "checkpoint.keep=1"])


def joiner(folder: Path, place: str | None = None, **more: Any) -> WorkerSpec:
    return WorkerSpec(role="join", name="a", folder=str(folder), ticket=TICKET, place=place, **more)


def test_a_joiner_opens_no_place_that_only_the_founder_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a bucket with the joiner's own runs: they would be read, handed out and, with ``keep = 1``, removed."""
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: pytest.fail("opened"))
    notes: list[str] = []
    for place in (str(tmp_path / "own-runs"), "s3://own-bucket/runs", *REFUSED):
        used = place_of(told_to_write(place), joiner(tmp_path / "join"), notes.append)
        assert isinstance(used, Folder)
        assert used.where(Key(1, bytes(32))).startswith(str(tmp_path / "join"))
        assert f"--place {place}" in notes[-1]


def test_a_joiner_writes_to_the_place_that_its_owner_names(tmp_path: Path) -> None:
    place = str(tmp_path / "shared")
    notes: list[str] = []
    used = place_of(told_to_write(place), joiner(tmp_path / "join", place), notes.append)
    assert used.name == open_place(place, 1).name
    assert not notes
    with pytest.raises(ConfigError, match=r"--place: .*/other is not where the run's checkpoints go \(.*/shared\)"):
        place_of(told_to_write(place), joiner(tmp_path / "join", str(tmp_path / "other")), notes.append)
    with pytest.raises(ConfigError, match=r"not where the run's checkpoints go \(the run folder\)"):
        place_of(load_config(None, []), joiner(tmp_path / "join", place), notes.append)


@pytest.mark.parametrize("url", REFUSED)
def test_a_place_is_of_a_short_list_and_never_a_chain(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ConfigError, match=r"give a folder, or a URL of file, .* without '::'"):
        open_place(url, 1)


def test_a_founder_does_not_choose_where_a_joiners_tokens_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own-cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {k} of some text, of which there are many" for k in range(400)))
    config = load_config(None, [f"data.path={text}", f"data.cache={tmp_path / 'founder'}", "model.vocab=300"])
    founders = TokenCache.build(config.data, 300)
    chosen = tmp_path / "by-the-founder"
    told = config.model_copy(update={"data": config.data.model_copy(update={"cache": str(chosen)})})
    cache = own_data(
        host_of(joiner(tmp_path / "join", data=str(text))), RunFacts.of(told), founders.tokenizer_json, founders.digest
    )
    assert cache is not None
    assert not chosen.exists()


def test_a_ticket_need_not_be_an_argument_that_others_on_the_machine_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "mule1-abc"
    (tmp_path / "ticket").write_text(text + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(text + "\n"))
    found = [read_ticket(given) for given in (text, str(tmp_path / "ticket"), "-")]
    assert [given and given.strip() for given in found] == [text] * 3
    assert read_ticket(None) is None
    with pytest.raises(AdmissionError, match="or name a file with one"):
        read_ticket(str(tmp_path / "none"))
    for command in (["join"], ["status"], ["stop"], ["kick", "somebody"], ["doctor"]):
        answer = CliRunner().invoke(main.app, command, env={"MULETRAIN_TICKET": str(tmp_path / "none")})
        assert isinstance(answer.exception, AdmissionError), command


# Every row of the table in docs/trust.md --------------------------------------------------------------------------------


def rows() -> set[str]:
    """What the table says of the founder's configuration, row by row."""
    text = (Path(__file__).parents[1] / "docs" / "trust.md").read_text(encoding="utf-8")
    table = text.partition("\n## What a run can make your machine do\n")[2].partition("\n## ")[0]
    return {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| `")}


ATTACKS: dict[str, list[str]] = {
    "`model`, `train`, `optimizer`, `wire`, `pipeline`": ["model.layers=3", "train.batch=8", "wire.activations=fp16"],
    "`model.from`": ["model.from={trap}"],
    "`model.architecture`": [
        'model.architecture=\'{{"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_head": 2, "n_layer": 2, '
        '"tie_word_embeddings": false, "_name_or_path": "{trap}", "name_or_path": "{trap}", "pretrained_model_name": '
        '"{trap}", "attn_implementation": "owner/kernel", "_attn_implementation": "{trap}", "experts_implementation": '
        '"owner/kernel"}}\''
    ],
    "`data.path`, `data.tokenizer`, `data.cache`": [
        "data.path={trap}/*.txt",
        "data.tokenizer={trap}/tokenizer.json",
        "data.cache={trap}/cache",
    ],
    "`data.format`, `data.chat_template`, `data.date`, `data.loss_on`, `data.pack`": [
        "data.format=messages",
        "data.chat_template={trap}/secret.txt",
        "data.date=1999-12-31",
    ],
    "`adapter`": ["adapter.rank=4", "adapter.dora=true", "adapter.from={trap}/adapter"],
    "`data.validation`": ["data.validation={trap}/secret.txt"],
    "`data.field`": ["data.field=../../etc/passwd"],
    "`data.share`": ["data.share=true"],
    "`fleet`": ["fleet.profile={trap}/fleet.toml", "fleet.rebalance_period=1"],
    "`compute.precision`, `compute.checkpointing`, `compute.compile`": [
        "compute.precision=fp32",
        "compute.checkpointing=always",
        "compute.compile=off",
    ],
    "`compute.device`, `compute.threads`, `compute.memory`": [
        "compute.device=cuda:7",
        "compute.threads=4096",
        "compute.memory=1000000",
    ],
    "`checkpoint.every`, `checkpoint.keep`": ["checkpoint.every=1", "checkpoint.keep=1000"],
    "`checkpoint.place`": ["checkpoint.place={trap}/runs"],
    "`network`": ["network.listen=0.0.0.0", "network.port=22"],
    "`logging`": ['logging.to=["wandb", "trackio"]', "logging.project={trap}/../project"],
}


def test_each_row_of_the_table_is_tried() -> None:
    assert rows() == ATTACKS.keys()


TOUCHED: list[str] = []
"""Paths that were opened, listed, made or removed, and programs and addresses, while ``WATCHING``."""
WATCHING: list[bool] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHING and event.startswith(("open", "os.", "shutil.", "subprocess.", "socket.connect")):
        TOUCHED.append(f"{event} {arguments[:2]}")


sys.addaudithook(_note)


@pytest.mark.parametrize("row", sorted(ATTACKS))
def test_what_a_founder_puts_into_its_configuration_touches_nothing_of_a_joiner(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the configuration as it comes to the stage that computes, with the corpus of the joiner's own."""
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "secret.txt").write_text("credentials\n\n" * 50)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own-cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # torch sets it when it traces
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"paragraph {k} of some text, of which there are many" for k in range(400)))
    sizes = ["model.width=16", "model.heads=2", "model.layers=2", "model.context=16", "model.vocab=300"]
    own = TokenCache.build(load_config(None, [f"data.path={text}"]).data, 300)
    attack = load_config(None, [*sizes, *(a.format(trap=trap) for a in ATTACKS[row])])
    environment, files = dict(os.environ), sorted(trap.rglob("*"))
    spec = joiner(tmp_path / "join", data=str(text), memory_gib=1.0)
    TOUCHED.clear()
    WATCHING.append(True)
    try:
        facts = RunFacts.of(RunConfig.model_validate_json(attack.model_dump_json(by_alias=True)))
        machine = asyncio.run(host_of(spec).probe_machine(None))
        facts.plan()
        build_compute(facts.drawn(), 0, machine, spec.fleet_index).close()
        place = place_of(facts.config, spec, lambda *_: None)
        if "data.validation" in row:
            with pytest.raises(
                AdmissionError, match=r"held-out text of its own \(data\.validation\).* join without it"
            ):
                own_data(host_of(spec), facts, own.tokenizer_json, own.digest)
        elif "data.chat_template" in row:
            with pytest.raises(AdmissionError, match="lacks the text of its chat template; join without it"):
                own_data(host_of(spec), facts, own.tokenizer_json, own.digest)
        elif "data.field" not in row:
            own_data(host_of(spec), facts, own.tokenizer_json, own.digest)
    finally:
        WATCHING.clear()
    assert [t for t in TOUCHED if str(trap) in t or t.startswith(("socket.connect", "subprocess"))] == []
    assert place.where(Key(1, bytes(32))).startswith(str(tmp_path / "join"))
    assert machine.offer.device == 1 << 30, "the joiner's own word"
    assert dict(os.environ) == environment
    assert sorted(trap.rglob("*")) == files
