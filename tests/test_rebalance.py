"""Who moves to another stage: the paper's rule, and by marginal throughput."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.clock import LoopClock
from muletrain.errors import PeerUnreachable
from muletrain.policy.assignment import Load, Move, View
from muletrain.policy.rebalance import by_queue, by_throughput
from muletrain.runtime.members.rebalancing import Rebalancer

from .virtual import virtually

HORIZON_S = 600.0


def view(*stages: dict[str, float], copy_s: float = 0.0, work: tuple[float, ...] | None = None) -> View:
    """``stages[s]``: speed of each peer of stage s, measured there alone."""
    loads = {p: Load(s, 0.0, {s: v}, 1.0) for s, peers in enumerate(stages) for p, v in peers.items()}
    return View(loads, work or (1.0,) * len(stages), (copy_s,) * len(stages))


def equal(*sizes: int, copy_s: float = 0.0) -> View:
    return view(*({f"{s}-{k:02d}": 1.0 for k in range(n)} for s, n in enumerate(sizes)), copy_s=copy_s)


def queued(*stages: dict[str, float]) -> View:
    loads = {p: Load(s, q, {}) for s, peers in enumerate(stages) for p, q in peers.items()}
    return View(loads, (1.0,) * len(stages), (0.0,) * len(stages))


def after(view: View, moves: tuple[Move, ...]) -> View:
    assert len({m.peer for m in moves}) == len(moves)
    assert all(view.loads[m.peer].stage == m.source != m.target for m in moves)
    loads = dict(view.loads) | {m.peer: replace(view.loads[m.peer], stage=m.target) for m in moves}
    return replace(view, loads=loads)


def sizes(view: View) -> list[int]:
    return [len(peers) for peers in view.served()]


def throughput(view: View) -> float:
    """Of the slowest stage, by power (work/s) as announced for the stage of the first announcement."""
    totals = [0.0] * view.stages
    for load in view.loads.values():
        (measured_at, speed), *_ = load.speeds.items()
        totals[load.stage] += speed * view.work[measured_at] / view.work[load.stage]
    return min(totals)


def test_costs_that_are_wrong_promise_no_gain_again_and_again() -> None:
    """As seen live: the model says that stage 1 costs three times as much, and the peers do about as much at either."""
    seen = view({"a": 12.9, "b": 12.3}, {"c": 14.3, "d": 13.0, "e": 11.5}, work=(1.0, 3.0))
    assert {(m.source, m.target) for m in by_throughput(seen, HORIZON_S)} == {(0, 1), (1, 0)}
    assert by_throughput(seen, HORIZON_S, exchange=False) == ()
    poor = view({"a": 12.9}, {"b": 12.3, "c": 14.3, "d": 13.0, "e": 11.5}, work=(1.0, 3.0))
    assert [(m.source, m.target) for m in by_throughput(poor, HORIZON_S, exchange=False)] == [(1, 0)]


def test_the_papers_rule_moves_the_idlest_peer_of_the_idlest_stage_to_the_busiest() -> None:
    moves = by_queue(queued({"a": 3, "b": 2}, {"c": 1, "d": 0, "e": 1}, {"f": 9}))
    assert moves == (Move("d", 1, 2),)
    assert by_queue(queued({"a": 3}, {"b": 1, "c": 2})) == ()  # equal loads
    assert by_queue(queued({"a": 3}, {"b": 1})) == ()  # never the last peer
    assert by_queue(queued({"b": 0, "a": 0}, {"c": 1})) == (Move("a", 0, 1),)  # ties by id


def test_one_and_three_become_two_and_two_at_once() -> None:
    before = equal(1, 3)
    assert sizes(after(before, by_throughput(before, HORIZON_S))) == [2, 2]


def test_several_move_at_once_where_that_pays() -> None:
    assert sizes(after(equal(2, 2, 8), by_throughput(equal(2, 2, 8), HORIZON_S))) == [4, 4, 4]
    one = by_throughput(equal(2, 3, 5), HORIZON_S)
    assert [(m.source, m.target) for m in one] == [(2, 0)], "3, 3, 4 is as good as it gets, with one move"
    tied = by_throughput(equal(2, 2, 3, 5), HORIZON_S)
    assert sizes(after(equal(2, 2, 3, 5), tied)) == [3, 3, 3, 3], (
        "stages that share the last place are relieved together"
    )


def test_nothing_moves_where_nothing_is_gained() -> None:
    for balanced in (equal(2, 2), equal(2, 3), equal(3, 3, 2, 3), equal(1, 1)):
        assert by_throughput(balanced, HORIZON_S) == ()


def test_the_strong_and_the_weak_change_places() -> None:
    lopsided = view({"a": 3.0, "b": 3.0}, {"c": 1.0, "d": 1.0})
    ends = after(lopsided, by_throughput(lopsided, HORIZON_S))
    assert throughput(ends) == 4.0
    assert sizes(ends) == [2, 2]


def test_a_stage_of_more_work_gets_more_peers() -> None:
    """Speeds measured at one stage are carried over by the work of the other."""
    heavy = view({f"a{k}": 1.0 for k in range(6)}, {"b0": 1.0, "b1": 1.0}, work=(1.0, 2.0))
    ends = after(heavy, by_throughput(heavy, HORIZON_S))
    assert sizes(ends) == [4, 4]
    assert throughput(ends) == pytest.approx(3.0), "4 against 2 + 2 at half the speed"


def test_what_was_measured_at_a_stage_counts_more_than_what_follows_from_another() -> None:
    """``b`` has served stage 1 before, and was of no use there."""
    loads = {
        "a": Load(0, 0.0, {0: 1.0}),
        "b": Load(0, 0.0, {0: 1.0, 1: 0.01}),
        "c": Load(0, 0.0, {0: 1.0}),
        "d": Load(0, 0.0, {0: 1.0}),
        "e": Load(1, 0.0, {1: 1.0}),
    }
    moves = by_throughput(View(loads, (1.0, 1.0), (0.0, 0.0)), HORIZON_S)
    assert len(moves) == 1
    assert moves[0].peer in ("c", "d")


def test_a_move_must_gain_more_than_it_costs_within_the_horizon() -> None:
    assert by_throughput(equal(1, 3, copy_s=100.0), horizon_s=210.0)
    assert by_throughput(equal(1, 3, copy_s=100.0), horizon_s=190.0) == ()
    assert by_throughput(equal(1, 3, copy_s=math.inf), HORIZON_S) == ()


def test_noise_in_the_measurements_moves_nobody() -> None:
    noisy = view({"a": 1.05, "b": 0.97}, {"c": 0.95, "d": 0.98, "e": 1.06})
    assert by_throughput(noisy, HORIZON_S) == ()


def test_a_view_that_lacks_a_stage_moves_nobody() -> None:
    assert by_throughput(view({}, {"a": 1.0, "b": 1.0}), HORIZON_S) == ()
    assert by_queue(queued({"a": 1, "b": 2}, {})) == ()


def test_absurd_announcements_count_as_none() -> None:
    loads = {f"p{k}": Load(1, 0.0, {1: 1.0}) for k in range(3)} | {"q": Load(0, 0.0, {0: math.nan, 7: 1.0})}
    for speed in (math.inf, -1.0, 0.0):
        absurd = {**loads, "r": Load(1, 0.0, {1: speed, -1: speed}), "s": Load(9, 0.0, {9: 1.0})}
        ends = after(View(absurd, (1.0, 1.0), (0.0, 0.0)), by_throughput(View(absurd, (1.0, 1.0), (0.0, 0.0)), 60.0))
        assert sizes(ends) == [2, 3] or sizes(ends) == [3, 2]


speed = st.floats(0.05, 20.0)
fleets = st.integers(2, 4).flatmap(
    lambda stages: st.builds(
        lambda rows, work, copy_s: View(
            {f"p{k:02d}": Load(s, q, {s: v / work[s]}, 1.0) for k, (s, v, q) in enumerate(rows)},
            work,
            (copy_s,) * stages,
        ),
        st.lists(st.tuples(st.integers(0, stages - 1), speed, st.floats(0, 20)), min_size=stages, max_size=16),
        st.tuples(*[st.floats(0.3, 3.0)] * stages),
        st.floats(0, 200),
    )
)


@given(fleets)
def test_every_move_gains_and_a_constant_fleet_comes_to_rest(fleet: View) -> None:
    """Each period's moves raise the throughput by themselves, hence no placement is ever seen twice."""
    for _ in range(6):
        moves = by_throughput(fleet, HORIZON_S)
        ends = after(fleet, moves)
        if not moves:
            return
        assert throughput(ends) > throughput(fleet)
        fleet = ends
    pytest.fail("still moving after six periods")


