"""The virtual world: whole runs with faults from seeds keep every promise, and broken protocols are found out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from muletrain.compute import scaling
from muletrain.compute.arithmetic import StageArithmetic
from muletrain.compute.torch_compute import TorchCompute
from muletrain.events import (
    FaultInjected,
    GradientStandsOut,
    MicrobatchRerouted,
    PeerDown,
    StateMissed,
    StepApplied,
    SteppedBack,
)
from muletrain.runtime.members.context import Context
from muletrain.runtime.microbatch.messages import Lost, Why
from muletrain.runtime.step.record import StepRecord
from muletrain.runtime.step.runner import StepRunner
from proofs import draws, reference
from proofs.draws.basic import draw
from proofs.play import play
from proofs.reference import SingleProcess
from proofs.scenario import FOR_EVER_S, Fault, Scenario
from proofs.verdict import readable

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(800)

# fmt: off
SCENARIOS = [
    Scenario(1, (2, 2), 2, 4, 8, 0.01, (Fault(0.35, "kill", ("peer-1b",)),)),
    Scenario(2, (2, 2), 2, 4, 8, 0.01, (Fault(0.4, "kill", ("peer-0b",)),)),
    Scenario(3, (2, 3), 2, 4, 8, 0.05, (Fault(0.5, "freeze", ("peer-1b",), 30.0),)),
    Scenario(4, (2, 2, 2), 2, 3, 6, 0.02, (Fault(0.6, "cut", ("peer-1b",), 15.0), Fault(1.0, "kill", ("peer-2b",)))),
    Scenario(5, (1, 3), 1, 3, 9, 0.1, (Fault(1.5, "kill", ("peer-1b",), on="shard"),)),  # after its announcement
    Scenario(6, (1, 3, 1), 1, 3, 9, 0.1, (Fault(0.0, "kill", ("peer-1a",), on="shard", nth=2),)),  # one chunk of it has arrived
]
AGREEMENT = [  # at exact points of the agreement on a step
    Scenario(21, (2, 2), 2, 3, 8, 0.01, (  # the only holder of the whole gradient, while it says so
        Fault(0.0, "damage", ("peer-1a",), on="reduced"), Fault(0.0, "kill", ("peer-1a",), on="entry", nth=3),
    )),
    Scenario(7, (2, 2), 2, 3, 8, 0.01, (Fault(0.0, "damage", ("peer-1b",), on="reduced"),)),
    Scenario(8, (2, 2), 2, 3, 8, 0.01, (Fault(0.0, "kill", ("peer-1b",), on="entry", nth=2),)),
]
FALSE_GRADIENTS = [
    Scenario(1, (2, 2), 2, 2, 8, 0.01, (Fault(0.0, "corrupt", ("peer-1a",), 0.8, how="nan"),)),
    Scenario(1, (1, 2), 1, 2, 8, 0.01, (Fault(0.0, "corrupt", ("peer-1b",), 0.8, how="hundredfold"),)),
    Scenario(1, (2, 2), 2, 2, 8, 0.01, (Fault(0.0, "corrupt", ("peer-0b",), 0.8, how="activations"),)),
]
# fmt: on
FORKED = 310
"""A seed in which both sides of a partition train on, and one leaves its history in the end."""


def test_ten_seeds_keep_every_promise() -> None:
    command = [sys.executable, "-m", "proofs", "fuzz", "--first", "36", "--seeds", "10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=760)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary["faults"] > 10
    assert len(summary["kinds"]) > 5


def test_who_is_behind_gets_what_it_misses_while_the_others_do_not_count_on_it() -> None:
    """After a partition one peer lacks a gradient. Its donors mark it down, since it is still at the step before."""
    assert play(draws.draw(911)).violations == []


def test_a_donor_whose_blocks_do_not_come_gives_way_to_another() -> None:
    """Between two replicas only small frames pass, so each answers the other's probes; the third has the gradient, too."""
    faults = Fault(3.8, "join", ("peer-2j0",)), Fault(5.2, "small", ("peer-1a", "peer-1b"), FOR_EVER_S, limit=2000)
    assert play(Scenario(1117, (3, 3, 1), 2, 2, 9, 0.1, faults, disk_s=0.01)).violations == []


