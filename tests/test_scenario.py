"""``muletrain simulate fleet`` plays what ``muletrain plan`` lays out, or what a plan's file says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from muletrain.cli.actions.scenario import PLANNED_PIPELINE, Scenario, scenario
from muletrain.cli.main import app
from muletrain.config.costs import Costs
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.plan_file import Plan, Prediction, Stage
from muletrain.model.make import make_model
from muletrain.sim.fleet.flow import Weather
from tests.planned_fleets import FLEET, TINY

if TYPE_CHECKING:
    from pathlib import Path

SETS = [x for text in (*TINY, "train.batch=32") for x in ("--set", text)]


def said(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def simulated(*arguments: str) -> dict[str, Any]:
    return said("simulate", "fleet", *arguments, "--hours", "2")


def recommended(plan: dict[str, Any]) -> dict[str, Any]:
    return dict(plan["strategies"][plan["recommended"]])


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> str:
    (tmp_path / "fleet.toml").write_text(FLEET)
    return str(tmp_path / "fleet.toml")


def test_both_commands_give_one_figure_by_their_defaults(file: str) -> None:
    """Of what both play: planned pipelines are the planner's alone."""
    plan = said("plan", file, *SETS)
    best = max(p["tokens_per_s"] for p in plan["strategies"] if p["strategy"] in ("swarm", "swap") and not p["problem"])
    assert simulated(file, *SETS)["tokens_per_s"] == pytest.approx(best, rel=0.1)


def test_a_plan_is_played_with_its_stages_and_machines(file: str, tmp_path: Path) -> None:
    plan = said("plan", file, *SETS)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    chosen = recommended(plan)
    sets = [x for text in TINY if "microbatch" not in text for x in ("--set", text)]
    found = simulated(file, *sets, "--plan", str(tmp_path / "plan.json"))
    assert found["stages"] == len(chosen["stages"])
    assert found["tokens_per_s"] == pytest.approx(chosen["tokens_per_s"], rel=0.1)
    (tmp_path / "other.toml").write_text(FLEET.replace('"far"', '"away"'))
    refused = CliRunner().invoke(
        app, ["simulate", "fleet", str(tmp_path / "other.toml"), *sets, "--plan", str(tmp_path / "plan.json")]
    )
    assert refused.exit_code != 0
    assert "use the fleet file of the plan" in str(refused.exception)


UNEVEN_STAGES = (
    Stage(layers=(0, 1), machines=("near-0", "near-1", "near-0")),
    Stage(layers=(1, 4), machines=("far-0", "far-0", "far-0")),
)
"""Of three pipelines; near-0 and far-0 serve several."""


def test_uneven_stages_of_a_plan_are_played_with_its_layers_microbatch_and_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody plays the even cut, or the size of microbatches that the configuration would have without the plan; nor where
    'simulate' lays the machines out by itself."""
    sets = [text for text in TINY if "microbatch" not in text]
    told: dict[str, Any] = {"runnable": True, "microbatch": 2, "stages": UNEVEN_STAGES, "left_out": ("far-1",)}
    swarm = Prediction(strategy="swarm", microbatches=(16,), state_device="cpu", spares=("near-2",), **told)
    seats = Prediction(strategy="pipeline", schedule="1f1b", microbatches=(6, 5, 5), **told)
    even = swarm.model_copy(update={"stages": (Stage(layers=(0, 2), machines=("near-0",)), UNEVEN_STAGES[1])})
    plan = Plan(
        fleet="fleet",
        model="model",
        params=make_model(load_config(None, sets).model).params,
        batch=32,
        context=512,
        strategies=(even, swarm, seats),
        recommended=1,
        why="",
    )
    path, file = tmp_path / "plan.json", tmp_path / "fleet.toml"
    path.write_text(plan.model_dump_json())
    file.write_text(FLEET)

    def asked(choice: str | None, plan: Path | None = path) -> Scenario:
        given = sets if plan is not None else [*sets, "train.batch=32"]
        return scenario(load_fleet(file), Weather(), None, given, Costs(), plan=plan, choice=choice)

    monkeypatch.setattr("muletrain.cli.actions.scenario.laid_out", lambda question, names: swarm)
    for found in (asked(None), asked(None, plan=None)):
        scene, run = found.scene()
        assert (scene.cut, scene.cost.sequences, scene.cost.microbatches) == (((0, 1), (1, 4)), 2, 16)
        assert (run.fleet.stages, run.fleet.layers, run.optimizer.state_device) == (2, (1, 3), "cpu")
        assert [(kind.name, kind.count) for kind in scene.kinds] == [("near", 3), ("far", 1)], "far-1 is left out"
        serving = found.serving(scene)
        assert serving is not None
        assert sum(near for near, _ in serving) == 3, "the spare is seated"
        assert serving[0][0] >= 2
        assert [far for _, far in serving] == [0, 1]
    planned = asked("1f1b")
    assert (planned.told[-1], planned.layout) == (PLANNED_PIPELINE, seats)
    seated = planned.serving(planned.scene()[0])
    assert seated is not None
    assert [far for _, far in seated] == [0, 1], "one machine in three pipelines is one"


UNEVEN = """
machines = [
    { name = "big", tflops = 10, memory_gib = 20, host_gib = 64 },
    { name = "small", count = 3, tflops = 5, memory_gib = 6, host_gib = 64 },
]
"""


def test_a_model_that_only_uneven_stages_hold_is_played(tmp_path: Path) -> None:
    """No even cut gives each stage a machine: that was refused, with the advice to take fewer stages."""
    (tmp_path / "fleet.toml").write_text(UNEVEN)
    found = simulated(
        str(tmp_path / "fleet.toml"), "--model", "gpt3-xl", "--set", "train.batch=64", "--set", "swap.backing=off"
    )
    assert found["tokens_per_s"] > 0
    assert found["stages"] > 1


@pytest.mark.parametrize(
    ("spot", "stated"),
    [("memory_gib = 0.1, host_gib = 0.1", ["--set", "fleet.stages=1"]), ("memory_gib = 24, up_mbps = 0.1", [])],
    ids=["no room", "a slow link"],
)
def test_churn_of_machines_that_are_left_out_hits_nobody_else(tmp_path: Path, spot: str, stated: list[str]) -> None:
    """Of the spot machines the run has no use, or no room for them; the others are reliable, and stay."""
    (tmp_path / "fleet.toml").write_text(
        """
machines = [
    { name = "stays", count = 2, tflops = 10, memory_gib = 24, host_gib = 64 },
    { name = "spot", count = 2, tflops = 1, SPOT, reliable = false },
]
churn = { leave_per_hour = 5 }
""".replace("SPOT", spot)
    )
    found = simulated(str(tmp_path / "fleet.toml"), "--model", "gpt3-350m", "--set", "train.batch=64", *stated)
    assert found["left_out"] == (["spot"] if stated else []), found["left_out"]
    assert found["events"].get("left", 0) == 0
