"""Who computes which part of a microbatch: each sequence counts once in each pass, whatever workers do."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.policy.deadline import IDLE, MOST_RESTS, Rests
from muletrain.policy.passes import Given, Part, Pass
from muletrain.policy.pool import LEFT_S, OWN, Pool
from muletrain.policy.worker import FLOOR_S, UNMEASURED_S, server_to_move_to

A, B, C = "a", "b", "c"
FORWARD = Part(Pass.FORWARD, 0, 0, 0, 1)


def pool_of(**speeds: float) -> Pool:
    """A pool of the server's own device, and workers that take one part at once. Their speeds were measured; 0: they were
    not."""
    pool = Pool()
    pool.enlist(OWN)
    pool.ready(OWN, 1)
    for worker, speed in speeds.items():
        pool.enlist(worker)
        pool.ready(worker, 1)
        if speed:
            pool._workers[worker].came_back(FORWARD, -9 - 1 / speed, -9.0)
    return pool


def taken(pool: Pool, worker: str, now: float = 0.0) -> Given:
    given = pool.take(worker, now)
    assert given is not None
    return given


def test_parts_are_as_large_as_workers_are_fast() -> None:
    pool = pool_of(a=4.0, b=2.0, c=1.0)
    pool.put(Pass.FORWARD, 0, 0, 14, 0.0)
    parts = [taken(pool, worker).part for worker in (A, B, C)]
    assert [(part.first, part.rows) for part in parts] == [(0, 8), (8, 4), (12, 2)]


def test_an_idle_worker_takes_the_last_part_that_waits_at_a_much_busier_one() -> None:
    """It computes the forward again, so a part of one sequence takes it 3 s, and those that wait at the busy one 2 s each."""
    pool = pool_of(a=1.0, b=1.0)
    for worker in (A, B):
        pool.put_part(part := Part(Pass.FORWARD, 0, 9, 0, 1), 0.0, worker)
        assert pool.done(worker, taken(pool, worker).number, 1.0)
        assert not pool.wants(part)
    parts = [Part(Pass.BACKWARD, 0, index, 0, 1) for index in range(5)]
    for part in parts:
        pool.put_part(part, 1.0, A)
    assert taken(pool, A, 1.0).part == parts[0]
    pool.put_part(Part(Pass.AGAIN, 0, 5, 0, 1), 1.0, A, only=A)
    stolen = taken(pool, B, 1.0)
    assert stolen.part == parts[4], "the last one that others may have"
    assert pool.done(B, stolen.number, 4.0)
    assert taken(pool, B, 4.0).part == parts[3]
    pool.drop_parts(parts[3:])
    pool.drop_parts([Part(Pass.AGAIN, 0, 5, 0, 1)])
    assert pool.take(B, 7.0) is None, "A has the other three in 6 s"


def test_what_is_left_of_a_step_comes_before_the_next_one() -> None:
    """Under delayed updates that one is under way when the step's end waits for lost gradients, and for checks."""
    pool = pool_of(a=1.0)
    first, second = Part(Pass.AGAIN, 0, 0, 0, 1), Part(Pass.CHECK, 0, 1, 0, 1)
    pool.put_part(first, 0.0)
    pool.put(Pass.FORWARD, 0, 2, 1, 0.0)
    assert taken(pool, A).part.what is Pass.FORWARD
    pool.ready(A, 4)
    pool.put(Pass.FORWARD, 1, 0, 1, 0.0)
    assert taken(pool, A).part == first
    pool.put_part(second, 0.0)
    assert taken(pool, A).part == second


