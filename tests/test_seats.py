"""Strategy pipeline: planned membership, who stands in, and the order of work, in the virtual world."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muletrain.config.load import load_config
from muletrain.errors import ConfigError
from muletrain.events import MicrobatchTaken, SeatEmpty, SeatFilled, SlotWorked
from muletrain.policy.assignment import Load, View
from muletrain.strategies.base import StandIn
from muletrain.strategies.pipeline import Pipeline
from proofs.play import play
from proofs.reference import facts_of
from proofs.scenario import Fault, Scenario, planned
from proofs.verdict import readable

if TYPE_CHECKING:
    from proofs.verdict import Outcome

torch.set_num_threads(1)
SCHEDULES = pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
SEATS = Pipeline((("a", "b"), ("c", "d"), ("e", "f")), (3, 3), "1f1b")
SHARED = Pipeline((("a", "b", "a"), ("c", "c", "c"), ("e", "f", "g")), (3, 3, 2), "1f1b")

# --- who ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_pipelines_take_turns_in_proportion(microbatches: list[int]) -> None:
    seats = Pipeline((tuple(map(str, range(len(microbatches)))),), tuple(microbatches), "gpipe")
    total = sum(microbatches)
    taken = Counter[int]()
    for index in range(total):
        taken[seats.lane(index)] += 1
        for p, n in enumerate(microbatches):
            assert abs(taken[p] - (index + 1) * n / total) <= len(microbatches)
    assert [taken[p] for p in range(len(microbatches))] == microbatches


def test_a_seat_is_its_holder_s_then_a_spare_s_then_anyone_s() -> None:
    assert SEATS.choose(0, 0, {"a", "b", "x"}) == ["a"]
    assert SEATS.choose(0, 0, {"b", "y", "x"}) == ["x", "y"]
    assert SEATS.choose(0, 0, {"b"}) == []
    assert SEATS.choose(0, 0, {"b", "c"}) == ["c"]  # of another stage: here it has no seat


def moves(seats: Pipeline, *serving: str, able: str | None = None) -> dict[str, int]:
    """Of peers with names of one letter, by stage; ``able``: who has room for other stages, default everyone."""
    loads = {
        f"id-{name}": Load(s, name=name, targets=None if able is None or name in able else frozenset())
        for s, here in enumerate(serving)
        for name in here
    }
    return {move.peer.removeprefix("id-"): move.target for move in seats.assign(View(loads, (1.0,) * len(serving)))}


def test_a_spare_goes_where_a_peer_was_lost_if_its_own_stage_needs_it_not() -> None:
    assert moves(SEATS, "abx", "c", "ef") == {"x": 1}
    assert moves(SEATS, "ax", "c", "ef") == {}
    assert moves(SEATS, "axy", "c", "ef") == {"y": 1}
    assert moves(SEATS, "abxy", "c", "e") == {"x": 1, "y": 2}
    assert moves(SEATS, "abxy", "c", "ef", able="y") == {"y": 1}
    assert moves(SEATS, "abx", "cdz", "ef") == {}
    assert moves(SEATS, "abx", "cz", "ef") == {}


def test_a_peer_may_serve_several_pipelines_of_its_stage() -> None:
    new = {name: Load(-1, name=name) for name in "abceg"}
    assert [move.target for move in SHARED.assign(View(new, (1.0,) * 3))] == [0, 0, 1, 2, 2]
    assert [SHARED.choose(1, index, {"c", "x"}) for index in range(8)] == [["c"]] * 8
    assert SHARED.stand_ins([{"b"}, {"c"}, {"e", "f", "g"}]) == {StandIn(0, 0, "a"): (), StandIn(0, 2, "a"): ()}
    assert moves(SHARED, "b", "c", "efgxy") == {"x": 0}
    assert [SHARED.most_in_flight(0, name) for name in ("a", "b", "spare")] == [5, 3, 5]
    assert [SHARED.most_in_flight(1, name) for name in ("c", "spare")] == [6, 6]
    assert SHARED.capacity(3) == 3 * 24
    assert [s.window(s.capacity(3), (2, 1, 3), trainers=2) for s in (SHARED, SEATS)] == [12, 12]
    gpipe = replace(SHARED, schedule="gpipe", microbatches=(40, 3, 5))
    assert [gpipe.most_in_flight(0, name) for name in ("a", "b")] == [45, 3]
    assert gpipe.window(gpipe.capacity(3), (2, 1, 3), trainers=2) == 40


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ('pipeline.seats=[["a"]]', "pipeline.seats: 1 lists for fleet.stages = 2"),
        ('pipeline.seats=[["a","b"],["c"]]', "pipeline.seats: lists of unequal length"),
        ('pipeline.seats=[["a"],["a"]]', "'a' is named twice"),
        ('pipeline.seats=[["a","a"],["b","a"]]', "'a' is named twice"),
        ("pipeline.microbatches=[4]", "pipeline.microbatches: .*without pipeline.seats"),
        ("fleet.layers=[4]", "fleet.layers: 1 numbers for fleet.stages = 2"),
        ("fleet.layers=[1, 2]", "fleet.layers: 3 .*model.layers = 4"),
    ],
)
def test_what_makes_no_plan_is_told(wrong: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("[", r"\[")):
        load_config(None, [wrong])


def test_microbatches_of_pipelines_make_up_the_step() -> None:
    given = ['pipeline.seats=[["a","b"],["c","d"]]', "train.batch=16", "train.microbatch=4"]
    with pytest.raises(ConfigError, match=r"pipeline.microbatches: \[1, 2\] for 2 pipelines and 4 microbatches"):
        load_config(None, [*given, "pipeline.microbatches=[1, 2]"])
    assert load_config(None, [*given, "pipeline.microbatches=[1, 3]"]).pipeline.microbatches == (1, 3)


# --- played -------------------------------------------------------------------------------------------------------------


def world(stages: tuple[int, ...], schedule: str, *faults: Fault, shared: bool = False, **fields: Any) -> Scenario:
    kept: dict[str, Any] = {"trainers": 2, "steps": 3, "microbatches": 8, "delay_s": 0.0, "trace": True, **fields}
    return Scenario(1, stages, faults=faults, overrides=planned(stages, schedule, shared=shared), **kept)


def played(scenario: Scenario) -> Outcome:
    """Every promise is kept: weights are a single process's, among others."""
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def takers(outcome: Outcome, after: int) -> dict[tuple[int, int], set[str]]:
    """Of each (stage, pipeline), in the steps from ``after`` on. In the first one peers ask for second opinions."""
    strategy, found = facts_of(outcome.scenario).plan.strategy, defaultdict[tuple[int, int], set[str]](set)
    for event in outcome.events:
        if isinstance(event, MicrobatchTaken) and event.step >= after:
            found[event.stage, strategy.lane(event.index)].add(event.peer)
    return dict(found)


