"""A field that the run would ignore is an error that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from muletrain.cli.actions.planned import follows
from muletrain.config.effects import IDLE
from muletrain.config.load import load_config, load_located
from muletrain.config.schema import RunConfig
from muletrain.errors import ConfigError


def test_swap_with_several_stages_is_refused_and_one_stage_is_not() -> None:
    with pytest.raises(ConfigError, match=r"fleet.stages: 3 stages, but with strategy swap .*leave it out"):
        follows(load_config(None, ["fleet.stages=3"]), "swap", local=True)
    for overrides in ([], ["fleet.stages=1"]):
        assert follows(load_config(None, overrides), "swap", local=True).fleet.stages == 1


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("train.sequence_warmup=4", "without train.sequence_start"),
        ("train.sequence_start=32", "without train.sequence_warmup"),
        ("optimizer.final_lr=0.1 optimizer.schedule=constant", "with optimizer.schedule = 'constant'"),
        ("model.arguments.width=3", "without model.factory"),
        ("data.on_error=skip", "without data.factory"),
        ("data.end_token=x model.factory=a.b:c data.factory=a.b:d", "with data.factory"),
        ("data.share=true model.factory=a.b:c data.factory=a.b:d", "with data.factory"),
        ("data.heldout=0.1 data.validation=x", "with data.validation"),
        ("train.validate_every=5 data.heldout=0", "with data.heldout = 0 and no data.validation"),
        ("data.share=true fleet.trainers=1", "with fleet.trainers = 1"),
        ("fleet.rebalance_period=9 fleet.rebalance=off", "with fleet.rebalance = 'off'"),
        ("pipeline.schedule=gpipe", "without pipeline.seats"),
        ("hub.verify=0.5", "without hub.clients"),
        ("swap.folder=x swap.backing=ram", "with swap.backing = 'ram'"),
        ("swap.together=3 swap.backing=off", "with swap.backing = 'off'"),
    ],
)
def test_a_field_without_effect_is_refused(override: str, why: str) -> None:
    field = override.split("=")[0]
    with pytest.raises(ConfigError, match=rf"{field.split('.width')[0]}: .* has no effect {why}.*leave \w+ out"):
        load_config(None, override.split())
    if "model.factory" not in override:
        load_config(None, [part for part in override.split()[1:]])


def test_fields_without_effect_are_fields() -> None:
    for path in (path for idle in IDLE for path in idle.fields.split()):
        section, name = path.split(".")
        annotation: Any = RunConfig.model_fields[section].annotation
        assert name in annotation.model_fields, path


# what that commit wrote into a run's folder and its checkpoints, with fields that had no effect already
EARLIER = sorted((Path(__file__).parent / "configurations").glob("*.toml"))


@pytest.mark.parametrize("file", EARLIER, ids=lambda file: file.stem)
def test_configurations_of_earlier_versions_are_read(file: Path) -> None:
    """Nobody asks anew for what they say; a field that the user sets at a resume has to have an effect."""
    config, _ = load_located(file, kept=True)
    assert RunConfig.model_validate_json(file.with_suffix(".json").read_text()) == config
    assert (config.fleet.rebalance_period, config.hub.verify, config.train.sequence_warmup) == (9, 0.5, 7)
    with pytest.raises(ConfigError, match="no effect"):
        load_config(file)
    assert load_located(file, ["train.steps=400"], kept=True)[0].train.steps == 400
    for load in (
        lambda asked: load_located(file, [asked], kept=True),
        lambda asked: load_located(None, [asked], config),
    ):
        with pytest.raises(ConfigError, match=r"swap.together: 2 has no effect with swap.backing = 'off'"):
            load("swap.together=2")
        with pytest.raises(ConfigError, match=r"model.arguments: .* has no effect without model.factory"):
            load("model.arguments.x=1")


def test_there_are_configurations_of_earlier_versions() -> None:
    assert EARLIER