def test_a_worker_with_room_for_two_parts_leaves_the_rest_of_a_pass_to_others() -> None:
    """The pass ends with its last part, so the server's own device does not wait until the client has no room."""
    pool = pool_of(a=1.0)
    pool.ready(A, 2)
    for worker in (A, OWN):
        pool.put_part(part := Part(Pass.FORWARD, 0, 7, 0, 1), 0.0, worker)
        assert pool.done(worker, taken(pool, worker).number, 1.0)
        assert not pool.wants(part)
    pool.put(Pass.FORWARD, 0, 0, 8, 1.0)
    assert taken(pool, A, 1.0).part == Part(Pass.FORWARD, 0, 0, 0, 4)
    assert pool.take(A, 1.0) is None
    assert taken(pool, OWN, 1.0).part == Part(Pass.FORWARD, 0, 0, 4, 4)
    pool.put(Pass.FORWARD, 0, 1, 8, 1.0)
    assert taken(pool, A, 1.0).part == Part(Pass.FORWARD, 0, 1, 0, 4), "of the next one it takes its share"


def test_helpers_are_worth_the_time_that_their_accumulators_take() -> None:
    """Of 96 forwards, two workers and k more, with their accumulators, take 96 / (2 + k) + 3 k s."""
    pool = pool_of(a=1.0, b=1.0)
    assert pool.helpers(3.0) == 0
    for index in range(32):
        pool.put_part(Part(Pass.AGAIN, 0, index, 0, 1), 0.0)
    assert pool.helpers(0.0) == 2, "no accumulator came yet"
    assert pool.helpers(3.0) == 3  # the least is at 3.7
    assert pool.helpers(100.0) == 0


def test_measured_speed_counts_more_than_what_a_worker_says_of_itself() -> None:
    pool = pool_of(a=1.0, b=1.0)
    for k in range(3):
        for worker, seconds in (A, 1.0), (B, 3.0):
            pool.put_part(Part(Pass.FORWARD, 0, k, 0, 1), 10.0 * k, worker)
            assert pool.done(worker, taken(pool, worker, 10.0 * k).number, 10.0 * k + seconds)
    pool.put(Pass.FORWARD, 0, 9, 8, 100.0)
    assert [taken(pool, worker, 100.0).part.rows for worker in (A, B)] == [6, 2]
    pool.rest(101.0)
    pool.ready(A, 1)
    pool.ready(B, 1)
    assert pool.speed() == pytest.approx(1.0 + 1 / 3), "it is remembered while the weights change"


def test_forward_and_backward_weigh_as_in_a_microbatch() -> None:
    """A backward that takes 4.5 times as long as a forward, whose outputs it computes again: 5.5 s for a cost of three,
    whichever of them came more often of late."""
    pool = pool_of(a=1.0)
    for k, what in enumerate((Pass.FORWARD, Pass.BACKWARD, Pass.BACKWARD)):
        pool.put_part(Part(what, 0, k, 0, 1), 10.0 * k, A)
        assert pool.done(A, taken(pool, A, 10.0 * k).number, 10.0 * k + (1.0 if what is Pass.FORWARD else 4.5))
    assert pool.speed() == pytest.approx(3 / 5.5)


def test_what_shares_passes_now_is_told_from_what_will() -> None:
    pool = pool_of(a=1.0, b=2.0)
    assert (pool.speed(), pool.own_speed(), pool.sharing_speed()) == (3.0, 0.0, 3.0)
    pool.put_part(part := Part(Pass.FORWARD, 0, 7, 0, 1), 0.0, OWN)
    assert pool.done(OWN, taken(pool, OWN).number, 0.5)
    assert not pool.wants(part)
    assert (pool.own_speed(), pool.sharing_speed()) == (2.0, 5.0)
    pool.rest(1.0)
    pool.ready(B, 1)
    assert (pool.speed(), pool.sharing_speed()) == (3.0, 4.0), "one still takes the weights"


def test_a_backward_goes_to_the_worker_that_has_its_forward_until_that_one_is_gone() -> None:
    pool = pool_of(a=1.0, b=1.0)
    part = Part(Pass.BACKWARD, 0, 0, 0, 2)
    pool.put_part(part, 0.0, A)
    assert pool.take(B, 0.0) is None
    pool.lost(A, 0.0)
    assert taken(pool, B).part == part


