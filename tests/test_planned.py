"""``muletrain run --plan``: a plan's file becomes a run, by real processes, too; what does not fit is told."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.cli.actions.planned import clients_of, indices_of, names_of, planned
from muletrain.compute.estimate import StageMemory
from muletrain.config.load import load_config
from muletrain.config.plan_file import Plan, Prediction, Stage
from muletrain.errors import CapacityError, ConfigError
from muletrain.events import SeatEmpty, StepApplied, read_events
from muletrain.model.spec import ModelSpec
from muletrain.runs.join.admission import LiveMembers
from muletrain.runs.join.messages import JoinRequest, Welcome
from muletrain.runs.join.seating import Seating
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.strategies import strategy_of
from muletrain.strategies.hub import Hub
from muletrain.strategies.pipeline import Pipeline
from muletrain.strategies.swap import Swap
from muletrain.strategies.swarm import Swarm

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ("model.width=32", "model.heads=2", "model.layers=3", "model.context=16", "model.vocab=512")
STAGES = (Stage(layers=(0, 1), machines=("east",)), Stage(layers=(1, 3), machines=("west",)))
NEEDS = [
    StageMemory(weights=n, moments=0, gradient=0, delayed=0, activations=0, copies=0, on_device=n, on_host=0)
    for n in (512, 2048)
]
SWARM = Prediction(strategy="swarm", runnable=True, microbatch=2, microbatches=(4,), stages=STAGES)
PIPELINE = Prediction(
    strategy="pipeline",
    schedule="1f1b",
    runnable=True,
    microbatch=2,
    microbatches=(4,),
    stages=STAGES,
    spares=("cellar",),
)
PLAN = Plan(
    fleet="three",
    model="model",
    params=ModelSpec.from_config(load_config(None, SMALL).model).params,
    batch=8,
    context=16,
    strategies=(SWARM, PIPELINE, Prediction(strategy="hub", runnable=False, problem="nobody stays")),
    recommended=1,
    why="",
)


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.model_copy(update=changes).model_dump_json())
    return path


def test_a_plan_says_who_serves_what(tmp_path: Path) -> None:
    config = planned(load_config(None, SMALL), written(tmp_path))
    assert (config.fleet.stages, config.fleet.layers, config.fleet.peers) == (2, (1, 2), 3)
    assert (config.train.batch, config.train.microbatch) == (8, 2)
    assert (config.pipeline.seats, config.pipeline.schedule) == ((("east",), ("west",)), "1f1b")
    assert names_of(config) == ["east", "west", "cellar"]
    swarm = planned(load_config(None, SMALL), written(tmp_path), "swarm")
    assert (swarm.fleet.stages, swarm.fleet.layers, swarm.pipeline.seats) == (2, (1, 2), ())


def test_of_a_hub_the_plan_says_who_serves_and_who_helps(tmp_path: Path) -> None:
    stages = tuple(
        s.model_copy(update={"machines": (f"lab-{k}", f"spot-{k}", f"home-{k}"), "clients": (f"spot-{k}", f"home-{k}")})
        for k, s in enumerate(STAGES)
    )
    hub = Prediction(strategy="hub", runnable=True, microbatch=2, microbatches=(4,), stages=stages)
    path = written(tmp_path, strategies=(SWARM, hub))
    config = planned(load_config(None, SMALL), path, "hub")
    assert (config.fleet.stages, config.fleet.layers, config.fleet.peers) == (2, (1, 2), 2)
    assert (config.hub.seats, config.hub.helpers) == (
        (("lab-0",), ("lab-1",)),
        (("spot-0", "home-0"), ("spot-1", "home-1")),
    )
    assert (names_of(config), clients_of(config)) == (["lab-0", "lab-1"], ["spot-0", "home-0", "spot-1", "home-1"])
    with pytest.raises(ConfigError, match=r"swarm of .* has no clients"):
        planned(load_config(None, [*SMALL, "hub.clients=1"]), path, "swarm")


def test_machines_of_a_planned_swap_serve_the_whole_model_and_find_out_what_goes_together(tmp_path: Path) -> None:
    whole = (Stage(layers=(0, 3), machines=("east", "west")),)
    swap = Prediction(strategy="swap", runnable=True, microbatch=2, microbatches=(2, 2), stages=whole, accumulate=3)
    config = planned(load_config(None, SMALL), written(tmp_path, strategies=(swap,), recommended=0))
    assert strategy_of(config) == Swap()
    assert (config.fleet.stages, config.fleet.peers) == (1, 2)
    with pytest.raises(ConfigError, match=r"swap\.whole: swarm of .* has stages|fleet\.stages"):
        planned(load_config(None, [*SMALL, "swap.whole=true", "fleet.stages=1"]), written(tmp_path), "swarm")


def test_machines_of_a_planned_hub_get_their_role_and_stage_by_name() -> None:
    """Whatever their owners say; others do as their owners say."""
    seating = Seating(NEEDS, [1.0, 1.0], Hub((("a",), ("b",))), NEEDS, {"c": 0})

    def newcomer(name: str, *, client: bool) -> JoinRequest:
        return JoinRequest(
            version="1",
            name=name,
            stage=None,
            device="cpu",
            flops=1.0,
            memory=4096,
            host_memory=None,
            client=client,
        )

    assert [seating.is_client(newcomer(name, client=True)) for name in "abcd"] == [False, False, True, True]
    assert [seating.is_client(newcomer(name, client=False)) for name in "abcd"] == [False, False, True, False]
    assert [seating.choose(newcomer(name, client=False), [["cpu"], []]) for name in "ab"] == [0, 1]
    assert seating.choose_for_client(newcomer("c", client=True), [9.0, 0.0]) == 0
    assert seating.choose_for_client(newcomer("d", client=True), [9.0, 0.0]) == 1


def test_machines_that_the_plan_leaves_out_are_not_started(tmp_path: Path) -> None:
    alone = PIPELINE.model_copy(
        update={"stages": (Stage(layers=(0, 3), machines=("west",)),), "spares": (), "left_out": ("east", "cellar")}
    )
    profile = tmp_path / "fleet.toml"
    profile.write_text('machines = [{ name = "cellar" }, { name = "west" }, { name = "east" }]')
    path = written(tmp_path, strategies=(alone,), recommended=0)
    config = planned(load_config(None, [*SMALL, f"fleet.profile={profile}"]), path)
    assert (config.fleet.peers, names_of(config), indices_of(config)) == (1, ["west"], [1])


def test_a_plan_that_mixes_devices_updates_weights_on_the_cpu(tmp_path: Path) -> None:
    path = written(tmp_path, strategies=(SWARM, PIPELINE.model_copy(update={"state_device": "cpu"})))
    assert planned(load_config(None, SMALL), path).optimizer.state_device == "cpu"
    assert planned(load_config(None, SMALL), path, "swarm").optimizer.state_device == "device"
    with pytest.raises(ConfigError, match=r"optimizer.state_device: 'device', .*plan.json mixes devices"):
        planned(load_config(None, [*SMALL, "optimizer.state_device=device"]), path)


def test_machines_of_the_plan_are_those_of_the_profile(tmp_path: Path) -> None:
    profile = tmp_path / "fleet.toml"
    profile.write_text('machines = [{ name = "cellar" }, { name = "west" }, { name = "east" }]')
    config = planned(load_config(None, [*SMALL, f"fleet.profile={profile}"]), written(tmp_path))
    assert indices_of(config) == [2, 1, 0]
    profile.write_text('machines = [{ name = "east", count = 3 }]')
    with pytest.raises(ConfigError, match="no machine 'cellar', which the plan names"):
        indices_of(config)


@pytest.mark.parametrize(
    ("changes", "given", "choice", "complaint"),
    [
        ({}, ["model.layers=4"], None, "the plan is for a model"),
        ({}, ["train.batch=16"], None, "train.batch: 16, .*plan.json is for 8"),
        ({}, ["train.microbatch=1"], None, "train.microbatch: 1, .* is for 2"),
        ({}, [], "gpipe", "the plan has no strategy 'gpipe'; it has swarm, pipeline, 1F1B, hub"),
        ({"recommended": None, "why": "nothing fits"}, [], None, ": nothing fits"),
        ({"recommended": 2}, [], None, "hub is not possible on this fleet: nobody stays"),
        ({"recommended": 9}, [], None, "recommended: 9, .*3 strategies"),
        ({"version": 7}, [], None, "version 7"),
        (
            {"strategies": (PIPELINE.model_copy(update={"strategy": "swap", "accumulate": 4}),), "recommended": 0},
            [],
            None,
            "swap.whole: .*fleet.stages = 2",
        ),
        (
            {"strategies": (PIPELINE.model_copy(update={"spares": ("west",)}),), "recommended": 0},
            [],
            None,
            "'west' is named twice",
        ),
        (
            {"strategies": (PIPELINE.model_copy(update={"microbatches": (5,)}),), "recommended": 0},
            [],
            None,
            "pipeline.microbatches",
        ),
    ],
)
def test_what_does_not_fit_the_plan_is_told(
    tmp_path: Path, changes: dict[str, Any], given: list[str], choice: str | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        planned(load_config(None, [*SMALL, *given]), written(tmp_path, **changes), choice)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [('{"cost_s": 1}', "'plan --network'"), ("[", "'muletrain plan"), (None, "writes a plan")],
)
def test_what_is_no_plan_is_told(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        planned(load_config(None, SMALL), path)


def test_machines_get_the_seat_of_their_name_whoever_lets_them_in() -> None:
    """At the beginning and later; one that comes back under the name of a dead one has its name and seat; a name of a
    living one gets a number."""
    strategy = Pipeline((("east",), ("west",)), (4,), "1f1b")
    join = JoinRequest(version="", name="west", stage=None, device="cpu", flops=0, memory=1 << 40, host_memory=None)
    seating = Seating(NEEDS, [1.0, 1.0], strategy)
    assert seating.choose(join, [[], []]) == 1
    assert seating.choose(join.model_copy(update={"name": "cellar"}), [[], []]) == 0
    assert seating.choose(join.model_copy(update={"stage": 0}), [[], []]) == 0
    assert Seating(NEEDS, [1.0, 1.0], Swarm()).choose(join, [[], []]) == 0
    small = join.model_copy(update={"memory": 1 << 10})
    with pytest.raises(CapacityError, match="the smallest stage on offer needs 2"):
        seating.choose(small, [[], []])
    stages = {"east": 0, "west": 1, "cellar": 1}
    members = tuple(Member(id=n, name=n, stage=s, trainer=True, place="") for n, s in stages.items())
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=2, members=members, coordinator="east", first_step=0
    )
    roster = Roster(genesis, "east")
    live = LiveMembers(roster)

    def name_of(name: str) -> str:
        welcome = Welcome(config="", stage=1, data=bytes(32), tokenizer_size=0)
        return live.add("new", join.model_copy(update={"name": name}), welcome).name

    async def named() -> None:
        for name in ("west", "cellar"):
            assert name_of(name) == f"{name}-2"
            roster.mark_dead(name)
        assert [name_of(name) for name in ("west", "cellar")] == ["west", "cellar"]

    asyncio.run(named())


def test_a_plan_runs_and_a_spare_takes_the_seat_of_a_peer_that_is_killed(tmp_path: Path) -> None:
    """Stages of unequal size: one layer at a machine that serves both pipelines, two at one machine for each."""
    stages = (Stage(layers=(0, 1), machines=("east", "east")), Stage(layers=(1, 3), machines=("west", "moor")))
    unequal = PIPELINE.model_copy(update={"stages": stages, "microbatches": (3, 1)})
    sets = [x for setting in (*SMALL, "train.steps=24") for x in ("--set", setting)]
    path = written(tmp_path, strategies=(SWARM, unequal))
    command = [sys.executable, "-m", "muletrain.cli.main", "run", "--plan", str(path), *sets]
    done = subprocess.run(
        [*command, "--chaos", "kill west@step5"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((folder / "checkpoints" / "step-00000024" / "manifest.json").read_text())
    assert manifest["cut"] == [[0, 1], [1, 3]]
    events = [e for file in folder.glob("*.jsonl") for e in read_events(file)]
    applied = [e for e in events if isinstance(e, StepApplied)]
    served = {e.step: e.microbatches for e in applied if e.peer == "cellar"}
    assert {served[step] for step in range(1, 6)} == {0}
    assert {served[step] for step in (23, 24)} == {3}
    assert {e.microbatches for e in applied if e.peer == "moor"} == {1}
    assert {e.microbatches for e in applied if e.peer == "east"} == {4}
    said = [e for e in events if isinstance(e, SeatEmpty)]
    assert any((e.pipeline, e.stage, e.seat, e.spares) == (0, 1, "west", "cellar") for e in said)