@pytest.mark.parametrize("scenario", [*SCENARIOS, *AGREEMENT, *FALSE_GRADIENTS], ids=str)
def test_the_scenarios_are_survived(scenario: Scenario) -> None:
    outcome = play(scenario)
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(FaultInjected)


def _another_device(patch: pytest.MonkeyPatch, steps: range) -> None:
    """The last replica of stage 1 rounds otherwise in the updates of ``steps``."""
    right, made = reference.stage_compute, []

    def compute(facts: Any, stage: int, *, joins: bool = False) -> TorchCompute:
        own = right(facts, stage, joins=joins)
        made.append(stage)
        if made.count(1) == 2 and stage == 1:  # after the first replica's
            apply = own.apply

            async def differently(gradient: Any, update: Any, turn: Any) -> None:
                await apply(gradient, update, turn)
                if update.step in steps:
                    own.arithmetic.masters[:5] *= 1 + 2**-22

            patch.setattr(own, "apply", differently)
        return own

    patch.setattr(reference, "stage_compute", compute)


@pytest.mark.parametrize("stages", [(2, 2), (1, 2)], ids=str)
def test_a_replica_that_differs_in_the_last_bit_copies_the_others(
    stages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _another_device(monkeypatch, range(1, 2))
    outcome = play(Scenario(1, stages, 1, 4, 8, 0.01, (), same_bits=False))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.ends["peer-1b"] == "finished"
    assert outcome.of(StateMissed, "peer-1b")


def test_a_replica_that_differs_at_every_step_leaves_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _another_device(monkeypatch, range(100))
    outcome = play(Scenario(1, (2, 2), 1, 5, 8, 0.01, (), same_bits=False))
    assert [v for v in outcome.violations if not v.startswith("peer-1b did not survive")] == []
    assert "devices of one kind in a stage" in outcome.ends.pop("peer-1b")
    assert set(outcome.ends.values()) == {"finished"}


def test_sides_of_which_neither_covers_every_stage_end_in_one_lineage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 has built another record of the first step than stage 0, as when each knew another of two rounds."""
    right = StepRunner.advance

    def advance(self: StepRunner, record: StepRecord) -> None:
        if record.step == 0 and self._ctx.roster.own.stage == 1:
            record = replace(
                record, stages=(record.stages[0].model_copy(update={"round": bytes(32)}), *record.stages[1:])
            )
        right(self, record)

    monkeypatch.setattr(StepRunner, "advance", advance)
    outcome = play(Scenario(1, (2, 2), 2, 3, 4, 0.01, ()))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert set(outcome.ends.values()) == {"finished"}


@pytest.mark.parametrize("relays", [True, False])
def test_two_that_never_reach_each_other_cost_nothing_where_members_relay(relays: bool) -> None:
    """Nor does the relay's death: the pair gets another."""
    never = Fault(0.0, "cut", ("peer-0b", "peer-1b"), FOR_EVER_S)
    outcome = play(Scenario(31, (2, 2), 2, 4, 8, 0.01, (never,), relays=relays))
    assert not outcome.violations
    troubles = [*outcome.of(MicrobatchRerouted), *outcome.of(PeerDown)]
    assert bool(troubles) != relays, "\n".join(readable(outcome))
    if relays:
        dying = Fault(1.0, "kill", ("peer-1a",))
        outcome = play(
            Scenario(32, (2, 3), 2, 4, 8, 0.01, (replace(never, who=("peer-1b", "peer-1c")), dying), relays=True)
        )
        assert not outcome.violations, "\n".join(readable(outcome))


def test_a_trainer_in_every_peer_and_sequences_that_grow() -> None:
    growing = ("model.context=12", "train.sequence_start=2", "train.sequence_warmup=3")
    outcome = play(Scenario(6, (2, 2), 4, 4, 9, 0.01, (Fault(0.5, "kill", ("peer-1b",)),), overrides=growing))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.difference > 0


@pytest.mark.parametrize("trainers", [1, 4])
def test_room_for_one_request_at_a_time_slows_the_run_and_changes_no_number(
    trainers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []
    right = Context.send

    async def send(self: Context, peer: str, message: Any, *args: Any, **more: Any) -> None:
        refused.extend([message] if isinstance(message, Lost) and message.why is Why.FULL else [])
        await right(self, peer, message, *args, **more)

    monkeypatch.setattr(Context, "send", send)
    outcome = play(Scenario(7, (2, 1, 2), trainers, 2, 12, 0.01, (), capacity=1))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert len(refused) > 10


@pytest.mark.parametrize("how", ["nan", "hundredfold"])
def test_who_computes_again_dies_and_nobody_else_serves_the_stage(how: str) -> None:
    """What was given up is computed again by who gave it up, and counts."""
    faults = (
        Fault(0.0, "corrupt", ("peer-1a",), 0.8, how=how),
        Fault(0.0, "kill", ("peer-1b",), on="seal", nth=2),
    )
    outcome = play(Scenario(1, (1, 2), 1, 2, 8, 0.01, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.of(GradientStandsOut)
    assert outcome.virtual_s < 10.0


def test_who_computes_again_freezes_and_the_member_goes_on_without_it() -> None:
    """It comes back with a second result that nobody waits for any more, and holds nobody up."""
    faults = (Fault(0.0, "corrupt", ("peer-1a",), 0.8, how="nan"), Fault(1.76, "freeze", ("peer-1b",), 6.0))
    outcome = play(Scenario(1, (1, 2), 1, 3, 8, 0.01, faults))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s < 20.0


def test_nobody_waits_for_a_replica_that_waits_for_those_that_go_on_without_it() -> None:
    """After a partition whose sides, and two newcomers, know different ones of each other; the run stood for six
    minutes."""
    outcome = play(draw(587))
    assert outcome.violations == [], "\n".join(readable(outcome))
    # newcomers that find everybody gone ask for some minutes more, or begin anew
    assert max(e.t for e in outcome.of(StepApplied) if "-0j" not in e.peer) < 30.0


def test_a_peer_that_waits_for_the_record_finds_replicas_that_it_believed_dead() -> None:
    """After a partition a replica held its own round, and its two others sealed one without it: it saw one of them, so
    it did not give way, and they waited for microbatches that their trainer sent to it. (Both sides have half a record by
    then, and lack a stage: after a minute one takes the other's history.)"""
    outcome = play(draw(316))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert max(e.t for e in outcome.of(StepApplied)) < 90.0


def test_a_stage_that_another_peer_reaches_is_not_lost() -> None:
    one_way = Fault(1.0, "one way", ("peer-0a", "peer-1a"), 60.0)
    outcome = play(Scenario(1, (2, 1), 2, 6, 8, 0.01, (one_way,), adopt_after_s=3.0))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert not outcome.of(SteppedBack)


def test_the_trainers_own_stage_is_not_lost_when_one_peer_of_the_next_does_not_reach_it() -> None:
    """Nobody else sends to it. That peer stepped back, and trained no more with the others."""
    one_way = Fault(4.2, "one way", ("peer-1a", "peer-0a"), FOR_EVER_S)
    outcome = play(Scenario(1, (1, 2, 2), 1, 4, 8, 0.01, (one_way,), adopt_after_s=5.0, checkpoint_every=1, apart=True))
    assert not any(e.t < 60.0 for e in outcome.of(SteppedBack)), "\n".join(readable(outcome))
    assert outcome.of(StepApplied)[-1].t < 60.0


def test_a_stage_that_no_peer_before_it_reaches_is_lost_although_the_one_behind_it_is_reached() -> None:
    cuts = [Fault(1.0, "cut", (peer, "peer-1a"), FOR_EVER_S) for peer in ("peer-0a", "peer-0b")]
    outcome = play(Scenario(1, (2, 1, 2), 2, 4, 8, 0.01, tuple(cuts), adopt_after_s=3.0, checkpoint_every=1))
    assert {outcome.ends[p] for p in ("peer-0a", "peer-0b", "peer-2a", "peer-2b")} == {"finished"}
    assert outcome.of(StepApplied)[-1].t < 400.0


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(430, id="a first operation that never ends"),
        pytest.param(752, id="a replica judged itself, and another came back"),
    ],
)
def test_worlds_that_broke_a_promise_once(seed: int) -> None:
    outcome = play(draw(seed))
    assert outcome.violations == [], "\n".join(readable(outcome))


def test_a_checkpoint_ends_where_those_that_wait_believe_who_collects_it_dead() -> None:
    """After a partition each side has a coordinator of its own, and believes the other side dead: the last checkpoint
    never ended."""
    outcome = play(draw(232))
    assert outcome.violations == [], "\n".join(readable(outcome))


def test_a_queue_without_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.facts_of
    monkeypatch.setattr(
        reference, "facts_of", lambda s: replace(right(s), plan=replace(right(s).plan, capacity=s.capacity + 1))
    )
    outcome = play(Scenario(7, (2, 1, 2), 4, 2, 12, 0.01, (), capacity=1))
    assert any("holds 2 requests, and has room for 1" in v for v in outcome.violations)


def test_frames_are_overtaken_by_other_streams_and_no_number_changes() -> None:
    stalled = Scenario(7, (2, 1, 2), 2, 3, 8, 0.01, (Fault(0.5, "kill", ("peer-2b",)),), stalls=0.3)
    outcome, undisturbed = play(stalled), play(replace(stalled, stalls=0.0))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.virtual_s > 2 * undisturbed.virtual_s


@pytest.mark.parametrize(("codec", "low", "high"), [("fp16", 1e-6, 1e-4), ("int8", 1e-5, 5e-3)])
def test_coarser_averaging_stays_near_and_the_same_on_every_replica(codec: str, low: float, high: float) -> None:
    """Replicas compare their weights whenever they seal. The large epsilon keeps AdamW from enlarging what is next to
    nothing."""
    coarse = (f"wire.gradients={codec}", "optimizer.eps=0.1")
    outcome = play(Scenario(8, (2, 3), 2, 4, 8, 0.01, (), overrides=coarse, tolerance=high))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert outcome.difference > low


@pytest.mark.parametrize("magnitude", [1e-12, 1e12])
def test_averaging_in_fp16_trains_tiny_and_huge_losses_as_a_single_process_does(
    magnitude: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of 1e-8 was trained 30 times less by two replicas than by one, and one of 1e4 not at all."""
    accumulate, mean = StageArithmetic.accumulate, SingleProcess.mean_gradient

    def larger(self: StageArithmetic, gradients: Any, step: int) -> None:
        accumulate(self, tuple(g * magnitude for g in gradients), step)

    def larger_mean(self: SingleProcess, step: int, inputs: Any, targets: Any) -> Any:
        gradient, loss = mean(self, step, inputs, targets)
        return gradient * magnitude, loss

    monkeypatch.setattr(StageArithmetic, "accumulate", larger)
    monkeypatch.setattr(SingleProcess, "mean_gradient", larger_mean)
    coarse = ("wire.gradients=fp16", f"optimizer.eps={0.1 * magnitude}", "optimizer.clip=none")
    for stages in ((1, 1), (2, 2)):
        outcome = play(Scenario(8, stages, 1, 3, 4, 0.01, (), overrides=coarse, tolerance=1e-4))
        assert outcome.violations == [], "\n".join(readable(outcome))


def test_fp16_that_overflows_skips_the_step_for_all_and_goes_on_with_a_smaller_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU without bf16; a scale that is too large by far at first."""
    monkeypatch.setattr(scaling, "FIRST", 2.0**17)
    half, killed = ("compute.precision=fp16", "optimizer.eps=0.1"), Fault(0.3, "kill", ("peer-0b",))
    outcome = play(Scenario(9, (2, 1), 2, 3, 4, 0.01, (killed,), overrides=half, tolerance=1e-4))
    assert outcome.violations == [], "\n".join(readable(outcome))
    assert {(e.step, e.skipped) for e in outcome.of(StepApplied)} == {(1, True), (2, True), (3, False)}


@pytest.mark.parametrize("seed", [0, 3, 6])
def test_worlds_in_which_peers_swap_their_stage_keep_the_promises(seed: int) -> None:
    """Drawn only where they are asked for, so that older seeds stay as they are."""
    drawn = draws.draw(seed, "swap")
    assert drawn.swapped
    assert not draws.draw(seed).swapped
    assert play(drawn).violations == []
