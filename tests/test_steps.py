"""Steps that are played without messages: against times by hand, and against the schedules of a single pipeline."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.config.fleet_file import Link
from muletrain.planning.cost import RunCost, StageCost, averages_at
from muletrain.planning.schedules import Station, play
from muletrain.sim.machines import Kind, Setting
from muletrain.sim.steps import steps
from muletrain.sim.steps.steps import Cast, cast
from muletrain.sim.steps.wires import Wires, without_links
from muletrain.strategies.pipeline import Pipeline, Schedule

MEBI = 2.0**20
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
    microbatches: int = 16,
    bytes_per_s: float = MEBI,
) -> Setting:
    """``times_s``: forward and backward, by kind and stage; all kinds are as far from each other."""
    stages = len(times_s[0])
    cost = RunCost(
        stages=tuple(StageCost(1.0, recomputable=True, state_bytes=0, averaged_bytes=averaged) for _ in range(stages)),
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
    assert took.step_s - took.computing_s == pytest.approx(delays * 0.125 + 2 * 3 / averages_at(4, 1.0, 1.0))


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


@settings(deadline=None, max_examples=60)
@given(
    times_s=st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4),
    nbytes=st.integers(0, 3).map(lambda n: n << 18),
    delay_s=st.integers(0, 8).map(lambda n: n / 16),
    microbatches=st.integers(1, 12),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
)
def test_one_pipeline_takes_what_its_schedule_does(
    times_s: list[tuple[float, float]], nbytes: int, delay_s: float, microbatches: int, schedule: Schedule
) -> None:
    """What plays schedules knows of no trainers, no seats and no end of a step."""
    stages = len(times_s)
    times_s = [
        (f + 0.0007 * 2**0.5 * (s + 1), b + 0.0003 * 3**0.5 * (s + 2)) for s, (f, b) in enumerate(times_s)
    ]  # no ties
    chain = setting([times_s], delay_s, nbytes=nbytes, microbatches=microbatches)
    sent_s = nbytes / MEBI
    first, last = (lambda s: s == 0), (lambda s: s == stages - 1)
    stations = tuple(
        Station(
            f,
            b,
            **({} if last(s) else {"on_s": sent_s, "on_delay_s": delay_s, "on_up_s": sent_s, "on_down_s": sent_s}),
            **(
                {}
                if first(s)
                else {"back_s": sent_s, "back_delay_s": delay_s, "back_up_s": sent_s, "back_down_s": sent_s}
            ),
        )
        for s, (f, b) in enumerate(times_s)
    )
    names = tuple(f"p{s}" for s in range(stages))
    strategy = Pipeline(tuple((name,) for name in names), (microbatches,), schedule)
    who = Cast(tuple((s, 0) for s in range(stages)), (0,), strategy, names)
    # what comes at (nearly) the same instant may take its turn in another order
    assert steps.play(chain, who).computing_s == pytest.approx(play(schedule, stations, microbatches), rel=0.03)


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
