"""A field that the run would ignore is an error that says what to do."""

from __future__ import annotations

import pytest

from muletrain.cli.actions.planned import follows
from muletrain.config.load import load_config
from muletrain.errors import ConfigError


def test_swap_with_several_stages_is_refused_and_one_stage_is_not() -> None:
    with pytest.raises(ConfigError, match=r"fleet.stages: 3 stages, but with strategy swap .*leave it out"):
        follows(load_config(None, ["fleet.stages=3"]), "swap", local=True)
    for overrides in ([], ["fleet.stages=1"]):
        assert follows(load_config(None, overrides), "swap", local=True).fleet.stages == 1


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("train.sequence_warmup=4", "train.sequence_start"),
        ("pipeline.schedule=gpipe", "pipeline.seats"),
    ],
)
def test_a_field_without_the_one_that_gives_it_effect_is_refused(override: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        load_config(None, [override])