def test_what_is_late_goes_to_another_worker_and_the_first_result_counts() -> None:
    pool = pool_of(a=0, b=0)
    pool.put(Pass.LOSS, 0, 0, 1, 0.0)
    late = taken(pool, A)
    assert pool.next_due() == UNMEASURED_S
    assert pool.expire(UNMEASURED_S - 1e-3) == ()
    assert pool.expire(UNMEASURED_S) == (A,)
    assert pool.take(A, 99.0) is None, "it is late, and gets nothing more"
    again = taken(pool, B, 99.0)
    assert again.part == late.part
    assert pool.done(B, again.number, 100.0)
    assert pool.unwanted() == [(A, late.number)]
    assert not pool.done(A, late.number, 101.0), "its result is late"
    pool.put(Pass.LOSS, 0, 1, 1, 102.0)
    assert pool.take(A, 102.0) is not None, "it is back"


def test_a_worker_computes_for_steps_whose_weights_it_has() -> None:
    """Under delayed updates two steps are under way, and weights of one more come while they are."""
    pool = pool_of(a=1.0, b=1.0)
    pool.ready(A, 1, (0, 1))
    pool.ready(A, 1, (2,))
    pool.ready(B, 1, (1,))
    ahead = Part(Pass.LOSS, 2, 0, 0, 4)
    pool.put_part(ahead, 0.0, B)
    assert pool.take(B, 0.0) is None, "though it is preferred"
    assert not pool.can_check(2, A, OWN)
    assert taken(pool, A).part == ahead
    assert (pool.busy(A, 1), pool.busy(A, 2)) == (False, True)
    pool.put(Pass.LOSS, 0, 0, 4, 0.0)
    assert taken(pool, OWN).part == Part(Pass.LOSS, 0, 0, 0, 1), "nobody else has those weights (any more)"
    pool.rest(1.0)
    pool.ready(A, 1, (1,))
    pool.put_part(ahead, 1.0)
    assert pool.take(A, 1.0) is None, "it may have other ones now"


def test_who_is_slow_is_given_longer() -> None:
    pool = pool_of(a=1.0)
    for k in range(3):
        pool.put(Pass.FORWARD, 0, k, 1, 0.0)
        pool.done(A, taken(pool, A, 100.0 * k).number, 100.0 * k + 5.0)
    pool.put(Pass.FORWARD, 0, 9, 1, 0.0)
    taken(pool, A, 1000.0)
    assert pool.next_due() == pytest.approx(1000.0 + 4 * 5.0)
    assert pool.next_due() > 1000.0 + FLOOR_S


def test_the_server_computes_what_nobody_else_does_and_what_it_began() -> None:
    pool = pool_of(a=1.0)
    pool.put(Pass.FORWARD, 0, 0, 4, 0.0)
    assert pool.take(OWN, 0.0) is None
    pool.put_part(mine := Part(Pass.BACKWARD, 0, 7, 0, 4), 0.0, OWN)
    begun = taken(pool, OWN)
    assert begun.part == mine
    assert pool.done(OWN, begun.number, 1.0)
    assert pool.take(OWN, LEFT_S - 0.1) is None
    assert taken(pool, OWN, LEFT_S).part == Part(Pass.FORWARD, 0, 0, 0, 4), "nobody took it"


@pytest.mark.parametrize(("own_s", "helps"), [(1.0, True), (3.9, True), (5.0, False)])
def test_the_server_helps_workers_that_have_no_room_unless_it_is_much_slower(own_s: float, helps: bool) -> None:
    pool = pool_of(a=1.0)
    for worker, seconds in (A, 1.0), (OWN, own_s):
        pool.put_part(part := Part(Pass.FORWARD, 0, 7, 0, 1), 0.0, worker)
        given = taken(pool, worker)
        assert given.part == part
        pool.done(worker, given.number, seconds)
    pool.put(Pass.FORWARD, 0, 0, 8, 10.0)
    assert taken(pool, A, 10.0).part.rows == (round(8 * own_s / (own_s + 1)) if helps else 8)
    pool.put(Pass.FORWARD, 0, 1, 8, 10.0)
    assert (pool.take(OWN, 10.0) is not None) == helps


