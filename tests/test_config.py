"""Configuration: values of files and overrides; what is printed loads again; digests and lines of keys."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from muletrain.config.dump import FIRST, toml_value
from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.config.load import describe, digest, dump_toml, load_config, load_toml
from muletrain.config.locate import key_lines
from muletrain.config.problems import keys_of, submodel
from muletrain.config.schema import Codec, RunConfig
from muletrain.errors import ConfigError
from tests.toml_files import write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --- values ----------------------------------------------------------------------------------------------------------


def test_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nlayers = 8\nwidth = 96\n[wire]\nactivations = "fp32"\n')
    sets = ["model.layers=12", "data.path=corpus/*.txt", "optimizer.clip=none", "optimizer.lr = 1"]
    config = load_config(path, [*sets, "model.from=my/llama", "data.field=2024", 'network.announce=["/a", "/b"]'])
    assert (config.model.layers, config.model.width, config.model.from_) == (12, 96, "my/llama")
    assert (config.data.path, config.data.field) == ("corpus/*.txt", "2024")
    assert (config.optimizer.clip, config.optimizer.lr) == (None, 1.0)
    assert config.wire.activations is Codec.FP32
    assert config.network.announce == ("/a", "/b")


@pytest.mark.parametrize(
    ("value", "expected"), [('"a b"', "a b"), ("a=b", "a=b"), ("1\nx = 2", "1\nx = 2"), ("true", "true"), ("''", "")]
)
def test_text_needs_no_quotes(value: str, expected: str) -> None:
    assert load_config(None, [f"data.path={value}"]).data.path == expected


def test_the_last_override_wins() -> None:
    assert load_config(None, ["train.steps=1", "train.steps=2"]).train.steps == 2


def test_sizes_of_a_preset_are_not_judged_by_the_defaults() -> None:
    for sizes in ("model.preset=gpt3-125m", "model.from=my-llama"):
        config = load_config(None, [sizes, "fleet.stages=12", "fleet.peers=12"])
        assert config.fleet.stages == 12


def test_a_preset_survives_being_written_down(tmp_path: Path) -> None:
    """Readers of a preset override it by ``model_fields_set``: a copy must not state what was not given."""
    config = load_config(None, ["model.preset=gpt3-125m", "model.context=128", "model.from=x"])
    copies = [
        load_config(write(tmp_path, dump_toml(config)), []),
        RunConfig.model_validate_json(config.model_dump_json(by_alias=True)),
        RunConfig.model_validate_json(config.model_dump_json()),
    ]
    for copy in copies:
        assert copy == config
        assert copy.model.model_fields_set == {"preset", "context", "from_"}
        assert digest(copy) == digest(config)
    stating_more = load_config(None, ["model.preset=gpt3-125m", "model.context=128", "model.from=x", "model.width=192"])
    assert digest(stating_more) != digest(config)


def test_the_sizes_of_a_checkpoint_survive_being_written_down(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(dump_toml(load_config(None, ["model.from=my-llama", "model.dropout=0.5"])))
    assert load_config(tmp_path / "a.toml").model.model_fields_set == {"from_", "dropout"}


def test_configs_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().model.layers = 3


# --- printing --------------------------------------------------------------------------------------------------------


def fields(kind: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, info in keys_of(kind).items():
        if sub := submodel(info):
            yield from ((f"{key}.{k}", sub) for k in keys_of(sub))
        else:
            yield key, kind


@pytest.mark.parametrize("kind", [RunConfig, Fleet])
def test_every_field_is_described_and_numbers_have_a_unit(kind: type[BaseModel]) -> None:
    for name, section in fields(kind):
        info = keys_of(section)[name.split(".")[-1]]
        assert info.description, name
        if re.search(r"\b(int|float)\b", str(info.annotation)):
            assert re.search(r"\[[^]]+\]$", info.description), f"{name} has no unit"
        if info.default is None:
            assert info.examples, f"{name} is off by default and shows no example"


@pytest.mark.parametrize("kind", [RunConfig, Fleet])
def test_the_printed_configuration_names_every_field_with_a_comment(kind: type[BaseModel]) -> None:
    text = describe(kind)
    for name, _ in fields(kind):
        assert re.search(rf"^(# )?{name.split('.')[-1]} = .+  # .+", text, re.MULTILINE), name


def test_the_printed_configuration_is_the_default(tmp_path: Path) -> None:
    first = describe(only=FIRST)
    for text in (describe(), first):
        assert load_config(write(tmp_path, text), []) == RunConfig()
    assert len(first.splitlines()) < 80
    assert "[pipeline]" not in first


def test_a_preset_put_into_the_printed_configuration_sets_the_sizes(tmp_path: Path) -> None:
    text = describe().replace("# preset = ", "preset = ")
    assert load_config(write(tmp_path, text)).model.model_fields_set == {"preset"}


def test_the_printed_fleet_loads(tmp_path: Path) -> None:
    assert load_fleet(write(tmp_path, describe(Fleet))).machines[0].name == "desk"


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        (RunConfig, {"train.sequence_start", "data.factory"}),
        (RunConfig, {"train.sequence_start", "data.validation", "data.end_token"}),
        (Fleet, set[str]()),
    ],
)
def test_the_commented_out_examples_load(tmp_path: Path, kind: type[BaseModel], without: set[str]) -> None:
    """All but alternatives to each other, and a field that needs another one."""
    section, lines = "", list[str]()
    for line in describe(kind).splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        found = re.match(r"# (\w+) = ", line)
        lines.append(line[2:] if found and f"{section}.{found[1]}" not in without else line)
    config = load_toml(kind, write(tmp_path, "\n".join(lines)))
    unset = {
        f"{key}.{name}"
        for key, section in config
        if isinstance(section, BaseModel)
        for name, value in section
        if value is None
    }
    assert unset == without


def test_dump_round_trips(tmp_path: Path) -> None:
    sets = ["optimizer.clip=none", 'data.path=a "b"\\c\n\té\x7f', "model.from=x", "compute.memory=7.5"]
    config = load_config(None, [*sets, 'network.announce=["/ip4/1.2.3.4/tcp/1"]', "wire.gradients=int8"])
    assert config.optimizer.clip is None
    assert load_config(write(tmp_path, dump_toml(config)), []) == config


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_toml(text: str) -> None:
    assert tomllib.loads(f"k = {toml_value(text)}")["k"] == text


@pytest.mark.parametrize(
    ("overrides", "peers", "trainers"),
    [
        ([], 4, 2),
        (["fleet.stages=3"], 6, 2),
        (["fleet.stages=1", "fleet.peers=1"], 1, 1),
        (["fleet.peers=3", "fleet.trainers=3"], 3, 3),
    ],
)
def test_a_local_fleet_has_two_peers_a_stage_and_two_trainers(overrides: list[str], peers: int, trainers: int) -> None:
    config = load_config(None, overrides).local()
    assert (config.fleet.peers, config.fleet.trainers) == (peers, trainers)
    assert digest(config) == digest(load_config(None, overrides))


# --- digest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override",
    ["model.layers=6", "train.seed=1", "optimizer.lr=1", "wire.gradients=fp32", "fleet.stages=1", "data.heldout=0.1"],
)
def test_what_changes_the_numbers_changes_the_digest(override: str) -> None:
    assert digest(load_config(None, [override])) != digest(RunConfig())


@pytest.mark.parametrize(
    "override",
    ["fleet.peers=8", "data.path=x", "data.cache=x", "compute.threads=3", "checkpoint.every=5", "train.time_limit=9"],
)
def test_where_a_run_happens_does_not_change_the_digest(override: str) -> None:
    assert digest(load_config(None, [override])) == digest(RunConfig())


def test_the_digest_is_of_values_not_of_their_spelling(tmp_path: Path) -> None:
    spelled = write(tmp_path, "[optimizer]\nweight_decay = 1\n[model]\nlayers = 4\n")
    assert digest(load_config(spelled, [])) == digest(load_config(None, ["optimizer.weight_decay=1.0"]))


# --- lines -----------------------------------------------------------------------------------------------------------


def test_lines_of_keys() -> None:
    text = (
        'top = 1\n\n[a]  # comment with = and [\nx = """\ny = 2\n"""\ny = [\n  1, # ]\n  "]",\n]\n'
        '"quo ted" = {z = "}", w = [1]}\nb.c = \'#\'\n[[m]]\nn = 1\n[m.sub]\nk = 1\n[[m]]\nn = 2\n[ d . e ]\nf=1'
    )
    tomllib.loads(text)
    lines = key_lines(text)
    assert lines == {
        ("top",): 1,
        ("a",): 3,
        ("a", "x"): 4,
        ("a", "y"): 7,
        ("a", "quo ted"): 11,
        ("a", "b"): 12,
        ("a", "b", "c"): 12,
        ("m",): 13,
        ("m", 0): 13,
        ("m", 0, "n"): 14,
        ("m", 0, "sub"): 15,
        ("m", 0, "sub", "k"): 16,
        ("m", 1): 17,
        ("m", 1, "n"): 18,
        ("d",): 19,
        ("d", "e"): 19,
        ("d", "e", "f"): 20,
    }


# --- fleets ----------------------------------------------------------------------------------------------------------


def test_a_model_that_was_trained_before_is_trained_further_by_small_steps(tmp_path: Path) -> None:
    """Also after the configuration was written and read again; who sets a rate gets it."""
    rates = [
        load_config(None, sets).optimizer.lr for sets in ([], ["model.from=x"], ["model.from=x", "optimizer.lr=0.5"])
    ]
    assert rates == [3e-3, 2e-5, 0.5]
    assert load_config(None, ["model.from=x", "optimizer.name=lamb"]).optimizer.lr == 1e-3
    config = load_config(None, ["model.from=x"])
    (tmp_path / "a.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "a.toml") == config
    assert RunConfig.model_validate_json(config.model_dump_json(by_alias=True)) == config


def test_a_table_in_a_setting_is_toml(tmp_path: Path) -> None:
    fields = ["adapter.rank=8", "model.from=x"]
    config = load_config(None, [*fields, r"adapter.ranks={'.*\.v_proj'=4}"])
    assert config.adapter.ranks == {r".*\.v_proj": 4}
    assert load_config(write(tmp_path, dump_toml(config))) == config
    with pytest.raises(ConfigError, match=r"not valid TOML: .*a backslash is written twice, in single quotes once"):
        load_config(None, [*fields, r'adapter.ranks={".*\.v_proj"=4}'])
