"""``muletrain plan FLEET.toml``: averaging and swapping by hand, predictions against the simulator, and errors that say
what to change."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from muletrain.cli.actions.whatif import what_if
from muletrain.cli.main import app
from muletrain.config import plan_file as schema
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.plan_file import Plan, Prediction
from muletrain.errors import CapacityError, MuletrainError
from muletrain.model.spec import ModelSpec
from muletrain.papers import atom
from muletrain.planning.splits import (
    Member,
    Swapper,
    averaging_s,
    recommend,
    shared_out,
    swap_split,
)
from muletrain.planning.swapping import Layer, accumulation, round_s, swapping
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import simulate_fleet
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.placed import Placed
from muletrain.sim.plan.planner import confirmed, in_order
from muletrain.sim.plan.question import HASTE, Question
from muletrain.sim.plan.swarm import NoSteps, Settled, played_step_s, promising, settled
from muletrain.sim.setting import UPDATE_S
from muletrain.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]

# --- shares ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 500), st.lists(st.floats(0.01, 10), min_size=1, max_size=9))
def test_everything_is_shared_out_in_proportion(items: int, speeds: list[float]) -> None:
    found = shared_out(items, speeds)
    assert sum(found) == items
    assert all(abs(n - items * v / sum(speeds)) < 1 + 1e-6 for n, v in zip(found, speeds, strict=True))


def test_averaging_by_hand() -> None:
    members = [Member(10.0, 20.0), Member(20.0, 20.0)]
    assert averaging_s(100.0, members[:1], 5.0, 1.0) == 0.0
    assert averaging_s(100.0, members, math.inf, 0.5) == pytest.approx(2 / 2 * 100 / 10 + 4 * 0.5)


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


def test_a_step_of_swapping_machines_by_hand() -> None:
    layers = (Layer(1.0, 2.0, 10.0, 1.0),)
    split = swap_split([Swapper(layers, ((0, 1),), 1.0, 1)] * 3, 30, 2.0)
    assert (split.compute_s, split.data_parallel_s) == pytest.approx((30.0, 2.0))
    assert split.bubble_s == pytest.approx(1.5)  # the last pieces


# --- hub ---------------------------------------------------------------------------------------------------------------


HUB_FLEET = """[[machines]]
name = "lab"
count = 2
tflops = 4
memory_gib = 1
up_mbps = 1000
down_mbps = 1000
[[machines]]
name = "spot"
count = 4
tflops = 2
memory_gib = 1
reliable = false
up_mbps = 1000
down_mbps = 1000
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


def hub_of(tmp_path: Path, *overrides: str) -> tuple[Question, Prediction]:
    (tmp_path / "fleet.toml").write_text(HUB_FLEET)
    run = load_config(None, [*HUB_RUN, *overrides])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), 2, 8)
    return question, plan_hub.predict(question, seed=0, time_limit_s=0.5)


def test_a_hub_that_is_played_takes_as_long_as_predicted(tmp_path: Path) -> None:
    question, found = hub_of(tmp_path)
    assert found.problem == ""
    servers = {name for stage in found.stages for name in stage.machines if name not in stage.clients}
    assert any(stage.clients for stage in found.stages)
    assert servers == {"lab-0", "lab-1"}
    plan = Plan(fleet="f", model="model", params=1, batch=512, context=512, strategies=(found,), recommended=0, why="")
    (played,) = confirmed(question, plan).strategies
    assert played.played_step_s == pytest.approx(found.step_s, rel=0.15)


def test_clients_of_a_hub_keep_no_moments_and_cannot_do_with_delayed_updates(tmp_path: Path) -> None:
    _, found = hub_of(tmp_path)
    by_machine = {row.machine: row for row in found.memory}
    assert by_machine["spot"].optimizer == 0 < by_machine["lab"].optimizer
    _, refused = hub_of(tmp_path, "optimizer.delayed=true")
    assert "optimizer.delayed" in refused.problem


# --- recommended -------------------------------------------------------------------------------------------------------


def test_what_does_not_run_is_not_recommended() -> None:
    slow = Prediction(strategy="swarm", runnable=True, tokens_per_s=10.0)
    fast = Prediction(strategy="swap", runnable=False, tokens_per_s=25.0)
    best, why = recommend([fast, slow])
    assert best == 1
    assert why.startswith("swarm is the fastest strategy that runs today")
    assert "not yet runnable: swap (2.50 times as fast)" in why
    assert recommend([slow.model_copy(update={"problem": "no room"}), fast])[0] is None


