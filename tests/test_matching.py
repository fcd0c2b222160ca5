"""The bottleneck matching of two stages and the path through all, against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest

from muletrain.planning.matching import bottleneck, bottlenecks, compiled, scratch
from muletrain.planning.pipelines import shortest_path
from muletrain.planning.placement import link_times
from tests.placements import least, task_of


def matched(weights: np.ndarray, at_most: float = math.inf, weight: float = 0.0) -> tuple[float, float, list[int]]:
    """Rows and columns are devices of two stages."""
    size = len(weights)
    here, match = np.arange(size), np.full(size, -1)
    slowest, guide = bottleneck(linked(weights), here, here + size, weight, at_most, match, scratch(size))
    return slowest, guide, match.tolist()


def linked(weights: np.ndarray) -> np.ndarray:
    return np.block([[np.zeros_like(weights), weights], [weights.T, np.zeros_like(weights)]])


@pytest.mark.parametrize("seed", range(40))
def test_the_bottleneck_matching_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 7)) if seed < 30 else int(rng.integers(9, 70))
    weights = rng.integers(0, 6, (size, size)).astype(float) if seed % 2 else rng.random((size, size))
    value, guide, match = matched(weights, weight=1.0)
    assert value == least(weights)
    assert size > 6 or value == min(max(weights[i, p[i]] for i in range(size)) for p in permutations(range(size)))
    assert sorted(match) == list(range(size))
    assert max(weights[i, match[i]] for i in range(size)) == value
    assert guide == pytest.approx(math.sqrt(np.mean([weights.min(0) ** 2, weights.min(1) ** 2])))
    assert matched(weights, value)[0] == value
    assert matched(weights, value - 1e-6)[0] == math.inf
    assert matched(weights, value + guide + 1e-6, weight=1.0)[0] == value
    assert matched(weights, value + guide - 1e-6, weight=1.0)[0] == math.inf


def test_matchings_of_many_groups_are_those_of_each_two() -> None:
    task, groups = task_of(0, (5, 5, 5)), np.random.default_rng(0).permutation(15).reshape(3, 5)
    link = link_times(task, 1e9)
    slowest, match = bottlenecks(link, groups, scratch(5))
    for i, j in permutations(range(3), 2):
        assert slowest[i, j] == least(link[np.ix_(groups[i], groups[j])])
        assert max(link[groups[i], groups[j, match[i, j]]]) == slowest[i, j]
    assert slowest.diagonal().tolist() == [0, 0, 0]


def test_where_nothing_can_be_kept_it_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder that can be written."""
    kinds: list[dict[str, bool]] = []

    def njit(**kind: bool) -> Callable[[Any], Any]:
        kinds.append(kind)
        if kind.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr("muletrain.planning.matching.njit", njit)
    assert compiled(len) is len
    assert kinds == [{"nogil": True, "cache": True}, {"nogil": True}]


@pytest.mark.parametrize("seed", range(10))
def test_the_path_through_the_stages_is_the_shortest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 8))
    weights = rng.random((size, size))
    weights += weights.T
    cost, order = shortest_path(weights)
    assert cost == pytest.approx(min(sum(weights[a, b] for a, b in pairwise(p)) for p in permutations(range(size))))
    assert sorted(order) == list(range(size))
    assert cost == pytest.approx(sum(weights[a, b] for a, b in pairwise(order)))


def test_the_path_through_many_stages_is_a_short_one() -> None:
    places = np.random.default_rng(0).permutation(30)
    cost, order = shortest_path(np.abs(places[:, None] - places).astype(float))
    assert sorted(order) == list(range(30))
    assert cost == 29, "on a line the order of the places"
