"""A field that the run would ignore is an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from muletrain.cli.actions.planned import follows
from muletrain.config.effects import IDLE
from muletrain.config.load import load_config
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
