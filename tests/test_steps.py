"""Steps that are played without messages: against times by hand, and against what slots and links allow."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.config.fleet_file import Link
from muletrain.planning.cost import RunCost, StageCost, averages_at
from muletrain.planning.splits import Station, roughly_s
from muletrain.sim.fleet.rates import Rates
from muletrain.sim.setting import Kind, Setting
from muletrain.sim.steps import steps
from muletrain.sim.steps.endings import ended_s, ending_bytes
from muletrain.sim.steps.steps import Cast, cast
from muletrain.sim.steps.wires import Wires, without_links
from muletrain.strategies.pipeline import Pipeline, Schedule

MEBI = 2.0**20
BOTH = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
KIND = Kind(
    name="a",
    region="x",
    device="a",
    count=1,
    reliable=True,
    forward_s=(),
    backward_s=(),
    fits=frozenset(),
    quarters=(),
    up_bytes_per_s=MEBI,
    down_bytes_per_s=MEBI,
    assumed="",
)


def setting(
    times_s: list[list[tuple[float, float]]],
    delay_s: float = 0.0,
    *,
    nbytes: int = 0,
    averaged: int = 0,
    tied: int = 0,
    microbatches: int = 16,
    bytes_per_s: float = MEBI,
) -> Setting:
    """``times_s``: forward and backward, by kind and stage; all kinds are as far from each other."""
    stages = len(times_s[0])
    cost = RunCost(
        stages=tuple(
            StageCost(
                1.0, recomputable=True, state_bytes=0, averaged_bytes=averaged, tied_bytes=tied * (s in (0, stages - 1))
            )
            for s in range(stages)
        ),
        forward_bytes=(0, *(nbytes for _ in range(stages - 1))),
        backward_bytes=(0, *(nbytes for _ in range(stages - 1))),
        microbatches=microbatches,
        sequences=1,
        tokens=1,
    )
    kinds = tuple(
        replace(
            KIND,
            forward_s=tuple(f for f, _ in each),
            backward_s=tuple(b for _, b in each),
            up_bytes_per_s=bytes_per_s,
            down_bytes_per_s=bytes_per_s,
        )
        for each in times_s
    )
    links = tuple((Link(delay_s, bytes_per_s),) * len(kinds) for _ in kinds)
    return Setting(kinds, links, cost, tuple((s, s + 1) for s in range(stages)), ())


def test_a_machine_alone_computes_all_the_time() -> None:
    alone = setting([[(0.25, 0.5)]])
    took = steps.play(alone, cast(alone, [(1,)], trainers=2))
    assert took == (16 * 0.75, 16 * 0.75)


@pytest.mark.parametrize(("stages", "delays"), [(1, 4), (2, 5)])
def test_the_end_of_a_step_by_hand(stages: int, delays: int) -> None:
    """Word that all is through, seals, shards, means; and, if there are other stages, word of who holds theirs. Three
    of four shards go up each time, on links that pacing keeps nearly full."""
    four = setting([[(0.25, 0.5)] * stages], 0.125, averaged=4 << 20)
    took = steps.play(four, cast(four, [(4,)] * stages, trainers=1))
    by_hand_s = pytest.approx(delays * 0.125 + 2 * 3 / averages_at(4, 1.0, 1.0))
    assert took.step_s - took.computing_s == by_hand_s
    assert ended_s(four, [(4,)] * stages) == by_hand_s
    assert ended_s(four, [(1,)] * stages) == 0.0


def test_the_exchange_of_tied_gradients_by_hand() -> None:
    """Peers of the first stage take 8 MiB each, together from both peers of the last one, and the other way round: 8 s,
    and 16 s where four want them from two. It begins when both stages have averaged, and takes five messages."""
    for peers, exchange_s in (([2, 2, 2], 8.0), ([4, 2, 2], 16.0)):
        ends = []
        for tied in (0, 8 << 20):
            every = setting([[(0.25, 0.5)] * 3], 0.125, averaged=1 << 20, tied=tied)
            took = steps.play(every, cast(every, [(n,) for n in peers], trainers=1))
            by_rates = Rates(every, trainers=1).ending_s([(n,) for n in peers])
            ends.append((took.step_s - took.computing_s, by_rates))
        for with_none, with_tied in zip(*ends, strict=True):
            assert with_tied - with_none == pytest.approx(exchange_s + 5 * 0.125, abs=0.3)
        sent = Counter[tuple[int, int]]()
        for way, nbytes in ending_bytes(every.cost, [(n,) for n in peers]):
            sent[way] += nbytes
        assert sent[0, 0] == 2 * sum(n - 1 for n in peers) * (1 << 20) + (peers[0] + peers[2]) * (8 << 20)


def test_what_is_averaged_while_the_next_step_is_computed_takes_no_time_of_its_own() -> None:
    four = setting([[(0.25, 0.5)]], 0.125, averaged=1 << 20, microbatches=64)
    at_once, delayed = (steps.play(four, cast(four, [(4,)], trainers=1), delayed=late).step_s for late in (False, True))
    assert at_once - delayed == pytest.approx(
        2 * 0.75 + 3 * 0.125, abs=0.75
    )  # word that all is through comes first still
    assert delayed >= 64 * 0.75 / 4


def test_what_a_full_downlink_does_not_take_waits_at_its_sender_and_others_go_first() -> None:
    """Links that are alike: what goes to the one that takes another's message waits, what goes elsewhere is sent
    meanwhile. Where the downlinks are wide, nothing waits."""
    assert _came(MEBI) == [("cb", 4.0), ("ad", 5.0), ("ab", 9.0)]
    assert _came(4 * MEBI) == [("cb", 4.0), ("ab", 5.0), ("ad", 9.0)]


def _came(down: float) -> list[tuple[str, float]]:
    four = setting([[(0.0, 0.0)]] * 4)
    kinds = tuple(replace(kind, down_bytes_per_s=down) for kind in four.kinds)
    four = replace(four, kinds=kinds, links=tuple((Link(0.0, 8 * MEBI),) * 4 for _ in kinds))
    wires, seen = Wires(four, range(4), coupled=True), list[tuple[str, float]]()

    def arrived(way: str) -> None:
        seen.append((way, wires.now_s))

    for way, after_s in ("cb", 0.0), ("ab", 1.0), ("ad", 1.0):
        a, b = map("abcd".index, way)
        wires.after(after_s, partial(wires.send, a, b, 4 * MEBI, partial(arrived, way)))
    wires.run(lambda: False)
    return seen


def test_a_narrow_uplink_is_shared_by_activations_and_gradients() -> None:
    """The middle one of three sends two messages for each microbatch; nothing else takes time."""
    three = setting([[(0.0, 0.0)] * 3], nbytes=1 << 20)
    who = cast(three, [(1,)] * 3, trainers=1)
    assert steps.play(three, who).step_s >= 16 * 2
    assert steps.play(without_links(three), who).step_s == 0.0


TIMES = st.integers(1, 16).map(lambda n: n / 16)


def one_pipeline(every: Setting, schedule: Schedule) -> Cast:
    """Machine ``s`` is of kind ``s`` where there are as many kinds as stages, else of kind 0."""
    stages = len(every.cut)
    names = tuple(f"p{s}" for s in range(stages))
    strategy = Pipeline(tuple((name,) for name in names), (every.cost.microbatches,), schedule)
    return Cast(tuple((s, s if len(every.kinds) == stages else 0) for s in range(stages)), (0,), strategy, names)


def computing_s(every: Setting, schedule: Schedule) -> float:
    return steps.play(every, one_pipeline(every, schedule)).computing_s


@BOTH
def test_equal_stages_without_links_have_the_textbook_s_bubble(schedule: Schedule) -> None:
    """Huang et al. 2019, sec. 2.3: stages - 1 of microbatches + stages - 1 slots."""
    equal = without_links(setting([[(1.0, 2.0)] * 4], microbatches=8))
    assert computing_s(equal, schedule) == pytest.approx((8 + 4 - 1) * 3.0)


@BOTH
def test_links_by_hand(schedule: Schedule) -> None:
    """One microbatch: there and back, the last stage does both at once; of two the second comes while the first
    computes."""
    one, two = (setting([[(1.0, 2.0)] * 2], 0.25, nbytes=1 << 19, microbatches=n) for n in (1, 2))
    assert computing_s(one, schedule) == pytest.approx(1 + 0.75 + 3 + 0.75 + 2)
    assert computing_s(two, schedule) == pytest.approx(1 + 0.75 + 3 + 3 + 0.75 + 2)


def test_what_waits_goes_first_as_the_schedule_says() -> None:
    """The first stage's forward passes, of 1 s, come before or between its backward passes, of 3 s."""
    slow = without_links(setting([[(1.0, 3.0), (0.1, 0.1)]], microbatches=3))
    assert computing_s(slow, "gpipe") == pytest.approx(3 + 3 * 3)
    # one may wait behind the one that is computed, so the third forward comes after both of their backward passes
    assert computing_s(slow, "1f1b") == pytest.approx(1 + 1 + 3 + 3 + 1 + 0.2 + 3)
    slower = without_links(setting([[(1.0, 3.0), (5.0, 5.0)]], microbatches=2))
    assert computing_s(slower, "1f1b") == pytest.approx(1 + 10 + 10 + 3)


