"""A member that lies about rounds: it dictates no gradient, expels nobody, and is named; and what it says of others
counts for nothing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.events import (
    AveragingFailed,
    CheckpointWritten,
    FrameRefused,
    PeerExpelled,
    ReplicaApart,
    StepApplied,
    StepWaits,
)
from muletrain.runtime.members.row import RoundEntry, ShardFacts, Statements, Sync
from muletrain.runtime.microbatch.microbatches import Microbatches
from muletrain.runtime.peer.peer import Peer
from muletrain.runtime.step.record import StepRecord
from proofs.lying import LIES
from proofs.play import play
from proofs.scenario import FOR_EVER_S, Fault, Scenario, planned
from proofs.verdict import Outcome, readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import PeerId
    from muletrain.runtime.microbatch.inflight import InFlightStep

pytestmark = pytest.mark.timeout(240)

LIARS = [(2, "peer-1a"), (2, "peer-1b"), (3, "peer-1a"), (3, "peer-1c"), (5, "peer-1a"), (5, "peer-1e")]
"""Replicas of stage 1, and which of them lies."""


def played(replicas: int, *faults: Fault, first: int = 2, steps: int = 3) -> Outcome:
    outcome = play(Scenario(21, (first, replicas), 2, steps, 8, 0.01, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def forged(lineage: bytes, step: int, holder: PeerId, members: tuple[PeerId, ...], **more: Any) -> RoundEntry:
    """The lowest round, of a gradient so long that whoever believes it would shrink the whole update to nothing."""
    facts = ShardFacts(content=bytes(32), square_norm=1e12, finite=True)
    fields: dict[str, Any] = {"stage": 1, "round": bytes(32), "stop": False, "shards": (facts,) * len(members)}
    return RoundEntry(**fields | {"lineage": lineage, "step": step, "holder": holder, "members": members} | more)


def lying(patch: pytest.MonkeyPatch, liar: PeerId, lie: Callable[[Peer, InFlightStep], RoundEntry]) -> None:
    """``liar`` does its work, and tells everyone of a round of its own as soon as a step begins, and when it has
    sealed."""
    begin = Microbatches.begin

    def begins(self: Microbatches, work: InFlightStep, *, retry: bool) -> None:
        begin(self, work, retry=retry)
        if self._ctx.net.peer_id == liar:
            peer: Any = SimpleNamespace(roster=self._ctx.roster)

            async def tell() -> None:
                for _ in range(3):
                    told = Statements(lineage=work.lineage, step=work.step, stage=1, entry=lie(peer, work))
                    await self._ctx.tell(self._ctx.roster.everyone(), told)
                    await self._ctx.clock.sleep(0.3)

            self._ctx.spawn(tell(), "lie")

    patch.setattr(Microbatches, "begin", begins)


def others(peer: Peer) -> tuple[PeerId, ...]:
    return peer.roster.replicas()


def accused(outcome: Outcome) -> set[PeerId]:
    return {e.remote for e in outcome.of(FrameRefused)}


def names_the_liar(outcome: Outcome, liar: PeerId) -> None:
    """All that know better do, and accuse nobody else."""
    honest = {p for p, _ in outcome.scenario.members if p.startswith("peer-1")} - {liar}
    assert {e.peer for e in outcome.of(FrameRefused, remote=liar)} >= honest
    assert accused(outcome) == {liar}
    assert set(outcome.ends.values()) == {"finished"}
    assert not outcome.of(PeerExpelled)


@pytest.mark.parametrize(("replicas", "liar"), LIARS)
def test_one_replica_alone_dictates_no_gradient(replicas: int, liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, liar, lambda peer, work: forged(work.lineage, work.step, liar, (liar,)))
    names_the_liar(played(replicas), liar)


@pytest.mark.parametrize(("replicas", "liar"), LIARS)
def test_nor_in_the_name_of_all_while_it_gives_them_up(
    replicas: int, liar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(peer: Peer, work: InFlightStep) -> RoundEntry:
        return forged(work.lineage, work.step, liar, tuple(sorted((liar, *others(peer)))), without=others(peer))

    lying(monkeypatch, liar, lie)
    names_the_liar(played(replicas), liar)


@pytest.mark.parametrize(("replicas", "liar"), LIARS)
def test_one_replica_alone_expels_nobody(replicas: int, liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lying(
        monkeypatch, liar, lambda peer, work: forged(work.lineage, work.step, liar, (liar,), expelled=others(peer)[:64])
    )
    names_the_liar(played(replicas), liar)


@pytest.mark.parametrize(("replicas", "liar"), LIARS)
def test_nor_with_another_that_knows_nothing_of_it(replicas: int, liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage of two the other one is of another stage."""

    def lie(peer: Peer, work: InFlightStep) -> RoundEntry:
        victim, *rest = others(peer)
        with_it = rest[0] if rest else "peer-0a"
        pair = tuple(sorted((liar, with_it)))
        return forged(work.lineage, work.step, liar, pair, expelled=(victim,), without=(with_it,))

    lying(monkeypatch, liar, lie)
    outcome = played(replicas)
    assert set(outcome.ends.values()) == {"finished"}
    assert not outcome.of(PeerExpelled)
    assert accused(outcome) <= {liar}


