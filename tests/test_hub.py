"""Allocations of a hub: the latency model by hand, and the searches."""

from __future__ import annotations

import numpy as np
import pytest

from muletrain.policy.allocate import allocate
from muletrain.policy.hub import HubStage, HubTask, evaluate
from muletrain.policy.partition import Chain


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
        delay, np.full((5, 5), 8.0), (1e12, 1e12, 2e12, 2e12, 4e12), (True,) * 4 + (False,), Chain((4e12, 8e12)), 1e9, 10
    )  # fmt: skip
    cost = evaluate(task, [HubStage((0,), (1,), (), (0, 1)), HubStage((2,), (3,), (4,), (1, 2))])
    first, second = cost.stages
    assert (first.activations_s, first.gradients_s) == pytest.approx((0, 0.050 + 1))
    assert (first.inside_s, first.compute_s) == pytest.approx((0.010 + 0.5, 4 / 2))
    assert (second.activations_s, second.gradients_s) == pytest.approx((0.030 + 1, 0))
    assert (second.inside_s, second.compute_s) == pytest.approx((2 * 0.010 + 2 * 0.5, 8 / 8))
    assert cost.step_s == pytest.approx(10 * (0.050 + 1 + 0.010 + 0.5 + 2))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stages", [None, 2])
def test_never_slower_than_the_papers_way(seed: int, stages: int | None) -> None:
    task = task_of(seed, 5, 3)
    paper = allocate(task, "hybrid", seed=seed, stages=stages)
    ours = allocate(task, seed=seed, stages=stages)
    assert ours.lower_bound_s <= ours.cost.step_s <= paper.cost.step_s