def test_a_send_slot_sends_one_thing_after_another() -> None:
    narrow = setting([[(1.0, 1.0)] * 2], nbytes=10 << 20, microbatches=3)
    narrow = replace(narrow, cost=replace(narrow.cost, backward_bytes=(0, 0)))
    assert computing_s(narrow, "gpipe") == pytest.approx(1 + 3 * 10 + 2 + 1)


def test_an_uplink_is_shared_by_what_goes_both_ways() -> None:
    """Gradients (2 s of the uplink) wait behind the second microbatch's activations (4 s), on paths of their own."""
    for microbatches, sending_s in (1, 4), (2, 4 + 4):
        every = setting([[(1.0, 1.0)] * 3], nbytes=0, microbatches=microbatches, bytes_per_s=math.inf)
        middle = replace(every.kinds[0], up_bytes_per_s=MEBI)
        cost = replace(every.cost, forward_bytes=(0, 0, 4 << 20), backward_bytes=(0, 2 << 20, 0))
        three = replace(
            every, kinds=(every.kinds[0], middle, every.kinds[0]), links=(every.links[0] * 3,) * 3, cost=cost
        )
        assert computing_s(three, "gpipe") == pytest.approx(1 + 1 + sending_s + 2 + 1 + 2 + 1)


@settings(deadline=None, max_examples=100)
@given(
    times_s=st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5),
    nbytes=st.integers(0, 3).map(lambda n: n << 18),
    delay_s=st.integers(0, 8).map(lambda n: n / 16),
    microbatches=st.integers(1, 24),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_one_pipeline_is_as_fast_as_its_slots_allow_and_about_as_fast_as_estimated(
    times_s: list[tuple[float, float]], nbytes: int, delay_s: float, microbatches: int, schedule: Schedule
) -> None:
    chain, last, sent_s = (
        setting([times_s], delay_s, nbytes=nbytes, microbatches=microbatches),
        len(times_s) - 1,
        nbytes / MEBI,
    )
    on = {"on_s": sent_s, "on_delay_s": delay_s, "on_up_s": sent_s}
    back = {"back_s": sent_s, "back_delay_s": delay_s, "back_up_s": sent_s}
    stations = tuple(
        Station(f, b, **(on if s < last else {}), **(back if s else {})) for s, (f, b) in enumerate(times_s)
    )
    took_s, once_s = computing_s(chain, schedule), sum(f + b for f, b in times_s) + 2 * last * (sent_s + delay_s)
    assert microbatches * max(f + b for f, b in times_s) - 1e-9 <= took_s <= microbatches * once_s + 1e-9
    assert roughly_s(schedule, stations, microbatches) == pytest.approx(took_s, rel=0.4)  # 37 %: long links, 1F1B


