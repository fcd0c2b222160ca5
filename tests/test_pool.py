"""Who computes which part of a microbatch: each sequence counts once in each pass, whatever workers do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muletrain.policy.pool import FLOOR_S, OWN, Part, Pass, Pool

A, B, C = "a", "b", "c"


def pool_of(**rooms: int) -> Pool:
    pool = Pool()
    for worker, room in rooms.items():
        pool.enlist(worker, 1.0, room)
    return pool


def test_parts_are_as_large_as_workers_are_fast() -> None:
    pool = Pool()
    for worker, speed in (A, 4.0), (B, 2.0), (C, 1.0), (OWN, 0.0):
        pool.enlist(worker, speed, 1)
    pool.put(Pass.FORWARD, 0, 0, 14)
    assert [pool.take(w, 0.0) for w in (A, B, C)] == [
        Part(Pass.FORWARD, 0, 0, 0, 8),
        Part(Pass.FORWARD, 0, 0, 8, 4),
        Part(Pass.FORWARD, 0, 0, 12, 2),
    ]


def test_measured_speed_counts_more_than_what_a_worker_says_of_itself() -> None:
    pool = pool_of(a=1, b=1)
    for k in range(3):
        for worker, seconds in (A, 1.0), (B, 3.0):
            pool.put_part(part := Part(Pass.FORWARD, 0, k, 0, 1), worker)
            assert pool.take(worker, 10.0 * k) == part
            assert pool.done(worker, part, 10.0 * k + seconds)
    pool.put(Pass.FORWARD, 0, 9, 8)
    assert [pool.take(w, 100.0).rows for w in (A, B)] == [6, 2]  # type: ignore[union-attr]


def test_a_backward_goes_to_the_worker_that_has_its_forward_until_that_one_is_gone() -> None:
    pool = pool_of(a=1, b=1)
    part = Part(Pass.BACKWARD, 0, 0, 0, 2)
    pool.put_part(part, A)
    assert pool.take(B, 0.0) is None
    pool.lost(A)
    assert pool.take(B, 0.0) == part


def test_what_is_late_goes_to_another_worker_and_the_first_result_counts() -> None:
    pool = pool_of(a=2, b=2)
    pool.put(Pass.LOSS, 0, 0, 1)
    part = pool.take(A, 0.0)
    assert part is not None
    assert pool.expire(pool.next_due() - 1e-3) == ()
    assert pool.expire(pool.next_due()) == (A,)
    assert pool.take(A, 99.0) is None, "it is late, and gets nothing more"
    assert pool.take(B, 99.0) == part
    assert pool.done(B, part, 100.0)
    assert not pool.done(A, part, 101.0), "its result is late"
    pool.put(Pass.LOSS, 0, 1, 1)
    assert pool.take(A, 102.0) is not None, "it is back"


def test_the_server_computes_when_nobody_else_does_and_what_it_began() -> None:
    pool = pool_of(a=1)
    pool.enlist(OWN, 0.0, 1)
    pool.put(Pass.FORWARD, 0, 0, 4)
    assert pool.take(OWN, 0.0) is None
    mine = Part(Pass.BACKWARD, 0, 7, 0, 4)
    pool.put_part(mine, OWN)
    assert pool.take(OWN, 0.0) == mine
    assert pool.done(OWN, mine, 1.0)
    pool.lost(A)
    assert pool.take(OWN, 2.0) == Part(Pass.FORWARD, 0, 0, 0, 4)


def test_what_was_lost_with_an_accumulator_waits_behind_what_the_pipeline_needs() -> None:
    pool = pool_of(a=3)
    again = Part(Pass.AGAIN, 0, 0, 0, 1)
    pool.put_part(again)
    pool.put(Pass.FORWARD, 0, 1, 1)
    assert [p.what for p in (pool.take(A, 0.0), pool.take(A, 0.0)) if p] == [Pass.FORWARD, Pass.AGAIN]


def test_what_is_dropped_keeps_its_place_until_it_is_back_and_does_not_count() -> None:
    pool = pool_of(a=1)
    pool.put(Pass.FORWARD, 3, 0, 2)
    part = pool.take(A, 0.0)
    assert part is not None
    assert pool.drop(3, 0) == [(A, part)]
    pool.put(Pass.FORWARD, 3, 1, 2)
    assert pool.take(A, 0.0) is None
    pool.failed(A, part)
    assert pool.take(A, 0.0) is not None


def test_a_late_worker_of_long_usual_time_is_given_longer() -> None:
    pool = pool_of(a=1)
    for k in range(3):
        pool.put(Pass.FORWARD, 0, k, 1)
        part = pool.take(A, 100.0 * k)
        assert part is not None
        pool.done(A, part, 100.0 * k + 5.0)
    pool.put(Pass.FORWARD, 0, 9, 1)
    pool.take(A, 1000.0)
    assert pool.next_due() == pytest.approx(1000.0 + 4 * 5.0)
    assert pool.next_due() > 1000.0 + FLOOR_S


@given(st.data())
def test_each_sequence_counts_once_in_each_pass_whatever_workers_do(data: st.DataObject) -> None:
    """Workers come, go, fall silent, fail and come back with late results, in any order; in the end the server's own
    device does what is left."""
    pool, now = Pool(), 0.0
    pool.enlist(OWN, 0.0, 1)
    rows = {(what, k): data.draw(st.integers(1, 5)) for k in range(2) for what in (Pass.FORWARD, Pass.LOSS)}
    for (what, k), n in rows.items():
        pool.put(what, 0, k, n)
    counted: dict[tuple[Pass, int], list[int]] = {key: [] for key in rows}
    out: list[tuple[str, Part]] = []

    def come_back(worker: str, part: Part) -> None:
        if pool.done(worker, part, now):
            counted[part.what, part.index] += range(part.first, part.first + part.rows)

    for _ in range(data.draw(st.integers(0, 25))):
        now += data.draw(st.sampled_from([0.1, 100.0]))
        worker = data.draw(st.sampled_from([A, B, C]))
        match data.draw(st.sampled_from(["enlist", "lost", "take", "done", "failed", "expire"])):
            case "enlist":
                pool.enlist(worker, data.draw(st.sampled_from([0.0, 1.0, 5.0])), data.draw(st.integers(1, 2)))
            case "lost":
                pool.lost(worker)
            case "take":
                if (part := pool.take(worker, now)) is not None:
                    out.append((worker, part))
            case "expire":
                pool.expire(now)
            case what if out:
                who, part = out.pop(data.draw(st.integers(0, len(out) - 1)))
                pool.failed(who, part) if what == "failed" else come_back(who, part)
    for worker in (A, B, C):
        pool.lost(worker)
    while (part := pool.take(OWN, now)) is not None:
        come_back(OWN, part)
    assert {key: sorted(found) for key, found in counted.items()} == {key: [*range(n)] for key, n in rows.items()}
    assert not pool.waiting()
