"""Allocations of a hub: the latency model by hand, and the searches."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.errors import CapacityError, ConfigError
from muletrain.planning import allocate as front
from muletrain.planning import hub_annealing, hub_clustering
from muletrain.planning.allocate import SEARCHES
from muletrain.planning.hub_annealing import State, Walk, with_layers
from muletrain.planning.hub_pace import Group, Pace, fastest, smooth
from muletrain.planning.hub_task import HubStage, HubTask, evaluate
from muletrain.planning.partition import Capacity, Chain, partition_chain
from muletrain.planning.pipelines import shortest_path

allocate = partial(front.allocate, time_limit_s=1e4)
"""However slow this machine is: another number of moves would be another solution."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer moves, for what does not depend on the quality."""
    monkeypatch.setattr(hub_annealing, "ROUNDS", ((4, 20), (2, 50)))


def task_of(seed: int, servers: int, clients: int, layers: int = 4) -> HubTask:
    """Links unequal in the two directions, unequal machines and layers."""
    rng = np.random.default_rng(seed)
    count = servers + clients
    return HubTask(
        rng.uniform(1, 200, (count, count)),
        rng.uniform(0.1, 5, (count, count)),
        tuple(rng.uniform(1e12, 9e12, count).tolist()),
        (True,) * servers + (False,) * clients,
        Chain(tuple(rng.uniform(1e12, 3e12, layers).tolist())),
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
        Chain((4e12, 8e12)),
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


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stages", [None, 2])
def test_never_slower_than_the_papers_way(seed: int, stages: int | None) -> None:
    task = task_of(seed, 5, 3)
    paper = allocate(task, "hybrid", seed=seed, stages=stages)
    ours = allocate(task, seed=seed, stages=stages)
    assert ours.lower_bound_s <= ours.cost.step_s <= paper.cost.step_s


def exhaustive(task: HubTask, stages: int | None = None) -> float:
    """The best of all groups, orders, roles and layers."""
    servers = [d for d, r in enumerate(task.reliable) if r]
    clients = [d for d, r in enumerate(task.reliable) if not r]
    layers = len(task.chain.work)

    def roles(group: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        if len(group) == 1:
            return [(group, group)]
        return [(p[:n], p[n:]) for p in permutations(group) for n in range(1, len(p))]

    best = math.inf
    for count in [stages] if stages else range(1, min(len(servers), layers) + 1):
        cuts = [tuple(pairwise((0, *ends, layers))) for ends in combinations(range(1, layers), count - 1)]
        for where in product(range(count + 1), repeat=len(task.flops)):  # ``count``: idle
            groups = [tuple(d for d in servers if where[d] == k) for k in range(count)]
            if not all(groups):
                continue
            joined = [tuple(d for d in clients if where[d] == k) for k in range(count)]
            for way in product(*map(roles, groups)):
                bare = evaluate(replace(task, memory_bytes=()), _stages(way, joined, cuts[0])).stages
                speeds = [sum(task.flops[d] for d in (*g, *j)) for g, j in zip(groups, joined, strict=True)]
                for cut in cuts:
                    times = [
                        stage.total_s - stage.compute_s + sum(task.chain.work[slice(*run)]) / speed
                        for stage, run, speed in zip(bare, cut, speeds, strict=True)
                    ]
                    if task.microbatches * max(times) < best:
                        with suppress(ValueError):  # memory
                            best = evaluate(task, _stages(way, joined, cut)).step_s
    return best


def _stages(
    roles: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...],
    clients: list[tuple[int, ...]],
    cut: tuple[tuple[int, int], ...],
) -> list[HubStage]:
    return [HubStage(*r, c, run) for r, c, run in zip(roles, clients, cut, strict=True)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("servers", "clients"), [(2, 2), (3, 1), (4, 0)])
def test_small_fleets_as_good_as_trying_all(seed: int, servers: int, clients: int) -> None:
    task = task_of(seed, servers, clients, layers=3)
    if seed % 3 == 1:  # no machine holds it all
        task = replace(
            task,
            memory_bytes=tuple(2.0 + (d + seed) % 2 for d in range(servers + clients)),
            chain=replace(task.chain, state_bytes=(1.0, 1.0, 2.0)),
        )
    assert allocate(task, seed=seed).cost.step_s == pytest.approx(exhaustive(task))


def fleet(seed: int) -> HubTask:
    """Small enough for speed, large enough for choices; some machines are too small for most stages."""
    task = task_of(seed, 6, 4, layers=8)
    memory = tuple(np.random.default_rng(seed).choice([3.0, 5.0, 9.0], 10).tolist())
    return replace(task, memory_bytes=memory, chain=replace(task.chain, state_bytes=(1.0,) * 8))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("search", SEARCHES)
def test_the_same_seed_finds_the_same(search: str) -> None:
    found = [allocate(fleet(1), search, seed=7) for _ in range(2)]
    assert found[0].complete
    assert found[0] == found[1]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("search", SEARCHES)
def test_slower_links_and_machines_by_the_same_factor_change_the_time_and_nothing_else(search: str) -> None:
    task = fleet(2)
    slower = replace(
        task,
        delay_ms=task.delay_ms * 4,
        bandwidth_gbps=task.bandwidth_gbps / 4,
        chain=replace(task.chain, work=tuple(4 * w for w in task.chain.work)),
    )
    before, after = allocate(task, search, seed=3), allocate(slower, search, seed=3)
    assert after.stages == before.stages
    assert after.cost.step_s == pytest.approx(4 * before.cost.step_s)


@pytest.mark.parametrize("seed", range(4))
def test_other_names_of_the_devices_change_nothing(seed: int) -> None:
    task, names = task_of(seed, 3, 1, layers=3), np.random.default_rng(seed).permutation(4)
    renamed = replace(
        task,
        delay_ms=task.delay_ms[np.ix_(names, names)],
        bandwidth_gbps=task.bandwidth_gbps[np.ix_(names, names)],
        flops=tuple(task.flops[d] for d in names),
        reliable=tuple(task.reliable[d] for d in names),
    )
    assert allocate(renamed, seed=seed).cost.step_s == pytest.approx(allocate(task, seed=seed).cost.step_s)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("search", SEARCHES)
def test_links_between_clients_do_not_matter(search: str) -> None:
    task = fleet(3)
    worse = replace(task, bandwidth_gbps=task.bandwidth_gbps.copy())
    worse.bandwidth_gbps[6:, 6:] /= 50
    assert allocate(worse, search, seed=3) == allocate(task, search, seed=3)


def test_out_of_time_it_is_still_not_slower_than_the_papers_way(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = allocate(fleet(4), "hybrid", seed=4)
    monkeypatch.setattr(hub_annealing, "MOVE_S", 0.1)
    short = [allocate(fleet(4), seed=4, time_limit_s=100.0) for _ in range(2)]
    assert short[0] == short[1]  # fewer moves, planned before
    assert short[0].complete
    assert 500 < short[0].tried < 1500
    monkeypatch.setattr(hub_annealing, "MOVE_S", 1e-9)  # a machine much slower than thought
    monkeypatch.setattr(hub_annealing, "PAIR_S", 0.0)
    stopped = allocate(fleet(4), seed=4, time_limit_s=0.01)
    assert not stopped.complete
    assert max(short[0].cost.step_s, stopped.cost.step_s) <= paper.cost.step_s


@pytest.mark.parametrize("seed", range(3))
def test_a_search_knows_what_the_evaluator_says(seed: int) -> None:
    """Of all states that a walk comes to; layers are alike, so that the best ones are known."""
    task = fleet(seed)
    task = replace(task, chain=replace(task.chain, work=(2e12,) * 8))
    pace = Pace(task)
    state: State = (Group((0, 1, 2), (3, 4, 5), (6, 7, 8, 9)),)
    chain = Walk(task, pace, state, random.Random(seed), fixed=False)
    seen = set[int]()
    for _ in range(600):
        state = chain.propose(state) or state
        stages = with_layers(task, pace, state)
        time_s, smooth_s = pace.of(state)
        assert time_s >= smooth_s * (1 - 1e-9)
        if stages is None:
            assert time_s == math.inf
        else:
            assert task.microbatches * time_s == pytest.approx(evaluate(task, stages).step_s)
            seen.add(len(stages))
    assert len(seen) > 2


@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 9), st.sampled_from([2.0, 4.0, 30.0])), min_size=1, max_size=5),
    st.lists(st.sampled_from([1.0, 1.0, 2.5]), min_size=5, max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_the_quick_cut_is_exact_for_layers_that_are_alike_and_never_too_fast(
    stages: list[tuple[float, float, float]], work: list[float]
) -> None:
    chain = Chain(tuple(work), (1.0,) * len(work))
    overheads, speeds, memory = zip(*stages, strict=True)
    ends = [[min(first + int(m), len(work)) for first in range(len(work))] for m in memory]
    prefix = np.cumsum((0.0, *work)).tolist()
    quick = fastest(overheads, speeds, ends, prefix, smooth(overheads, speeds, prefix[-1]))
    try:
        best = max(partition_chain(chain, [Capacity(s, m, 1.0, o) for o, s, m in stages]).time_s)
    except CapacityError:
        best = math.inf
    assert quick == pytest.approx(best) if len(set(work)) == 1 else quick >= best * (1 - 1e-9)


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
        Chain((1e11,) * 6),
        1e6,
    )


