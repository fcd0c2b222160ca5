"""A plan on a terminal: it fits, nothing is cut off, and help flows with the terminal's width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from muletrain.cli.main import app, simulate
from muletrain.cli.show.console import say
from muletrain.cli.show.plan_tables import tell
from muletrain.config.fleet_file import Fleet
from muletrain.config.plan_file import Improvement, Memory, Plan, Prediction, Split, Stage, Traffic

FLEET = Fleet.model_validate(
    {
        "name": "spot",
        "machines": [
            {"name": "spot-east", "count": 20, "device": "T4", "region": "virginia"},
            {"name": "lab", "count": 4, "device": "A100 40GB", "region": "oregon"},
        ],
    }
)
EAST = tuple(p.name for p in FLEET.peers() if p.region == "virginia")
LAB = tuple(p.name for p in FLEET.peers() if p.region == "oregon")


def prediction(strategy: str, schedule: str = "", problem: str = "", scale: float = 2.0**30) -> Prediction:
    def memory(machine: str, stage: int) -> Memory:
        parts = (int(n * scale) for n in (9.78, 13.04, 22.8, 3.78, 39.1, 36.4, 40, 1058.7, 2000))
        names = (
            "weights",
            "optimizer",
            "gradients",
            "activations",
            "buffers",
            "device_needs",
            "device_has",
            "host_needs",
            "host_has",
        )
        return Memory(machine=machine, stage=stage, **dict(zip(names, parts, strict=True)))  # type: ignore[arg-type]

    def traffic(sender: str, receiver: str) -> Traffic:
        return Traffic(
            sender=sender,
            receiver=receiver,
            activations=1e11,
            gradients=1e11,
            averaging=4.5e10,
            bandwidth_bytes_per_s=1.25e8,
            delay_s=0.0335,
        )

    return Prediction.model_validate(
        {
            "strategy": strategy,
            "schedule": schedule,
            "runnable": strategy in ("swarm", "pipeline"),
            "problem": problem,
            "microbatch": 1,
            "microbatches": (1024,),
            "stages": (Stage(layers=(0, 16), machines=EAST), Stage(layers=(16, 32), machines=LAB)),
            "swapped": ((0, 8), (8, 16), (16, 24), (24, 32)) if strategy == "swap" else (),
            "step_s": 3661.0,
            "tokens_per_s": 6789.0,
            "split": Split(compute_s=2000.0, pipeline_s=1000.0, data_parallel_s=600.0, bubble_s=61.0),
            "price_per_billion_tokens": 12345.0,
            "memory": (memory("spot-east", 0), memory("lab", 1)),
            "traffic": (traffic("virginia", "oregon"), traffic("oregon", "oregon")),
            "notes": ("nobody leaves: where a machine is lost, a spare or the others of its stage stand in",),
        }
    )


def shown(*strategies: Prediction, width: int = 80, **more: object) -> str:
    plan = Plan(
        fleet="spot",
        model="llama-7b",
        params=6_740_000_000,
        batch=1024,
        context=2048,
        strategies=strategies,
        recommended=0,
        why="the fastest strategy that runs today",
    ).model_copy(update=more)
    text = io.StringIO()
    tell(Console(file=text, width=width, force_terminal=True, color_system=None, highlight=False), plan, FLEET)
    return text.getvalue()


EVERY = (
    prediction("swarm"),
    prediction("pipeline", "1f1b"),
    prediction("pipeline", "gpipe"),
    prediction("swap"),
    prediction("hub"),
)


def test_five_strategies_fit_into_80_columns_and_nothing_is_cut_off() -> None:
    text = shown(*EVERY)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for cell in ("6.79k", "1024 x 1", "1:01:01", "245 GB"):
        assert text.count(cell) >= 5, text  # in every column
    for cell in (
        "1:01:01",
        "33:20, 55%",
        "data-parallel",
        "1,059",
        "245 GB",
        "1 (4 parts)",
        "12,345",
        "optimizer",
        "36.4 of 40",
    ):
        assert cell in text, text


def test_what_is_not_possible_takes_no_column_but_says_why() -> None:
    text = shown(
        EVERY[0], prediction("hub", problem="none of 24 devices is reliable, and a hub needs " + "reliable ones " * 9)
    )
    assert "hub" not in text.split("hub is not possible")[0]
    sentence = text.split("hub is not possible: ")[1].split("\n\n")[0]
    assert " ".join(sentence.split()).endswith("reliable ones")  # no word is broken where the terminal ends


def test_link_speeds_are_those_of_the_machines_that_work() -> None:
    """What does not run today sends more, over a narrower link."""
    narrow = tuple(t.model_copy(update={"bandwidth_bytes_per_s": 5e6, "activations": 1e12}) for t in EVERY[4].traffic)
    text = shown(EVERY[0], EVERY[4].model_copy(update={"traffic": narrow}))
    assert "1 Gb/s, 33.5 ms" in text
    assert "40 Mb/s" not in text


def test_limits_changes_and_idle_machines_are_told_with_reasons() -> None:
    better = Improvement(
        change="wire.gradients=int8",
        tokens_per_s=9876.0,
        gain=0.42,
        machines=3,
        training="gradients are rounded to 8 bits",
    )
    told = {
        "limit": "averaging over the upload of desk (100 Mb/s)",
        "fewer": "desk alone is faster than several machines",
        "improvements": (better,),
        "without_work": ("2 x lab: too little memory",),
    }
    swarm = EVERY[0].model_copy(update={"limit": told.pop("limit")})
    text = shown(swarm, **told)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for said in (
        "limit: averaging over the upload of desk (100 Mb/s)",
        "fewer machines: desk alone is faster than several machines",
        "without work: 2 x lab: too little memory",
        "9.88k 42 % 3",
    ):
        assert said in words
    assert "no single change" not in words
    assert "no single change that 'plan' tried gives 5 % more" in shown(EVERY[0])


def test_small_models_are_told_in_mib() -> None:
    text = shown(prediction("swarm", scale=2.0**20))
    assert "MiB (+ beside GPU)" in text
    assert "36.4 +" in text


def test_a_pipe_gets_whole_sentences() -> None:
    text = io.StringIO()
    say(Console(file=text, width=80), "word " * 40)
    assert text.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [*app.registered_commands, *simulate.registered_commands],
    ids=lambda command: command.callback.__name__,
)
def test_help_leaves_line_breaks_to_the_terminal(command: object) -> None:
    text = command.help  # type: ignore[attr-defined]
    assert text
    assert "\n" not in text.replace("\n\n", "")
    assert "  " not in text
