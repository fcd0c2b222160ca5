"""``muletrain plan`` on fewer machines than there are, what it says of limits, and changes that help."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.plan_file import Prediction, Stage
from muletrain.model.spec import ModelSpec
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.fewer import compared
from muletrain.sim.plan.limits import without_work
from muletrain.sim.plan.planner import confirmed, plan
from muletrain.sim.plan.question import Question
from muletrain.sim.setting import stage_needs

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.config.plan_file import Plan

HOMES = """
[[machines]]
name = "laptop"
count = 2
tflops = 2.5
memory_gib = 4
up_mbps = 40
[[machines]]
name = "desk"
count = 3
device = "RTX 4090"
up_mbps = 100
down_mbps = 500
"""


def asked(tmp_path: Path, batch: int, text: str = HOMES, *sets: str) -> Question:
    (tmp_path / "fleet.toml").write_text(text)
    run = load_config(None, ["model.preset=gpt3-350m", f"train.batch={batch}", *sets])
    return Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), microbatch=1)


def recommended(found: Plan) -> Prediction:
    assert found.recommended is not None
    return found.strategies[found.recommended]


@pytest.mark.slow
def test_one_machine_is_planned_where_averaging_costs_more_than_others_bring(tmp_path: Path) -> None:
    question = asked(tmp_path, 256)
    found = plan(question, time_limit_s=1.0)
    chosen = recommended(found)
    assert [stage.machines for stage in chosen.stages] == [("desk-0",)]
    alone = asked(tmp_path, 256, HOMES.replace("count = 3", "count = 1").replace("count = 2", "count = 1"))
    assert chosen.tokens_per_s == pytest.approx(plan_swarm.predict(alone.of_first({"desk": 1})).tokens_per_s)
    assert set(chosen.left_out) == {"desk-1", "desk-2", "laptop-0", "laptop-1"}
    assert chosen.spares == ()
    assert chosen.limit == "computing on desk"
    assert found.fewer.startswith("desk-0 alone is faster than several machines: ")
    assert "limited by " in found.fewer
    memory, slower = found.without_work
    assert memory.startswith(
        "2 x laptop: the run is faster without; do not let them join, for it would have to swap a stage: "
    )
    assert slower == "2 x desk: the run is faster without; do not let them join"
    played_s = recommended(confirmed(question, found)).played_step_s
    assert played_s == pytest.approx(chosen.step_s, rel=0.05)


@pytest.mark.slow
def test_from_the_batch_that_is_named_on_more_machines_are_planned(tmp_path: Path) -> None:
    named = int(plan(asked(tmp_path, 256), time_limit_s=1.0).fewer.split("--batch ")[1].split()[0])
    for batch, machines in ((named * 8 // 10, 1), (named * 12 // 10, 3)):
        found = plan(asked(tmp_path, batch), time_limit_s=1.0)
        assert len({name for stage in recommended(found).stages for name in stage.machines}) == machines
        assert found.fewer.startswith("desk-0 alone is faster") == (machines == 1)


@pytest.mark.slow
def test_changes_that_help_give_what_a_plan_with_them_does(tmp_path: Path) -> None:
    """With one of them machines pay that are left out without it."""
    found = plan(asked(tmp_path, 1700), time_limit_s=1.0)
    best = found.improvements[0]
    assert (best.change, best.machines) == ("optimizer.delayed=true", 5)
    assert best.tokens_per_s == pytest.approx((1 + best.gain) * recommended(found).tokens_per_s)
    with_it = plan(asked(tmp_path, 1700, HOMES, best.change), time_limit_s=1.0)
    assert recommended(with_it).tokens_per_s > 0.95 * best.tokens_per_s, "a longer search may find a better one"


def test_machines_that_keep_each_other_busy_all_stay(tmp_path: Path) -> None:
    fast = HOMES.replace("up_mbps = 100", "up_mbps = 10000").replace("down_mbps = 500", "down_mbps = 10000")
    found = plan(asked(tmp_path, 256, fast), time_limit_s=1.0)
    assert set(recommended(found).left_out) <= {"laptop-0", "laptop-1"}, "these would have to swap, behind 40 Mb/s"
    assert {name for stage in recommended(found).stages for name in stage.machines} >= {"desk-0", "desk-1", "desk-2"}


def test_steps_of_microseconds_can_be_planned(tmp_path: Path) -> None:
    sizes = ("model.width=64", "model.heads=2", "model.layers=2", "model.context=64", "train.microbatch=1")
    (tmp_path / "fleet.toml").write_text(HOMES)
    run = load_config(None, [*sizes, "train.batch=4"])
    found = plan(
        Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), microbatch=1),
        time_limit_s=1.0,
    )
    assert all(p.step_s > 0 for p in found.strategies if p.runnable)


SMALL = """
machines = [
    { name = "big", count = 3, device = "T4", memory_gib = 24 },
    { name = "small", device = "T4", memory_gib = 5.6, host_gib = 64 },
]
"""


def in_two(tmp_path: Path, text: str, *sets: str) -> Question:
    return replace(asked(tmp_path, 256, text, "model.preset=gpt3-xl", *sets), stages=2)


def test_a_machine_with_a_third_of_the_memory_swaps_its_stage_and_is_worth_it(tmp_path: Path) -> None:
    found = plan(in_two(tmp_path, SMALL))
    chosen = recommended(found)
    assert "small" in {name for stage in chosen.stages for name in stage.machines}
    assert found.swapping.startswith("small (stage ")
    told = float(found.swapping.split(": ")[1].split("x")[0])
    assert told >= 1.05, "without swapping it serves fewer layers, block by block"
    off = plan(in_two(tmp_path, SMALL, "swap.backing='off'"))
    assert off.swapping == ""
    assert told == pytest.approx(chosen.tokens_per_s / recommended(off).tokens_per_s, rel=0.05)


def test_what_a_swapped_stage_takes_adds_up(tmp_path: Path) -> None:
    """The columns of a plan. (In 16 bits: a resident stage has a working copy, too.)"""
    question = in_two(tmp_path, SMALL, "compute.precision=bf16")
    cut = question.spec.cut(2)
    for stage, need in enumerate(stage_needs(question.run, question.spec, cut)):
        offer, swapped = question.offer("small"), need.swapped
        assert swapped is not None
        assert not need.resident(offer)
        found = question.memory("small", stage, need)
        columns = found.weights + found.optimizer + found.gradients + found.activations + found.buffers
        assert columns == found.device_needs + found.host_needs
        assert found.weights == 4 * question.spec.stage_params(cut, stage), "fp32 masters alone"


def test_a_machine_that_is_too_small_hears_what_it_lacks_for_a_swapped_stage(tmp_path: Path) -> None:
    """Of the device, or beside it."""
    for small, lacks in (
        ("memory_gib = 0.25, host_gib = 64", r"even swapped it needs .*, and 256 MiB may be used: give more memory"),
        (
            "memory_gib = 5.6, host_gib = 4",
            r"swapped it needs .* beside a GPU, and 4 GiB may be used: take swap.backing",
        ),
    ):
        question = in_two(tmp_path, SMALL.replace("memory_gib = 5.6, host_gib = 64", small))
        (told,) = without_work(question, plan_swarm.predict(question))
        assert re.match(r"small: too little memory for a stage of this plan, which needs .*; it has .*; " + lacks, told)


def test_a_plan_says_what_the_whole_fleet_does_while_nobody_leaves(tmp_path: Path) -> None:
    """Where churn takes much of it: otherwise the figures are alike, and one is enough."""
    question = asked(tmp_path, 256)
    stage = Stage(layers=(0, 24), machines=("desk-0",))
    chosen = Prediction(strategy="swarm", runnable=True, stages=(stage,), tokens_per_s=900.0)
    every = stage.model_copy(update={"machines": ("desk-0", "desk-1", "desk-2")})
    for churned, told in (
        (500.0, "(swarm, 1k while nobody leaves, limited by churn)"),
        (950.0, "(swarm, limited by churn)"),
    ):
        whole = chosen.model_copy(
            update={"stages": (every,), "tokens_per_s": 1000.0, "churned_tokens_per_s": churned, "limit": "churn"}
        )
        said = compared(question, chosen, whole)
        assert said == f"desk-0 alone is faster than several machines: 900 tokens/s against {churned:.0f} on 3 {told}"
