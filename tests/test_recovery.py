"""How soon the protocol goes on after a fault: whole runs on a virtual clock. benchmarks/recovery measures real
processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from muletrain.clock import LoopClock
from muletrain.compute.paced import PacedCompute
from muletrain.events import AveragingFailed, MicrobatchesRerun, MicrobatchRerouted, PeerDown, StepApplied
from muletrain.network.memory import MemoryHub
from muletrain.runtime.members.context import Context
from muletrain.runtime.members.messages import Member
from muletrain.runtime.members.roster import Genesis, Roster
from muletrain.runtime.members.row import Row, Sync
from muletrain.runtime.microbatch.position import Position, Survey
from muletrain.sim.loop import run_virtually
from proofs.play import play
from proofs.scenario import BACKWARD_S, FORWARD_S, Fault, Scenario
from proofs.verdict import Outcome, readable
from tests.virtual import virtually

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Microbatch
    from muletrain.compute.results import Result
    from muletrain.compute.slot import Turn
    from muletrain.runtime.core.plan import Plan

SERVICE_S = FORWARD_S + BACKWARD_S
STEPS, MICROBATCHES, DELAY_S = 8, 8, 0.01


def played(*faults: Fault, stages: tuple[int, ...] = (2, 2)) -> Outcome:
    outcome = play(Scenario(1, stages, 1, STEPS, MICROBATCHES, DELAY_S, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def recomputed(outcome: Outcome) -> int:
    """Microbatches that stage 1 computed again. In the first step the first gradient that each one gets back is compared
    with another's."""
    return sum(e.recomputed for e in outcome.of(StepApplied, stage=1) if e.step > 1)


def end_s(outcome: Outcome) -> float:
    return outcome.of(StepApplied, "peer-0a", step=STEPS)[0].t


@pytest.mark.parametrize("victim", ["peer-0b", "peer-1b"])
def test_the_work_of_a_dead_peer_is_given_out_again_at_once(victim: str) -> None:
    """Its streams end with it: nobody waits for a deadline."""
    at_s = 2.0  # in the middle of the third step
    outcome = played(Fault(at_s, "kill", (victim,)))
    assert outcome.of(MicrobatchRerouted)[0].t - at_s < 5 * DELAY_S


