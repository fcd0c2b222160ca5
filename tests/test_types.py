"""A value that a user typed keeps its type wherever the configuration travels, or is refused."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.config.dump import dump_toml, toml_value
from muletrain.config.load import load_config
from muletrain.config.model_sections import ModelConfig
from muletrain.config.problems import keys_of, submodel
from muletrain.config.schema import RunConfig
from muletrain.errors import ConfigError
from muletrain.model.traced.chain import TracedModel
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.join.limits import told_config
from muletrain.runs.resuming import checked
from tests.toml_files import message, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TYPED = st.one_of(
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
    st.sampled_from([0, 1, 0.0, -0.0, 1.0, "0", "1", "true", "none", "1.0", "é"]),
)
NAMES = st.text("aZé_9", max_size=5).map("a{}".format)
FIELDS = [
    (section, name, info)
    for section, own in keys_of(RunConfig).items()
    for name, info in keys_of(submodel(own) or RunConfig).items()
]
PLAIN: dict[type, Any] = {bool: True, int: 1, float: 1.5, str: "1"}


def exact(value: object) -> str:
    """``value`` with its type, and the sign of a zero."""
    return repr(value)


def saved_and_loaded(folder: Path) -> Callable[[RunConfig], RunConfig]:
    def resumed(config: RunConfig) -> RunConfig:
        return load_config(write(folder, dump_toml(config)))

    return resumed


def of_a_checkpoint(folder: Path) -> Callable[[RunConfig], RunConfig]:
    def opened(config: RunConfig) -> RunConfig:
        spec = {"architecture": json.dumps({"vocab_size": 9}), "context": 8}
        about = {"format": 2, "step": 1, "parts": [], "files": [], "spec": spec}
        config_json = json.loads(config.model_dump_json(by_alias=True))
        (folder / "manifest.json").write_text(json.dumps({**about, "config": config_json}))
        return Checkpoint.open(folder).config

    return opened


def told(config: RunConfig) -> RunConfig:
    return told_config(config.model_dump_json(by_alias=True))


def checked_again(config: RunConfig) -> RunConfig:
    return RunConfig.model_validate({name: getattr(config, name) for name in RunConfig.model_fields})


def from_its_fields(config: RunConfig) -> RunConfig:
    """Checked as Python's own values, which pydantic converts where a field allows it."""
    return config.model_copy(update={"model": ModelConfig.model_validate(config.model.model_dump(by_alias=True))})


@given(st.dictionaries(NAMES, TYPED, max_size=4))
def test_arguments_of_a_factory_keep_their_types(
    tmp_path_factory: pytest.TempPathFactory, arguments: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("types")
    text = f'[model]\nfactory = "a.b:c"\narguments = {toml_value(arguments)}\n'
    by_file = load_config(write(folder, text))
    by_option = load_config(None, ["model.factory=a.b:c", f"model.arguments={toml_value(arguments)}"])
    for config in (by_file, by_option):
        ways = (saved_and_loaded(folder), of_a_checkpoint(folder), told, checked_again, from_its_fields)
        for way in ways:
            assert exact(way(config).model.arguments) == exact(arguments), way
        assert exact(TracedModel.by_factory(config.model).config["arguments"]) == exact(dict(sorted(arguments.items())))


@pytest.mark.parametrize(("section", "name", "info"), FIELDS, ids=[f"{s}.{n}" for s, n, _ in FIELDS])
def test_no_field_takes_a_value_of_another_type(tmp_path: Path, section: str, name: str, info: Any) -> None:
    kinds = {kind for kind in (info.annotation, *get_args(info.annotation)) if kind in PLAIN}
    for kind, value in PLAIN.items() if kinds else ():
        try:
            config = load_config(write(tmp_path, f"[{section}]\n{name} = {toml_value(value)}\n"))
        except ConfigError:
            continue
        own = getattr(config, section)
        found = next(getattr(own, field) for field, known in type(own).model_fields.items() if known == info)
        assert kind in kinds or (kind, type(found)) == (int, float)
        assert found == value


@pytest.mark.parametrize("value", ["2024-01-31", "07:45:00", "2024-01-31T07:45:00Z", "{a = 2024-01-31}"])
@pytest.mark.parametrize("field", ["data.path", "model.arguments"])
def test_a_date_is_no_text(tmp_path: Path, field: str, value: str) -> None:
    section, name = field.split(".")
    error = message(tmp_path, f"[{section}]\n{name} = {value}\n")
    assert error.startswith(f"my.toml:2: {field}")
    assert 'in "quotes"' in error


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_argument_is_finite(tmp_path: Path, value: float) -> None:
    assert "finite" in message(tmp_path, f'[model]\nfactory = "a:b"\narguments = {{x = {value}}}\n')


def test_a_resumed_run_refuses_an_argument_of_another_type(tmp_path: Path) -> None:
    before, now = (
        load_config(None, ["model.factory=a.b:c", f"model.arguments={{depth = {value}}}"]) for value in ("1", "true")
    )
    of_a_checkpoint(tmp_path)(before)
    checkpoint = Checkpoint.open(tmp_path)
    checked(checkpoint, before)
    with pytest.raises(ConfigError, match=r"model\.arguments .*1.* before, .*true.* now"):
        checked(checkpoint, now)
