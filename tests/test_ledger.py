"""The ledger and the step record: exactly once, and one decision for everyone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from muletrain.errors import ProtocolError
from muletrain.swarm.ledger import Ledger
from muletrain.swarm.messages import Entries, RoundEntry
from muletrain.swarm.record import RecordBuilder, StepRecord, round_id

LINEAGE = b"L" * 32


def entry(
    stage: int,
    holder: str = "a",
    members: tuple[str, ...] = ("a",),
    *,
    without: tuple[str, ...] = (),
    shard: dict[str, object] | None = None,
    **changes: object,
) -> RoundEntry:
    """What ``holder`` says of a round of ``members``; ``shard`` changes the facts of the last one's shard."""
    facts: dict[str, object] = {"content": b"c" * 32, "square_norm": 4.0, "finite": True}
    fields: dict[str, object] = {
        "lineage": LINEAGE, "step": 4, "stage": stage, "round": bytes([stage]) * 32, "members": members, "holder": holder,
        "shards": [*[facts] * (len(members) - 1), {**facts, **(shard or {})}], "stop": False, "without": without,
    }  # fmt: skip
    return RoundEntry.model_validate({**fields, **changes})


def record(*entries: RoundEntry, stages: int = 2) -> StepRecord | None:
    builder = RecordBuilder(4, LINEAGE, stages, LINEAGE)
    for e in entries:
        builder.add(e)
    return builder.record()


def test_ledger_grants_each_microbatch_once() -> None:
    ledger = Ledger(LINEAGE, 0, 4)
    assert ledger.begin(1)
    assert not ledger.begin(1), "already running"
    ledger.commit(1, 5.0)
    assert not ledger.begin(1), "already in the accumulator"
    assert ledger.begin(2)
    ledger.abort(2)
    assert ledger.begin(2), "an aborted one may run again"
    with pytest.raises(RuntimeError, match="still accumulate"):
        ledger.seal()
    ledger.commit(2, 6.0)
    assert ledger.seal() == {1, 2}
    assert not ledger.begin(3), "sealed"
    ledger.reopen(keep=True)
    assert ledger.begin(3)
    assert not ledger.begin(1)
    ledger.abort(3)
    assert ledger.losses == {1: 5.0, 2: 6.0}
    ledger.reopen(keep=False)
    assert ledger.begin(1)


def test_ledger_refuses_indices_the_step_does_not_have() -> None:
    with pytest.raises(ProtocolError, match=r"0\.\.3"):
        Ledger(LINEAGE, 0, 4).begin(4)


def test_a_round_is_complete_when_every_member_holds_it_or_is_given_up_by_one_that_does() -> None:
    pair = ("a", "b")
    assert record(entry(0)) is None, "no word of stage 1"
    assert record(entry(0), entry(1, "a", pair)) is None, "b does not hold it yet"
    assert record(entry(0), entry(1, "a", pair), entry(1, "b", pair)) is not None
    assert record(entry(0), entry(1, "a", pair, without=("b",))) is not None
    three = ("a", "b", "c")
    assert record(entry(0), entry(1, "a", three, without=("b",))) is None
    later = entry(1, "c", three, without=("a",))
    assert record(entry(0), entry(1, "a", three, without=("b",)), later) is not None, "taken together"
    repeated = [entry(1, "a", three, without=("b",)), entry(1, "a", three), entry(1, "c", three)]
    assert record(entry(0), *repeated) is not None, "who was given up stays given up"


def test_who_took_the_gradient_from_a_holder_does_not_stand_for_a_member() -> None:
    assert record(entry(0), entry(1, "x", ("a",))) is None
    assert record(entry(0), entry(1, "x", ("a",)), entry(1, "a", ("a",))) is not None


def test_record_is_the_same_whatever_the_order_of_arrival_and_whoever_was_given_up() -> None:
    entries = [entry(0), entry(1, "a", ("a", "b")), entry(1, "b", ("a", "b"))]
    a, b = record(*entries), record(*reversed(entries))
    c = record(entry(0), entry(1, "b", ("a", "b"), without=("a",)))
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.hash == b.hash == c.hash


def test_of_two_complete_rounds_of_a_stage_the_lowest_counts_whichever_came_first() -> None:
    low, high = entry(1, round=b"\x11" * 32), entry(1, round=b"\xee" * 32)
    for both in ((low, high), (high, low)):
        found = record(entry(0), *both)
        assert found is not None
        assert found.stages[1].round == low.round


@pytest.mark.parametrize(
    "change",
    [
        {"shard": {"content": b"x" * 32}},
        {"shard": {"square_norm": 5.0}},
        {"shard": {"finite": False}},
        {"stop": True},
        {"leaves": ("a",)},
        {"expelled": ("z",)},
        {"round": b"r" * 32},
    ],
)
def test_record_hash_covers_everything(change: dict[str, Any]) -> None:
    a, b = record(entry(0), entry(1)), record(entry(0), entry(1, **change))
    assert a is not None
    assert b is not None
    assert a.hash != b.hash