def test_where_machines_are_left_out_a_plan_that_names_the_others_is_recommended_of_equal_ones() -> None:
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=10.0)
    named = swarm.model_copy(update={"strategy": "pipeline", "schedule": "1f1b", "tokens_per_s": 9.95})
    assert recommend([swarm, named])[0] == 0
    swarm = swarm.model_copy(update={"left_out": ("b",)})
    assert recommend([swarm, named])[0] == 1
    assert recommend([swarm, named.model_copy(update={"tokens_per_s": 9.0})])[0] == 0


# --- a fleet -----------------------------------------------------------------------------------------------------------

FLEET = """
[[machines]]
name = "near"
count = 3
region = "x"
tflops = 0.02
memory_gib = 1.0
price_per_hour = 0.5
[[machines]]
name = "far"
count = 2
region = "y"
tflops = 0.03
memory_gib = 1.0
price_per_hour = 1.0
up_mbps = 200
down_mbps = 200
[defaults]
rtt_ms = 60
bandwidth_mbps = 100
"""
MANY_SMALL = FLEET.replace("memory_gib = 1.0", "memory_gib = 0.01").replace("count = 3", "count = 40")
TINY = (
    "model.width=256",
    "model.heads=4",
    "model.layers=4",
    "model.context=512",
    "model.vocab=512",
    "checkpoint.every=0",
    "train.microbatch=1",
    "fleet.rebalance_period=20",
)


ALONE = '[[machines]]\nname = "a"\ndevice = "CPU"\n'
TWO_WAYS = """
machines = [
    {{ name = "near", region = "x", tflops = 0.02, memory_gib = 0.05 }},
    {{ name = "far", region = "y", tflops = 0.02, memory_gib = 0.05 }},
]
[matrix]
regions = ["x", "y"]
rtt_ms = [[1, 20], [80, 1]]
bandwidth_mbps = [[1000, {}], [{}, 1000]]
"""


