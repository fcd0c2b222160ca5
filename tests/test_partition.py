"""Cuts of unequal layers into unequal stages, against all cuts there are."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.planning.partition import cheapest_cut, partition


@given(st.integers(1, 7), st.data())
@settings(max_examples=300, deadline=None)
def test_no_cut_is_better(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    cost = st.floats(0.1, 5) | st.just(math.inf)
    shape = (stages, layers + 1, layers + 1)
    costs = np.reshape(data.draw(st.lists(cost, min_size=math.prod(shape), max_size=math.prod(shape))), shape)
    cuts = [tuple(pairwise((0, *ends, layers))) for ends in combinations(range(1, layers), stages - 1)]
    every = {cut: [float(costs[k, *run]) for k, run in enumerate(cut)] for cut in cuts}
    best, found = min(map(max, every.values())), cheapest_cut(costs)
    if math.isinf(best):
        assert found is None
        return
    assert found is not None
    assert found[0] == max(every[found[1]]) == pytest.approx(best)
    squares = min(sum(x * x for x in t) for t in every.values() if max(t) <= best * (1 + 1e-9))
    assert sum(x * x for x in every[found[1]]) == pytest.approx(squares)


def test_stages_that_are_alike_are_cut_as_stages_with_the_same_costs() -> None:
    work = (1.0, 1.3, 1.6, 1.0, 1.3, 1.6, 3.0)
    sums = np.cumsum((0.0, *work))
    found = cheapest_cut(np.repeat((sums[None] - sums[:, None])[None], 3, axis=0))
    assert found is not None
    assert found[1] == partition(work, 3)


def test_a_stage_twice_as_fast_gets_twice_the_layers() -> None:
    layers = np.arange(10.0)
    work = layers[None] - layers[:, None]
    assert cheapest_cut(np.array([work, work / 2])) == (3.0, ((0, 3), (3, 9)))


@pytest.mark.parametrize("stages", [0, 3])
def test_more_stages_than_layers_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match=f"cannot cut 2 layers into {stages} stages"):
        partition((1.0, 2.0), stages)
