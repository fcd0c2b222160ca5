"""Hard moments that a step's agreement must survive (docs/protocol.md, "Executions"), as worlds of production code.

Stage 0 has the replicas A, B and C, stage 1 has X and Y, and stage 2 has Z. A and B are trainers. Faults begin after two
steps, when waits follow from measured times. Each docstring names the rule without which its world fails.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.events import (
    LeaveCancelled,
    LineageLeft,
    MicrobatchesRerun,
    StateMissed,
    StepApplied,
    SteppedBack,
)
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario
from proofs.verdict import Outcome, readable

if TYPE_CHECKING:
    from collections.abc import Iterable

A, B, C, X, Y, Z = "peer-0a", "peer-0b", "peer-0c", "peer-1a", "peer-1b", "peer-2a"
BEGIN_S = 3.2
"""In the third step."""
SOON_S = 4.5
"""Within three steps, as they take here."""
DELAYED = ("optimizer.delayed=true",)


def world(*faults: Fault, steps: int = 8, stages: tuple[int, ...] = (3, 2, 1), **more: Any) -> Scenario:
    return Scenario(1, stages, 2, steps, 6, 0.05, faults, **more)


def played(scenario: Scenario, *, within_s: float = 0.0) -> Outcome:
    """Play a world whose promises hold. The run stands still no longer than faults last, and ``within_s`` (0:
    ``Scenario.bound_s``)."""
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    lasting_s = max((f.for_s for f in scenario.faults if f.for_s < FOR_EVER_S), default=0.0)
    assert stood_s(outcome) <= lasting_s + (within_s or scenario.bound_s)
    return outcome


def stood_s(outcome: Outcome) -> float:
    """The longest time in which no peer applied a step that nobody had applied before [virtual s]."""
    first: dict[int, float] = {}
    for event in outcome.of(StepApplied):
        first.setdefault(event.step, event.t)
    return max(b - a for a, b in pairwise([0.0, *sorted(first.values())]))


def records(outcome: Outcome, peers: Iterable[str]) -> dict[int, set[str]]:
    """The records of each step that ``peers`` applied."""
    found: dict[int, set[str]] = {}
    for event in outcome.of(StepApplied, *peers):
        found.setdefault(event.step, set()).add(event.lineage)
    return found


def all_finished(outcome: Outcome, *but: str) -> bool:
    """Did all peers come to the end of one history?"""
    ends = {end for name, end in outcome.ends.items() if name not in but}
    return ends == {"finished"} and len(set(outcome.lineages.values())) == 1


def loses(a: str, b: str, for_s: float, *, on: str = "", kind: str = "cut") -> Fault:
    return Fault(BEGIN_S, kind, (a, b), for_s, on=on)


def test_1_the_first_holder_loses_its_replicas_and_dies_before_they_have_its_gradient() -> None:
    """A holder alone is no majority, so no peer applies its round, and no gradient is lost that was applied
    (``record.held_by_most``)."""
    cuts = (loses(A, other, 100.0, on="entry") for other in (B, C))
    outcome = played(world(*cuts, Fault(4.75, "kill", (A,))))
    assert all_finished(outcome)
    assert outcome.of(MicrobatchesRerun, B, C), "of A's"
    assert not outcome.of(SteppedBack)


def test_2_a_replica_that_hears_nobody_of_its_stage_makes_no_record() -> None:
    """The other stages' peers hear its replicas, which therefore vote (``exchange.make_sure``)."""
    outcome = played(world(loses(A, B, 5.0), loses(A, C, 5.0)), within_s=SOON_S)
    assert all_finished(outcome)
    assert all(len(lineages) == 1 for lineages in records(outcome, outcome.ends).values())
    assert not outcome.of(LineageLeft)


def test_3_a_replica_is_cut_from_the_holders_alone() -> None:
    """C waits for no attempt of its own: the step counts without it, and C takes what it missed once it can
    (``exchange.ask``: a peer at a later step ends this one)."""
    parted = (loses(p, C, 5.0, on=on, kind=k) for p in (A, B) for on, k in (("reduced", "one way"), ("entry", "cut")))
    outcome = played(world(*parted))
    assert all_finished(outcome)
    assert outcome.of(StateMissed, C)
    assert not outcome.of(LineageLeft)


def test_6_a_peer_begins_anew_under_its_identity_before_it_is_missed() -> None:
    """It had sealed, and takes the state of the step's beginning. It leaves the step to the replicas that go on without
    it (``views.yields``)."""
    faults = Fault(BEGIN_S, "kill", (A,), on="shard"), Fault(4.66, "join", (A,))
    outcome = played(world(*faults), within_s=SOON_S)
    assert all_finished(outcome)
    assert not outcome.of(LineageLeft)


