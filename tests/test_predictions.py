"""What strategies are predicted to do: by hand, and against what the simulator plays."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muletrain.cli.main import app
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.plan_file import Plan, Prediction
from muletrain.model.spec import ModelSpec
from muletrain.planning.swapping import Layer, accumulation, round_s, swapping
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import simulate_fleet
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.placed import Placed
from muletrain.sim.plan.planner import confirmed
from muletrain.sim.plan.question import HASTE, Question
from muletrain.sim.plan.swarm import Settled, played_step_s, promising, settled
from muletrain.sim.setting import UPDATE_S, Setting
from muletrain.sim.steps.steps import Took
from reproduction import atom
from tests.planned_fleets import FLEET, TINY

ROOT = Path(__file__).parents[1]

# --- swapping ----------------------------------------------------------------------------------------------------------


def test_c_is_atom_s() -> None:
    """Equal layers: b 12 d^2 / W against 2 x 12 d^2 L (1 + L / 6d) / F (its sec. III-C)."""
    params, tokens, width = 12.0 * atom.WIDTH**2, atom.TOKENS, atom.WIDTH
    forward_s = 2 * params * tokens * (1 + tokens / (6 * width)) / atom.FP16_FLOP_PER_S
    layers = [Layer(forward_s, 3 * forward_s, 4 * params, 0.0)] * 4
    found = swapping(layers, 2.5 * 4 * params, atom.LOAD_BYTES_PER_S, 4)
    assert len(found.runs) == 4
    assert found.accumulate == pytest.approx(atom.accumulation(4, atom.FP16_FLOP_PER_S))


def test_a_model_that_fits_is_not_swapped() -> None:
    layers = [Layer(1.0, 2.0, 10.0, 1.0)] * 4
    found = swapping(layers, 44.0, 1.0, 3)
    assert (found.runs, found.accumulate, found.device_bytes) == (((0, 4),), 0.0, 44.0)
    assert round_s(layers, found.runs, 1.0, 3) == pytest.approx(3 * 4 * 3.0)


def test_a_round_waits_for_what_loads_longer_than_its_neighbour_computes() -> None:
    """Two halves of 20 bytes at 1 B/s: forward 2 m and backward 4 m beside them, 2 m and 4 m alone."""
    layers, runs = [Layer(1.0, 2.0, 10.0, 1.0)] * 4, ((0, 2), (2, 4))
    assert accumulation(layers, runs, 1.0) == 10.0
    assert round_s(layers, runs, 1.0, 10) == pytest.approx(10 * 12)
    assert round_s(layers, runs, 1.0, 1) == pytest.approx(20 + 2 + 20 + 4)


# --- hub ---------------------------------------------------------------------------------------------------------------


HUB_FLEET = """[[machines]]
name = "lab"
count = 2
tflops = 4
memory_gib = 1
up_mbps = 2000
down_mbps = 2000
[[machines]]
name = "spot"
count = 4
tflops = 2
memory_gib = 1
reliable = false
up_mbps = 2000
down_mbps = 2000
[defaults]
local_rtt_ms = 2
"""
HUB_RUN = (
    "model.layers=4",
    "model.width=256",
    "model.heads=4",
    "model.context=512",
    "train.batch=512",
    "checkpoint.every=0",
)


def hub_of(tmp_path: Path, *overrides: str, mbps: int = 2000) -> tuple[Question, Prediction]:
    (tmp_path / "fleet.toml").write_text(HUB_FLEET.replace("2000", str(mbps)))
    run = load_config(None, [*HUB_RUN, *overrides])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), 2, 8)
    return question, plan_hub.predict(question, seed=0, time_limit_s=0.5)


@pytest.mark.parametrize("delayed", ["false", "true"])
def test_a_hub_that_is_played_takes_as_long_as_predicted(tmp_path: Path, delayed: str) -> None:
    question, found = hub_of(tmp_path, f"optimizer.delayed={delayed}")
    assert found.problem == ""
    servers = {name for stage in found.stages for name in stage.machines if name not in stage.clients}
    assert any(stage.clients for stage in found.stages)
    assert servers == {"lab-0", "lab-1"}
    plan = Plan(fleet="f", model="model", params=1, batch=512, context=512, strategies=(found,), recommended=0, why="")
    (played,) = confirmed(question, plan).strategies
    assert played.played_step_s == pytest.approx(found.step_s, rel=0.12)


def test_clients_whose_parts_would_wait_for_a_busy_link_are_left_out(tmp_path: Path) -> None:
    """Activations between the stages take 68 % of the servers' links alone, and a play with clients is no faster."""
    question, found = hub_of(tmp_path, mbps=1000)
    assert question.fleet.machines[1].count == 4
    assert not any(stage.clients for stage in found.stages)


