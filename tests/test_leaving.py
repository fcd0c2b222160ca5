"""Leaving in order: who goes is agreed on by the step record, nobody waits for it, and no number changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.cli.show.status import Announced
from muletrain.events import (
    LeaveCancelled,
    LeavePutOff,
    LeftBehind,
    MicrobatchRerouted,
    PeerDown,
    PeerLeft,
    PeerMoved,
    StepApplied,
    SteppedBack,
)
from muletrain.runs.training import Training
from muletrain.runtime.core.lifecycle import Lifecycle, State
from muletrain.runtime.members.leaving import Departure
from muletrain.runtime.members.roster import MAX_GONE, MAX_MEMBERS, Genesis, Member, Roster
from muletrain.runtime.members.row import StageEntry
from muletrain.runtime.step.record import StepRecord
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import LEFT, readable
from proofs.world import World

if TYPE_CHECKING:
    from muletrain.events import Event

pytestmark = pytest.mark.timeout(400)


def record(*stages: list[str | None]) -> StepRecord:
    """Of each stage: which of its members want to go."""
    entries = [
        StageEntry(
            stage=stage,
            round=bytes(32),
            size=len(leaves),
            content=bytes(32),
            square_norm=1.0,
            finite=True,
            leaves=tuple(sorted(w for w in leaves if w is not None)),
        )
        for stage, leaves in enumerate(stages)
    ]
    return StepRecord(3, bytes(32), tuple(entries))


def test_of_a_stage_one_goes_at_a_time_and_never_the_only_one() -> None:
    def nobody_trains(peer: str) -> bool:
        return False

    assert record([None, None], [None]).leavers(nobody_trains) == ()
    assert record([None, "b"], [None]).leavers(nobody_trains) == ("b",)
    assert record(["a", "b"], ["c", None, "e"]).leavers(nobody_trains) == ("a", "c")
    assert record(["a"], [None]).leavers(nobody_trains) == ()


def test_of_the_trainers_one_goes_at_a_time() -> None:
    assert record(["a", None], ["b", None]).leavers({"a", "b"}.__contains__) == ("a",)
    assert record(["a", None], ["b", "c"]).leavers({"a", "b"}.__contains__) == ("a", "c")


def test_who_leaves_is_part_of_what_all_agree_on() -> None:
    assert record([None, "b"]).hash != record([None, None]).hash


@pytest.mark.parametrize("leaver", ["peer-1b", "peer-0b"])
def test_leaving_is_no_fault(leaver: str) -> None:
    """A replica, and one that is a trainer, too: nobody suspects it, nothing runs twice, and it is gone before the
    end."""
    outcome = play(Scenario(1, (2, 2), 2, 4, 8, 0.01, (Fault(0.35, "leave", (leaver,)),)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.ends[leaver] == LEFT
    assert outcome.of(PeerLeft, "peer-0a", peer_id=leaver, name=leaver, step=1)
    assert not outcome.of(PeerDown)
    assert not outcome.of(MicrobatchRerouted)
    assert not [e for e in outcome.of(StepApplied) if e.recomputed]
    assert len(outcome.of(StepApplied, leaver)) == 1


def test_who_left_says_so_in_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """'muletrain status' would show it for as long as its last word holds."""
    worlds: list[World] = []

    class Kept(World):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            worlds.append(self)

    monkeypatch.setattr("proofs.play.World", Kept)
    outcome = play(Scenario(1, (2, 2), 2, 4, 8, 0.01, (Fault(0.35, "leave", ("peer-1b",)),)))
    assert outcome.ends["peer-1b"] == LEFT
    said = {
        peer: Announced.read(peer, value) for peer, (_, value) in worlds[0].hub.directory.entries["fuzz/peers"].items()
    }
    assert {peer: a is not None and a.left for peer, a in said.items()} == {
        "peer-0a": False,
        "peer-0b": False,
        "peer-1a": False,
        "peer-1b": True,
    }


def test_after_the_last_step_it_is_no_news_that_others_go() -> None:
    """An ordered stop would end with an alarm, and how to reach the peer."""
    told: list[Event] = []
    life = Lifecycle()
    of: Any = SimpleNamespace(
        peer=SimpleNamespace(position=SimpleNamespace(life=life)),
        _host=SimpleNamespace(log=SimpleNamespace(emit=told.append)),
    )
    down, left = PeerDown("vm", "no route to it is known"), PeerLeft("vm", "vm", 7)
    Training._emit(of, down)
    life.to(State.FINISHED)
    Training._emit(of, down)
    Training._emit(of, left)
    assert told == [down, left]


def test_all_of_a_stage_want_to_go_and_the_last_stays_and_says_so() -> None:
    wishes = tuple(Fault(0.5, "leave", (f"peer-1{k}",)) for k in "abc")
    outcome = play(Scenario(3, (2, 3), 2, 4, 8, 0.05, wishes))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert sorted(outcome.ends[f"peer-1{k}"] for k in "abc") == ["finished", LEFT, LEFT]
    assert len(outcome.of(LeavePutOff)) == 1
    assert not outcome.of(PeerDown)


def test_who_collects_checkpoints_stays() -> None:
    outcome = play(Scenario(1, (2, 2), 2, 3, 8, 0.01, (Fault(0.3, "leave", ("peer-0a",)),)))
    assert outcome.violations == []
    assert outcome.ends["peer-0a"] == "finished"
    (put_off,) = outcome.of(LeavePutOff, name="peer-0a")
    assert put_off.reason == "it coordinates the checkpoints"


def test_the_last_trainer_stays() -> None:
    members = tuple(
        Member(id=p, name=p, stage=int(p[1]), trainer=p in ("s0a", "s1b")) for p in ("s0a", "s0b", "s1a", "s1b")
    )
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=2, members=members, coordinator="s0a", first_step=0
    )
    roster = Roster(genesis, "s1b")
    assert roster.needs_us() is None
    roster.mark_dead("s0a")
    assert roster.needs_us() == "no other peer has the data"
    roster.mark_alive("s0a")
    roster.left("s1a")
    assert roster.needs_us() == "no other peer serves stage 1"
    assert "s1a" not in roster.everyone()
    roster.mark_alive("s1a")
    assert roster.needs_us() is None


def test_a_peer_knows_itself_which_stage_it_serves() -> None:
    """Others may have obeyed a step back that moves it and that it never heard of, or counted one move twice."""
    members = tuple(Member(id=p, name=p, stage=k % 2, trainer=True) for k, p in enumerate(("a0", "a1", "b0", "b1")))
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=2, members=members, coordinator="a0", first_step=0
    )
    own, other = Roster(genesis, "b1"), Roster(genesis, "a0")
    other.moved("b1", 0)
    other.moved("b1", 0)
    assert other.member("b1").since == 1, "the same move twice is one"
    own.hear_of(other.member("b1"))
    assert own.is_alive("b1")
    assert own.stage(1) == ("a1", "b1")
    assert other.admit(own.own), "its own word is the later one"
    assert other.member("b1").stage == 1
    own.hear_of(other.member("b1"))
    assert own.own == other.member("b1"), "they agree: no word is to follow"


def test_what_is_said_of_others_never_stands_against_their_own_word() -> None:
    """One lie about how late its word was would keep a peer from ever saying where it serves, and from being understood
    at all."""
    members = tuple(Member(id=p, name=p, stage=k, trainer=True) for k, p in enumerate("ab"))
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=2, members=members, coordinator="a", first_step=0
    )
    last = 2**48 - 1
    roster = Roster(genesis, "a")
    newcomer = Member(id="new", name="new", stage=1, trainer=True)
    for lie in (newcomer, *members):
        roster.hear_of(lie.model_copy(update={"stage": 1 - lie.stage, "since": last}))
    assert roster.own == members[0], "and not of a number that nobody takes"
    assert roster.member("b") == members[1]
    assert roster.member("new").stage == 0, "as far as anybody said"
    roster.moved("new", 1)
    Member.unpack(roster.member("new").pack())
    roster.hear_of(newcomer.model_copy(update={"stage": 0, "since": last}))
    assert roster.admit(newcomer.model_copy(update={"stage": 0}))
    assert roster.admit(newcomer.model_copy(update={"since": 1}))
    assert not roster.admit(newcomer), "an earlier word of its own"


def test_who_would_leave_nobody_with_its_state_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the other replica freezes at the moment of leaving: the leaver counts itself in again, and the numbers
    hold."""
    asked = []
    right = Departure.taken_over

    async def nobody_has_it_at_first(self: Departure, lineage: bytes, step: int) -> bool:
        asked.append(step)
        return False if len(asked) == 1 else await right(self, lineage, step)

    monkeypatch.setattr(Departure, "taken_over", nobody_has_it_at_first)
    outcome = play(Scenario(1, (2, 2), 2, 4, 8, 0.01, (Fault(0.35, "leave", ("peer-1b",)),)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(LeaveCancelled, "peer-1b")
    assert outcome.ends["peer-1b"] == LEFT, "it asks again"
    assert asked == [1, 2]


def test_who_leaves_stays_until_the_other_replica_has_the_step() -> None:
    """The leaver's last chunk of the gradient is lost: the other replica needs its state."""
    faults = (Fault(0.3, "leave", ("peer-1b",)), Fault(1.04, "damage", ("peer-1b",), 0.1))
    outcome = play(Scenario(5, (2, 2), 2, 3, 6, 0.1, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.ends["peer-1b"] == LEFT


def test_a_leaver_whose_stage_is_lost_comes_back_with_the_newest_state() -> None:
    """The run stepped back to its beginning while the leaver was still there, and waited for the dead replica to take
    over."""
    faults = (Fault(0.35, "leave", ("peer-1b",)), Fault(0.8535, "kill", ("peer-1a",)))
    outcome = play(Scenario(1, (2, 2), 2, 4, 8, 0.01, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert not outcome.of(StepApplied, "peer-1a"), "it died before it had the step"
    assert outcome.of(LeaveCancelled, "peer-1b")
    assert not outcome.of(SteppedBack)
    assert outcome.ends["peer-1b"] == "finished"


@pytest.mark.parametrize("gone", ["die", "leave"])
def test_machines_may_come_and_go_without_end(gone: str) -> None:
    """Those that are gone for longest are forgotten, never the living, nor the one whose place the run's checkpoints
    are in."""
    members = [
        Member(id=p, name=p, stage=k % 2, trainer=True, place="here" if p == "a" else "") for k, p in enumerate("abc")
    ]
    genesis = Genesis(
        run_id="r", config=bytes(32), data=bytes(32), stages=2, members=tuple(members), coordinator="a", first_step=0
    )
    roster = Roster(genesis, "b")
    roster.mark_dead("a")
    for k in range(2 * MAX_MEMBERS):
        newcomer = Member(id=f"new{k}", name=f"new{k}", stage=0, trainer=False)
        roster.admit(newcomer)
        roster.mark_alive(newcomer.id)
        assert roster.is_alive(newcomer.id)
        roster.mark_dead(newcomer.id) if gone == "die" else roster.left(newcomer.id)
    assert roster.knows(f"new{2 * MAX_MEMBERS - 1}")
    assert not roster.knows("new0")
    assert len(roster.everyone()) <= MAX_GONE + 3
    assert {"a", "b", "c"} <= {m.id for m in roster.members()}
    assert roster.others() == ("c",)
    roster.admit(Member(id="new0", name="new0", stage=1, trainer=False))
    assert roster.mark_alive("new0")


def test_who_moves_at_the_same_step_to_the_same_stage_is_heard_of() -> None:
    """Each believes that the other has gone, and introduces itself to everyone else only; when those have gone, too,
    each would take itself for the stage's only peer."""
    moves = tuple(Fault(0.35, "move", (mover,), to=1) for mover in ("peer-0b", "peer-2b"))
    for faults in (moves, (*moves, Fault(3.0, "kill", ("peer-1a",)))):
        outcome = play(Scenario(1, (2, 1, 2), 2, 12, 8, 0.01, faults))
        assert outcome.violations == [], "\n".join(readable(outcome))
        assert {outcome.ends[p] for p in ("peer-0b", "peer-2b")} == {"finished"}
        assert not outcome.of(LeftBehind)
        assert outcome.virtual_s < 60


@pytest.mark.parametrize("seed", [5, 10])
def test_who_moves_to_a_stage_that_is_a_step_behind_does_not_leave_once_more(seed: int) -> None:
    """The state that it gets is from before the step after which it left its old stage, so it applies that record again."""
    faults = (Fault(0.3126, "hang", ("peer-1a",), 29.6), Fault(1.5986, "move", ("peer-0b",), to=2))
    outcome = play(Scenario(seed, (3, 3, 1), 2, 3, 5, 0.05, faults, adopt_after_s=5.0, stalls=0.1))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(PeerMoved, "peer-0b")
    assert outcome.ends["peer-0b"] == "finished"
