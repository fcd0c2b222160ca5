"""Chains of unequal layers on unequal stages: against all cuts there are, and what does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.errors import CapacityError
from muletrain.planning.partition import Capacity, Chain, Cut, Shared, partition, partition_chain

GIB = 2**30
sizes = st.integers(0, 4).map(float)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    layers = draw(st.integers(1, 7))

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=layers, max_size=layers)))

    shared = st.builds(Shared, sizes, st.sets(st.integers(0, layers - 1), min_size=1).map(tuple))
    return Chain(each(st.floats(0.1, 5)), each(sizes), each(sizes), tuple(draw(st.lists(shared, max_size=2))))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Chain, list[Capacity]]:
    chain = draw(chains())
    capacity = st.builds(
        Capacity,
        st.floats(0.1, 5),
        st.integers(1, 25).map(float) | st.just(math.inf),
        st.integers(1, 3).map(float),
        st.floats(0, 3),
    )
    count = draw(st.integers(1, len(chain.work)))
    return chain, draw(st.lists(capacity, min_size=count, max_size=count))


def times(chain: Chain, stages: list[Capacity], cut: Cut) -> list[float]:
    """From the definition; inf where a stage has too little memory."""
    found = []
    for (first, end), stage in zip(cut, stages, strict=True):
        layers = range(first, end)
        nbytes = sum(chain.state_bytes[n] + stage.in_flight * chain.activation_bytes[n] for n in layers)
        nbytes += sum(s.nbytes for s in chain.shared if set(s.layers) & set(layers))
        work = sum(chain.work[n] for n in layers)
        found.append(stage.overhead_s + work / stage.speed if nbytes <= stage.memory_bytes else math.inf)
    return found


def cuts(layers: int, stages: int) -> list[Cut]:
    return [tuple(pairwise((0, *ends, layers))) for ends in combinations(range(1, layers), stages - 1)]


@given(problems())
@settings(max_examples=300, deadline=None)
def test_no_cut_is_better(problem: tuple[Chain, list[Capacity]]) -> None:
    chain, stages = problem
    every = [times(chain, stages, cut) for cut in cuts(len(chain.work), len(stages))]
    best = min(max(t) for t in every)
    if math.isinf(best):
        with pytest.raises(CapacityError, match=r"GiB.*use"):
            partition_chain(chain, stages)
        return
    found = partition_chain(chain, stages)
    assert found.time_s == pytest.approx(times(chain, stages, found.cut))
    assert max(found.time_s) == pytest.approx(best)
    squares = min(sum(x * x for x in t) for t in every if max(t) <= best * (1 + 1e-9))
    assert sum(x * x for x in found.time_s) == pytest.approx(squares)
    assert all(n <= s.memory_bytes for n, s in zip(found.memory_bytes, stages, strict=True))


@given(problems(), st.floats(0.01, 100))
@settings(max_examples=50, deadline=None)
def test_another_unit_of_work_is_the_same_cut_or_as_good_a_one(
    problem: tuple[Chain, list[Capacity]], scale: float
) -> None:
    chain, stages = problem
    try:
        found = partition_chain(chain, stages)
    except CapacityError:
        return
    scaled = replace(chain, work=tuple(w * scale for w in chain.work))
    same = partition_chain(scaled, [replace(s, speed=s.speed * scale) for s in stages])
    assert max(same.time_s) == pytest.approx(max(found.time_s))


def test_stages_that_are_alike_are_cut_as_before() -> None:
    work = (1.0, 1.3, 1.6, 1.0, 1.3, 1.6, 3.0)
    assert partition_chain(Chain(work), [Capacity()] * 3).cut == partition(work, 3)


def test_a_stage_twice_as_fast_gets_twice_the_layers() -> None:
    found = partition_chain(Chain((1.0,) * 9), [Capacity(1.0), Capacity(2.0)])
    assert found.cut == ((0, 3), (3, 9))
    assert found.time_s == (3.0, 3.0)


def test_weights_that_all_layers_share_are_held_once_a_stage() -> None:
    chain = Chain((1.0,) * 6, shared=(Shared(8.0, tuple(range(6))),))
    assert partition_chain(chain, [Capacity(memory_bytes=8.0)] * 2).memory_bytes == (8.0, 8.0)
    unshared = Chain((1.0,) * 6, state_bytes=(8.0,) * 6)
    assert partition_chain(unshared, [Capacity(memory_bytes=24.0)] * 2).memory_bytes == (24.0, 24.0)
    with pytest.raises(CapacityError, match="use more stages"):
        partition_chain(unshared, [Capacity(memory_bytes=16.0)] * 2)


def test_a_tied_embedding_counts_in_the_first_and_the_last_stage_and_not_between() -> None:
    chain = Chain((1.0,) * 6, (1.0,) * 6, shared=(Shared(10.0, (0, 5)),))
    assert partition_chain(chain, [Capacity()] * 3).memory_bytes == (12.0, 2.0, 12.0)
    assert partition_chain(chain, [Capacity()]).memory_bytes == (16.0,)


def test_activations_count_as_often_as_microbatches_are_in_flight() -> None:
    chain = Chain((1.0,) * 6, (1.0,) * 6, (2.0,) * 6)
    stages = [Capacity(memory_bytes=10.0, in_flight=2.0), Capacity(memory_bytes=12.0, in_flight=1.0)]
    assert partition_chain(chain, stages).memory_bytes == (10.0, 12.0)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            [4, 4],
            r"layer 1 alone needs 5 GiB, and no stage's machines have more than 4 GiB each; use machines with more memory",
        ),
        (
            [9, 0.5],
            r"stage 1 holds no layer: the smallest needs 1 GiB, and its smallest machine has 0.5 GiB; leave that machine out",
        ),
        (
            [5, 6],
            r"4 layers do not fit into 2 stages: filled in order, they hold 1 in 5 GiB, 2 in 6 GiB .*use more stages",
        ),
    ],
)
def test_what_does_not_fit_says_why_and_what_to_do(stages: list[float], message: str) -> None:
    chain = Chain((1.0,) * 4, tuple(n * GIB for n in (1.0, 5.0, 1.0, 5.0)))
    with pytest.raises(CapacityError, match=message):
        partition_chain(chain, [Capacity(memory_bytes=n * GIB) for n in stages])


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (lambda: Chain((1.0, 2.0), state_bytes=(1.0,)), "state_bytes: 1 entries for 2 layers"),
        (lambda: Chain((1.0, -2.0)), "not negative"),
        (lambda: Chain((1.0, math.inf)), "finite"),
        (lambda: Chain((1.0,), shared=(Shared(1.0, (1,)),)), "layers are 0 to 0"),
        (lambda: partition_chain(Chain((1.0,)), [Capacity()] * 2), "cannot cut 1 layers into 2 stages"),
        (lambda: partition_chain(Chain((1.0,)), []), "cannot cut 1 layers into 0 stages"),
        (lambda: partition_chain(Chain((1.0,)), [Capacity(speed=0.0)]), "speed of a stage is positive"),
    ],
)
def test_what_is_no_chain(chain: object, message: str) -> None:
    assert callable(chain)
    with pytest.raises(ValueError, match=message):
        chain()
