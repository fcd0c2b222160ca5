"""The ledger and the step record: exactly once, and one decision for everyone."""

from __future__ import annotations

import math

import pytest

from muletrain.errors import ProtocolError
from muletrain.swarm.ledger import Ledger
from muletrain.swarm.messages import ShardEntry
from muletrain.swarm.record import RecordBuilder, StepRecord, round_id

LINEAGE = b"L" * 32


def entry(stage: int, shard: int = 0, shards: int = 1, **changes: object) -> ShardEntry:
    fields: dict[str, object] = {
        "lineage": LINEAGE, "step": 4, "stage": stage, "round": bytes([stage]) * 32, "shard": shard, "shards": shards,
        "content": b"c" * 32, "square_norm": 4.0, "finite": True, "stop": False,
    }  # fmt: skip
    return ShardEntry.model_validate({**fields, **changes})


def record(*entries: ShardEntry, stages: int = 2) -> StepRecord | None:
    builder = RecordBuilder(4, LINEAGE, stages)
    for e in entries:
        builder.add(e)
    return builder.record()


def test_ledger_grants_each_microbatch_once() -> None:
    ledger = Ledger(LINEAGE, 0, 4)
    assert ledger.begin(1)
    assert not ledger.begin(1), "already running"
    ledger.commit(1)
    assert not ledger.begin(1), "already in the accumulator"
    assert ledger.begin(2)
    ledger.abort(2)
    assert ledger.begin(2), "an aborted one may run again"
    with pytest.raises(RuntimeError, match="still accumulate"):
        ledger.seal()
    ledger.commit(2)
    assert ledger.seal() == {1, 2}
    assert not ledger.begin(3), "sealed"
    ledger.reopen(keep=True)
    assert ledger.begin(3)
    assert not ledger.begin(1)
    ledger.abort(3)
    ledger.reopen(keep=False)
    assert ledger.begin(1)


def test_ledger_refuses_indices_the_step_does_not_have() -> None:
    with pytest.raises(ProtocolError, match=r"0\.\.3"):
        Ledger(LINEAGE, 0, 4).begin(4)


def test_record_needs_every_stage_and_every_shard() -> None:
    assert record(entry(0)) is None
    assert record(entry(0), entry(1, 0, 2)) is None
    assert record(entry(0), entry(1, 0, 2), entry(1, 1, 2)) is not None


def test_record_is_the_same_whatever_the_order_of_arrival() -> None:
    entries = [entry(0), entry(1, 0, 2), entry(1, 1, 2, content=b"d" * 32)]
    a, b = record(*entries), record(*reversed(entries))
    assert a is not None
    assert b is not None
    assert a.hash == b.hash


@pytest.mark.parametrize(
    "change", [{"content": b"x" * 32}, {"square_norm": 5.0}, {"finite": False}, {"stop": True}, {"round": b"r" * 32}]
)
def test_record_hash_covers_everything(change: dict[str, object]) -> None:
    a, b = record(entry(0), entry(1)), record(entry(0), entry(1, **change))
    assert a is not None
    assert b is not None
    assert a.hash != b.hash


def test_record_refuses_contradictions() -> None:
    builder = RecordBuilder(4, LINEAGE, 2)
    builder.add(entry(0))
    builder.add(entry(0))  # a repeated notice is fine
    with pytest.raises(ProtocolError, match="two different"):
        builder.add(entry(0, square_norm=9.0))
    with pytest.raises(ProtocolError, match="step 5"):
        builder.add(entry(0, step=5))
    with pytest.raises(ProtocolError, match="stage 2/2"):
        builder.add(entry(2))


def test_record_bounds_the_rounds_of_a_step() -> None:
    builder = RecordBuilder(4, LINEAGE, 2)
    for k in range(RecordBuilder.MAX_ROUNDS):
        builder.add(entry(0, round=bytes([k]) * 32))
    with pytest.raises(ProtocolError, match="rounds"):
        builder.add(entry(0, round=b"\xff" * 32))


def test_clip_is_by_the_global_norm() -> None:
    r = record(entry(0, square_norm=9.0), entry(1, square_norm=16.0))
    assert r is not None
    assert r.gradient_norm == 5.0
    assert r.clip_scale(1.0) == pytest.approx(0.2, rel=1e-6)
    assert r.clip_scale(10.0) == 1.0
    assert r.clip_scale(None) == 1.0


def test_one_non_finite_shard_makes_everyone_skip() -> None:
    r = record(entry(0), entry(1, finite=False))
    assert r is not None
    assert r.skip
    r = record(entry(0, square_norm=1e308), entry(1, square_norm=1e308 / 2))
    assert r is not None
    assert not r.skip
    assert math.isfinite(r.gradient_norm)


def test_rounds_differ_when_members_disagree_on_anything() -> None:
    sealed = {"a": frozenset({0}), "b": frozenset({1})}
    base = round_id(LINEAGE, 0, 1, 0, sealed, ("a", "b"))
    assert base == round_id(LINEAGE, 0, 1, 0, dict(reversed(sealed.items())), ("a", "b"))
    others = [
        round_id(b"M" * 32, 0, 1, 0, sealed, ("a", "b")), round_id(LINEAGE, 1, 1, 0, sealed, ("a", "b")),
        round_id(LINEAGE, 0, 2, 0, sealed, ("a", "b")), round_id(LINEAGE, 0, 1, 1, sealed, ("a", "b")),
        round_id(LINEAGE, 0, 1, 0, {"a": frozenset({0})}, ("a",)), round_id(LINEAGE, 0, 1, 0, sealed, ("a",)),
    ]  # fmt: skip
    assert len({base, *others}) == 7