@settings(deadline=None, max_examples=40)
@given(
    serving=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3),
    times_s=st.tuples(*[TIMES] * 4),
    nbytes=st.integers(0, 3).map(lambda n: n << 18),
    delay_s=st.integers(0, 4).map(lambda n: n / 16),
    delayed=st.booleans(),
)
def test_any_fleet(
    serving: list[tuple[int, int]],
    times_s: tuple[float, float, float, float],
    nbytes: int,
    delay_s: float,
    delayed: bool,
) -> None:
    """It ends, is no faster than compute and averaging allow, and half as fast if everything is half as fast."""
    a, b = times_s[:2], times_s[2:]
    stages, microbatches = len(serving), 12
    every, halved = (
        setting(
            [[(scale * x, scale * y)] * stages for x, y in (a, b)],
            scale * delay_s,
            nbytes=nbytes,
            averaged=1 << 20,
            microbatches=microbatches,
            bytes_per_s=MEBI / scale,
        )
        for scale in (1, 2)
    )
    who = cast(every, serving, trainers=2)
    took, slower = (steps.play(s, who, delayed=delayed) for s in (every, halved))
    assert slower.step_s == pytest.approx(2 * took.step_s)
    for counts in serving:
        speed = counts[0] / sum(a) + counts[1] / sum(b)
        averaging_s = 2 * (sum(counts) - 1) / sum(counts)
        assert took.step_s >= max(microbatches / speed + (not delayed) * averaging_s, averaging_s) - 1e-9