def answering(patch: pytest.MonkeyPatch, liar: PeerId, lie: Callable[[Peer, Sync], dict[str, Any]]) -> None:
    """``liar`` does its work. At each step it pretends to be at the next, so that everyone asks it for the record, and
    makes false statements."""
    begun = Peer.__init__

    def begins(self: Peer, *args: Any, **options: Any) -> None:
        begun(self, *args, **options)
        if self._ctx.net.peer_id == liar:
            self._ctx.net.serve(Sync.KIND, answer_falsely(self))

    def answer_falsely(peer: Peer) -> Any:
        versions = itertools.count(1)

        async def answer(sender: PeerId, payload: bytes) -> bytes:
            ask = Sync.unpack(payload)
            said = peer.position.row(ask.step, ask.lineage, brief=ask.brief)
            if said.current:
                said = said.model_copy(update={"current": False, "step": said.step + 1})
            lies = Statements(lineage=ask.lineage, step=ask.step, stage=said.stage, **lie(peer, ask))
            return said.model_copy(update={"version": next(versions), "said": lies}).pack()

        return answer

    patch.setattr(Peer, "__init__", begins)
    lying(patch, liar, lambda peer, work: forged(work.lineage, work.step + 1, liar, (liar,)))


@pytest.mark.parametrize(("replicas", "liar"), LIARS)
def test_what_one_member_says_that_others_agreed_on_counts_for_nothing(
    replicas: int, liar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def applied(peer: Peer, ask: Sync) -> dict[str, Any]:
        asked.append(ask.step)
        rounds = (
            forged(ask.lineage, ask.step, "peer-0a", ("peer-0a",), stage=0, stop=True, leaves=("peer-0a",)),
            forged(ask.lineage, ask.step, others(peer)[0], tuple(sorted(others(peer)))),
        )
        builder = peer.runner.state.builder
        record = StepRecord(builder.step, builder.previous, tuple(e.for_record() for e in rounds))
        own = rounds[1].model_copy(update={"holder": liar})
        return {"entries": record.stages, "record": record.hash, "entry": own}

    answering(monkeypatch, liar, applied)
    outcome = played(replicas)
    assert asked
    assert set(outcome.ends.values()) == {"finished"}


@pytest.mark.parametrize(("replicas", "liar"), LIARS)
def test_who_speaks_for_another_is_refused(replicas: int, liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(peer: Peer, ask: Sync) -> dict[str, Any]:
        holder = others(peer)[0]
        return {"entry": forged(ask.lineage, ask.step, holder, (holder,))}

    answering(monkeypatch, liar, entry)
    outcome = played(replicas)
    assert set(outcome.ends.values()) == {"finished"}
    assert liar in accused(outcome)


@pytest.mark.parametrize("how", LIES)
def test_a_member_that_lies_costs_no_number(how: str) -> None:
    """As fuzz draws it. Where it counts on nobody, damages copies, or withholds answers, the others take longer."""
    faults = [Fault(0.3, "lie", ("peer-1a",), FOR_EVER_S, how=how)]
    faults += [Fault(1.0, "join", ("peer-1l",))] if how in ("copies", "others") else []
    faults += [Fault(1.3, "kill", ("peer-1b",))] if how in ("claims", "alone") else []
    scenario = Scenario(3, (2, 3), 2, 4, 8, 0.02, tuple(faults), checkpoint_every=1, apart=how == "parts")
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert {outcome.ends[p] for p in ("peer-0a", "peer-0b", "peer-1c")} == {"finished"}
    assert outcome.of(StepApplied)[-1].t < {
        "work": 80.0,
        "seals": 80.0,
        "attests": 80.0,
        "admits": 120.0,
        "alone": 200.0,
        "holds": 650.0,
        "keeps": 60.0,
    }.get(how, 20.0)
    assert outcome.of(CheckpointWritten)


@pytest.mark.parametrize(("seed", "liar"), [(1, "peer-1a"), (3, "peer-1a"), (5, "peer-1c")])
def test_a_member_that_seals_again_and_again_ends_no_run(seed: int, liar: str) -> None:
    """Some of the others hear that it has sealed again, and blame each other. All ended after 1,500 s."""
    lies = Fault(0.3, "lie", (liar,), FOR_EVER_S, how="hurry")
    outcome = play(Scenario(seed, (2, 3), 2, 4, 8, 0.02, (lies,), checkpoint_every=1))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 150.0


def test_a_replica_that_answers_but_never_seals_is_left_out_of_many_steps() -> None:
    """All ended after 360 s."""
    lies = Fault(0.3, "lie", ("peer-1a",), FOR_EVER_S, how="seals")
    outcome = play(Scenario(3, (2, 3), 2, 8, 8, 0.02, (lies,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 90.0, "only one step waits for it"
    assert len(outcome.of(ReplicaApart)) == 2


@pytest.mark.parametrize(
    ("how", "begin_s", "replicas", "liar", "most_s"),
    [
        ("attests", 0.05, 2, "peer-1b", 180.0),
        ("attests", 0.05, 3, "peer-1a", 100.0),
        ("holds", 1.0, 3, "peer-1a", 150.0),
        ("holds", 1.0, 5, "peer-1b", 150.0),
        pytest.param("alone", 0.3, 2, "peer-1a", 400.0, marks=pytest.mark.slow),
    ],
)
def test_a_replica_that_holds_up_the_end_of_steps_is_left_out_of_many(
    how: str, begin_s: float, replicas: int, liar: str, most_s: float
) -> None:
    """Without these rules all end after hours, or each step takes half a minute. In a stage of two the first replica
    speaks for the stage at last. ``holds`` begins after the first round: peers wait ten minutes for that one."""
    lies = Fault(begin_s, "lie", (liar,), FOR_EVER_S, how=how)
    outcome = play(Scenario(3, (2, replicas), 2, 8, 8, 0.02, (lies,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < most_s
    assert outcome.of(ReplicaApart, name=liar, steps=8 if how == "alone" else 16)


@pytest.mark.parametrize(("replicas", "liar"), [(2, "peer-1b"), (3, "peer-1a")])
def test_a_replica_that_owns_up_only_when_asked_costs_a_question_each_step_and_is_named(
    replicas: int, liar: str
) -> None:
    """Peers ask as late as they do in a first step, since they never learn how long the others usually take."""
    lies = Fault(0.05, "lie", (liar,), FOR_EVER_S, how="admits")
    outcome = play(Scenario(3, (2, replicas), 2, 8, 8, 0.02, (lies,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 250.0
    assert {liar} in [{*e.names} for e in outcome.of(StepWaits)]


def test_two_replicas_that_leave_each_other_out_both_have_missing_microbatches_run_again() -> None:
    """One claims to hold those of a third, which died; so a trainer sent them to nobody who lacked them, and all ended
    after 15 minutes. Found by 'python -m proofs fuzz --kind lie' (seed 88008)."""
    faults = (
        Fault(1.63, "lie", ("peer-1b",), FOR_EVER_S, how="claims"),
        Fault(3.137, "kill", ("peer-1a",), 1.0),
    )
    seats = planned((1, 3), "1f1b", shared=True)
    outcome = play(Scenario(1, (1, 3), 1, 5, 6, 0.0, faults, sequences=1, skew=0.1, overrides=seats))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 60.0


def test_a_trainer_that_gives_out_other_text_is_refused_by_who_has_the_data() -> None:
    lies = Fault(0.3, "lie", ("peer-0b",), FOR_EVER_S, how="forged")
    outcome = play(Scenario(3, (3, 2), 3, 4, 8, 0.02, (lies,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert accused(outcome) == {"peer-0b"}


@pytest.mark.parametrize(("begin_s", "most_s"), [(0.05, 1100.0), (0.3, 200.0)])
def test_a_trainer_that_gives_out_nothing_and_says_that_it_does_holds_up_no_step_for_long(
    begin_s: float, most_s: float
) -> None:
    """All peers gave up after 315 s, and where it begins before they know how long a step takes, after 43 minutes."""
    lies = Fault(begin_s, "lie", ("peer-0b",), FOR_EVER_S, how="idle")
    outcome = play(Scenario(3, (3, 2), 2, 4, 8, 0.02, (lies,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < most_s


@pytest.mark.parametrize(("how", "most_s"), [("work", 120.0), ("full", 30.0), ("fast", 40.0), ("gaps", 30.0)])
def test_a_member_that_lies_about_its_work_changes_no_number_and_costs_what_an_overdue_peer_costs(
    how: str, most_s: float
) -> None:
    """It is at its microbatches for ever, or never has room: then it is asked last for 4 steps, and 8, and so on. Or it says
    that it needed no time, or lacks what others have. (Without the rule for overdue peers all gave up after an hour.)"""
    lies = Fault(0.3, "lie", ("peer-1b",), FOR_EVER_S, how=how)
    outcome = play(Scenario(3, (3, 3), 2, 6, 12, 0.02, (lies,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < most_s


def test_a_member_of_a_slow_round_that_says_it_is_a_step_ahead_is_left_out_of_the_step() -> None:
    """Its stage tried twenty times to average with it, and ended."""
    slow = tuple((peer, 1.6e6) for peer in ("peer-0a", "peer-0b", "peer-0c", "peer-1a"))
    lies = Fault(8.0, "lie", ("peer-0c",), FOR_EVER_S, how="progress")
    outcome = play(Scenario(3, (3, 1), 2, 2, 9, 0.01, (lies,), narrow=slow, weight=400.0, longer=10.0))
    assert {end for peer, end in outcome.ends.items() if peer != "peer-0c"} == {"finished"}
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(outcome.of(AveragingFailed, "peer-0a", step=1)) > 1, "it waits for what never comes"