@SCHEDULES
def test_every_microbatch_goes_through_its_planned_peers_and_spares_only_average_along(schedule: str) -> None:
    outcome = played(world((3, 2, 2), schedule, delay_s=0.01))
    assert takers(outcome, 1) == {(s, p): {f"peer-{s}{'ab'[p]}"} for s in range(3) for p in range(2)}
    assert outcome.ends["peer-0c"] == "finished"


@SCHEDULES
def test_peers_of_smaller_stages_serve_several_pipelines(schedule: str) -> None:
    outcome = played(world((1, 3, 2), schedule, shared=True, delay_s=0.01, capacity=24))
    expected = {(s, p): {f"peer-{s}{names[p]}"} for s, names in enumerate(("aaa", "abc", "aba")) for p in range(3)}
    assert takers(outcome, 1) == expected


@SCHEDULES
def test_others_of_the_stage_take_all_pipelines_of_a_peer_that_died(schedule: str) -> None:
    outcome = played(world((2, 3), schedule, Fault(0.5, "kill", ("peer-0a",)), shared=True, delay_s=0.01, steps=6))
    assert [takers(outcome, 5)[0, p] for p in range(3)] == [{"peer-0b"}] * 3
    assert len(outcome.of(SeatEmpty, spares="")) == 2  # pipelines 0 and 2


