"""``muletrain plan --network``: what it prints, and what is wrong with a network."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.errors import ConfigError
from muletrain.planning.placement import Task
from tests.placements import exhaustive, link_s, network


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if isinstance(result.exception, ConfigError):
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return result.stdout


def net(tmp_path: Path, **others: Any) -> str:
    delay, gbps = network(5, 6)
    file = tmp_path / "net.json"
    file.write_text(json.dumps({"delay_ms": delay.tolist(), "bandwidth_gbps": gbps.tolist(), **others}))
    return str(file)


SIZES = ("--activation-bytes", "300 MB", "--gradient-bytes", "0.5e9")


def test_the_command_prints_what_can_be_checked(tmp_path: Path) -> None:
    arguments = ("--network", net(tmp_path), "--stages", "3", "--pipelines", "2", *SIZES, "--seed", "4", "--json")
    arguments += ("--time-limit", "5m")  # work that agrees long before: a busy machine changes nothing
    found = json.loads(plan(*arguments))
    task = Task(*network(5, 6), (2, 2, 2), 3e8, 5e8)
    stages = found["assignment"]
    assert sorted(d for stage in stages for d in stage) == list(range(6))
    data_parallel = max(2 * link_s(task, a, b, 2.5e8) for a, b in stages)
    pipeline = sum(max(link_s(task, a, b, 3e8) for a, b in zip(x, y, strict=True)) for x, y in pairwise(stages))
    assert found["data_parallel_s"] == pytest.approx(data_parallel)
    assert found["pipeline_s"] == pytest.approx(pipeline)
    assert found["cost_s"] == pytest.approx(data_parallel + 2 * pipeline) == pytest.approx(exhaustive(task))
    assert found["matching"] == [[list(pair) for pair in zip(x, y, strict=True)] for x, y in pairwise(stages)]
    assert found["lower_bound_s"] <= found["cost_s"]
    again = json.loads(plan(*arguments))
    assert {**again, "seconds": 0} == {**found, "seconds": 0}


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    cities = ["rome", "rome", "oslo", "oslo", "kyiv", "kyiv"]
    out = plan("--network", net(tmp_path, regions=cities), "--stages", "2", "--pipelines", "2", *SIZES, "--spares")
    for word in ("cost", "data-parallel", "slowest link to the next stage", "left out: "):
        assert word in out
    assert any(city in out for city in cities)


def test_one_device_is_a_plan_of_its_own(tmp_path: Path) -> None:
    alone = net(tmp_path, delay_ms=[[0]], bandwidth_gbps=[[0]])
    arguments = ("--network", alone, "--stages", "1", "--pipelines", "1", "--time-limit", "0.2")
    found = json.loads(plan(*arguments, *SIZES, "--json"))
    assert (found["cost_s"], found["assignment"], found["gap"]) == (0, [[0]], 0)


def test_a_network_without_links_is_told(tmp_path: Path) -> None:
    none = net(tmp_path, bandwidth_gbps=[[0] * 6] * 6)
    said = plan("--network", none, "--stages", "3", "--pipelines", "2", *SIZES)
    assert "the network falls apart: 6 devices must reach each other, and at most 1 do" in said


def test_a_network_that_falls_apart_needs_only_who_reach_each_other(tmp_path: Path) -> None:
    """Device 0 has a link in one direction only, to anyone; the other five hold two pipelines of two stages."""
    gbps = network(5, 6)[1]
    gbps[0] = 0
    arguments = ("--network", net(tmp_path, bandwidth_gbps=gbps.tolist()), "--stages", "2", "--pipelines", "2", *SIZES)
    found = json.loads(plan(*arguments, "--spares", "--json", "--time-limit", "0.5"))
    assert 0 in found["spares"]
    assert len(found["spares"]) == 2
    whole = plan("--network", arguments[1], "--stages", "3", "--pipelines", "2", *SIZES)
    assert "6 devices must reach each other, and at most 5 do; device 0 has no links" in whole


def test_help_states_the_convention() -> None:
    words = " ".join(plan("--help").replace("│", " ").split())
    assert "A link takes delay + bytes x 8 / bandwidth" in words
    assert "Cost = data-parallel + 2 x pipeline" in words


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"delay_ms": [[0, 1], [1]]}, r"delay_ms\[1\] has 1 values"),
        ({"delay_ms": [[0, -1], [1, 0]]}, r"delay_ms\[0\]\[1\]: expected a finite number of at least 0, got -1"),
        ({"bandwidth_gbps": [[0, float("nan")], [1, 0]]}, r"bandwidth_gbps\[0\]\[1\]: .* 0 for no link, got nan"),
        (
            {"delay_ms": [[0, 1e10], [1, 0]]},
            r"delay_ms\[0\]\[1\]: 10000000000.0 .*milliseconds",
        ),
        ({"bandwidth_gbps": [[0, 1e-10], [1, 0]]}, r"1e-10 .*Gbit/s"),
        ({"delay_ms": [[0, "1"], [1, 0]]}, r"delay_ms\[0\]\[1\]: expected a number, got \"1\""),
        ({"delay_ms": [[0, True], [1, 0]]}, "expected a number, got true"),
        ({"delay_ms": 3}, "expected a list of N lists"),
        ({"delay_ms": None}, "delay_ms: missing"),
        ({"delay_ms": [[0]]}, "delay_ms has 1 rows and bandwidth_gbps 6"),
        ({"delays_ms": []}, "did you mean 'delay_ms'"),
        ({"regions": ["a"]}, "expected a list of 6 names"),
        ({}, r"has 6 devices, .* need 4; .* 6 \(2 x 3, .*--spares"),
    ],
)
def test_what_is_wrong_with_a_network_is_told(tmp_path: Path, others: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(plan("--network", net(tmp_path, **others), "--stages", "2", "--pipelines", "2", *SIZES))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--network", "dtfm-case9"), "did you mean 'dtfm-case"),
        (("--network", "nowhere"), "nowhere: "),
        (("--network", "dtfm-case1", "--time-limit", "0"), "--time-limit: "),
        (("--network", "dtfm-case1", "--time-limit", "soon"), "--time-limit: expected a duration"),
        (("--network", "dtfm-case1", "--gradient-bytes", "lots"), "--gradient-bytes: expected a size"),
    ],
)
def test_what_cannot_be_planned(arguments: tuple[str, ...], said: str) -> None:
    assert said in plan("--stages", "8", "--pipelines", "8", *SIZES, *arguments)