@given(fleets)
def test_no_stage_is_emptied_by_either_rule(fleet: View) -> None:
    served = [bool(peers) for peers in fleet.served()]
    for moves in (by_throughput(fleet, HORIZON_S), by_queue(fleet)):
        assert [bool(peers) for peers in after(fleet, moves).served()] == served


@given(fleets, st.randoms(use_true_random=False))
def test_everyone_who_sees_the_same_computes_the_same(fleet: View, rng: object) -> None:
    loads = list(fleet.loads.items())
    rng.shuffle(loads)  # type: ignore[attr-defined]
    other = replace(fleet, loads=dict(loads))
    assert by_throughput(other, HORIZON_S) == by_throughput(fleet, HORIZON_S)
    assert by_queue(other) == by_queue(fleet)


@given(fleets, st.data())
def test_peers_that_see_different_parts_of_the_fleet_leave_no_stage_empty(fleet: View, data: st.DataObject) -> None:
    """Each carries out what it computes for itself, from whatever it has heard of the others."""
    leaving: Counter[int] = Counter()
    for peer, load in fleet.loads.items():
        heard = data.draw(st.sets(st.sampled_from(sorted(fleet.loads))))
        part = {p: fleet.loads[p] for p in {*heard, peer}}
        leaving[load.stage] += any(m.peer == peer for m in by_throughput(replace(fleet, loads=part), HORIZON_S))
    for stage, peers in enumerate(fleet.served()):
        assert leaving[stage] < len(peers) or not peers


