"""What holds of placements whatever the network: of the cost, of the bound, and of what the search finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.planning.place import place
from muletrain.planning.placement import Assignment, Task, evaluate, lower_bound_s, slots

from .placements import exhaustive, link_s, task_of

SHAPES = [(2, 2), (2, 2, 2), (3, 3), (3, 1, 2), (1, 1, 1, 1), (4,)]
TASKS = st.builds(task_of, st.integers(0, 10**6), st.sampled_from(SHAPES), st.integers(0, 1), unequal=st.booleans())
EQUAL = st.builds(task_of, st.integers(0, 10**6), st.sampled_from([(2, 2), (2, 2, 2), (3, 3)]))


def drawn(task: Task, seed: int) -> Assignment:
    """Any placement."""
    left = np.random.default_rng(seed).permutation(len(task.delay_ms)).tolist()
    return tuple(slots([left.pop() for _ in range(size)], task.pipelines) for size in task.replicas)


def renamed(task: Task, order: list[int]) -> Task:
    """Device order[k] is called k."""
    pick = np.ix_(order, order)
    compute = tuple(task.compute_s[d] for d in order) if task.compute_s else ()
    return replace(task, delay_ms=task.delay_ms[pick], bandwidth_gbps=task.bandwidth_gbps[pick], compute_s=compute)


def scaled(task: Task, factor: float) -> Task:
    """Everything takes so many times as long."""
    compute = tuple(factor * s for s in task.compute_s)
    return replace(
        task, delay_ms=factor * task.delay_ms, bandwidth_gbps=task.bandwidth_gbps / factor, compute_s=compute
    )


def worse(task: Task, links: set[tuple[int, int]], factor: float) -> Task:
    """These links, in both directions, take so many times as long."""
    delay, gbps = task.delay_ms.copy(), task.bandwidth_gbps.copy()
    for a, b in links:
        for pair in ((a, b), (b, a)):
            delay[pair] *= factor
            gbps[pair] /= factor
    return replace(task, delay_ms=delay, bandwidth_gbps=gbps)


def used(assignment: Assignment) -> set[tuple[int, int]]:
    """Links in stages and between stages, the lower device first."""
    inside = {pair for stage in assignment for pair in combinations(sorted(set(stage)), 2)}
    between = {(min(p), max(p)) for hop in pairwise(assignment) for p in zip(*hop, strict=True)}
    return inside | between


@given(TASKS, st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_names_change_no_cost_and_no_bound(task: Task, seed: int) -> None:
    order = np.random.default_rng(seed + 1).permutation(len(task.delay_ms)).tolist()
    other, assignment = renamed(task, order), drawn(task, seed)
    names = tuple(tuple(order.index(d) for d in stage) for stage in assignment)
    assert evaluate(other, names).cost_s == pytest.approx(evaluate(task, assignment).cost_s)
    assert lower_bound_s(other) == pytest.approx(lower_bound_s(task))


@given(TASKS, st.integers(0, 100), st.floats(1e-2, 1e2))
@settings(max_examples=100, deadline=None)
def test_costs_and_bounds_scale_with_the_times(task: Task, seed: int, factor: float) -> None:
    assignment = drawn(task, seed)
    cost_s = evaluate(scaled(task, factor), assignment).cost_s
    assert cost_s == pytest.approx(factor * evaluate(task, assignment).cost_s)
    assert lower_bound_s(scaled(task, factor)) == pytest.approx(factor * lower_bound_s(task))


@given(EQUAL, st.integers(0, 100), st.floats(1.5, 50))
@settings(max_examples=100, deadline=None)
def test_only_links_that_count_change_a_cost(task: Task, seed: int, factor: float) -> None:
    assignment = drawn(task, seed)
    cost = evaluate(task, assignment)
    others = set(combinations(range(len(task.delay_ms)), 2)) - used(assignment)
    assert evaluate(worse(task, others, factor), assignment) == cost, "nobody uses these"
    for hop in pairwise(assignment):
        by_time = sorted((link_s(task, a, b, task.activation_bytes), a, b) for a, b in zip(*hop, strict=True))
        slowest_s = by_time[-1][0]
        for time_s, a, b in by_time[:-1]:
            dominated = worse(task, {(a, b)}, slowest_s / time_s * (1 - 1e-9))
            assert evaluate(dominated, assignment) == cost, "others of the hop take as long"
        after = evaluate(worse(task, {by_time[-1][1:]}, factor), assignment)
        assert after.pipeline_s == pytest.approx(cost.pipeline_s + (factor - 1) * slowest_s)
        assert after.data_parallel_s == cost.data_parallel_s


@given(TASKS, st.integers(0, 100), st.floats(1, 50))
@settings(max_examples=100, deadline=None)
def test_a_worse_link_makes_nothing_better(task: Task, seed: int, factor: float) -> None:
    a, b = sorted(np.random.default_rng(seed).permutation(len(task.delay_ms))[:2].tolist())
    after, assignment = worse(task, {(a, b)}, factor), drawn(task, seed)
    assert evaluate(after, assignment).cost_s >= evaluate(task, assignment).cost_s * (1 - 1e-9)
    assert lower_bound_s(after) >= lower_bound_s(task) * (1 - 1e-9)


@given(TASKS)
@settings(max_examples=60, deadline=None)
def test_no_placement_costs_less_than_the_bound(task: Task) -> None:
    assert 0 < lower_bound_s(task) <= exhaustive(task) * (1 + 1e-9)


@given(EQUAL, st.integers(0, 100), st.floats(0.1, 10))
@settings(max_examples=5, deadline=None)
def test_what_is_found_is_the_best_under_other_names_and_in_other_units(task: Task, seed: int, factor: float) -> None:
    best_s = exhaustive(task)
    order = np.random.default_rng(seed).permutation(len(task.delay_ms)).tolist()
    found = place(renamed(task, order))
    assert found.cost.cost_s == pytest.approx(best_s)
    assert found.cost.cost_s * (1 - found.gap) <= best_s * (1 + 1e-9), "the gap is certified"
    assert evaluate(task, place(scaled(task, factor)).assignment).cost_s == pytest.approx(best_s)


@given(EQUAL, st.floats(1.5, 50))
@settings(max_examples=5, deadline=None)
def test_links_that_the_best_placement_does_not_use_may_be_as_slow_as_they_like(task: Task, factor: float) -> None:
    found = place(task)
    others = set(combinations(range(len(task.delay_ms)), 2)) - used(found.assignment)
    after = worse(task, others, factor)
    assert exhaustive(after) == pytest.approx(found.cost.cost_s)
    assert place(after).cost.cost_s == pytest.approx(found.cost.cost_s)