def test_who_may_still_hand_a_gradient_over_does_not_compute_it_again() -> None:
    pool = pool_of(a=1.0, b=1.0)
    again = Part(Pass.AGAIN, 0, 0, 0, 1)
    pool.put_part(again, 0.0, barred=[A])
    assert pool.take(A, 0.0) is None
    given = taken(pool, B)
    assert given.part == again
    pool.drop_parts([again])
    assert pool.unwanted() == [(B, given.number)]
    assert not pool.done(B, given.number, 1.0), "it was handed over meanwhile"


def test_only_what_was_sent_before_a_worker_was_asked_can_be_lost_on_its_way() -> None:
    pool = pool_of(a=1.0, b=1.0)
    pool.put_part(FORWARD, 0.0)
    number = taken(pool, A).number
    pool.sent(number, 5.0)
    pool.reconcile(A, (), asked_at=4.0, now=6.0)
    assert pool.part(A, number) == FORWARD
    assert pool.take(B, 6.0) is None
    pool.reconcile(A, (), asked_at=7.0, now=8.0)
    assert pool.part(A, number) is None
    assert pool.unwanted() == [(A, number)], "it may come after all"
    assert taken(pool, B, 8.0).part == FORWARD


def test_what_the_server_is_to_decide_nobody_else_computes() -> None:
    pool = pool_of(a=1.0)
    check = Part(Pass.CHECK, 0, 0, 0, 1)
    pool.put_part(check, 0.0, OWN, only=OWN)
    pool.doubt(OWN, 1.0)
    assert pool.take(A, 1.0) is None
    pool.reconcile(OWN, (), asked_at=1.0, now=1.0)
    assert taken(pool, OWN, 1.0).part == check


def test_what_a_worker_cannot_compute_is_for_others_and_for_the_server() -> None:
    pool = pool_of(a=1.0)
    pool.put_part(FORWARD, 0.0)
    pool.failed(A, taken(pool, A).number, 1.0)
    assert pool.take(A, 1.0) is None
    assert taken(pool, OWN, 1.0).part == FORWARD


def test_what_was_lost_with_an_accumulator_waits_behind_what_the_pipeline_needs() -> None:
    pool = pool_of(a=1.0)
    again = Part(Pass.AGAIN, 0, 0, 0, 1)
    pool.put_part(again, 0.0)
    pool.put(Pass.FORWARD, 0, 1, 1, 0.0)
    first = taken(pool, A)
    pool.done(A, first.number, 1.0)
    assert [first.part.what, taken(pool, A, 1.0).part.what] == [Pass.FORWARD, Pass.AGAIN]


def test_what_is_dropped_keeps_its_place_until_it_is_back_and_does_not_count() -> None:
    pool = pool_of(a=1.0)
    pool.put(Pass.FORWARD, 3, 0, 2, 0.0)
    dropped = taken(pool, A)
    pool.drop(3, 0)
    assert pool.unwanted() == [(A, dropped.number)]
    pool.put(Pass.FORWARD, 3, 0, 2, 0.0)
    assert pool.take(A, 0.0) is None
    assert not pool.done(A, dropped.number, 1.0), "another giving of an equal part"
    assert pool.take(A, 1.0) is not None


def test_a_worker_that_keeps_what_is_not_wanted_becomes_late() -> None:
    """Otherwise the server would wait for it."""
    pool = pool_of(a=1.0)
    pool.put(Pass.FORWARD, 3, 0, 2, 0.0)
    taken(pool, A)
    pool.drop(3, 0)
    assert pool.expire(UNMEASURED_S) == (A,)
    pool.put(Pass.FORWARD, 3, 1, 2, UNMEASURED_S)
    assert pool.take(OWN, UNMEASURED_S) is not None


