"""Rounds at exact points of the protocol: whoever is lost, late or cut off there, the others go on, and lose no more
than they must."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from muletrain.clock import LoopClock
from muletrain.compute.torch_compute import TorchCompute
from muletrain.events import (
    AveragingFailed,
    FaultInjected,
    FrameRefused,
    GradientTaken,
    LeftBehind,
    MicrobatchesRerun,
    RoundGivenUp,
    StateMissed,
    StepApplied,
    WeightsDiffer,
)
from muletrain.network.memory import MemoryNetwork
from muletrain.policy.deadline import Deadline
from muletrain.policy.views import GroupView, counted_on, yields
from muletrain.runtime.averaging.averager import Averager
from muletrain.runtime.averaging.rounds import Round, RoundFailed
from muletrain.runtime.checkpoint.store import CheckpointStore
from muletrain.runtime.microbatch.inflight import InFlightStep
from muletrain.runtime.microbatch.messages import Forward
from muletrain.runtime.microbatch.stage_server import StageServer
from muletrain.runtime.peer import incoming
from muletrain.runtime.peer.messages import Finished
from muletrain.runtime.recovery.rollback import Rollback
from muletrain.runtime.step.agreement import RoundAgreement
from muletrain.runtime.step.company import Company
from muletrain.runtime.step.reduction import Reduction
from muletrain.runtime.step.state import APART, MAX_NUMBER, STALLED, Lessons
from muletrain.strategies.swarm import SWARM
from muletrain.wire.codec import encode_raw
from muletrain.wire.frame import Frame
from proofs.draws import basic, draw
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario, planned
from proofs.verdict import Outcome, readable

pytestmark = pytest.mark.timeout(240)


def played(stages: tuple[int, ...], *faults: Fault, microbatches: int = 8, overrides: tuple[str, ...] = ()) -> Outcome:
    outcome = play(Scenario(21, stages, 2, 3, microbatches, 0.01, faults, overrides=overrides))
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def applied(outcome: Outcome, peer: str, step: int) -> float:
    """When ``peer`` first applied a step [virtual s]."""
    return outcome.of(StepApplied, peer, step=step)[0].t


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_replica_that_dies_before_its_word_is_heard_costs_no_rerun_of_that_step(nth: int) -> None:
    """It had returned its last chunk, so that the other one holds everything, and says that it goes on alone."""
    outcome = played((2, 2), Fault(0.0, "kill", ("peer-1b",), on="entry", nth=nth))
    (fault,) = outcome.of(FaultInjected)
    assert applied(outcome, "peer-1a", 1) < fault.t + 0.2
    assert not outcome.of(MicrobatchesRerun), "the gradient contains its accumulator"


def test_a_replica_that_dies_while_it_returns_chunks_does_not_hold_up_those_that_lack_one() -> None:
    outcome = played((2, 3), Fault(0.0, "kill", ("peer-1c",), on="reduced", nth=2))
    (fault,) = outcome.of(FaultInjected)
    assert all(applied(outcome, f"peer-1{k}", 1) < fault.t + 2.0 for k in "ab")


def test_the_first_holder_dies_before_all_know_of_it() -> None:
    """Only one replica got the last chunk of the one that died; then it dies, too, in the middle of telling the
    others."""
    for holder in ("peer-1a", "peer-1b"):
        second = Fault(0.0, "kill", (holder,), on="entry", nth=3)
        outcome = played((2, 3), Fault(0.0, "kill", ("peer-1c",), on="reduced", nth=2), second)
        assert len(outcome.of(FaultInjected)) == 2
        assert outcome.virtual_s < 45, "one wait for a chunk, unmeasured yet"


def test_who_missed_a_chunk_takes_the_gradient_from_a_holder() -> None:
    outcome = played((2, 3), Fault(0.0, "damage", ("peer-1c",), on="reduced", nth=1))
    (lacking,) = outcome.of(AveragingFailed)  # the others' round held, and no other one was needed
    assert max(applied(outcome, f"peer-1{k}", 1) for k in "abc") < lacking.t + 0.2
    assert not outcome.of(MicrobatchesRerun)


def test_who_was_left_out_applies_the_step_late_instead_of_copying_a_state() -> None:
    outcome = played((2, 3), Fault(0.55, "freeze", ("peer-1b",), 4.0))
    assert outcome.of(GradientTaken)
    assert not outcome.of(StateMissed)
    assert outcome.left_behind == []


def test_who_was_cut_off_learns_of_it_from_the_first_frame_of_a_later_step() -> None:
    outcome = play(Scenario(15, (2, 2), 2, 8, 8, 0.01, (Fault(0.79, "cut", ("peer-1b",), 1.0),)))
    assert outcome.violations == []
    assert outcome.left_behind == []
    missed = [applied(outcome, "peer-0a", step) for step in range(1, 9)]
    noticed = min(e.t for kind in (GradientTaken, StateMissed) for e in outcome.of(kind, "peer-1b"))
    (cut,) = outcome.of(FaultInjected)
    heard = min(t for t in missed if t > cut.t + cut.for_s)
    assert noticed < heard + 0.5, "not after a deadline"
    assert applied(outcome, "peer-1b", 8) < missed[-1] + 0.5


def test_three_replicas_of_which_two_do_not_reach_each_other_keep_their_pace() -> None:
    outcome = played((2, 3), Fault(0.1, "cut", ("peer-1a", "peer-1b"), 1e4))
    assert outcome.of(LeftBehind)
    for step in (1, 2):  # at the end the others leave: it may miss what it has not taken by then
        assert max(applied(outcome, f"peer-1{k}", step) for k in "abc") < applied(outcome, "peer-0a", step) + 0.2
    assert applied(outcome, "peer-0a", 3) < 10


def test_of_two_replicas_that_do_not_reach_each_other_the_first_goes_on() -> None:
    outcome = played((2, 2), Fault(0.1, "cut", ("peer-1a", "peer-1b"), 1e4))
    assert outcome.left_behind == ["peer-1b"]
    assert applied(outcome, "peer-1a", 3) < 30


@pytest.mark.parametrize(("schedule", "longest_s"), [(None, 60.0), ("1f1b", 250.0)])
def test_one_of_two_replicas_that_never_has_room_does_not_end_the_run(schedule: str | None, longest_s: float) -> None:
    """Its replica's copies wait for room there, and what it fails at; in a planned pipeline, what it has the seat of."""
    lie = Fault(0.0, "lie", ("peer-1b",), FOR_EVER_S, how="full")
    assert played((2, 2), lie, overrides=planned((2, 2), schedule)).virtual_s < longest_s