def test_clusters_are_the_places() -> None:
    task = regions([2, 3, 1], 50.0)
    levels = list(hub_clustering.levels(task, hub_clustering.distances(task)))
    assert [len(level) for level in levels] == [1, 2, 3, 4, 5, 6]
    assert sorted(levels[2]) == [(0, 1), (2, 3, 4), (5,)]
    assert all(sorted(d for c in level for d in c) == list(range(6)) for level in levels)


def test_in_one_place_clusters_are_of_equal_speed() -> None:
    task = replace(regions([6], 0.0), flops=(5e12, 1e12, 1e12, 1e12, 1e12, 1e12))
    two = list(hub_clustering.levels(task, hub_clustering.distances(task)))[1]
    assert sorted(two) == [(0,), (1, 2, 3, 4, 5)]


def test_the_paper_divides_until_transfers_cost_more_than_eq_3_gains() -> None:
    # eq. 3: 0.1 s / stages; the second stage costs a transfer, the third one more, all others none
    assert len(allocate(regions([6], 0.0), "hybrid").stages) == 6
    assert len(allocate(regions([3, 3], 500.0), "hybrid").stages) == 1
    assert len(allocate(replace(regions([6], 0.0), activation_bytes=3e7), "hybrid").stages) == 2


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_stages_is_the_best_there_is(seed: int) -> None:
    task = task_of(seed, 9, 0)
    edges = hub_clustering.distances(task)
    clusters = list(hub_clustering.levels(task, edges))[6]
    ordered = hub_clustering.in_order(clusters, edges, np.random.default_rng(seed))
    assert sorted(ordered) == sorted(clusters)
    weights = hub_clustering.coarse(ordered, edges)
    length = sum(weights[k, k + 1] for k in range(len(ordered) - 1))
    assert length == pytest.approx(shortest_path(hub_clustering.coarse(clusters, edges))[0], rel=0.02)