def test_record_refuses_contradictions() -> None:
    builder = RecordBuilder(4, LINEAGE, 2, LINEAGE)
    builder.add(entry(0, "a", ("a", "b")))
    builder.add(entry(0, "a", ("a", "b")))  # a repeated notice is fine
    for wrong in ({"shard": {"square_norm": 9.0}}, {"shard": {"content": b"d" * 32}}, {"stop": True}):
        with pytest.raises(ProtocolError, match="contradicts"):
            builder.add(entry(0, "b", ("a", "b"), **wrong))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="contradicts"):
        builder.add(entry(0, "b", ("a", "c")))
    with pytest.raises(ProtocolError, match="step 5"):
        builder.add(entry(0, step=5))
    with pytest.raises(ProtocolError, match="stage 2/2"):
        builder.add(entry(2))
    with pytest.raises(ProtocolError, match="with 1 shards"):
        builder.add(entry(1).model_copy(update={"members": ("a", "b")}))
    with pytest.raises(ProtocolError, match="out of order"):
        builder.add(entry(1, "a", ("b", "a")))
    with pytest.raises(ProtocolError, match="others than its members"):
        builder.add(entry(1, leaves=("b",)))
    with pytest.raises(ProtocolError, match="a member is expelled"):
        builder.add(entry(1, expelled=("a",)))
    with pytest.raises(ProtocolError, match="gives itself up"):
        builder.add(entry(1, "a", ("a", "b"), without=("a",)))
    assert [e.holder for e in builder.entries()] == ["a"]
    builder.add(entry(1, "x", ("a",), without=("a",)))  # it took the gradient from one that is gone
    assert list(Entries.unpack(Entries.of(builder.entries()).pack()).entries) == list(builder.entries())


def test_what_a_stage_of_many_replicas_attests_to_fits_into_a_call() -> None:
    """Else whoever misses one notice of a step would believe everyone dead that it asks."""
    members = tuple(f"12D3KooW{k:044}" for k in range(100))
    said = [entry(0, holder, members) for holder in members]
    assert sum(len(e.pack()) for e in said) > 1 << 20
    assert len(Entries.of(said).pack()) < 1 << 16


def test_record_bounds_the_rounds_of_a_step() -> None:
    builder = RecordBuilder(4, LINEAGE, 2, LINEAGE)
    for k in range(RecordBuilder.MAX_ROUNDS):
        builder.add(entry(0, round=bytes([k]) * 32))
    with pytest.raises(ProtocolError, match="rounds"):
        builder.add(entry(0, round=b"\xff" * 32))


def test_clip_is_by_the_global_norm() -> None:
    r = record(entry(0, shard={"square_norm": 9.0}), entry(1, shard={"square_norm": 16.0}))
    assert r is not None
    assert r.gradient_norm == 5.0
    assert r.clip_scale(1.0) == pytest.approx(0.2, rel=1e-6)
    assert r.clip_scale(10.0) == 1.0
    assert r.clip_scale(None) == 1.0


def test_one_non_finite_shard_makes_everyone_skip() -> None:
    r = record(entry(0), entry(1, shard={"finite": False}))
    assert r is not None
    assert r.skip
    r = record(entry(0, shard={"square_norm": 1e100}), entry(1, shard={"square_norm": 1e100}))
    assert r is not None
    assert not r.skip
    assert math.isfinite(r.gradient_norm)


def test_who_leaves_after_a_step_follows_from_its_record() -> None:
    pair = ("a", "b")
    both = record(entry(0, "a", pair, leaves=pair, without=("b",)), entry(1, "c", ("c",), leaves=("c",)))
    assert both is not None
    assert both.leavers(lambda peer: False) == ("a",), "another stays in its stage; the last one of a stage never goes"
    trainers = record(
        entry(0, "a", pair, leaves=("a",), without=("b",)), entry(1, "c", ("c", "d"), leaves=("c",), without=("d",))
    )
    assert trainers is not None
    assert trainers.leavers(lambda peer: True) == ("a",), "one trainer at a time"
    assert trainers.leavers(lambda peer: peer == "a") == ("a", "c")


def test_rounds_differ_when_members_disagree_on_anything() -> None:
    sealed = {"a": frozenset({0}), "b": frozenset({1})}
    base = round_id(LINEAGE, 0, 1, 0, sealed, ("a", "b"), False)
    assert base == round_id(LINEAGE, 0, 1, 0, dict(reversed(sealed.items())), ("a", "b"), False)
    others = [
        round_id(b"M" * 32, 0, 1, 0, sealed, ("a", "b"), False), round_id(LINEAGE, 1, 1, 0, sealed, ("a", "b"), False),
        round_id(LINEAGE, 0, 2, 0, sealed, ("a", "b"), False), round_id(LINEAGE, 0, 1, 1, sealed, ("a", "b"), False),
        round_id(LINEAGE, 0, 1, 0, {"a": frozenset({0})}, ("a",), False), round_id(LINEAGE, 0, 1, 0, sealed, ("a",), False),
        round_id(LINEAGE, 0, 1, 0, sealed, ("a", "b"), True),
        round_id(LINEAGE, 0, 1, 0, sealed, ("a", "b"), False, (), ("z",)),
    ]  # fmt: skip
    assert len({base, *others}) == 9
