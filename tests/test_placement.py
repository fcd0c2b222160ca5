"""Placements: the cost model by hand, and what cannot be placed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from muletrain.errors import ConfigError
from muletrain.planning import annealing
from muletrain.planning.place import place
from muletrain.planning.placement import Assignment, Task, evaluate
from reproduction.evolutionary import evolve
from tests.placements import network, task_of, valid

# --- the cost model ----------------------------------------------------------------------------------------------------


def test_the_cost_of_two_stages_of_two_devices_by_hand() -> None:
    delay = np.array([[0, 10, 20, 30], [30, 0, 40, 50], [20, 40, 0, 60], [30, 50, 60, 0]], dtype=float)
    gbps = np.array([[9, 1, 2, 4], [3, 9, 2, 4], [2, 2, 9, 8], [4, 4, 8, 9]], dtype=float)
    task = Task(delay, gbps, (2, 2), activation_bytes=1e9, gradient_bytes=1e9)
    cost = evaluate(task, ((0, 1), (3, 2)))
    # 0-1: mean delay 20 ms, mean bandwidth 2; half a gigabyte is 4 Gbit: 2 s. 2-3: 60 ms, 0.5 s.
    assert cost.data_parallel_s == pytest.approx(2 * (0.020 + 4 / 2))
    assert cost.pipeline_s == pytest.approx(max(0.030 + 8 / 4, 0.040 + 8 / 2))
    assert cost.cost_s == pytest.approx(cost.data_parallel_s + 2 * cost.pipeline_s)


def test_every_other_device_of_the_stage_counts_and_the_slowest_device() -> None:
    delay = np.array([[0, 1, 2], [1, 0, 4], [2, 4, 0]], dtype=float) * 1000
    task = Task(delay, np.full((3, 3), 8.0), (3,), 0.0, 3e9)
    assert evaluate(task, ((0, 1, 2),)).cost_s == pytest.approx(2 * (2 + 1 + 4 + 1))
    assert evaluate(replace(task, compute_s=(1.0, 7.0, 2.0)), ((0, 1, 2),)).compute_s == 7.0


@pytest.mark.parametrize(
    "assignment",
    [
        ((0, 1), (2, 2)),  # too few devices
        ((0, 1), (1, 2)),  # one device twice
        ((0, 1), (2, 4)),  # not there
        ((0, 1),),
        ((0, 1, 2), (3,)),
    ],
)
def test_what_is_no_placement(assignment: Assignment) -> None:
    with pytest.raises(ValueError, match=r"stage|device"):
        evaluate(task_of(0, (2, 2)), assignment)


def test_pipelines_are_spread_evenly_over_a_smaller_stage() -> None:
    task = task_of(0, (4, 2))
    assert valid(task, ((0, 1, 2, 3), (4, 5, 4, 5)))
    with pytest.raises(ValueError, match="evenly"):
        evaluate(task, ((0, 1, 2, 3), (4, 4, 4, 5)))


# --- what cannot be (and what holds whatever the network: test_placement_properties) --------------------------------------


def test_links_that_are_not_there_are_avoided() -> None:
    task = task_of(0, (2, 2))
    gbps = task.bandwidth_gbps.copy()
    for a, b in [(0, 1), (2, 3)]:  # one direction is enough
        gbps[a, b] = 0
    for search in (annealing.search, evolve, partial(evolve, kernighan_lin=True)):
        found = place(replace(task, bandwidth_gbps=gbps), search=search, time_limit_s=0.5)
        assert not {(0, 1), (2, 3)} & {tuple(sorted(stage)) for stage in found.assignment}


def cut(task: Task, first: int) -> Task:
    """No links between the first devices and the others."""
    gbps = task.bandwidth_gbps.copy()
    gbps[:first, first:] = gbps[first:, :first] = 0
    return replace(task, bandwidth_gbps=gbps)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task(*network(0, 3), (2, 2), 1.0, 1.0), "2 stages need 4 devices, and there are 3"),
        (replace(task_of(0, (2, 2)), fits=(True, True, False, True)), "fits into the memory of 3 of 4"),
        (
            cut(task_of(0, (2, 2)), 1),
            "the network falls apart: 4 devices must reach each other, and at most 3 do; device 0 has no links",
        ),
        (
            replace(task_of(0, (3,)), bandwidth_gbps=np.array([[0, 1, 1], [1, 0, 0], [1, 0, 0.0]])),
            "without missing links",
        ),
    ],
)
def test_what_no_placement_can_do(task: Task, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place(task, time_limit_s=1)


def test_whoever_is_cut_off_or_has_no_memory_is_left_out() -> None:
    task = cut(task_of(0, (2, 2), 2), 1)
    found = place(replace(task, fits=(True, True, True, False, True, True)), time_limit_s=0.5)
    assert found.spares == (0, 3)