def test_servers_take_the_nearer_side_and_clients_the_nearest_stage() -> None:
    task = regions([2, 2, 2], 50.0, clients=2)
    task.delay_ms[2, :2], task.delay_ms[:2, 2] = 40.0, 40.0  # of the middle place, 2 is nearer to the first
    task.delay_ms[3, 4:6], task.delay_ms[4:6, 3] = 40.0, 40.0  # and 3 to the last
    stages = allocate(task, "hybrid", stages=3).stages
    assert stages[1].servers in {(2, 3), (3, 2)}
    first, last = (0, 2) if 0 in stages[0].servers else (2, 0)
    nearer = {2: stages[first], 3: stages[last]}
    assert stages[1].frontal == ((2,) if nearer[2] is stages[0] else (3,))
    assert [stage.clients for stage in (stages[first], stages[1], stages[last])] == [(), (), (6, 7)]


# What does not work, and what does all the same -----------------------------------------------------------------------


def test_one_device_serves_everything() -> None:
    found = allocate(task_of(0, 1, 0))
    assert found.stages == (HubStage((0,), (0,), (), (0, 4)),)
    assert found.gap == pytest.approx(0)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_client_without_links_or_memory_is_left_out(search: str) -> None:
    task = task_of(1, 3, 3)
    task.bandwidth_gbps[:3, 3] = 0.0
    task = replace(task, memory_bytes=(9.0, 9.0, 9.0, 9.0, 0.5, 9.0), chain=replace(task.chain, state_bytes=(1.0,) * 4))
    assert {3, 4} <= set(allocate(task, search).idle)