def planned(tmp_path: Path, *arguments: str, text: str = FLEET) -> str:
    (tmp_path / "fleet.toml").write_text(text)
    sets = [x for setting in TINY for x in ("--set", setting)]
    result = CliRunner().invoke(
        app, ["plan", str(tmp_path / "fleet.toml"), "--batch", "64", "--time-limit", "1", *sets, *arguments]
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_a_plan_adds_up(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json"))
    names = {"near-0", "near-1", "near-2", "far-0", "far-1"}
    assert [p.problem for p in found.strategies] == [""] * len(found.strategies)
    for p in found.strategies:
        used = [name for stage in p.stages for name in stage.machines]
        assert p.split is not None
        assert p.split.step_s == pytest.approx(p.step_s)
        assert p.tokens_per_s == pytest.approx(64 * 512 / p.step_s)
        assert sum(p.microbatches) * p.microbatch == 64
        assert len(used) == len(set(used))
        assert {*used, *p.spares, *p.left_out} == names
        assert not set(used) & set(p.spares)
        assert [layers for stage in p.stages for layers in range(*stage.layers)] == list(range(4))
        assert {m.machine for m in p.memory} == {name.split("-")[0] for name in used}
        for m in p.memory:
            assert m.device_has == 2**30 >= m.device_needs
            whole = m.weights + m.optimizer + m.gradients + m.activations + m.buffers
            assert m.device_needs + m.host_needs <= 2 * whole
        hourly = sum(0.5 if name.startswith("near") else 1.0 for name in used)
        assert p.price_per_billion_tokens == pytest.approx(hourly / 3600 / p.tokens_per_s * 1e9)
    assert found.recommended is not None
    chosen = found.strategies[found.recommended]
    assert chosen.tokens_per_s == max(p.tokens_per_s for p in found.strategies if p.runnable)
    assert {p.strategy for p in found.strategies if p.runnable} == {"swarm", "pipeline"}, (
        "swap is predicted otherwise than it runs, and a hub has no clients here"
    )


def test_a_strategy_that_nothing_predicts_is_in_the_plan_with_what_is_missing() -> None:
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=10.0)
    first, *others = in_order({"swarm": [swarm]})
    assert first is swarm
    assert [p.strategy for p in others] == [s.name for s in STRATEGIES if s.name != "swarm"]
    for p in others:
        assert p.problem == (
            f"nothing predicts strategy {p.strategy} yet: write sim/plan/{p.strategy}.py, and name it in sim/plan/planner.py"
        )
    assert recommend([first, *others])[0] == 0


def test_what_crosses_links_is_what_the_layout_says(tmp_path: Path) -> None:
    """Two stages side by side in two regions: 64 microbatches there and back, and halves of nothing."""
    text = FLEET.replace("count = 3", "count = 1").replace("count = 2", "count = 1")
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", text=text))
    swarm, *pipelines = (p for p in found.strategies if p.strategy in ("swarm", "pipeline"))
    for p in (swarm, *pipelines):
        assert {(t.sender, t.receiver) for t in p.traffic} == {("x", "y"), ("y", "x")}
        assert sum(t.averaging for t in p.traffic) == 0
        assert sum(t.gradients for t in p.traffic) == pytest.approx(64 * (512 * 256 + 4 * 512 * 256 / 4096))
        assert p.traffic[0].bandwidth_bytes_per_s == 12.5e6
        assert p.traffic[0].delay_s == 0.03


def test_swarm_settles_as_the_simulator_plays_it(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=64"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model))
    for stages in (1, 2, 4):
        scene = question.scene(stages, 1)
        played = simulate_fleet(scene.setting, scene.run, Weather(), hours=24)
        assert scene.setting.cost.microbatches / settled(scene).step_s == pytest.approx(played.throughput, rel=0.01)


def test_plan_and_simulate_need_the_same_memory(tmp_path: Path) -> None:
    """What is said is what the smallest microbatch needs, not the largest that was tried."""
    text = "".join(f'[[machines]]\nname = "{d}"\ndevice = "{d}"\n' for d in ("RTX 4090", "RTX 3090", "CPU"))
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(CapacityError) as simulated:
        what_if(tmp_path / "fleet.toml", None, "llama-7b", [], hours=1.0, seed=0, plot=None, json=True)
    arguments = ["plan", str(tmp_path / "fleet.toml"), "--model", "llama-7b", "--time-limit", "1", "--json"]
    found = Plan.model_validate_json(CliRunner().invoke(app, arguments).output)
    needs = "needs 139 GiB in 3 stages, all machines together have 64 GiB"
    assert needs in str(simulated.value)
    runnable = [p for p in found.strategies if p.runnable]
    assert {p.strategy for p in runnable} == {"swarm", "pipeline", "hub"}
    assert all(needs in p.problem for p in runnable if p.strategy != "hub")


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
    assert json.loads(said.output)["tokens_per_s"] == pytest.approx(found.tokens_per_s, rel=0.05)


def test_of_each_number_of_stages_the_best_is_played_unless_it_is_far_behind(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=64"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model))

    def does(share: float, stages: int) -> Settled:
        return replace(settled(question.scene(stages, 1)), roughly_s=1 / share)

    best, near, other, same, far = does(1.0, 4), does(0.85, 4), does(0.65, 2), does(0.63, 2), does(0.5, 1)
    assert promising([same, near, far, best, other]) == [near, best, other]
    assert promising([near] * 20 + [other, best])[-2:] == [other, best]


def test_a_search_that_the_time_limit_ended_is_said(tmp_path: Path) -> None:
    """What it finds depends on how busy the machine is, whatever the seed."""
    (tmp_path / "fleet.toml").write_text(FLEET)
    run = load_config(None, [*TINY, "train.batch=64"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), 2, 1)
    for limit_s, said in ((1e-6, True), (60.0, False)):
        assert [HASTE in p.notes for p in plan_pipeline.predict(question, 0, limit_s)] == [said, said]


def test_what_is_recommended_is_played(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", "--batch", "16", "--confirm"))
    assert found.recommended is not None
    for n, p in enumerate(found.strategies):
        assert p.played_step_s == (pytest.approx(p.step_s, rel=0.1) if n == found.recommended else None)


def test_what_comes_to_no_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleet.toml").write_text(
        '[[machines]]\nname = "a"\ncount = 2\nforward_ms = 90000\nbackward_ms = 90000\n'
    )
    run = load_config(None, [*TINY, "train.batch=16"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), 2, 1)
    with pytest.raises(NoSteps, match=r"played .* for 190 s, hardly any step .* Plan more stages or a larger batch"):
        played_step_s(question.scene(2, 1), 1.0)

    def never(*_: object, **__: object) -> float:
        raise NoSteps("hardly any step came to its end")

    monkeypatch.setattr(plan_swarm, "played_step_s", never)
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", "--batch", "16", "--confirm"))
    assert found.recommended is not None
    chosen = found.strategies[found.recommended]
    assert chosen.played_step_s is None
    assert "hardly any step came to its end" in chosen.notes


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


def test_prices_and_links_that_are_not_stated(tmp_path: Path) -> None:
    text = FLEET.replace("price_per_hour = 1.0\n", "").replace("bandwidth_mbps = 100\n", "")
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    assert all(p.price_per_billion_tokens is None for p in found.strategies if not p.spares)


def test_one_machine(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=ALONE))
    assert [p.problem for p in found.strategies] == [""] * len(found.strategies)
    assert all(p.split is not None and p.split.data_parallel_s == 0 for p in found.strategies)
    assert found.assumed == ("CPU: 0.3 TFLOP/s (eight cores of 40 GFLOP/s in fp32)",)


def test_machines_whose_memory_is_too_small_are_left_out(tmp_path: Path) -> None:
    text = FLEET.replace(
        'region = "x"\ntflops = 0.02\nmemory_gib = 1.0', 'region = "x"\ntflops = 0.02\nmemory_gib = 0.01'
    )
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    for p in found.strategies:
        assert set(p.spares) >= {"near-0", "near-1", "near-2"}


def test_links_may_have_unequal_directions(tmp_path: Path) -> None:
    """Neither machine holds the model: half of it each. Both ways count as they are; which of them is the narrow one
    changes nothing."""
    steps = []
    for narrow, wide in ((20, 200), (200, 20)):
        found = Plan.model_validate_json(planned(tmp_path, "--json", text=TWO_WAYS.format(narrow, wide)))
        for p in (p for p in found.strategies if p.strategy == "swarm" or p.schedule == "1f1b"):
            assert len(p.stages) == 2
            ways = {(t.sender, t.receiver): (t.bandwidth_bytes_per_s, t.delay_s) for t in p.traffic}
            assert ways == {("x", "y"): (narrow * 125e3, 0.01), ("y", "x"): (wide * 125e3, 0.04)}
            steps.append(p.step_s)
    assert steps[:2] == pytest.approx(steps[2:], rel=0.05)


def test_a_hub_needs_someone_who_stays(tmp_path: Path) -> None:
    text = FLEET.replace("tflops", "reliable = false\ntflops")
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    problems = {p.strategy: p.problem for p in found.strategies}
    assert "reliable" in problems.pop("hub")
    assert set(problems.values()) == {""}


def test_paced_machines_take_what_the_file_says(tmp_path: Path) -> None:
    text = '[[machines]]\nname = "a"\ncount = 2\nforward_ms = 100\nbackward_ms = 200\n'
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    problems = {p.strategy: p.problem for p in found.strategies}
    assert problems["swarm"] == ""
    assert "paced" in problems["swap"]


def test_one_machine_is_no_two_stages(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", text=ALONE))
    for p in (p for p in found.strategies if p.strategy in ("swarm", "pipeline")):
        assert "1 machines in all have room for a stage" in p.problem
        assert "each stage needs one" in p.problem


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (
            FLEET,
            ("--set", "model.width=8192", "--set", "model.layers=48"),
            ("machines[", "'near'", "add", "smaller model"),
        ),
        (MANY_SMALL, (), ("machines[0].memory_gib", "machine with more memory")),
        (FLEET, ("--stages", "9"), ("--stages 9", "4 layers")),
        (FLEET.replace("tflops = 0.02\n", ""), (), ("machines[0].tflops", "missing")),
        (FLEET, ("--pipelines", "2"), ("--pipelines belongs to --network",)),
        (FLEET, ("--network", "dtfm-case1"), ("FLEET.toml", "--network")),
        (FLEET, ("--microbatch", "3"), ("does not divide",)),
        (
            FLEET.replace("bandwidth_mbps = 100", "bandwidth_mbps = 0"),
            (),
            ("defaults.bandwidth_mbps", "greater than 0"),
        ),
        (TWO_WAYS.format("0", "50"), (), ("matrix.bandwidth_mbps[0][1]", "greater than 0")),
        (FLEET.replace("up_mbps = 200", "up_mbps = 0"), (), ("machines[1].up_mbps", "greater than 0")),
    ],
)
def test_what_cannot_be_planned_is_told(
    tmp_path: Path, text: str, arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(MuletrainError) as error:
        planned(tmp_path, *arguments, text=text)
    assert all(word in str(error.value) for word in said), str(error.value)


def test_a_network_says_what_it_needs() -> None:
    result = CliRunner().invoke(app, ["plan", "--network", "dtfm-case1", "--stages", "8"])
    assert "--pipelines, --activation-bytes, --gradient-bytes" in str(result.exception)


def test_people_see_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = planned(tmp_path, "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    words = " ".join(out.split())
    for said in (
        "recommended: ",
        "not yet",
        "pipeline links",
        "x to y",
        "100 Mb/s, 30 ms",
        "price of 10^9 tokens",
    ):
        assert said in words


def test_without_a_file_the_example_is_planned() -> None:
    result = CliRunner().invoke(app, ["plan", "--stages", "3", "--microbatch", "1", "--time-limit", "0.2"])
    assert "this is the example" in result.output
    assert "spot-t4.toml" in result.output


def test_every_field_is_explained() -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    kinds = (
        schema.Plan,
        schema.Prediction,
        schema.Split,
        schema.Stage,
        schema.Memory,
        schema.Traffic,
        schema.Improvement,
    )
    missing = [f"{kind.__name__}.{name}" for kind in kinds for name in kind.model_fields if f"`{name}`" not in text]
    assert missing == []


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