def test_clients_of_a_hub_keep_no_moments_and_delayed_updates_hide_what_ends_a_step(tmp_path: Path) -> None:
    (_, at_once), (_, late) = hub_of(tmp_path), hub_of(tmp_path, "optimizer.delayed=true")
    for found in (at_once, late):
        by_machine = {row.machine: row for row in found.memory}
        assert by_machine["spot"].optimizer == 0 < by_machine["lab"].optimizer
    assert late.step_s < 0.95 * at_once.step_s


# --- a fleet -----------------------------------------------------------------------------------------------------------


def test_swarm_settles_as_the_simulator_plays_it(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=64"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model))
    for stages in (1, 2, 4):
        scene = question.scene(stages, 1)
        played = simulate_fleet(scene.setting, scene.run, Weather(), hours=24)
        assert scene.setting.cost.microbatches / settled(scene).step_s == pytest.approx(played.throughput, rel=0.01)


MIXED = """
[[machines]]
name = "fast"
count = 2
device = "RTX 4090"
[[machines]]
name = "slow"
count = 3
device = "T4"
[defaults]
rtt_ms = 5
"""


def test_stages_that_mix_devices_are_predicted_with_the_weights_on_the_cpu(tmp_path: Path) -> None:
    """Unless the run says that they stay where they are; what doesn't mix is left alone."""
    (tmp_path / "fleet.toml").write_text(MIXED)
    (tmp_path / "alike.toml").write_text(MIXED.replace("RTX 4090", "T4"))

    def swarm(name: str, *sets: str) -> Prediction:
        run = load_config(None, ["model.preset=gpt3-350m", "train.batch=64", *sets])
        question = Question(load_fleet(tmp_path / name), run, ModelSpec.from_config(run.model), stages=1, microbatch=1)
        return plan_swarm.predict(question)

    mixed, stays, alike = (
        swarm("fleet.toml"),
        swarm("fleet.toml", "optimizer.state_device=device"),
        swarm("alike.toml"),
    )
    assert [p.state_device for p in (mixed, stays, alike)] == ["cpu", "device", "device"]
    assert mixed.memory[0].device_needs < stays.memory[0].device_needs
    assert mixed.memory[0].host_needs > stays.memory[0].host_needs
    params = ModelSpec.from_config(load_config(None, ["model.preset=gpt3-350m"]).model).params
    assert mixed.step_s == pytest.approx(stays.step_s + UPDATE_S * params, rel=0.02)
    assert "the CPU updates the weights" in mixed.notes[0]
    assert "unless optimizer.state_device = 'cpu'" in stays.notes[0]
    assert not alike.notes


def test_each_schedule_is_tried_on_the_layout_that_made_another_strategy_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Searches that find one machine for each stage, and swarm, which has all."""
    (tmp_path / "fleet.toml").write_text(MIXED.replace("count = 2", "count = 4").replace("RTX 4090", "T4"))
    run = load_config(None, ["model.preset=gpt3-350m", "train.batch=64"])
    question = Question(
        load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), stages=2, microbatch=1
    )
    whole = plan_pipeline.alike

    def narrow(*given: Any) -> list[Placed]:
        (found,) = whole(*given)
        return [replace(found, assignment=tuple(row[:1] for row in found.assignment))]

    monkeypatch.setattr(plan_pipeline, "alike", narrow)
    monkeypatch.setattr(plan_pipeline, "unequal", lambda *given: [])
    alone, swarm = plan_pipeline.predict(question, 0, 1.0), plan_swarm.predict(question)
    tried = plan_pipeline.tried_on(question, swarm, alone)
    machines = [{name for stage in p.stages for name in stage.machines} for p in (*alone, *tried)]
    assert list(map(len, machines)) == [2, 2, 7, 7]
    assert all(after.step_s < before.step_s for before, after in zip(alone, tried, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_plan_and_simulate_agree(tmp_path: Path, seed: int) -> None:
    """As long as nobody comes or goes: see benchmarks/plan/agree.py."""
    rng = random.Random(f"agree/{seed}")
    kinds = "".join(
        f'[[machines]]\nname = "{d}"\ncount = {rng.randint(2, 6)}\ndevice = "{d}"\nregion = "{rng.choice("xy")}"\n'
        f"up_mbps = {rng.choice([100, 1000, 10000])}\ndown_mbps = 1000\n"
        for d in ("T4", "A100", "RTX 4090")
    )
    file = tmp_path / "fleet.toml"
    file.write_text(f"{kinds}[defaults]\nrtt_ms = 40\n")
    sets = ["model.preset=gpt3-350m", "train.batch=128", f"fleet.stages={rng.randint(1, 4)}"]
    run = load_config(None, sets)
    question = Question(load_fleet(file), run, ModelSpec.from_config(run.model), run.fleet.stages, 1)
    found = plan_swarm.predict(question)
    arguments = [x for text in (*sets, "train.microbatch=1") for x in ("--set", text)]
    said = CliRunner().invoke(app, ["simulate", "fleet", str(file), "--hours", "24", "--json", *arguments])
    assert json.loads(said.stdout)["tokens_per_s"] == pytest.approx(found.tokens_per_s, rel=0.05)


def test_of_each_number_of_stages_the_best_is_played_unless_it_is_far_behind(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=64"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model))

    def does(share: float, stages: int) -> Settled:
        return replace(settled(question.scene(stages, 1)), roughly_s=1 / share)

    best, near, other, same, far = does(1.0, 4), does(0.85, 4), does(0.65, 2), does(0.63, 2), does(0.5, 1)
    assert promising([same, near, far, best, other]) == [near, best, other]
    assert promising([near] * 20 + [other, best])[-2:] == [other, best]


def test_what_is_too_slow_by_rates_is_not_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=64"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model))
    played, step = list[int](), plan_swarm.step

    def counted(setting: Setting, found: Settled, *, delayed: bool | None = None) -> Took:
        played.append(len(found.serving))
        return step(setting, found, delayed=delayed)

    monkeypatch.setattr(plan_swarm, "step", counted)
    assert plan_swarm.predict(question, least=math.inf).problem
    assert not played
    found = plan_swarm.predict(question)
    some = len(played)
    monkeypatch.setattr(plan_swarm, "FASTER", math.inf)
    assert plan_swarm.predict(question) == found
    assert 0 < some < len(played) - some, "with all promising layouts"


def test_a_search_that_the_time_limit_ended_is_said(tmp_path: Path) -> None:
    """What it finds depends on how busy the machine is, whatever the seed."""
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=64"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), 2, 1)
    for limit_s, said in ((1e-6, True), (60.0, False)):
        assert [HASTE in p.notes for p in plan_pipeline.predict(question, 0, limit_s)] == [said, said]


@pytest.mark.parametrize("stages", [2, 4])
def test_pipelines_do_what_was_predicted(tmp_path: Path, stages: int) -> None:
    """By all messages of the production code: unequal machines in two regions, one of them a spare."""
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=32"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), stages, 1)
    for found in plan_pipeline.predict(question, 0, 0.2):
        assert found.schedule
        scene = question.scene(stages, 1, tuple(stage.layers for stage in found.stages))
        scene = plan_pipeline.scheduled(question, scene, found.schedule, len(found.microbatches))
        played_s = played_step_s(scene, found.step_s, 6, plan_pipeline.membership(question, scene, found))
        assert found.step_s == pytest.approx(played_s, rel=0.05)


NARROW = """
[[machines]]
name = "a"
count = 3
tflops = 0.0231
memory_gib = 1.0
up_mbps = 39
down_mbps = 39
[[machines]]
name = "b"
count = 2
tflops = 0.0154
memory_gib = 0.2
[defaults]
local_rtt_ms = 17
local_bandwidth_mbps = 1000
"""


def test_an_answer_that_is_on_its_way_is_waited_for(tmp_path: Path) -> None:
    """Behind narrow uploads a probe comes back before a long answer; the microbatch is not computed again for that."""
    (tmp_path / "fleet.toml").write_text(NARROW)
    run = load_config(None, [*TINY, "model.layers=8", "model.ffn=704", "train.batch=48"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), 4, 1)
    (found,) = (p for p in plan_pipeline.predict(question, 0, 2.0) if p.schedule == "1f1b")
    scene = question.scene(4, 1, tuple(stage.layers for stage in found.stages))
    scene = plan_pipeline.scheduled(question, scene, "1f1b", len(found.microbatches))
    planned = plan_pipeline.membership(question, scene, found)
    hours = 4.5 * found.step_s / 3600
    outcome = simulate_fleet(scene.setting, scene.run, Weather(), hours=hours, fidelity="protocol", planned=planned)
    assert outcome.steps >= 4
    assert outcome.repeated_microbatches == 0


@pytest.mark.slow
def test_random_fleets_do_what_was_predicted() -> None:
    """Three of those of benchmarks/plan, by all messages of the production code."""
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks" / "plan" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for seed in range(3):
        row = benchmark.compared(seed)
        assert abs(row["error"]) <= 0.1, json.dumps(row)
        assert row["behind"] <= 0.05, json.dumps(row)