def test_a_server_without_room_for_a_layer_is_left_out_by_ours() -> None:
    task = task_of(1, 4, 0)
    task = replace(task, memory_bytes=(4.0, 4.0, 0.5, 4.0), chain=replace(task.chain, state_bytes=(1.0,) * 4))
    with pytest.raises(CapacityError, match="leave out those with the least memory"):
        allocate(task, "hybrid")
    assert 2 in allocate(task).idle


def test_missing_links_are_gone_round() -> None:
    task = task_of(2, 4, 0)
    task.bandwidth_gbps[0, 3] = task.bandwidth_gbps[1, 2] = 0.0
    assert math.isfinite(allocate(task).cost.step_s)
    with pytest.raises(ValueError, match="only a lone one is both"):
        evaluate(task, [HubStage((0, 1), (1,), (), (0, 4))])
    assert evaluate(task, [HubStage((0,), (3,), (), (0, 4))]).step_s == math.inf


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("change", "stages", "error", "message"),
    [
        ({"reliable": (False,) * 5}, None, ConfigError, r"none of 5 devices is reliable.*use the swarm strategy"),
        ({}, 4, ConfigError, r"4 stages need a reliable device each, and there are 3; use fewer"),
        ({}, 5, ConfigError, r"4 layers cannot be cut into 5 stages"),
        ({}, 0, ConfigError, r"cut into 0 stages"),
        (
            {"memory_bytes": (0.5 * 2**30,) * 3 + (9e9,) * 2},
            None,
            CapacityError,
            r"needs 1 GiB, and no reliable .* more than 0.5 GiB",
        ),
        ({"memory_bytes": (1.5 * 2**30,) * 5}, None, CapacityError, r"use"),
        ({"memory_bytes": (1.0,)}, None, ConfigError, r"an entry for each of 5 devices"),
        ({"bandwidth_gbps": np.diag(np.ones(5))}, None, ConfigError, r"falls apart: devices .* leave them out"),
        ({"bandwidth_gbps": np.ones((5, 4))}, None, ConfigError, r"5 x 5 numbers"),
        ({"bandwidth_gbps": np.full((5, 5), np.nan)}, None, ConfigError, r"bandwidth_gbps: nan from device 0 to 1"),
        ({"delay_ms": np.full((5, 5), -1.0)}, None, ConfigError, r"delay_ms: -1.0 from device 0 to 1; give"),
        ({"flops": (1e12, 0.0, 1e12, 1e12, 1e12)}, None, ConfigError, r"flops: device 1 has 0.0; leave it out"),
    ],
)
def test_what_cannot_work_says_what_to_do(
    search: str, change: dict[str, Any], stages: int | None, error: type[Exception], message: str
) -> None:
    task = task_of(0, 3, 2)
    task = replace(task, chain=replace(task.chain, state_bytes=(2.0**30,) * 4), **change)
    with pytest.raises(error, match=message):
        allocate(task, search, stages=stages)


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
        ([HubStage((0,), (1,), (2,), (0, 4))], "clients are not"),
    ],
)
def test_what_is_no_allocation(stages: list[HubStage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(task_of(0, 3, 2), stages)
