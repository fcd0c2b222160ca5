"""``simulate fleet`` says what would help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.errors import MuletrainError
from muletrain.model.spec import ModelSpec
from muletrain.sim.fleet import advice
from muletrain.sim.fleet.advice import MOST, WORTH, Change, Suggestion, suggestions
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import EXAMPLE, by_rates, weather
from muletrain.sim.setting import Setting, setting
from tests.tiny_fleets import PACED, run_of

if TYPE_CHECKING:
    from collections.abc import Callable


def by_rates_too(scene: Setting, run: RunConfig) -> float:
    """A play that finds what rates promised."""
    return by_rates(scene, run, Weather(), hours=8.0).throughput * scene.cost.tokens


def advised(
    tmp_path: Path, text: str, *overrides: str, played: Callable[[Setting, RunConfig], float] = by_rates_too
) -> list[Suggestion]:
    """As nobody comes or goes."""
    return suggestions(
        lambda change: run_of(tmp_path, text, *overrides, *([change.text] if change else [])), Weather(), played
    )


def test_what_is_suggested_has_been_played_and_its_gain_is_what_came_of_it(tmp_path: Path) -> None:
    options = ("fleet.stages=2", "train.batch=8", "fleet.rebalance=off", "wire.gradients=fp32")

    def half(scene: Setting, run: RunConfig) -> float:
        """A play in which a larger batch helps less than by rates, and nothing else does."""
        return 100.0 * (1.1 if run.train.batch == 16 else 1.0)

    promised = {s.change.field: s.gain for s in advised(tmp_path, PACED, *options)}
    assert promised["train.batch"] > 0.15
    (found,) = advised(tmp_path, PACED, *options, played=half)
    assert (found.change.field, found.gain) == ("train.batch", pytest.approx(0.1))


def test_what_would_help_by_hand(tmp_path: Path) -> None:
    """The step by hand above, 16.5 s for 8 microbatches, takes 28.5 s for 16; gradients cost nothing on these links."""
    found = advised(tmp_path, PACED, "fleet.stages=2", "train.batch=8", "fleet.rebalance=off", "wire.gradients=fp32")
    by_field = {s.change.field: s for s in found}
    assert by_field["train.batch"].change == Change("train.batch", "16", "each step has 16 sequences instead of 8")
    assert by_field["train.batch"].gain == pytest.approx((16 / 28.5) / (8 / 16.5) - 1)
    assert "wire.gradients" not in by_field


def test_averaging_on_narrow_links_is_helped_by_what_makes_it_smaller_or_later(tmp_path: Path) -> None:
    text = PACED + "[defaults]\nlocal_bandwidth_mbps = 1\n"
    options = ("fleet.stages=2", "train.batch=8", "wire.gradients=fp32", "wire.activations=int8")
    found = advised(tmp_path, text, *options)
    assert {s.change.text for s in found} >= {"optimizer.delayed=true", "wire.gradients=int8"}
    assert not {"fleet.stages", "train.microbatch"} & {s.change.field for s in found}, (
        "paced machines say nothing of them"
    )
    assert [s.gain for s in found] == sorted((s.gain for s in found), reverse=True)
    assert len(found) <= MOST
    for s in found:  # each is what rates say of the run with that change
        before, after = (
            by_rates(*run_of(tmp_path, text, *options, *more), Weather(), hours=12.0) for more in ([], [s.change.text])
        )
        assert s.gain == pytest.approx(after.throughput / before.throughput - 1, rel=0.02)
        assert s.gain >= WORTH


def test_a_fleet_that_loses_nothing_is_told_nothing(tmp_path: Path) -> None:
    one = PACED.replace("count = 4", "count = 1")
    assert advised(tmp_path, one, "fleet.stages=1", "train.batch=512", "wire.gradients=int8") == []


def test_stages_that_lose_their_last_peer_every_now_and_then_are_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 stages do more than 10 of more machines each, but only as nobody leaves."""
    monkeypatch.setattr(advice, "changes", lambda run, *, paced, quality: [Change("fleet.stages", "13")])
    fleet = load_fleet(EXAMPLE)

    def changed(change: Change | None) -> tuple[Setting, RunConfig]:
        stages = "fleet.stages=10" if change is None else change.text
        config = load_config(None, ["model.preset=llama-7b", "train.batch=512", "train.microbatch=1", stages])
        return setting(fleet, config, ModelSpec.from_config(config.model)), config

    assert [s.change.value for s in suggestions(changed, Weather(), by_rates_too)] == ["13"]
    assert suggestions(changed, weather(fleet.churn, EXAMPLE.parent), by_rates_too) == []


def test_changes_that_do_not_fit_are_not_named(tmp_path: Path) -> None:
    def changed(change: Change | None) -> tuple[Setting, RunConfig]:
        if change is not None and change.field == "train.batch":
            raise MuletrainError("no room")
        return run_of(tmp_path, PACED, "fleet.stages=2", "train.batch=8", *([change.text] if change else []))

    assert "train.batch" not in {s.change.field for s in suggestions(changed, Weather(), by_rates_too)}