def test_replicas_that_lose_sight_of_each_other_for_a_while_both_come_to_the_end() -> None:
    outcome = played((2, 2), Fault(0.1, "cut", ("peer-1a", "peer-1b"), 6.0), microbatches=12)
    assert set(outcome.ends.values()) == {"finished"}


def test_who_waits_for_one_that_left_the_step_to_others_leaves_it_to_them_too() -> None:
    """After a partition two of four replicas go on without the other two, of which one knows it. What the other holds
    they believed to be there, and tried 20 times to average without it. Found by 'python -m proofs fuzz'."""
    faults = (
        Fault(0.595, "partition", ("peer-0a", "peer-0c", "peer-1a", "peer-2a"), 1.163),
        Fault(0.654, "damage", ("peer-0a",), 15.9),
        Fault(0.811, "join", ("peer-0j0",), 0.0),
        Fault(1.530, "slow", ("peer-2b",), 13.9),
    )
    outcome = play(Scenario(435, (3, 2, 2), 2, 2, 5, 0.0, faults, overrides=("optimizer.delayed=true",)))
    assert outcome.violations == []


def test_a_replica_that_left_the_step_to_others_is_waited_for_by_nobody() -> None:
    """Two companies, each of which waited for a member that had left the step to the other one. Found by 'muletrain
    fuzz'."""
    outcome = play(basic.draw(188))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 60


def test_a_step_that_one_of_two_replicas_did_alone_beyond_a_partition_is_taken_by_the_other() -> None:
    """It is at the next step by then, alone, and nobody can ask it any more what it had sealed. Found by 'muletrain
    fuzz'."""
    outcome = play(basic.draw(274))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 120, "a wait for microbatches, unmeasured yet"


def test_a_replica_that_holds_a_round_alone_gives_way_to_most() -> None:
    """It has what the others miss, and no trainer runs that again while it says so. Found by 'python -m proofs fuzz'."""
    outcome = play(draw(400160, "naps"))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(RoundGivenUp)
    awake_s = max(e.t + e.for_s for e in outcome.of(FaultInjected))
    assert min(e.t for e in outcome.of(StepApplied) if e.t > awake_s) - awake_s < 60, "89 s without that"


