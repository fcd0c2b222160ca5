"""``muletrain simulate fleet`` plays what ``muletrain plan`` lays out, or what a plan's file says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from muletrain.cli.main import app
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
