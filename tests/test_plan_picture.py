"""``plan --plot``: a bar for each strategy, the layout of the recommended one, and a machine alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from muletrain.cli.show.pictures import DARK, LIGHT, check_pictures
from muletrain.cli.show.plan_picture import draw
from muletrain.config.fleet_file import load_fleet
from muletrain.config.plan_file import Plan, Prediction, Stage
from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLEET = """
machines = [
    { name = "desk", region = "anna", device = "RTX 4090", up_mbps = 100, down_mbps = 500 },
    { name = "tower", region = "ben", device = "RTX 3090", up_mbps = 40, down_mbps = 250 },
]
defaults = { rtt_ms = 30 }
"""


def drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *predictions: Prediction
) -> tuple[str, list[str], list[str]]:
    """The message of the picture, and the words of its left and its right half."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def saved(self: Figure, path: Path, dpi: float) -> None:
        figures.append(self)
        save(self, path, dpi=dpi)

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
    paths = [tmp_path / "out.png", tmp_path / "out.dark.svg"]
    draw(plan, load_fleet(tmp_path / "fleet.toml"), paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in paths[1].read_text()
    assert [figure.get_facecolor() for figure in figures] == [to_rgba(LIGHT.back), to_rgba(DARK.back)]
    left, right = figures[0].axes
    for axes in (left, right):
        _check_apart(figures[0], axes)
    words = [
        [*(t.get_text() for t in axes.texts), *(t.get_text() for t in axes.get_yticklabels())] for axes in (left, right)
    ]
    return figures[0].texts[0].get_text(), words[0], [*words[1], right.get_xlabel()]


def to_rgba(name: str) -> tuple[float, float, float, float]:
    from matplotlib.colors import to_rgba as convert

    return convert(name)


def _check_apart(figure: Figure, axes: Axes) -> None:
    """No text of the picture lies on another one."""
    figure.draw_without_rendering()
    texts = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.title]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]
    for n, (text, box) in enumerate(boxes):
        assert [other for other, at in boxes[:n] if box.overlaps(at)] == [], text


STAGES = (Stage(layers=(0, 3), machines=("desk",)), Stage(layers=(3, 4), machines=("tower",)))
SWARM = Prediction(strategy="swarm", runnable=True, tokens_per_s=10, stages=STAGES)


def test_each_strategy_has_a_bar_and_the_layout_is_that_of_the_recommended_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, bars, layout = drawn(
        tmp_path,
        monkeypatch,
        SWARM.model_copy(update={"strategy": "hub", "tokens_per_s": 50.1}),
        SWARM.model_copy(update={"strategy": "pipeline", "schedule": "1f1b", "tokens_per_s": 4}),
        SWARM.model_copy(update={"strategy": "swap", "problem": "no room"}),
        SWARM.model_copy(update={"tokens_per_s": 60.0, "churned_tokens_per_s": 50.0}),
    )
    assert message == "Use swarm: 50 tokens/s with 2 machines in 2 stages"
    assert bars == [
        "50, recommended",
        "50.1",
        "4",
        "not possible",
        "swarm",
        "hub",
        "pipeline, 1F1B",
        "swap",
    ]
    assert layout[:4] == ["1", "1", "anna\n1 x RTX 4090", "ben\n1 x RTX 3090"]
    assert "slowest link: anna to ben, 100 Mb/s, 15 ms" in layout[4].replace("\n", " ")
    assert "back 40 Mb/s" in layout[4].replace("\n", " "), "both directions"


def test_many_stages_have_labels_that_do_not_touch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tuple(Stage(layers=(n, n + 1), machines=("desk", "tower")) for n in range(16))
    message, _, _ = drawn(tmp_path, monkeypatch, SWARM.model_copy(update={"stages": stages}))
    assert message.endswith("in 16 stages")
    drawn(tmp_path, monkeypatch, SWARM.model_copy(update={"stages": stages[:6]}))


def test_a_machine_alone_is_no_empty_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Prediction(
        strategy="swap", runnable=True, tokens_per_s=10, stages=(Stage(layers=(0, 4), machines=("desk",)),)
    )
    message, _, layout = drawn(tmp_path, monkeypatch, alone)
    assert message == "Use desk alone (swap): 10 tokens/s"
    assert layout == ["1", "anna\n1 x RTX 4090", "ben\n1 without work", ""]


def test_only_pictures_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_pictures([])
    with pytest.raises(MuletrainError, match=r"pip install 'muletrain\[plots\]'"):
        check_pictures([tmp_path / "plan.png"])


def test_a_picture_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MuletrainError, match=r"plan.jpg: the name must end in .png or .svg"):
        check_pictures([tmp_path / "plan.jpg"])