@pytest.mark.parametrize(
    ("views", "committed", "gives_way"),
    [
        ({"b": "bc", "c": "bc"}, "", True),
        ({"b": "bc"}, "", False),  # one of three
        ({"b": "bc", "c": "abc"}, "", False),
        ({"b": "bc", "c": "bc"}, "c", False),  # it holds a round, too, and makes no other
        ({"b": "bc", "d": "bd"}, "", False),  # it is down
    ],
)
def test_a_holder_gives_way_only_to_most_of_its_live_replicas(
    views: dict[str, str], committed: str, gives_way: bool
) -> None:
    """They try another round without it."""
    given, dropped = list[Any](), list[bool]()
    ledger = SimpleNamespace(in_flight=set(), reopen=lambda keep: dropped.append(not keep), seal=lambda: None)
    work = SimpleNamespace(gave_way=False, ledger=ledger, round=b"")
    holder: Any = SimpleNamespace(
        _ctx=SimpleNamespace(
            net=SimpleNamespace(peer_id="a"),
            roster=SimpleNamespace(own=SimpleNamespace(stage=0), stage=lambda stage: ("a", "b", "c")),
            emit=given.append,
            compute=SimpleNamespace(clear=lambda step: dropped.append(step == 3)),
        ),
        _state=SimpleNamespace(
            gradient=object(), builder=SimpleNamespace(record=lambda: None), step=3, committed=lambda: {*committed}
        ),
        _company=SimpleNamespace(views=lambda: {m: SimpleNamespace(members=tuple(v)) for m, v in views.items()}),
        _work=work,
    )
    Reduction._give_way(holder)
    assert work.gave_way == gives_way
    assert (len(given), dropped) == (int(gives_way), [True, True] * gives_way)


@pytest.mark.parametrize("wrong", [0, 1])
def test_replicas_whose_weights_differ_go_on_with_the_first_one_s(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that differs in the last bit after step 0: the later one of the two takes the state of the first."""
    right, seen = TorchCompute.apply, []

    async def apply(self: TorchCompute, gradient: Any, update: Any, turn: Any) -> None:
        await right(self, gradient, update, turn)
        if self.stage == 1 and update.step == 0:
            seen.append(self)
            if len(seen) == 1 + wrong:  # the reference serves all stages as one
                masters = self.arithmetic.masters
                masters[0] = torch.nextafter(masters[0], torch.tensor(2.0))

    monkeypatch.setattr(TorchCompute, "apply", apply)
    outcome = play(Scenario(21, (2, 2), 2, 3, 6, 0.01, ()))
    assert outcome.violations == ["peer-1a and peer-1b, replicas of one stage, have other weights after step 1"]
    assert len(seen) == 2
    assert outcome.of(WeightsDiffer)
    assert set(outcome.ends.values()) == {"finished"}


def peer_1c_tries(attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RoundAgreement.next_attempt

    def next_attempt(self: RoundAgreement) -> int:
        ahead = self._ctx.net.peer_id == "peer-1c" and self._state.step == 0
        return max(right(self), attempt if ahead else 0)

    monkeypatch.setattr(RoundAgreement, "next_attempt", next_attempt)


def test_a_replica_that_tries_far_ahead_does_not_use_up_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    peer_1c_tries(far := MAX_NUMBER - 1, monkeypatch)
    outcome = played((2, 3), Fault(0.0, "kill", ("peer-1b",), on="shard"))
    assert outcome.of(AveragingFailed, step=1, attempt=far), "that attempt failed, and another had to follow"
    assert outcome.virtual_s < 30


def test_an_attempt_that_nobody_can_have_come_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender would leave no numbers to the others."""
    peer_1c_tries(2 * MAX_NUMBER, monkeypatch)
    outcome = play(Scenario(21, (2, 3), 2, 1, 8, 0.01, ()))
    refused = outcome.of(FrameRefused, remote="peer-1c")
    assert {e.peer for e in refused} == {"peer-1a", "peer-1b"}, "by both of its replicas"


def test_word_of_the_end_may_come_before_it_where_nobody_writes_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointStore, "name", "")
    outcome = play(Scenario(23, (2, 2), 4, 2, 4, 0.05, (), stalls=0.5))
    assert outcome.violations == [], "\n".join(readable(outcome))


