"""Sub-models of strategy 'swap' (ATOM fig. 13): the best of all cuts, in polynomial time."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from muletrain.errors import CapacityError
from muletrain.planning.partition import Cut
from muletrain.planning.swapping import Layer, Swapping, accumulation, held_bytes, hidden, round_s, swapping

NODES, GRAPHS = 12, 200


def drawn(seed: int, nodes: int = NODES, *, again: bool = False) -> tuple[list[Layer], float, float, int]:
    """A random graph (whole numbers: sums are exact), a memory from too small to ample, a rate, and C. ``again``: forward is
    computed again."""
    draw = random.Random(seed)
    layers = [
        Layer(
            forward_s=float(draw.randint(1, 9)),
            backward_s=float(draw.randint(1, 20)),
            load_bytes=float(draw.choice([0, 1, 4, 30]) + draw.randint(0, 9)),
            work_bytes=float(draw.randint(0, 12)),
            cut_bytes=float(draw.randint(1, 6)),
        )
        for _ in range(draw.randint(1, nodes))
    ]
    if again:
        layers = [replace(layer, again_s=float(draw.randint(0, int(layer.forward_s)))) for layer in layers]
    whole = sum(layer.load_bytes + layer.work_bytes for layer in layers)
    return layers, draw.uniform(0.15, 1.1) * whole, draw.choice([0.5, 1.0, 2.0]), draw.randint(1, 4)


def every_cut(count: int) -> list[Cut]:
    inner = [c for k in range(count) for c in itertools.combinations(range(1, count), k)]
    return [tuple(pairwise((0, *cuts, count))) for cuts in inner]


def priced(layers: list[Layer], runs: Cut, memory: float, rate: float, c: int) -> tuple[float, float] | None:
    """Figure 13 by its words: seconds of waiting and bytes across cuts; None: it does not fit. Not waiting, but as good as it:
    what the last sub-model computes again elsewhere."""
    load, work, ahead, back = (
        [sum(getattr(x, name) for x in layers[a:b]) for a, b in runs]
        for name in ("load_bytes", "work_bytes", "forward_s", "backward_s")
    )
    waits = c * sum(layer.again_s for layer in layers[: runs[-1][0]])
    if len(runs) == 1:
        return (waits, 0.0) if load[0] + work[0] <= memory else None
    for one, two in pairwise(range(len(runs))):
        if load[one] + load[two] + max(work[one], work[two]) > memory:
            return None
        waits += max(0.0, load[two] / rate - c * ahead[one]) + max(0.0, load[one] / rate - c * back[two])
    return waits, sum(layers[end - 1].cut_bytes for _, end in runs[:-1])


@pytest.mark.parametrize("again", [False, True], ids=["as in the paper", "forward is computed again"])
def test_sub_models_are_those_of_the_exhaustive_search(again: bool) -> None:
    outcomes = {"resident": 0, "hidden": 0, "waits": 0, "too small": 0}
    for seed in range(GRAPHS):
        layers, memory, rate, c = drawn(seed, again=again)
        prices = [p for cut in every_cut(len(layers)) if (p := priced(layers, cut, memory, rate, c)) is not None]
        if not prices:
            with pytest.raises(CapacityError, match="smaller microbatch"):
                swapping(layers, memory, rate, c)
            outcomes["too small"] += 1
            continue
        found = swapping(layers, memory, rate, c)
        assert priced(layers, found.runs, memory, rate, c) == min(prices), (seed, found)
        before = found.runs[-1][0]
        assert found.waits_s + c * sum(layer.again_s for layer in layers[:before]) == min(prices)[0]
        assert found.device_bytes == held_bytes(layers, found.runs) <= memory
        outcomes["resident" if len(found.runs) == 1 else "waits" if found.waits_s else "hidden"] += 1
    assert min(outcomes.values()) >= 10, outcomes


@pytest.mark.parametrize("again", [False, True], ids=["as in the paper", "forward is computed again"])
def test_c_is_the_smallest_that_hides_the_loads_as_well_as_more_do(again: bool) -> None:
    lasting = 0
    for seed in range(60):
        layers, memory, rate, _ = drawn(seed, 8, again=again)
        fitting = [cut for cut in every_cut(len(layers)) if priced(layers, cut, memory, rate, 1) is not None]
        if not fitting:
            continue
        least = [min(priced(layers, cut, memory, rate, c) for cut in fitting)[0] / c for c in range(1, 13)]  # type: ignore[index,type-var]
        enough = [c for c in range(1, 13) if least[c - 1] <= least[-1] + 1e-9]
        found = hidden(layers, memory, rate, 12)
        assert found.minibatches == enough[0]
        lasting += found.waits_s > 0
        assert again or found.minibatches == 12 or found.waits_s == 0
    assert lasting, "some loads are hidden by no C"


def test_what_no_partition_hides_is_told_as_a_share_of_the_time() -> None:
    """Two halves of 20 bytes at 1 B/s; forward 2 and backward 4 a minibatch beside them."""
    layers = [Layer(1.0, 2.0, 10.0, 1.0)] * 4
    found = swapping(layers, 42.0, 1.0, 1)
    assert found.runs == ((0, 2), (2, 4))
    assert (found.waits_s, found.round_s) == (18.0 + 16.0, 12.0 + 18.0 + 16.0)
    assert found.lost == pytest.approx(34 / 46)
    assert found.round_s == round_s(layers, found.runs, 1.0, 1)
    computed_again = [replace(layer, again_s=0.5) for layer in layers]
    assert round_s(computed_again, found.runs, 1.0, 1) == found.round_s - 2 * 0.5, "the last sub-model need not"
    enough = swapping(layers, 42.0, 1.0, 10)
    assert (enough.lost, enough.accumulate, accumulation(layers, enough.runs, 1.0)) == (0.0, 10.0, 10.0)
    resident = swapping(layers, 44.0, 1.0, 1)
    assert (resident.runs, resident.lost, resident.accumulate) == (((0, 4),), 0.0, 0.0)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_a_thousand_layers_take_seconds(share: float) -> None:
    draw = random.Random(3)
    layers = [
        Layer(draw.uniform(1, 9), draw.uniform(2, 18), draw.uniform(1, 30), draw.uniform(0, 9), draw.uniform(1, 9))
        for _ in range(1000)
    ]
    begin = time.process_time()
    found = swapping(layers, share * sum(x.load_bytes + x.work_bytes for x in layers), 5.0, 2)
    assert time.process_time() - begin < 10.0
    assert isinstance(found, Swapping)
    assert len(found.runs) > 1