@SCHEDULES
def test_a_spare_stands_in_for_a_peer_that_died(schedule: str) -> None:
    outcome = played(world((2, 3), schedule, Fault(0.5, "kill", ("peer-1b",)), delay_s=0.01, steps=5))
    assert takers(outcome, 3)[1, 1] == {"peer-1c"}
    assert takers(outcome, 3)[1, 0] == {"peer-1a"}
    assert len(outcome.of(SeatEmpty, stage=1, seat="peer-1b", spares="peer-1c")) == 1


def test_without_a_spare_the_stage_is_wired_as_swarm_and_the_run_says_so() -> None:
    outcome = played(world((2, 2), "1f1b", Fault(0.5, "kill", ("peer-1b",)), delay_s=0.01, steps=5))
    assert takers(outcome, 3)[1, 1] == {"peer-1a"}
    assert len(outcome.of(SeatEmpty, spares="")) == 1


def test_a_peer_that_was_frozen_has_its_seat_again() -> None:
    outcome = played(world((2, 3), "1f1b", Fault(0.5, "freeze", ("peer-1b",), 5.0), delay_s=0.01, steps=16))
    assert "peer-1c" in takers(outcome, 1)[1, 1]
    assert takers(outcome, 15)[1, 1] == {"peer-1b"}
    assert outcome.of(SeatFilled, pipeline=1, stage=1, seat="peer-1b")


def test_a_spare_moves_to_the_stage_that_lost_a_peer() -> None:
    outcome = played(
        world(
            (2, 3),
            "1f1b",
            Fault(0.5, "kill", ("peer-0b",)),
            delay_s=0.01,
            steps=30,
            rebalance="throughput",
            rebalance_s=2.0,
        )
    )
    assert takers(outcome, 29)[0, 1] == {"peer-1c"}


# --- order --------------------------------------------------------------------------------------------------------------


def orders(outcome: Outcome) -> dict[tuple[str, int], str]:
    """By peer and step: 'F' and 'B' as its compute slot did them."""
    kinds, found = {"forward": "F", "backward": "B"}, defaultdict[tuple[str, int], str](str)
    for event in outcome.events:
        if isinstance(event, SlotWorked) and event.slot == "compute" and event.what in kinds and event.step > 0:
            found[event.peer, event.step] += kinds[event.what]
    return dict(found)


@pytest.mark.parametrize(
    ("schedule", "first", "second"),
    [("gpipe", "FFFFFFFFBBBBBBBB", None), ("1f1b", "FFFBFBFBFBFBFBBB", "FFBFBFBFBFBFBFBB")],
)
def test_stages_work_in_the_order_of_the_schedule(schedule: str, first: str, second: str | None) -> None:
    found = orders(played(world((1, 1, 1), schedule, trainers=1)))
    for step in (1, 2):
        assert found["peer-0a", step] == first
        assert second is None or found["peer-1a", step] == second
        assert found["peer-1a", step][:4] == ("FFFF" if schedule == "gpipe" else "FFBF")


def test_1f1b_has_no_more_in_flight_than_it_says_where_links_delay() -> None:
    found = orders(played(world((2, 2, 2), "1f1b", delay_s=0.1)))
    for (peer, _), order in found.items():
        owed = [order[:k].count("F") - order[:k].count("B") for k in range(len(order) + 1)]
        assert max(owed) <= 3 - int(peer.split("-")[1][0])
    assert len(found) == 8


def test_1f1b_has_so_many_in_flight_for_each_pipeline_that_a_peer_serves() -> None:
    found = orders(played(world((1, 3), "1f1b", shared=True, delay_s=0.1, microbatches=12, capacity=24)))
    for (peer, _), order in found.items():
        assert max(order[:k].count("F") - order[:k].count("B") for k in range(len(order) + 1)) == 6, peer
    assert {peer for peer, _ in found} == {"peer-0a"}