def test_an_order_to_step_back_that_comes_after_the_end_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, right, rollbacks = Rollback.__init__, MemoryNetwork.call, dict[str, Rollback]()

    def begins(self: Rollback, *args: Any, **options: Any) -> None:
        begun(self, *args, **options)
        rollbacks[self._ctx.net.peer_id] = self

    async def call(self: MemoryNetwork, peer: str, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if method == Finished.KIND:  # the peer goes next
            ordered = rollbacks[self.peer_id].ordered
            if not ordered.done():
                ordered.set_result(None)
            await asyncio.sleep(1.0)
        return await right(self, peer, method, payload, timeout_s=timeout_s)

    monkeypatch.setattr(Rollback, "__init__", begins)
    monkeypatch.setattr(MemoryNetwork, "call", call)
    outcome = played((1, 1), microbatches=2)
    assert set(outcome.ends.values()) == {"finished"}


def test_what_is_abandoned_before_it_begins_gives_its_place_back() -> None:
    async def scenario() -> None:
        work = InFlightStep(0, bytes(32), 4)
        ctx: Any = SimpleNamespace(
            roster=SimpleNamespace(own=SimpleNamespace(stage=0, name="a")),
            plan=SimpleNamespace(capacity=8, trace=False, strategy=SWARM),
            clock=LoopClock(),
            meter=SimpleNamespace(absences=0),
            spawn=lambda serving, name: asyncio.create_task(serving),
        )
        nothing = cast("Any", None)
        pipeline = StageServer(ctx, cast("Any", SimpleNamespace(computing=lambda step: work)), None, nothing, nothing)
        pipeline.expects = lambda *_: None  # type: ignore[method-assign]
        forward = Forward(
            lineage=bytes(32),
            step=0,
            index=1,
            attempt=0,
            trainer="t",
            stage=0,
            accumulate=(0,),
            gradient=False,
        )
        await pipeline.on_forward("t", forward, Frame("forward", {}, []))
        assert work.serving == {1}
        work.end()
        pipeline.abandon()
        await asyncio.sleep(0.01)
        assert not work.serving, "else it would be busy with it for ever"

    asyncio.run(scenario())


def test_of_frames_that_come_early_no_more_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "LIMIT", 3)
    kept = incoming.EarlyFrames(capacity=2)
    for step in (5, 4, 6, 7):
        kept.keep("a", Frame("statements", {"step": step}))
    assert [(sender, frame.header["step"]) for sender, frame in kept.take()] == [("a", 5), ("a", 4), ("a", 6)]
    assert kept.take() == []
    monkeypatch.setattr(incoming, "BYTES", 100)
    for step in (1, 2, 3):
        kept.keep("a", Frame("shard", {"step": step}, [encode_raw(bytes(60))]))
    assert len(kept.take()) == 1
    for sender in "abc":
        kept.keep(sender, Frame("shard", {"step": 1}, [encode_raw(bytes(50))]))
    assert [sender for sender, _ in kept.take()] == ["a", "b"]


def test_of_frames_that_come_early_one_sender_takes_no_room_from_others() -> None:
    kept = incoming.EarlyFrames(capacity=2)
    for step in range(incoming.LIMIT):
        kept.keep("a", Frame("gap", {"step": step}))
        kept.keep("a", Frame("forward", {"step": step}, [encode_raw(bytes(60))]))
    kept.keep("b", Frame("gap", {"step": 1}))
    kept.keep("b", Frame("forward", {"step": 1}, [encode_raw(bytes(60))]))
    assert Counter(sender for sender, _ in kept.take()) == {"a": incoming.NOTICES + 2, "b": 2}


# Who reduces with whom: pure --------------------------------------------------------------------------------------------


def test_a_first_view_is_a_guess_and_leaves_nobody_out() -> None:
    views = {"b": GroupView(0, ("b", "c")), "c": GroupView(0, ("a", "b", "c"))}
    assert counted_on("a", ["b", "c"], views) == ("a", "b", "c")
    assert not yields("a", ("a", "b", "c"), views)


def test_members_that_know_the_same_choose_the_same() -> None:
    views = {"a": GroupView(1, ("a", "c")), "b": GroupView(1, ("b", "c"))}
    assert counted_on("c", ["a", "b"], views) == ("a", "c")
    assert counted_on("a", ["c"], {"c": GroupView(1, ("a", "c"))}) == ("a", "c")
    assert yields("b", ("b", "c"), {"c": GroupView(1, ("a", "c"))})
    assert not yields("a", ("a", "c"), {"b": GroupView(1, ("b", "c"))}), "the lower one stays"


def test_a_member_counts_first_on_those_that_count_on_it() -> None:
    """Nobody knows what b counts on: its link to a carries nothing."""
    assert counted_on("a", ["b", "c"], {"c": GroupView(1, ("a", "c"))}) == ("a", "c")
    assert counted_on("a", ["b", "c"], {"c": GroupView(0, ("a", "c"))}) == ("a", "b", "c")