@pytest.mark.parametrize("apart", [False, True], ids=["9", "8"])
def test_8_and_9_a_replica_that_froze_holding_the_step_attests_after_the_other_did_it_again(apart: bool) -> None:
    """A wakes as B's round counts, and takes that round's gradient instead of its own (``reduction.take``, same_facts).
    8: Y heard of no round until then, and makes another record."""
    frozen = Fault(BEGIN_S, "damage", (A,), on="reduced"), Fault(BEGIN_S, "freeze", (A,), 4.9, on="reduced")
    cuts = (Fault(4.5, "cut", (Y, other), 5.0) for other in (B, X, Z) if apart)
    outcome = played(world(*frozen, *cuts, stages=(2, 2, 1)))
    assert all_finished(outcome)
    assert outcome.of(MicrobatchesRerun, B), "of A's"


def test_10_microbatches_of_the_next_step_after_two_records_are_told_apart() -> None:
    """Under delayed updates, step t+1 is computed while step t is agreed on. Two sides that part in step t compute it after
    two records of step t, and nobody computes for the other side (``forks``)."""
    parted = Fault(BEGIN_S, "partition", (A, X, Z), 5.0)
    outcome = played(world(parted, stages=(2, 2, 2), steps=10, overrides=DELAYED))
    assert all_finished(outcome)
    assert any(len(lineages) == 2 for lineages in records(outcome, outcome.ends).values())
    assert outcome.of(LineageLeft)


def test_12_one_of_two_leaves_and_the_other_dies_before_the_step_is_agreed_on() -> None:
    """The last of a stage puts its leave off, and a record of one member lets nobody leave (``roster.needs_us``,
    ``record.leavers``)."""
    faults = Fault(BEGIN_S, "leave", (X,)), Fault(BEGIN_S, "kill", (Y,), on="reduced")
    assert all_finished(played(world(*faults), within_s=SOON_S))


def test_12_one_of_two_leaves_and_the_other_dies_after_the_step_is_agreed_on() -> None:
    """Who leaves asks first whether a replica has the step, and comes back (``departure.taken_over``)."""
    outcome = played(world(Fault(BEGIN_S, "leave", (X,)), Fault(BEGIN_S, "kill", (Y,), on="entry")))
    assert all_finished(outcome)
    assert outcome.of(LeaveCancelled, X)
    assert not outcome.of(SteppedBack)


def test_14_the_first_replica_is_heard_by_nobody_of_its_stage_for_a_while() -> None:
    """Its replicas reach it, believe that it has applied the step, and take its gradient once that comes
    (``state._believed``, applied)."""
    faults = loses(A, B, 6.0, kind="one way"), loses(A, C, 6.0, kind="one way")
    assert all_finished(played(world(*faults), within_s=SOON_S))


def test_14_two_replicas_go_on_without_one_that_never_reaches_them() -> None:
    """The third replica does not decide alone, since other peers hear the two (``exchange.make_sure``)."""
    outcome = play(world(*(loses(A, other, FOR_EVER_S, kind="one way") for other in (B, C))))
    assert outcome.ends[B] == outcome.ends[C] == "finished"
    assert stood_s(outcome) <= 30.0


@pytest.mark.parametrize(
    "faults",
    [
        (Fault(4.2, "join", ("peer-0A",)), Fault(BEGIN_S, "kill", (C,), on="shard")),
        (Fault(BEGIN_S, "freeze", (A,), 6.0), Fault(BEGIN_S, "kill", (C,), on="shard")),
        (Fault(BEGIN_S, "cut", (A,), 4.0), Fault(7.0, "kill", (C,), on="shard")),
    ],
    ids=["joins", "away", "behind"],
)
def test_15_the_first_replica_is_not_there_when_another_dies(faults: tuple[Fault, ...]) -> None:
    """The first in the order of names leaves the step to the others (``views.yields``), or comes to their attempt
    (``state.latest_attempt``). One that wakes just after the death has the survivor leave the step to it, and begins the
    step's microbatches anew."""
    assert all_finished(played(world(*faults), within_s=SOON_S + 0.5))


@pytest.mark.parametrize("overrides", [(), DELAYED], ids=["", "delayed"])
def test_19_no_microbatch_runs_twice_in_a_step_without_faults(overrides: tuple[str, ...]) -> None:
    """Frames overtake each other for up to a second. No microbatch is taken for lost within the time that answers take
    (``policy.trips``)."""
    outcome = played(Scenario(1, (3, 2, 1), 3, 3, 24, 0.1, (), overrides=overrides, stalls=0.3))
    assert sum(e.recomputed for e in outcome.of(StepApplied)) == 0
    assert not outcome.of(MicrobatchesRerun)


@pytest.mark.parametrize("heard", [0, 1])
def test_20_replicas_hear_of_a_death_some_milliseconds_apart(heard: int) -> None:
    """One of the two may know a seal of the dead that the other does not. Each ends its attempt once it hears of the death
    (``agreement._announce``, lost)."""
    fault = Fault(BEGIN_S, "kill", (A,), on="seal", nth=1 + heard)
    assert all_finished(played(world(fault), within_s=SOON_S))