def test_the_strongest_stays_though_it_would_be_the_best_to_go() -> None:
    """Each of the two weak ones, who do not know of each other, goes and counts on it."""
    fleet = view({"s": 4.0, "weak": 1.0, "poor": 1.0}, {"t": 0.5})
    for peer, unknown in (("s", None), ("weak", "poor"), ("poor", "weak")):
        part = {p: load for p, load in fleet.loads.items() if p != unknown}
        moves = by_throughput(replace(fleet, loads=part), HORIZON_S)
        assert any(m.peer == peer for m in moves) == (peer != "s")


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=7))
def test_two_stages_end_near_the_best_placement(speeds: list[float]) -> None:
    """Found by trying all; greedy stays within a peer of it."""
    fleet = view({"p0": speeds[0]}, {f"p{k}": v for k, v in enumerate(speeds) if k})
    moves = by_throughput(fleet, HORIZON_S)
    best = max(
        min(sum(v for v, s in zip(speeds, placed, strict=True) if s == stage) for stage in (0, 1))
        for placed in product((0, 1), repeat=len(speeds))
    )
    assert throughput(after(fleet, moves)) >= best - max(speeds) * 0.5 - 1e-9


@given(st.data())
def test_peers_that_are_alike_may_be_counted_instead_of_listed(data: st.DataObject) -> None:
    """Simulations of thousands of peers do; the moves are the same ones."""
    stages = data.draw(st.integers(1, 4))
    counted, listed = {}, {}
    for s, g in product(range(stages), range(data.draw(st.integers(1, 3)))):
        speeds = {s: data.draw(st.sampled_from([0.5, 1.0, 2.0]))} if data.draw(st.integers(0, 9)) else {}
        targets = data.draw(st.sampled_from([None, frozenset(range(stages)), frozenset({0})]))
        load = Load(s, data.draw(st.floats(0, 3)), speeds, data.draw(st.sampled_from([math.inf, 2.0])), targets)
        number = data.draw(st.integers(1, 4))
        counted[f"{s}.{g}"] = replace(load, alike=number)
        listed |= {f"{s}.{g}.{k}": load for k in range(number)}
    work, state = (
        [data.draw(st.sampled_from([1.0, 2.0])) for _ in range(stages)],
        [data.draw(st.sampled_from([0.0, 3.0]))] * stages,
    )
    few, many = View(counted, work, state), View(listed, work, state)
    for exchange in (True, False):
        moves = by_throughput(many, 100.0, exchange=exchange)
        assert by_throughput(few, 100.0, exchange=exchange) == tuple(replace(m, peer=m.peer[:3]) for m in moves)
    assert [(m.source, m.target) for m in by_queue(few)] == [(m.source, m.target) for m in by_queue(many)]


