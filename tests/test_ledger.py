"""The ledger and the step record: exactly once, and one decision for everyone."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from muletrain.errors import ProtocolError
from muletrain.policy.deadline import Deadline
from muletrain.runtime.core.times import AGAIN_S
from muletrain.runtime.members.row import RoundEntry, Row, Statements
from muletrain.runtime.microbatch.inflight import Ledger
from muletrain.runtime.step.record import RecordBuilder, StepRecord, round_id
from muletrain.runtime.step.state import Lessons, StepState

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
        "lineage": LINEAGE,
        "step": 4,
        "stage": stage,
        "round": bytes([stage]) * 32,
        "members": members,
        "holder": holder,
        "shards": [*[facts] * (len(members) - 1), {**facts, **(shard or {})}],
        "stop": False,
        "without": without,
    }
    return RoundEntry.model_validate({**fields, **changes})


class Alive:
    """What one peer believes."""

    def __init__(self, *stages: tuple[str, ...]) -> None:
        self.stages = list(stages)
        self.now_s = 0.0

    def stage(self, stage: int) -> tuple[str, ...]:
        return self.stages[stage]

    voters = stage

    @property
    def version(self) -> int:
        return hash(tuple(self.stages))

    def builder(self) -> RecordBuilder:
        clock: Any = SimpleNamespace(now=lambda: self.now_s)
        return RecordBuilder(4, LINEAGE, len(self.stages), LINEAGE, cast("Any", self), clock, PATIENCE.seconds)


def record(*entries: RoundEntry, live: tuple[tuple[str, ...], ...] = (("a",), ("a",))) -> StepRecord | None:
    builder = Alive(*live).builder()
    for e in entries:
        builder.add(e)
    return builder.record()


def test_ledger_grants_each_microbatch_once() -> None:
    ledger = Ledger(4)
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


def test_a_ledger_with_gaps_accepts_these_alone() -> None:
    """What else is on its way was missing before its holder came back: it would be in two accumulators."""
    ledger = Ledger(4)
    assert ledger.begin(1)
    ledger.commit(1, 5.0)
    ledger.seal()
    ledger.reopen(keep=True, gaps={2})
    assert not ledger.begin(3)
    assert not ledger.takes(3)
    assert ledger.takes(1)
    ledger.seal()
    ledger.reopen(keep=True)  # a round failed
    assert ledger.begin(2)
    ledger.abort(2)
    ledger.reopen(keep=False)
    assert ledger.begin(3)


def test_ledger_refuses_indices_the_step_does_not_have() -> None:
    with pytest.raises(ProtocolError, match=r"0\.\.3"):
        Ledger(4).begin(4)


PATIENCE = Deadline()
PAIR, THREE = ("a", "b"), ("a", "b", "c")


def test_half_of_the_replicas_speak_for_a_stage_whose_others_say_nothing_for_long() -> None:
    overdue_s = PATIENCE.seconds()
    for members, holders, counts in ((PAIR, "a", True), (THREE, "a", False), (("a", "b", "c", "d"), "ab", True)):
        alive = Alive(("a",), members)
        builder = alive.builder()
        builder.add(entry(0))
        for holder in holders:
            builder.add(entry(1, holder, members, without=tuple(m for m in members if m not in holders)))
        assert builder.record() is None
        alive.now_s = overdue_s - 1
        assert builder.record() is None, "the others may still be at it"
        alive.now_s = overdue_s
        assert (builder.record() is not None) == counts


def test_two_that_lost_each_other_do_not_wait_for_a_third_for_ever() -> None:
    """Each has a round of its own, so none will have most."""
    for members, counts in ((THREE, True), (("a", "b", "c", "d"), False)):
        alive = Alive(("a",), members)
        builder = alive.builder()
        for holder in "ba":
            builder.add(entry(1, holder, (holder,), round=holder.encode() * 32))
        assert builder.round_of(1) is None
        alive.now_s = PATIENCE.seconds() - 1
        assert builder.round_of(1) is None, "the third may still attest to one of them"
        alive.now_s += 1
        found = builder.round_of(1)
        assert (found is not None and found.round == b"a" * 32) == counts


def test_a_round_counts_when_no_live_member_lacks_it_and_most_replicas_attest_to_it() -> None:
    both = (("a",), PAIR)
    assert record(entry(0), live=both) is None, "no word of stage 1"
    assert record(entry(0), entry(1, "a", PAIR), live=both) is None, "b does not hold it yet"
    assert record(entry(0), entry(1, "a", PAIR), entry(1, "b", PAIR), live=both) is not None
    assert record(entry(0), entry(1, "a", PAIR)) is not None, "b is believed dead"
    assert record(entry(0), entry(1, "a", PAIR, without=("b",)), live=both) is None, "of two that live both are needed"
    every = (("a",), THREE)
    two = entry(1, "a", THREE), entry(1, "b", THREE)
    assert record(entry(0), *two, live=every) is None, "c may have it in a moment"
    assert record(entry(0), *two, entry(1, "a", THREE, without=("c",)), live=every) is not None
    assert record(entry(0), two[0], entry(1, "a", THREE, without=("b", "c")), live=every) is None
    repeated = entry(1, "a", THREE, without=("c",)), entry(1, "a", THREE), entry(1, "b", THREE)
    assert record(entry(0), *repeated, live=every) is not None, "who was given up stays given up"


def test_the_word_of_the_dead_counts_but_not_against_that_of_the_living() -> None:
    assert record(entry(0), entry(1, "a"), live=(("a",), ())) is not None, "it died when it had told us"
    other = entry(1, "b", ("b",), round=b"o" * 32)
    found = record(entry(0), entry(1, "a", PAIR), other, live=(("a",), ("b",)))
    assert found is not None
    assert found.stages[1].round == other.round


def test_a_round_that_only_dead_replicas_hold_counts_if_there_is_no_other() -> None:
    """Nobody can give its gradient any more, and who has applied nothing yet can do without it."""
    dead, live = entry(1, "a", PAIR), entry(1, "b", ("b",), round=b"o" * 32)
    for told in itertools.permutations((entry(0), dead, live)):
        builder = Alive(("a",), ("b",)).builder()
        builder.abstain(1, "b")  # it had wanted the round of the dead, and came too late
        for each in told:
            builder.add(each)
        found = builder.record()
        assert found is not None
        assert found.stages[1].round == live.round


def test_a_replica_that_abstains_is_not_waited_for() -> None:
    builder = Alive(("a",), PAIR).builder()
    builder.add(entry(0))
    builder.add(entry(1, "a"))
    assert builder.record() is None
    builder.abstain(1, "b")
    assert builder.record() is not None


def test_who_took_the_gradient_from_a_holder_does_not_stand_for_a_member() -> None:
    live = (("a",), ("a", "x"))
    assert record(entry(0), entry(1, "x"), live=live) is None
    assert record(entry(0), entry(1, "x"), entry(1, "a"), live=live) is not None


def test_record_is_the_same_whatever_the_order_of_arrival_and_whoever_is_believed_dead() -> None:
    entries = [entry(0), entry(1, "a", PAIR), entry(1, "b", PAIR)]
    believed = [(("a",), PAIR), (("a",), ("a",)), (("a",), ("b",)), ((), ())]
    found = {r.hash for live in believed for e in (entries, entries[::-1]) if (r := record(*e, live=live)) is not None}
    assert len(found) == 1


def test_of_two_rounds_of_a_stage_that_counts_to_which_most_attest_whichever_came_first() -> None:
    one, *more = entry(1, "a", round=b"\x11" * 32), *(entry(1, m, ("b", "c"), round=b"\xee" * 32) for m in "bc")
    for order in ([one, *more], [*more, one]):
        found = record(entry(0), *order, live=(("a",), THREE))
        assert found is not None
        assert found.stages[1].round == more[0].round


def test_replicas_that_lost_sight_of_each_other_hold_one_round_each_and_in_the_end_the_first_one_s_counts() -> None:
    alive = Alive(("a",), THREE)
    builder = alive.builder()
    for e in (entry(0), entry(1, "c", ("c",), round=b"\x11" * 32), entry(1, "b", ("b",), round=b"\xee" * 32)):
        builder.add(e)
    alive.now_s = 100.0
    assert builder.record() is None, "a may attest to either"
    alive.stages[1] = ("b", "c")
    assert builder.record() is None, "one of them may take what the other holds"
    alive.now_s += AGAIN_S
    found = builder.record()
    assert found is not None
    assert found.stages[1].round == b"\xee" * 32


def test_of_one_round_that_two_describe_otherwise_what_most_say_counts() -> None:
    false = entry(1, "a", THREE, shard={"square_norm": 9.0})
    found = record(entry(0), false, entry(1, "b", THREE), entry(1, "c", THREE), live=(("a",), THREE))
    assert found is not None
    assert found.stages[1].square_norm == 12.0


def test_a_past_step_is_as_most_say_that_applied_it_if_they_are_two() -> None:
    right, wrong = record(entry(0), entry(1)), record(entry(0), entry(1, stop=True))
    assert right is not None
    assert wrong is not None
    true, false = right.stages, wrong.stages
    builder = Alive(THREE, ("d", "e")).builder()
    assert builder.claim("a", false, wrong.hash)
    assert builder.record() is None, "one may lie"
    assert builder.claim("b", true, right.hash)
    assert builder.record() is None
    assert not builder.claim("c", true, wrong.hash), "other steps came before it"
    assert builder.claim("c", true, right.hash)
    assert builder.record() == right
    with pytest.raises(ProtocolError, match="instead of 2"):
        builder.claim("d", true[:1], right.hash)
    builder = Alive(THREE, ("d", "e")).builder()
    builder.follow("c", right.hash)
    assert builder.claim("a", true, right.hash)
    assert builder.record() is None, "one may lie, also to another that follows it"
    assert builder.claim("b", false, wrong.hash)
    assert builder.record() == right, "more peers follow this one"
    builder.follow("d", wrong.hash)
    assert builder.record() is None
    alone = Alive(("me",), ("b",)).builder()
    alone.claim("b", true, right.hash)
    assert alone.record() is not None, "nobody else lives"


def test_a_replica_that_applied_the_step_is_known_by_all_that_it_says_and_since_when() -> None:
    right, wrong = record(entry(0), entry(1)), record(entry(0), entry(1, stop=True))
    assert right is not None
    assert wrong is not None
    true, false = right.stages, wrong.stages
    alive = Alive(THREE, ("d", "e"))
    builder = alive.builder()
    assert builder.claim("b", true, right.hash)
    assert builder.applied(0, -1.0) == [], "not for long"
    assert builder.applied(1, 0.0) == [], "it is no replica of that stage"
    alive.now_s = 9.0
    assert builder.claim("b", true, right.hash)
    assert builder.applied(0, 0.0) == [true[0]]
    alive.stages[0] = ("a", "c")
    assert builder.applied(0, 0.0) == [], "it does not live"
    alive.stages[0] = THREE
    assert builder.claim("b", false, wrong.hash)
    assert builder.applied(0, 0.0) == [], "another story is heard anew"


def test_one_alone_expels_nobody() -> None:
    """A third decides: the two that agree both say so."""
    with pytest.raises(ProtocolError, match="one member alone"):
        Alive(("a",), THREE).builder().add(entry(1, "a", expelled=("b",)))
    builder = Alive(("a",), ("a",)).builder()
    for e in (entry(0), entry(1, "a", PAIR, expelled=("c",))):
        builder.add(e)
    assert builder.record() is not None
    assert not builder.sentenced(1), "b is dead, and said nothing"
    builder.add(entry(1, "b", PAIR, expelled=("c",)))
    assert builder.sentenced(1)


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
    a, b = record(entry(0), entry(1, "a", PAIR)), record(entry(0), entry(1, "a", PAIR, **change))
    assert a is not None
    assert b is not None
    assert a.hash != b.hash


def test_record_refuses_contradictions() -> None:
    builder = Alive(("a",), ("a",)).builder()
    builder.add(entry(0, "a", PAIR))
    builder.add(entry(0, "a", PAIR))  # a repeated notice is fine
    with pytest.raises(ProtocolError, match="step 5"):
        builder.add(entry(0, step=5))
    with pytest.raises(ProtocolError, match="stage 2/2"):
        builder.add(entry(2))
    with pytest.raises(ProtocolError, match="with 1 shards"):
        builder.add(entry(1).model_copy(update={"members": PAIR}))
    with pytest.raises(ProtocolError, match="out of order"):
        builder.add(entry(1, "a", ("b", "a")))
    with pytest.raises(ProtocolError, match="others than its members"):
        builder.add(entry(1, leaves=("b",)))
    with pytest.raises(ProtocolError, match="a member is expelled"):
        builder.add(entry(1, expelled=("a",)))
    with pytest.raises(ProtocolError, match="gives itself up"):
        builder.add(entry(1, "a", PAIR, without=("a",)))
    assert [[*r.holders] for r in builder.rounds(0)] == [["a"]]
    builder.add(entry(1, "x", without=("a",)))  # it took the gradient from one that is gone


def test_what_a_peer_answers_that_applied_a_step_of_many_replicas_fits_into_a_call() -> None:
    """Else whoever missed it would believe everyone dead that it asks."""
    members = tuple(f"12D3KooW{k:044}" for k in range(1000))
    said = Statements(lineage=LINEAGE, step=4, stage=0, entry=entry(0, members[0], members))
    assert len(Row(current=False, step=6, stage=0, said=said).pack()) < 1 << 18


def test_what_one_holder_attests_to_is_bounded_and_takes_no_room_from_others() -> None:
    builder = Alive(("a",), ("a",)).builder()
    for k in range(RecordBuilder.MAX_ROUNDS):
        builder.add(entry(0, round=bytes([k]) * 32))
    with pytest.raises(ProtocolError, match="rounds of one holder"):
        builder.add(entry(0, round=b"\xff" * 32))
    builder.add(entry(0, "b", ("b",), round=b"\xff" * 32))


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
    live = (("a",), ("c",))
    both = record(entry(0, "a", pair, leaves=pair), entry(1, "c", ("c",), leaves=("c",)), live=live)
    assert both is not None
    assert both.leavers(lambda peer: False) == ("a",), "another stays in its stage; the last one of a stage never goes"
    trainers = record(entry(0, "a", pair, leaves=("a",)), entry(1, "c", ("c", "d"), leaves=("c",)), live=live)
    assert trainers is not None
    assert trainers.leavers(lambda peer: True) == ("a",), "one trainer at a time"
    assert trainers.leavers(lambda peer: peer == "a") == ("a", "c")


def test_rounds_differ_when_members_disagree_on_anything() -> None:
    sealed = {"a": frozenset({0}), "b": frozenset({1})}
    base = round_id(LINEAGE, 0, 1, 0, sealed, ("a", "b"), False)
    assert base == round_id(LINEAGE, 0, 1, 0, dict(reversed(sealed.items())), ("a", "b"), False)
    others = [
        round_id(b"M" * 32, 0, 1, 0, sealed, ("a", "b"), False),
        round_id(LINEAGE, 1, 1, 0, sealed, ("a", "b"), False),
        round_id(LINEAGE, 0, 2, 0, sealed, ("a", "b"), False),
        round_id(LINEAGE, 0, 1, 1, sealed, ("a", "b"), False),
        round_id(LINEAGE, 0, 1, 0, {"a": frozenset({0})}, ("a",), False),
        round_id(LINEAGE, 0, 1, 0, sealed, ("a",), False),
        round_id(LINEAGE, 0, 1, 0, sealed, ("a", "b"), True),
        round_id(LINEAGE, 0, 1, 0, sealed, ("a", "b"), False, (), ("z",)),
    ]
    assert len({base, *others}) == 9


def test_silent_replicas_have_the_time_of_slow_rounds() -> None:
    """1 GB of gradients takes minutes on a home link, while microbatches take seconds."""
    state: Any = object.__new__(StepState)
    state._lessons = lessons = Lessons()
    lessons.step.measured(3.0)
    assert state._silence_s() == lessons.step.seconds()
    lessons.averaging.measured(400.0)
    assert state._silence_s() == 800.0
