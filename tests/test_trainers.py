"""Trainers that go, that live and give out nothing, or that come back late: the others' work goes on, and each
microbatch counts once."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from muletrain.events import (
    CheckpointWritten,
    LastTrainer,
    MicrobatchesRerun,
    NoTrainer,
    OrphansTaken,
    StepApplied,
)
from muletrain.policy.wiring import claimant
from muletrain.runtime.members.detector import FailureDetector
from muletrain.runtime.microbatch.inflight import InFlightStep
from muletrain.runtime.microbatch.messages import TrainerDone
from muletrain.runtime.microbatch.microbatches import Microbatches
from muletrain.runtime.microbatch.position import Survey
from muletrain.runtime.microbatch.trainer import Trainer
from proofs.play import play
from proofs.scenario import SUSPENDED, Fault, Scenario
from proofs.verdict import Outcome, readable

pytestmark = pytest.mark.timeout(240)
STEPS = 4


def played(trainers: int, *faults: Fault, microbatches: int = 8, **more: Any) -> Outcome:
    return play(Scenario(21, (2, 2), trainers, STEPS, microbatches, 0.01, faults, **more))


def whole(outcome: Outcome) -> Outcome:
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def stuck(monkeypatch: pytest.MonkeyPatch, method: str, late_s: float = math.inf) -> None:
    """``method`` of peer-0b's trainer begins so much later, or never."""
    right = getattr(Trainer, method)

    async def never(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if self._ctx.net.peer_id == "peer-0b" and self._step > 0:
            await (asyncio.Event().wait() if late_s == math.inf else self._ctx.clock.sleep(late_s))
        return await right(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, method, never)


def test_microbatches_of_a_trainer_that_lives_and_gives_out_nothing_pass_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All peers gave up after 440 s."""
    stuck(monkeypatch, "see_through")
    outcome = whole(played(2))
    assert outcome.virtual_s < 60
    assert outcome.of(OrphansTaken, owners="peer-0b")


def test_many_gaps_at_the_same_moment_cost_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame made the trainer ask all peers."""
    asked: list[str] = []
    right, ask = Trainer.run_step, FailureDetector.ask_all

    async def counted(self: FailureDetector, *args: Any, **kwargs: Any) -> Any:
        asked.append(self._peer.net.peer_id)
        return await ask(self, *args, **kwargs)

    async def run_step(self: Trainer, **kwargs: Any) -> None:
        if self._ctx.net.peer_id == "peer-0a" and self._step == 1:
            with monkeypatch.context() as counting:
                counting.setattr(FailureDetector, "ask_all", counted)
                everyone = (self._survey.everyone(self._lineage, self._step) for _ in range(10))
                found = await asyncio.gather(*everyone)
            assert asked.count("peer-0a") == 1
            assert found == [found[0]] * 10
        await right(self, **kwargs)

    monkeypatch.setattr(Trainer, "run_step", run_step)
    whole(played(2))
    assert asked


def test_what_was_in_flight_at_a_death_is_asked_about_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer asked all peers about each of 32 microbatches; in a fleet of 256, 18,000 questions."""
    asked, ask = [0], Survey._ask

    async def counted(self: Survey, *args: Any) -> Any:
        asked[0] += self._ctx.roster.own.trainer
        return await ask(self, *args)

    monkeypatch.setattr(Survey, "_ask", counted)
    outcome = whole(
        play(Scenario(21, (2, 2, 2), 1, STEPS, 32, 0.01, (Fault(0.0, "kill", ("peer-1b",), on="backward", nth=24),)))
    )
    assert again(outcome)
    assert asked[0] <= 4


def test_no_microbatch_passes_on_while_microbatches_come_through() -> None:
    """In a step of four hours a trainer took over what the others had not given out yet, since their peers were full; half
    a stage's accumulators overlapped, and had to go."""
    outcome = play(Scenario(320010, (2, 2, 2), 5, 1, 128, 0.0, (), longer=1200.0, slower=1200.0))
    assert outcome.violations == []
    assert not again(outcome)


@pytest.mark.parametrize("late_s", [3.0, 5.0, 20.0])
def test_a_trainer_that_wakes_when_its_microbatches_have_passed_on_computes_none_of_them_again(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck(monkeypatch, "see_through", late_s)
    outcome = whole(played(2))
    assert not outcome.of(MicrobatchesRerun), "no accumulator had to go"


def again(outcome: Outcome) -> int:
    """How many microbatches were computed again."""
    return sum(e.recomputed for e in outcome.of(StepApplied))


@pytest.mark.parametrize("join_s", [0.3, 1.3, 1.7])
def test_a_trainer_that_comes_within_a_step_has_nothing_computed_twice(join_s: float) -> None:
    """Some microbatches fall to it that another trainer has not given out yet. (76 to 106 were computed again.)"""
    outcome = whole(played(2, Fault(join_s, "join", ("peer-0j0",)), microbatches=48))
    assert not outcome.of(MicrobatchesRerun)
    assert again(outcome) == 0


@pytest.mark.parametrize("how", ["", SUSPENDED])
@pytest.mark.parametrize(
    ("freeze_s", "for_s", "delay_s", "most"),
    [(0.9, 4.0, 0.01, 15), (1.7, 4.0, 0.01, 20), (1.3, 12.0, 0.01, 34), (1.3, 12.0, 0.1, 34)],
)
def test_who_stood_still_computes_nothing_that_others_have_by_now(
    freeze_s: float, for_s: float, delay_s: float, most: int, how: str
) -> None:
    """What it had under way, and what it would have given out, passed to others. (88 to 116 were computed again.)"""
    frozen = Fault(freeze_s, "freeze", ("peer-0b",), for_s, how=how)
    outcome = whole(play(Scenario(21, (2, 2), 4, STEPS, 48, delay_s, (frozen,))))
    assert again(outcome) <= most
    assert {e.step for e in outcome.of(MicrobatchesRerun)} <= {1}


def silenced(stages: tuple[int, ...], silent: str, at_s: float, kill_s: float) -> Outcome:
    """``silent`` stands still for 4 s, and a trainer dies ``kill_s`` later than that begins."""
    faults = Fault(at_s, "freeze", (silent,), 4.0), Fault(at_s + kill_s, "kill", ("peer-0b",))
    return whole(play(Scenario(21, stages, 4, STEPS, 48, 0.01, faults)))


@pytest.mark.parametrize(
    ("stages", "silent", "at_s", "kill_s", "most"),
    [((3, 2), "peer-1a", 0.9, 0.0, 10), ((3, 2), "peer-1a", 0.9, 0.5, 12)],
)
def test_what_a_silent_peer_may_have_is_not_accumulated_in_its_place(
    stages: tuple[int, ...], silent: str, at_s: float, kill_s: float, most: int
) -> None:
    """The dead trainer had given it out, and another stage has it. (42 to 46 were computed again.)"""
    assert again(silenced(stages, silent, at_s, kill_s)) <= most


def test_what_was_dropped_after_it_was_run_again_is_run_once_more() -> None:
    """A replica accumulates what another one lacks, and then drops its accumulator. Who runs it again for the first of the
    two forgot the second, and everyone waited for 24 s."""
    assert silenced((2, 2), "peer-1b", 0.9, 0.5).virtual_s < 45


def test_a_trainer_that_comes_back_hears_what_falls_to_it_now() -> None:
    """Replicas had told the other trainers what they lack, but not this one. They waited for 24 s."""
    assert silenced((2, 3), "peer-1b", 0.9, 0.0).virtual_s < 45


@pytest.mark.parametrize(
    ("how", "at_s"),
    [
        pytest.param(
            SUSPENDED, (2.8, 4.25), id="it had missed that microbatches were through, and asked for that late"
        ),
        pytest.param("", (2.8, 4.0), id="it was asked what it had just before it dropped that"),
    ],
)
def test_nobody_waits_for_long_for_two_that_slept(how: str, at_s: tuple[float, float]) -> None:
    """(Everyone waited for 24 s.)"""
    faults = Fault(at_s[0], "freeze", ("peer-1b",), 10.0, how=how), Fault(at_s[1], "freeze", ("peer-0b",), 8.0)
    assert whole(play(Scenario(78, (2, 2, 2), 6, STEPS, 48, 0.01, faults))).virtual_s < 42


@pytest.mark.parametrize("overrides", [(), ("optimizer.delayed=true",)])
def test_a_trainer_that_wakes_at_the_moment_at_which_they_pass_on_changes_no_number(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may give them out: then whole accumulators are dropped, and run again."""
    for late_s in (2.45, 2.5, 2.55):
        with monkeypatch.context() as patch:
            stuck(patch, "see_through", late_s)
            whole(played(2, overrides=overrides))


def test_gaps_of_a_trainer_that_does_not_run_them_again_pass_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck(monkeypatch, "refill")
    outcome = whole(played(2, Fault(1.5, "kill", ("peer-1b",), on="seal", nth=1)))
    assert outcome.of(MicrobatchesRerun)
    assert outcome.virtual_s < 60


def test_the_last_trainer_dies_and_the_run_waits_for_another() -> None:
    """It ended after 511 s."""
    outcome = whole(played(1, Fault(1.0, "kill", ("peer-0a",)), Fault(700.0, "join", ("peer-0j0",))))
    assert outcome.of(NoTrainer)
    assert len(outcome.of(StepApplied, step=STEPS)) == 4


def test_where_no_trainer_comes_what_there_is_is_written() -> None:
    outcome = played(1, Fault(1.5, "kill", ("peer-0a",)))
    done = max(e.step for e in outcome.of(StepApplied))
    assert outcome.of(CheckpointWritten, step=done)
    assert 900 < outcome.virtual_s < 1500
    assert all("no trainer can" in end for end in outcome.ends.values())


def test_that_one_trainer_is_left_is_said_once() -> None:
    outcome = whole(played(2, Fault(1.0, "kill", ("peer-0b",))))
    assert len(outcome.of(LastTrainer)) == 1


def test_each_turn_another_trainer_builds_a_microbatch() -> None:
    trainers = ["a", "b", "c"]
    turns = [claimant(3, 5, trainers, turn) for turn in range(4)]
    assert turns[0] == claimant(3, 5, trainers) == turns[3]
    assert set(turns) == set(trainers)


def test_the_word_about_microbatch_0_is_that_of_who_measures_the_held_out_loss() -> None:
    """Another trainer's report of its loss counted where such a step began."""
    trainers, step = ("a", "b"), next(s for s in range(100) if claimant(s, 0, ("a", "b")) == "b")
    roster: Any = SimpleNamespace(trainers=lambda: trainers, coordinator=lambda: SimpleNamespace(id="a"))
    roster.member = lambda peer: SimpleNamespace(trainer=True)
    work = InFlightStep(step, bytes(32), 2)
    for validates, counts in ((True, "a"), (False, "b")):
        plan = SimpleNamespace(validates=lambda _, v=validates: v)
        ctx: Any = SimpleNamespace(plan=plan, roster=roster, net=SimpleNamespace(peer_id="c"))
        actor: Any = SimpleNamespace(_ctx=ctx, _position=SimpleNamespace(computing=lambda _: work))
        work.losses.clear()
        for sender, loss in (("a", 1.0), ("b", 2.0), ("a", 1.0)):
            Microbatches.on_trainer_done(
                actor, sender, TrainerDone(lineage=bytes(32), step=step, indices=(0,), losses=(loss,))
            )
        assert work.losses[0] == (1.0 if counts == "a" else 2.0)