# Weights beside the state ---------------------------------------------------------------------------------------------


def test_a_move_waits_for_weights_that_the_mover_lacks() -> None:
    """While these come nothing changes, so what takes as long as the horizon is no gain."""
    before = equal(1, 3)
    (move,) = by_throughput(before, HORIZON_S)
    slow = {p: replace(load, prepares_s=(2 * HORIZON_S, 0.0)) for p, load in before.loads.items()}
    assert by_throughput(replace(before, loads=slow), HORIZON_S) == ()
    soon = {p: replace(load, prepares_s=(HORIZON_S / 2, 0.0)) for p, load in before.loads.items()}
    assert by_throughput(replace(before, loads=soon), HORIZON_S) == (move,)
    costly = equal(1, 3, copy_s=0.3 * HORIZON_S)
    assert by_throughput(costly, HORIZON_S), "the copying alone would be worth it"
    late = {p: replace(load, prepares_s=(0.8 * HORIZON_S, 0.0)) for p, load in costly.loads.items()}
    assert by_throughput(replace(costly, loads=late), HORIZON_S) == ()


class Slow:
    """A mover that lacks weights of each other stage."""

    def __init__(self, clock: LoopClock, problem: str = "") -> None:
        self._clock, self._problem, self.done, self.moved = clock, problem, False, list[int | None]()

    def load(self) -> int:
        return 0

    def fits(self, stage: int) -> bool:
        return True

    def prepares_s(self, stage: int) -> float:
        return 0.0 if self.done else 7.0

    async def prepare(self, stage: int) -> None:
        await self._clock.sleep(7.0)
        if self._problem:
            raise PeerUnreachable(self._problem)
        self.done = True

    def move(self, stage: int | None) -> None:
        self.moved.append(stage)


@pytest.mark.parametrize("problem", ["", "nobody gives them"])
def test_a_peer_serves_on_while_the_weights_come(problem: str) -> None:
    """It announces again and again where it goes, moves once they are there, and stays if nobody has them."""
    clock, said, events = LoopClock(), list[dict[str, object]](), list[object]()

    async def announce(key: str, value: bytes, kept_s: float) -> None:
        said.append(json.loads(value))

    own = SimpleNamespace(stage=1, id="me", name="me")
    roster = SimpleNamespace(own=own, genesis=SimpleNamespace(run_id="run", coordinator="other"))
    plan = SimpleNamespace(rebalance_s=2.0, stages=2)
    net = SimpleNamespace(announce=announce, peer_id="me")
    ctx: Any = SimpleNamespace(
        roster=roster,
        plan=plan,
        net=net,
        clock=clock,
        emit=events.append,
        spawn=lambda work, name: asyncio.get_running_loop().create_task(work, name=name),
    )

    async def scenario() -> None:
        begun = clock.now()
        slow = Slow(clock, problem)
        assert await Rebalancer(ctx, slow, slow.load, slow.move)._prepared(0) == (None if problem else 0)
        assert clock.now() - begun == pytest.approx(7.0)

    virtually(scenario())
    assert [(a["stage"], a["coming"]) for a in said] == [(0, True)] * 4
    assert said[0]["prepares_s"] == [7.0, 7.0]
    assert [type(e).__name__ for e in events] == (["MoveRefused"] if problem else [])
