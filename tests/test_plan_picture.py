"""``plan --plot``: every strategy is drawn, links in both directions, and a machine alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muletrain.cli.show.plan_picture import draw
from muletrain.config.fleet_file import load_fleet
from muletrain.config.plan_file import Plan, Prediction, Stage

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

FLEET = """
machines = [
    { name = "desk", region = "anna", device = "RTX 4090", up_mbps = 100, down_mbps = 500 },
    { name = "tower", region = "ben", device = "RTX 3090", up_mbps = 40, down_mbps = 250 },
]
defaults = { rtt_ms = 30 }
"""


def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *predictions: Prediction) -> list[list[str]]:
    """The words of each row of the picture, title first."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def saved(self: Figure, *given: object, **more: object) -> None:
        figures.append(self)
        save(self, *given, **more)

    monkeypatch.setattr(Figure, "savefig", saved)
    (tmp_path / "fleet.toml").write_text(FLEET)
    plan = Plan(
        fleet="f",
        model="m",
        params=1,
        batch=1,
        context=1,
        strategies=predictions,
        recommended=len(predictions) - 1,
        why="",
    )
    draw(plan, load_fleet(tmp_path / "fleet.toml"), tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 5000
    rows = [axes for axes in figures[0].axes if axes.get_title(loc="left")]
    return [[axes.get_title(loc="left"), *(text.get_text() for text in axes.texts)] for axes in rows]


def test_every_strategy_is_drawn_and_both_directions_of_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (Stage(layers=(0, 3), machines=("desk",)), Stage(layers=(3, 4), machines=("tower",)))
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=10, stages=stages)
    rows = drawn(
        tmp_path,
        monkeypatch,
        swarm.model_copy(update={"strategy": "hub"}),
        swarm.model_copy(update={"strategy": "pipeline", "schedule": "1f1b"}),
        swarm.model_copy(update={"problem": "no room"}),
        swarm.model_copy(update={"churned_tokens_per_s": 5.0}),
    )
    titles = [row[0].split(":")[0] for row in rows]
    assert titles == ["swarm, recommended", "hub", "pipeline, 1F1B"], "the recommended one first, all that are possible"
    assert "5 while machines leave" in rows[0][0]
    assert any(
        text.splitlines() == ["\N{RIGHTWARDS ARROW} 100 Mb/s, 15 ms", "\N{LEFTWARDS ARROW} 40 Mb/s, 15 ms"]
        for text in rows[0]
    )


def test_a_machine_alone_is_no_empty_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Prediction(
        strategy="swap", runnable=True, tokens_per_s=10, stages=(Stage(layers=(0, 4), machines=("desk",)),)
    )
    (row,) = drawn(tmp_path, monkeypatch, alone)
    assert row[1:] == ["1", "RTX 4090"]
