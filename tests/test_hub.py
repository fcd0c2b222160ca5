"""Hubs that are planned, and HYBRID's own allocation: its latency model by hand, and its steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.errors import CapacityError
from muletrain.model.spec import ModelSpec
from muletrain.planning.pipelines import shortest_path
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan.question import Question
from reproduction import hybrid_allocation as hybrid
from reproduction.hybrid_cost import HubStage, HubTask, evaluate

if TYPE_CHECKING:
    from pathlib import Path

# Planned --------------------------------------------------------------------------------------------------------------

MACHINE = """[[machines]]
name = "{}"
count = {}
tflops = {}
memory_gib = {}
reliable = {}
up_mbps = {}
down_mbps = 1000
"""
MODEL = ("model.width=256", "model.heads=4", "model.context=512", "train.batch=512")


def asked(
    tmp_path: Path,
    *machines: tuple[str, int, float, float, str, int],
    stages: int | None = None,
    layers: int = 4,
    links: str = "",
) -> Question:
    text = "".join(MACHINE.format(*machine) for machine in machines) + links
    (tmp_path / "fleet.toml").write_text(f"{text}[defaults]\nlocal_rtt_ms = 2\n")
    run = load_config(None, [*MODEL, f"model.layers={layers}"])
    return Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), stages, 8)


def test_a_stage_of_slow_servers_gets_fewer_layers_and_clients_help_the_slower_stage(tmp_path: Path) -> None:
    question = asked(tmp_path, ("fast", 1, 6, 1, "true", 1000), ("slow", 1, 2, 1, "true", 1000), stages=2)
    found = plan_hub.predict(question, 0, 1e4)
    layers = {stage.machines: stage.layers[1] - stage.layers[0] for stage in found.stages}
    assert layers == {("fast-0",): 3, ("slow-0",): 1} or layers == {("fast",): 3, ("slow",): 1}
    clients = asked(tmp_path, ("server", 2, 1, 1, "true", 1000), ("client", 3, 2, 1, "false", 1000), stages=2)
    found = plan_hub.predict(clients, 0, 1e4)
    assert all(stage.clients for stage in found.stages)
    assert all(name.startswith("client") == (name in s.clients) for s in found.stages for name in s.machines)


@pytest.mark.parametrize(
    ("up_mbps", "links"),
    [(1, ""), (1000, '[[links]]\nbetween = ["server", "client"]\nrtt_ms = 2\nbandwidth_mbps = 0.3\n')],
    ids=["their own", "the path to servers"],
)
def test_clients_behind_links_too_slow_for_the_weights_are_left_out(tmp_path: Path, up_mbps: int, links: str) -> None:
    machines = ("server", 2, 2, 1, "true", 1000), ("client", 3, 4, 1, "false", up_mbps)
    question = asked(tmp_path, *machines, links=links)
    found = plan_hub.predict(question, 0, 1e4)
    assert found.problem == ""
    assert set(found.spares) >= {f"client-{n}" for n in range(3)}
    assert plan_hub.NO_CLIENTS in found.notes


def test_servers_without_room_for_a_stage_are_left_out(tmp_path: Path) -> None:
    question = asked(tmp_path, ("server", 2, 2, 1, "true", 1000), ("tiny", 1, 9, 0.01, "true", 1000))
    found = plan_hub.predict(question, 0, 1e4)
    assert found.problem == ""
    assert found.spares == ("tiny",)
    nowhere = plan_hub.predict(asked(tmp_path, ("tiny", 2, 9, 0.01, "true", 1000)), 0, 1e4)
    assert "of a hub, each stage needs a reliable machine, and 2 of 2 are" in nowhere.problem


def test_as_many_stages_as_reliable_machines_are_tried_where_no_machine_holds_an_even_part(tmp_path: Path) -> None:
    """Seven layers in even parts make 1, 2, 3, 4 or 7 stages: 4 are too few for these machines, 7 more than there are."""
    small = ("server", 5, 2, 0.1, "true", 1000)
    assert plan_hub.predict(asked(tmp_path, small, stages=4, layers=7), 0, 1e4).problem
    assert len(plan_hub.predict(asked(tmp_path, small, layers=7), 0, 1e4).stages) == 5


def test_the_same_seed_finds_the_same(tmp_path: Path) -> None:
    machines = [("a", 2, 2, 1, "true", 300), ("b", 2, 5, 1, "true", 1000), ("c", 3, 4, 1, "false", 1000)]
    assert len({plan_hub.predict(asked(tmp_path, *machines), 7, 1e4).model_dump_json() for _ in range(2)}) == 1


# The latency model ----------------------------------------------------------------------------------------------------


def task_of(seed: int, servers: int, clients: int, layers: int = 4) -> HubTask:
    """Links unequal in the two directions, unequal machines and layers."""
    rng = np.random.default_rng(seed)
    count = servers + clients
    return HubTask(
        rng.uniform(1, 200, (count, count)),
        rng.uniform(0.1, 5, (count, count)),
        tuple(rng.uniform(1e12, 9e12, count).tolist()),
        (True,) * servers + (False,) * clients,
        tuple(rng.uniform(1e12, 3e12, layers).tolist()),
        activation_bytes=2e7,
        microbatches=8,
    )


def test_two_stages_by_hand() -> None:
    delay = np.full((5, 5), 10.0)
    delay[1, 2], delay[2, 1], delay[3, 4] = 30.0, 50.0, 70.0
    task = HubTask(
        delay,
        np.full((5, 5), 8.0),
        (1e12, 1e12, 2e12, 2e12, 4e12),
        (True,) * 4 + (False,),
        (4e12, 8e12),
        1e9,
        10,
    )
    cost = evaluate(task, [HubStage((0,), (1,), (), (0, 1)), HubStage((2,), (3,), (4,), (1, 2))])
    first, second = cost.stages
    assert (first.activations_s, first.gradients_s) == pytest.approx((0, 0.050 + 1))
    assert (first.inside_s, first.compute_s) == pytest.approx((0.010 + 0.5, 4 / 2))
    assert (second.activations_s, second.gradients_s) == pytest.approx((0.030 + 1, 0))
    assert (second.inside_s, second.compute_s) == pytest.approx((2 * 0.010 + 2 * 0.5, 8 / 8))
    assert cost.step_s == pytest.approx(10 * (0.050 + 1 + 0.010 + 0.5 + 2))


# The paper's steps ----------------------------------------------------------------------------------------------------


def regions(sizes: list[int], far_ms: float, clients: int = 0) -> HubTask:
    """Reliable machines in places ``far_ms`` apart on a line; clients in the last place."""
    where = np.repeat(np.arange(len(sizes)), sizes)
    where = np.append(where, np.full(clients, len(sizes) - 1))
    count = len(where)
    return HubTask(
        1.0 + far_ms * np.abs(where[:, None] - where[None]),
        np.full((count, count), 10.0),
        (1e12,) * count,
        tuple(d < sum(sizes) for d in range(count)),
        (1e11,) * 6,
        1e6,
    )


def test_clusters_are_the_places() -> None:
    task = regions([2, 3, 1], 50.0)
    levels = list(hybrid.levels(task, hybrid.distances(task)))
    assert [len(level) for level in levels] == [1, 2, 3, 4, 5, 6]
    assert sorted(levels[2]) == [(0, 1), (2, 3, 4), (5,)]
    assert all(sorted(d for c in level for d in c) == list(range(6)) for level in levels)


def test_in_one_place_clusters_are_of_equal_speed() -> None:
    task = replace(regions([6], 0.0), flops=(5e12, 1e12, 1e12, 1e12, 1e12, 1e12))
    two = list(hybrid.levels(task, hybrid.distances(task)))[1]
    assert sorted(two) == [(0,), (1, 2, 3, 4, 5)]


def test_the_paper_divides_until_transfers_cost_more_than_eq_3_gains() -> None:
    # eq. 3: 0.1 s / stages; the second stage costs a transfer, the third one more, all others none
    assert len(hybrid.allocate(regions([6], 0.0), seed=0)) == 6
    assert len(hybrid.allocate(regions([3, 3], 500.0), seed=0)) == 1
    assert len(hybrid.allocate(replace(regions([6], 0.0), activation_bytes=3e7), seed=0)) == 2


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_stages_is_the_best_there_is(seed: int) -> None:
    task = task_of(seed, 9, 0)
    edges = hybrid.distances(task)
    clusters = list(hybrid.levels(task, edges))[6]
    ordered = hybrid.in_order(clusters, edges, np.random.default_rng(seed))
    assert sorted(ordered) == sorted(clusters)
    weights = hybrid.coarse(ordered, edges)
    length = sum(weights[k, k + 1] for k in range(len(ordered) - 1))
    assert length == pytest.approx(shortest_path(hybrid.coarse(clusters, edges))[0], rel=0.02)


def test_servers_take_the_nearer_side_and_clients_the_nearest_stage() -> None:
    task = regions([2, 2, 2], 50.0, clients=2)
    task.delay_ms[2, :2], task.delay_ms[:2, 2] = 40.0, 40.0  # of the middle place, 2 is nearer to the first
    task.delay_ms[3, 4:6], task.delay_ms[4:6, 3] = 40.0, 40.0  # and 3 to the last
    stages = hybrid.allocate(task, seed=0, stages=3)
    assert stages[1].servers in {(2, 3), (3, 2)}
    first, last = (0, 2) if 0 in stages[0].servers else (2, 0)
    nearer = {2: stages[first], 3: stages[last]}
    assert stages[1].frontal == ((2,) if nearer[2] is stages[0] else (3,))
    assert [stage.clients for stage in (stages[first], stages[1], stages[last])] == [(), (), (6, 7)]


# What does not work, and what does all the same -----------------------------------------------------------------------


def test_one_device_serves_everything() -> None:
    assert hybrid.allocate(task_of(0, 1, 0), seed=0) == [HubStage((0,), (0,), (), (0, 4))]


def test_a_client_without_links_or_memory_is_left_out() -> None:
    task = task_of(1, 3, 3)
    task.bandwidth_gbps[:3, 3] = 0.0
    task = replace(task, memory_bytes=(9.0, 9.0, 9.0, 9.0, 0.5, 9.0), layer_bytes=(1.0,) * 4)
    assert not {3, 4} & {d for stage in hybrid.allocate(task, seed=0) for d in stage.devices}


def test_the_paper_leaves_no_server_out() -> None:
    task = replace(task_of(1, 4, 0), memory_bytes=(4.0, 4.0, 0.5, 4.0), layer_bytes=(1.0,) * 4)
    with pytest.raises(CapacityError, match="leave out those with the least memory"):
        hybrid.allocate(task, seed=0)


def test_a_missing_link_takes_for_ever() -> None:
    task = task_of(2, 4, 0)
    task.bandwidth_gbps[0, 3] = 0.0
    assert evaluate(task, [HubStage((0,), (3,), (), (0, 4))]).step_s == math.inf


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "without a gap"),
        ([HubStage((0,), (1,), (), (0, 3))], "without a gap"),
        ([HubStage((0,), (1,), (), (0, 4)), HubStage((2,), (2,), (), (4, 4))], "at least one layer"),
        ([HubStage((0,), (1,), (), (0, 2)), HubStage((1,), (2,), (), (2, 4))], "one stage at most"),
        ([HubStage((0,), (1,), (9,), (0, 4))], "one of the task's"),
        ([HubStage((0,), (), (), (0, 4))], "a frontal and a backward server"),
        ([HubStage((0,), (3,), (), (0, 4))], "servers are reliable"),
        ([HubStage((0, 1), (1,), (), (0, 4))], "only a lone one is both"),
        ([HubStage((0,), (1,), (2,), (0, 4))], "clients are not"),
    ],
)
def test_what_is_no_allocation(stages: list[HubStage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(task_of(0, 3, 2), stages)