def test_what_died_with_a_peer_is_run_again_beside_the_rest_and_no_further_than_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not after the rest, with a pipeline that has to fill again; and a stage that lost nothing does not go back
    through it."""
    in_vain = []
    right = PacedCompute.backward

    async def backward(
        self: PacedCompute, mb: Microbatch, grad: Tensor, turn: Turn, *, accumulate: bool
    ) -> Result | None:
        in_vain.extend([mb] if self.stage == 0 and not accumulate else [])
        return await right(self, mb, grad, turn, accumulate=accumulate)

    monkeypatch.setattr(PacedCompute, "backward", backward)
    outcome = played(Fault(2.3, "kill", ("peer-1b",)))  # it has three of the third step's
    assert not outcome.of(MicrobatchesRerun)
    assert not in_vain


def test_of_a_dead_trainers_microbatches_only_what_died_with_it_is_computed_again() -> None:
    """Whoever has one in its accumulator knows the loss, too."""
    outcome = play(Scenario(1, (3, 2), 3, STEPS, MICROBATCHES, DELAY_S, (Fault(1.9, "kill", ("peer-0c",)),)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert recomputed(outcome) <= 5, "stage 0 lost five"


@pytest.mark.parametrize("victim", ["peer-0b", "peer-1b"])
def test_a_frozen_peer_is_found_out_by_its_silence(victim: str) -> None:
    """It owes answers and gives none: others compute what it owes. That it is dead, all find out at the same time, not
    one by one."""
    at_s = 2.0  # in the middle of the third step
    outcome = played(Fault(at_s, "freeze", (victim,), 60.0))
    assert 0.0 < outcome.of(MicrobatchRerouted)[0].t - at_s < 3 * SERVICE_S + 0.5
    suspected = [e.t for e in outcome.of(PeerDown, peer_id=victim)]
    assert len(suspected) == 3
    assert suspected[0] - at_s > 1.5, "that costs a rerun, and is not believed at once"
    assert suspected[-1] - suspected[0] < 0.5


def test_a_false_alarm_costs_what_was_computed_twice_and_nothing_else() -> None:
    """A peer that was silent for a second has what it owed in its accumulator, and nobody else has."""
    outcome = played(Fault(2.0, "freeze", ("peer-1b",), 1.0))
    rerouted = outcome.of(MicrobatchRerouted, stage=1)
    assert rerouted, "it was suspected"
    assert not [*outcome.of(PeerDown), *outcome.of(MicrobatchesRerun), *outcome.of(AveragingFailed)]
    assert sum(e.microbatches for e in outcome.of(StepApplied, stage=1)) == STEPS * MICROBATCHES
    assert recomputed(outcome) <= len(rerouted)


def test_who_is_slow_to_answer_gets_twice_the_time_when_it_is_asked_again() -> None:
    """Where everyone is, as on cores that fleets share, all would believe each other dead for ever."""
    a, b = (Member(id=p, name=p, stage=s, trainer=True) for s, p in enumerate("ab"))
    genesis = Genesis(
        run_id="run", config=bytes(32), data=bytes(32), stages=2, members=(a, b), coordinator="a", first_step=0
    )
    answers_s, took_s = [0.1, 5.0, 5.0, 5.0, 0.1, 5.0], []
    left_s = list(answers_s)

    async def answer(sender: str, payload: bytes) -> bytes:
        await asyncio.sleep(left_s.pop(0))
        return Row(current=True, step=0, stage=1).pack()

    async def scenario() -> list[bool]:
        hub, clock = MemoryHub(), LoopClock()
        net, other = hub.join("a"), hub.join("b")
        other.serve(Sync.KIND, answer)
        nothing: Any = None
        ctx = Context(net, clock, nothing, Roster(genesis, "a"), nothing, emit=lambda event: None)
        answered = []
        for _ in answers_s:
            ctx.roster.mark_alive("b")  # a frame of its came
            begin = clock.now()
            answered.append(await ctx.detector.probe("b", genesis.lineage, 0) is not None)
            took_s.append(clock.now() - begin)
        await ctx.tasks.close()
        await net.close()
        await other.close()
        return answered

    assert run_virtually(scenario(), 100.0, []) == [True, False, False, True, True, True]
    assert took_s[1:4] == pytest.approx([1.5, 3.0, 5.0])


def test_before_it_tries_again_a_peer_looks_at_what_it_works_on_itself() -> None:
    """What its own pipeline is about to accumulate, another of its stage would have, too, if it were given out
    again."""
    a, b = (Member(id=p, name=p, stage=s, trainer=True) for s, p in enumerate("ab"))
    genesis = Genesis(
        run_id="run", config=bytes(32), data=bytes(32), stages=2, members=(a, b), coordinator="a", first_step=0
    )

    async def answer(sender: str, payload: bytes) -> bytes:
        return Row(current=True, step=0, stage=1).pack()

    async def scenario() -> None:
        hub, clock, nothing = MemoryHub(), LoopClock(), cast("Any", None)
        net, other = hub.join("a"), hub.join("b")
        other.serve(Sync.KIND, answer)
        plan = cast("Plan", SimpleNamespace(stages=2, microbatches=4, delayed=False))
        ctx = Context(net, clock, nothing, Roster(genesis, "a"), plan, emit=lambda event: None)
        position = Position(ctx, 0, genesis.lineage)
        survey, work = Survey(ctx, position), position.work
        work.serving.add(3)
        assert work.ledger.begin(3)

        def done() -> None:
            work.serving.clear()
            work.ledger.commit(3, 2.5)

        asyncio.get_running_loop().call_later(1.0, done)
        assert await survey.still_missing(genesis.lineage, 0, 3, (0, 1), lambda: 30.0) == ((1,), 2.5)
        assert 1.0 <= clock.now() < 2.0
        assert await survey.still_missing(genesis.lineage, 0, 2, (0, 1), lambda: 30.0) == ((0, 1), None)
        await ctx.tasks.close()
        await net.close()
        await other.close()

    virtually(scenario(), 100.0)


@pytest.mark.parametrize(("works", "late", "waits_s"), [(True, False, 200.0), (False, False, 40.0), (True, True, 15.0)])
def test_a_microbatch_that_a_peer_says_it_works_on_is_waited_for_while_that_peer_makes_progress(
    works: bool, late: bool, waits_s: float
) -> None:
    """Each step took twice as long where a microbatch takes more than 15 s: it was accumulated twice, so whole accumulators
    were dropped. A peer may say so for ever: then the wait has an end."""
    a, b = (Member(id=p, name=p, stage=s, trainer=True) for s, p in enumerate("ab"))
    genesis = Genesis(
        run_id="run", config=bytes(32), data=bytes(32), stages=2, members=(a, b), coordinator="a", first_step=0
    )

    async def answer(sender: str, payload: bytes) -> bytes:
        now = asyncio.get_running_loop().time()
        done = tuple(range(1, 1 + int(now / 25))) if works else ()
        at_it = () if works and now > 200.0 else (0,)
        return Row(
            current=True, step=0, stage=1, accumulated=done + ((0,) if not at_it else ()), in_flight=at_it, late=late
        ).pack()

    async def scenario() -> float:
        hub, clock = MemoryHub(), LoopClock()
        net, other = hub.join("a"), hub.join("b")
        other.serve(Sync.KIND, answer)
        plan = cast("Plan", SimpleNamespace(stages=2, microbatches=64, delayed=False))
        ctx = Context(net, clock, cast("Any", None), Roster(genesis, "a"), plan, emit=lambda event: None)
        survey = Survey(ctx, Position(ctx, 0, genesis.lineage))
        missing, _ = await survey.still_missing(genesis.lineage, 0, 0, (1,), lambda: 40.0)
        assert missing == (() if works and not late else (1,))
        ended = clock.now()
        await ctx.tasks.close()
        await net.close()
        await other.close()
        return ended

    assert run_virtually(scenario(), 1000.0, []) == pytest.approx(waits_s, rel=0.1)


def test_a_peer_that_comes_back_gets_work_again() -> None:
    outcome, back_s = played(Fault(2.0, "freeze", ("peer-1b",), 4.0)), 6.0
    assert outcome.of(PeerDown, peer_id="peer-1b")[0].t < back_s
    later = [e.microbatches for e in outcome.of(StepApplied, "peer-1b") if e.t > back_s]
    assert sum(later[1:]) > 0  # the first step counts work from before the fault


def test_the_last_peer_of_a_stage_is_waited_for() -> None:
    """Nobody could do its work, so it is neither suspected nor given up: that would end in no peer at all."""
    outcome = played(Fault(2.0, "freeze", ("peer-1a",), 1.0), stages=(2, 1))
    assert not outcome.of(MicrobatchRerouted)
    assert end_s(outcome) < 3.0 + STEPS * 2.0


@pytest.mark.parametrize(("kind", "limit_s"), [("kill", 2.0), ("freeze", 6.0)])
def test_no_moment_is_a_bad_one_to_go(kind: str, limit_s: float) -> None:
    """Wherever in a step a replica goes (between its announcement and its part of the sum, too), the run loses
    seconds."""
    stages = (3, 3)
    undisturbed_s = end_s(played(stages=stages))
    for k in range(3):
        at_s = (4 + k / 3) * undisturbed_s / STEPS
        took_s = end_s(played(Fault(at_s, kind, ("peer-1b",), 0.0 if kind == "kill" else 100.0), stages=stages))
        assert took_s - undisturbed_s < limit_s


def test_requests_of_a_step_that_has_ended_are_given_up() -> None:
    """A slow newcomer leaves some behind; peers that rightly know nothing of them any more would be banned for that."""
    slow = Fault(0.3110971924880723, "slow", ("peer-2j0",), 10.10333803616441)
    joins = [Fault(2.1374136161850865, "join", ("peer-2j0",)), Fault(2.4190811258556333, "join", ("peer-2j1",))]
    outcome = play(Scenario(0, (1, 3, 1), 1, 5, 6, 0.0, (slow, *joins)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    step: dict[str, int] = {}
    for event in outcome.events:
        if isinstance(event, StepApplied):
            step[event.peer] = event.step
        elif isinstance(event, MicrobatchRerouted):
            assert event.step >= step.get(event.peer, 0), event


@pytest.mark.parametrize("at_s", [2.2, 2.9])
def test_what_many_stages_lack_is_run_again_for_all_at_once(at_s: float) -> None:
    """A replica freezes in a deep fleet, and its microbatches are lost at each stage after it. One stage after the other,
    each of 16 stages with a pass through all of them, took ten usual steps."""
    frozen = Fault(at_s, "freeze", ("peer-1b",), 60.0)
    outcome = play(Scenario(3, (2,) * 8, 2, 4, 16, 0.02, (frozen,)))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.longest < 2.5