@given(st.data())
def test_each_sequence_counts_once_in_each_pass_whatever_workers_do(data: st.DataObject) -> None:
    """Workers come, go, rest, fall silent, fail and come back with late results, and passes are dropped and put in again,
    in any order; in the end the server's own device does what is left."""
    pool, now, count = pool_of(), 0.0, st.integers(1, 5)
    rows = {(what, k): data.draw(count) for k in range(2) for what in (Pass.FORWARD, Pass.LOSS)}
    counted: dict[tuple[Pass, int], list[int]] = {key: [] for key in rows}
    out: list[tuple[str, Given]] = []

    def begin(key: tuple[Pass, int]) -> None:
        counted[key] = []
        pool.put(key[0], 0, key[1], rows[key], now)

    def come_back(worker: str, given: Given) -> None:
        part = given.part
        if pool.done(worker, given.number, now):
            counted[part.what, part.index] += range(part.first, part.first + part.rows)

    for key in rows:
        begin(key)
    for _ in range(data.draw(st.integers(0, 25))):
        now += data.draw(st.sampled_from([0.1, 100.0]))
        worker = data.draw(st.sampled_from([A, B, C]))
        match data.draw(
            st.sampled_from(["enlist", "lost", "rest", "take", "drop", "expire", "failed", "done", "done"])
        ):
            case "enlist":
                pool.lost(worker, now)
                pool.enlist(worker)
                pool.ready(worker, data.draw(st.integers(1, 2)))
            case "lost":
                pool.lost(worker, now)
            case "rest":
                pool.rest(now)
            case "take":
                if (given := pool.take(worker, now)) is not None:
                    out.append((worker, given))
            case "drop":
                index = data.draw(st.integers(0, 1))
                pool.drop(0, index)
                for what in (Pass.FORWARD, Pass.LOSS):
                    begin((what, index))
            case "expire":
                pool.expire(now)
            case what if out:
                who, given = out[data.draw(st.integers(0, len(out) - 1))]  # perhaps not for the first time
                pool.failed(who, given.number, now) if what == "failed" else come_back(who, given)
        pool.unwanted()
    for worker in (A, B, C):
        pool.lost(worker, now)
    while (given := pool.take(OWN, now)) is not None:
        come_back(OWN, given)
    assert {key: sorted(found) for key, found in counted.items()} == {key: [*range(n)] for key, n in rows.items()}


def test_a_client_that_is_given_nothing_takes_part_more_and_more_rarely() -> None:
    rests = Rests(random.Random(0))
    took_part = [rests.takes_part(worked=False) for _ in range(400)]
    assert all(took_part[: IDLE - 1])
    assert 400 / (MOST_RESTS + 1) < sum(took_part) < 80
    while not rests.takes_part(worked=False):
        pass
    assert all(rests.takes_part(worked=True) for _ in range(50)), "as soon as there is work it is there in each step"


@pytest.mark.parametrize("clients", [(2, 2, 2, 2, 2, 0), (0, 1, 1, 3, 1, 4), (8, 2), (1, 1, 1, 1, 1, 7)], ids=str)
def test_servers_are_equally_fast_after_their_clients_moved(clients: tuple[int, ...]) -> None:
    """On the average of many draws. Each server that had too many once sent what the weakest one lacked: all at once, so
    that of six servers one had eight clients, and the next step another one."""
    names = [f"server-{k}" for k in range(len(clients))]
    speeds, after, times = dict(zip(names, map(float, clients), strict=True)), Counter[str](), 1000
    draw = random.Random(0)
    for home in names * times:
        for _ in range(int(speeds[home])):
            after[server_to_move_to(speeds, home, int(speeds[home]), draw) or home] += 1
    mean = sum(clients) / len(clients)
    assert [after[name] / times for name in names] == pytest.approx([mean] * len(names), abs=0.1 * mean)


def test_no_client_moves_to_a_server_that_would_then_be_as_fast_as_its_own_one_was() -> None:
    draw = random.Random(0)
    assert {server_to_move_to({"a": 2.0, "b": 1.0, "c": 1.0}, "a", 2, draw) for _ in range(99)} == {None}
    assert {server_to_move_to({"a": 0.0, "b": 0.0}, "a", 0, draw) for _ in range(99)} == {None}