def test_a_member_that_counts_on_one_only_does_not_part_the_others() -> None:
    """A lie that each of them is told of itself."""
    views = {
        "b": GroupView(0, ("a", "b", "c", "d")),
        "c": GroupView(0, ("a", "b", "c", "d")),
        "d": GroupView(1, ("a", "d")),
    }
    assert counted_on("a", ["b", "c", "d"], views) == ("a", "b", "c")


def test_one_alone_that_names_others_lures_nobody_away() -> None:
    """b says that it goes on with c, which counts on nobody."""
    views = {"b": GroupView(1, ("b", "c")), "c": GroupView(1, ("c",))}
    assert not yields("d", ("d", "e"), views)
    assert yields("d", ("d", "e"), views | {"c": GroupView(1, ("b", "c"))})


def test_a_newcomer_that_few_know_does_not_part_the_others() -> None:
    """a came after c and d had announced, and has not heard of d. What it announces is no company."""
    views = {"a": GroupView(1, ("a", "b", "d")), "c": GroupView(1, ("b", "c", "d")), "d": GroupView(1, ("b", "c", "d"))}
    assert counted_on("b", ["a", "c", "d"], views) == ("b", "c", "d")
    assert not yields("c", ("b", "c", "d"), views)
    assert yields("c", ("b", "c", "d"), views | {"d": GroupView(2, ("a", "b", "d"))}), "it counts on the newcomer now"


def test_somebody_always_goes_on() -> None:
    """A chain a-b-c-d in which only neighbours reach each other: rounds of announcements until nobody changes its
    mind."""
    reach = {"a": ["b"], "b": ["a", "c"], "c": ["b", "d"], "d": ["c"]}
    views: dict[str, GroupView] = {}
    looking_on: set[str] = set()
    for attempt in range(6):
        for m, neighbours in reach.items():
            if m not in looking_on:
                views[m] = GroupView(
                    attempt, counted_on(m, neighbours, {k: v for k, v in views.items() if k in neighbours})
                )
        known = {m: {k: v for k, v in views.items() if k in reach[m]} for m in reach}
        looking_on = {m for m in reach if yields(m, views[m].members, known[m])}
    assert views["a"].members == views["b"].members == ("a", "b")
    assert looking_on == {"c"}
    assert views["d"].members == ("c", "d"), "it waits for c, which will have what b has"


@pytest.mark.parametrize("swapped", [(), ("peer-0a",)], ids=["resident", "swapped"])
def test_a_peer_alone_computes_a_step_again_if_a_round_fails(
    monkeypatch: pytest.MonkeyPatch, swapped: tuple[str, ...]
) -> None:
    """Its accumulator has become the mean: dividing it once more would be wrong."""
    reduce, failed = Averager.reduce, list[int]()

    async def fails_once(self: Averager, round_: Round, gradient: torch.Tensor) -> Any:
        found = await reduce(self, round_, gradient)
        if round_.step not in failed:
            failed.append(round_.step)
            raise RoundFailed("after the mean was made")
        return found

    monkeypatch.setattr(Averager, "reduce", fails_once)
    outcome = play(Scenario(7, (1,), 1, 3, 5, 0.01, (), swapped=swapped))
    assert outcome.violations == []
    assert failed == [0, 1, 2]


@pytest.mark.parametrize("why", ["overdue", "stalled"])
def test_who_offends_again_soon_is_left_out_for_longer_and_forgiven_after_as_many_good_steps(why: str) -> None:
    """From step to step: what one learns is known to the next."""
    first, lessons, said = {"overdue": APART, "stalled": STALLED}[why], Lessons(), list[Any]()
    roster = SimpleNamespace(name=str, is_alive=lambda peer: True, declines=lambda peer: False)
    detector = SimpleNamespace(silent_s=lambda peer: 0.0, deadline=Deadline())
    ctx: Any = SimpleNamespace(net=SimpleNamespace(peer_id="a"), roster=roster, detector=detector, emit=said.append)
    seals = {"b": SimpleNamespace(attempt=1, members=("b",))}

    def offends(step: int) -> Company:
        state: Any = SimpleNamespace(step=step, seals=seals, stands_aside=lambda peer: False)
        company = Company(cast("Any", SimpleNamespace(ctx=ctx, lessons=lessons)), state)
        if why == "overdue":
            company.note_overdue(["b"])
        else:
            company.note_stalled()
        assert company.is_apart("b")
        return company

    again = 10 + first + 1
    once_more = again + 2 * first + 2 * first
    for step in (10, again, once_more):
        offends(step)
    assert [(e.name, e.step, e.steps) for e in said] == [
        ("b", 11, first),
        ("b", again + 1, 2 * first),
        ("b", once_more + 1, first),
    ]
