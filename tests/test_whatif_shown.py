"""``simulate fleet`` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.cli.actions.simulate_fleet import what_if
from muletrain.cli.main import app
from muletrain.errors import MuletrainError
from muletrain.sim.fleet.simulation import EXAMPLE
from tests.tiny_fleets import PACED, TINY


def test_without_a_file_the_example_is_played_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    what_if(None, None, None, [], hours=0.1, seed=0, plot=[tmp_path / "out.png"], json=False)
    text = capsys.readouterr().out
    assert str(EXAMPLE) in text.replace("\n", "")
    for word in (
        "tokens/s",
        "share of the optimum",
        "ends of steps",
        "virginia",
        "time to recover",
        "computed again",
        "of these changes",
        "--set optimizer.delayed=true",
        "one update old",
    ):
        assert word in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    what_if(EXAMPLE, None, "llama-7b", ["train.batch=512"], hours=0.2, seed=0, plot=(), json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["stages"], said["machines"], said["left_out"]) == (11, 44, [])
    assert said["tokens_per_s"] > 0
    assert len(said["curve"]) == 400
    assert said["bytes"]["virginia to oregon"]["averaging"] > 0
    assert not said["partial"]
    best = said["advice"][0]
    assert best["tokens_per_s"] == pytest.approx((1 + best["gain"]) * said["tokens_per_s"])


def test_one_machine_has_no_traffic_to_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(PACED.replace("count = 4", "count = 1"))
    plot = tmp_path / "out.png"
    overrides = [*TINY, "fleet.stages=1", "train.batch=4"]
    what_if(tmp_path / "fleet.toml", None, None, overrides, hours=0.1, seed=0, plot=[plot], json=False)
    assert "traffic" not in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_moves_are_no_losses_to_recover_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(HOMES)
    options = (tmp_path / "fleet.toml", None, "gpt3-350m", ["train.batch=512", "fleet.stages=4"])
    what_if(*options, hours=2.0, seed=0, plot=(), json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["events"]["moved"] > 0
    assert (said["recoveries_s"], said["not_recovered"]) == ([], False)
    what_if(*options, hours=2.0, seed=0, plot=(), json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "machines none came or went" in text
    assert f"moves between stages {said['events']['moved']}" in text
    assert "not needed: no machine went away" in text


def test_machines_without_room_are_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    what_if(EXAMPLE, None, "llama-7b", ["fleet.stages=4", "swap.backing=off"], hours=0.2, seed=0, plot=(), json=False)
    said = capsys.readouterr().out
    assert "left out: 'spot-east'" in said
    assert "left out: 'lab'" not in said


HOMES = """
machines = [
    { name = "desk", count = 3, device = "RTX 4090", up_mbps = 100, down_mbps = 500 },
    { name = "laptop", count = 2, tflops = 2.5, memory_gib = 4, up_mbps = 40, down_mbps = 250 },
    { name = "old", count = 2, device = "CPU", up_mbps = 40, down_mbps = 250 },
]
"""
ONE = '[[machines]]\nname = "desk"\ncount = 4\ndevice = "RTX 3080"\n'


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (
            ONE + "host_gib = 64\n",
            ["model.preset=gpt3-175b"],
            "fleet.toml:3: machines[0].count: a model of 175 B parameters needs",
        ),
        (ONE + "host_gib = 64\n", ["model.preset=gpt3-175b"], "machines like 'desk', or take a smaller model"),
        (
            ONE.replace("count = 4", "count = 400"),
            ["model.preset=llama-65b", "fleet.stages=40"],
            "stage 0 of 40 needs 3",
        ),
        (
            ONE.replace("count = 4", "count = 400"),
            ["model.preset=llama-65b", "fleet.stages=40"],
            "the largest machine 'desk' has 10 GiB; take more stages (--set fleet.stages=N)",
        ),
        (
            ONE,
            ["fleet.stages=8"],
            "fleet.toml:3: machines[0].count: 4 machines in all have room for a stage, for fleet.stages = 8",
        ),
        (
            ONE.replace("RTX 3080", "RTX 3080 Max"),
            [],
            "fleet.toml:4: machines[0].device: the speed of 'RTX 3080 Max' is not known; give tflops beside it, "
            "plan on the machine that has it",
        ),
        (
            ONE.replace('device = "RTX 3080"\n', ""),
            [],
            "fleet.toml:1: machines[0].tflops: missing, and no device is named",
        ),
        (ONE + "up_mbps = -5\n", [], "fleet.toml:5: machines[0].up_mbps: must be greater than 0, got -5"),
        (ONE + '[churn]\ntrace = "none.csv"\n', [], "none.csv: cannot be read as a churn trace"),
    ],
)
def test_a_fleet_that_cannot_work(tmp_path: Path, text: str, overrides: list[str], said: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(MuletrainError) as caught:
        what_if(file, None, None, overrides, hours=0.1, seed=0, plot=(), json=True)
    assert said in str(caught.value)


def test_the_batch_has_an_option_as_in_plan(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(PACED)
    sets = [word for setting in (*TINY, "fleet.stages=2") for word in ("--set", setting)]
    words = ["simulate", "fleet", str(tmp_path / "fleet.toml"), "--batch", "24", "--hours", "0.02", *sets]
    out = CliRunner().invoke(app, words).stdout
    assert "24 microbatches of 1 x" in " ".join(out.split())
