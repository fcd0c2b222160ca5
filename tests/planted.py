"""Bugs to plant: for each promise of a run some that break it. Worlds of the fuzzer must find them
(``test_planted_seeds``)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from muletrain.compute.arithmetic import StageArithmetic
from muletrain.compute.torch_compute import TorchCompute
from muletrain.runtime.averaging.averager import Averager
from muletrain.runtime.averaging.rounds import RoundFailed
from muletrain.runtime.core import waiting
from muletrain.runtime.core.tasks import Tasks
from muletrain.runtime.members.row import ShardFacts
from muletrain.runtime.microbatch import trainer
from muletrain.runtime.microbatch.cross_check import GradientCrossCheck
from muletrain.runtime.microbatch.inflight import Ledger
from muletrain.runtime.microbatch.position import Survey
from muletrain.runtime.microbatch.trainer import Trainer
from muletrain.runtime.peer.reporting import Reporting
from muletrain.runtime.recovery import forks as lineages
from muletrain.runtime.recovery.rollback import Rollback
from muletrain.runtime.step import agreement, audit, record
from muletrain.runtime.step.record import Attested, StepRecord
from muletrain.runtime.step.reruns import Reruns
from muletrain.runtime.step.runner import StepRunner
from muletrain.runtime.step.state import StepState
from muletrain.wire.codec import decode
from tests.planted_state import (
    a_device_is_never_late,
    a_disk_that_is_full_ends_its_peer,
    damages_what_it_writes,
    forgets_moments,
    forgets_no_part,
    keeps_all_gradients,
    removes_nothing,
    room_for_one_more,
    shared_tokens_are_read_from_the_end,
    the_beginning_is_near_enough,
    without_moments,
    writes_the_weights_of_before,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def retry_accumulates_again(patch: pytest.MonkeyPatch) -> None:
    async def all_stages(
        self: Survey, lineage: bytes, step: int, index: int, stages: Any, *rest: Any, **more: Any
    ) -> Any:
        return stages, None

    def begin(self: Ledger, index: int) -> bool:
        self._in_flight.add(index)
        return True

    patch.setattr(Survey, "still_missing", all_stages)
    patch.setattr(Ledger, "begin", begin)


def part_of_the_record(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRecord, "gradient_norm", property(lambda self: self.stages[0].square_norm ** 0.5))


def stale_weights(patch: pytest.MonkeyPatch) -> None:
    """Every update comes one step late, so that microbatches see the weights of the step before."""
    right, late = TorchCompute.apply, {}

    async def apply(self: TorchCompute, gradient: Any, update: Any, turn: Any) -> None:
        before, late[id(self)] = late.get(id(self), torch.zeros_like(gradient)), gradient.clone()
        await right(self, before, update, turn)

    patch.setattr(TorchCompute, "apply", apply)


def lost_trainer(patch: pytest.MonkeyPatch) -> None:
    async def take_over_orphans(self: Trainer, *, late: bool = False) -> None:
        return None

    patch.setattr(Trainer, "take_over_orphans", take_over_orphans)


def reused_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agreement, "round_id", lambda lineage, stage, step, *rest: bytes([stage, step]) * 16)


def accumulator_kept_over_a_migration(patch: pytest.MonkeyPatch) -> None:
    """What a peer summed up for one stage is still there when it serves the next."""
    right_apply, right_load, kept = StageArithmetic.apply, StageArithmetic.load_state, {}

    def apply(self: StageArithmetic, gradient: Any, update: Any) -> None:
        kept[self.stage] = self.accumulator(update.step).clone()
        right_apply(self, gradient, update)

    def load(self: StageArithmetic, state: Any) -> None:
        right_load(self, state)
        accumulator = self.accumulator(0)
        for before in (gradient for stage, gradient in kept.items() if stage != self.stage):
            size = min(len(before), len(accumulator))
            accumulator[:size] += before[:size]

    patch.setattr(StageArithmetic, "apply", apply)
    patch.setattr(StageArithmetic, "load_state", load)
    patch.setattr(TorchCompute, "clear", lambda self, step: None)


def sides_stay_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lineages, "gives_way", lambda own, other, *, stalled: False)


def accumulator_kept(patch: pytest.MonkeyPatch) -> None:
    right = TorchCompute.apply

    async def apply(self: TorchCompute, gradient: Any, update: Any, turn: Any) -> None:
        accumulator = self.arithmetic.accumulator(update.step)
        kept = accumulator.clone()
        await right(self, gradient, update, turn)
        accumulator.copy_(kept)

    patch.setattr(TorchCompute, "apply", apply)


def gaps_ignored(patch: pytest.MonkeyPatch) -> None:
    right = audit.resolve

    def resolve(sealed: Any, microbatches: int) -> Any:
        cover = right(sealed, microbatches)
        return type(cover)(cover.chosen, cover.dropped, ())

    patch.setattr(audit, "resolve", resolve)


def one_holder_is_enough(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attested, "complete", lambda self, live, attesting: True)
    patch.setattr(record, "held_by_most", lambda rounds, voters, tie=0: rounds)


def attests_before_it_holds(patch: pytest.MonkeyPatch) -> None:
    """What it accumulated itself is taken for the mean, if the others' shards do not come."""
    right = Averager.reduce

    async def reduce(self: Averager, plan: Any, gradient: Any) -> Any:
        try:
            return await right(self, plan, gradient)
        except RoundFailed:
            facts = ShardFacts(content=bytes(32), square_norm=0.0, finite=True)
            return gradient / plan.microbatches, tuple(facts for _ in plan.members)

    patch.setattr(Averager, "reduce", reduce)


def nothing_stands_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(audit, "standing_out", lambda seals, again: [])


def what_is_left_out_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Whoever stands out counts with what it had, after others computed it again."""
    patch.setattr(Reruns, "drop", lambda self: None)


def no_second_opinion(patch: pytest.MonkeyPatch) -> None:
    async def gradient(self: GradientCrossCheck, forward: Any, sent: Any, answer: Any) -> Any:
        return decode(answer.gradient), True

    patch.setattr(GradientCrossCheck, "gradient", gradient)


def sums_losses(patch: pytest.MonkeyPatch) -> None:
    right = Reporting.applied

    def applied(self: Reporting, record: Any, work: Any, not_finite: str) -> None:
        work.losses = {index: 1.1 * loss for index, loss in work.losses.items()}
        right(self, record, work, not_finite)

    patch.setattr(Reporting, "applied", applied)


def pauses_for_long(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainer, "pause_s", lambda tries: 260.0)


def never_stops(patch: pytest.MonkeyPatch) -> None:
    """One of the stages does not hear of it."""
    right = StepRunner.advance

    def advance(self: StepRunner, record: Any) -> None:
        if record.stop:
            self._ctx.compute.clear(record.step)
            raise AssertionError("this peer does not know how to stop")
        right(self, record)

    patch.setattr(StepRunner, "advance", advance)


def both_steps_see_the_same_weights(patch: pytest.MonkeyPatch) -> None:
    right = StageArithmetic.module
    patch.setattr(StageArithmetic, "module", lambda self, step: right(self, 0))


def newcomers_get_the_newest_weights_only(patch: pytest.MonkeyPatch) -> None:
    right = StageArithmetic.load_state

    def load_state(self: StageArithmetic, state: dict[str, Any]) -> None:
        right(self, {name: value for name, value in state.items() if not name.startswith("delayed/")})

    patch.setattr(StageArithmetic, "load_state", load_state)


def the_step_ahead_is_cleared_with_the_one_that_is_over(patch: pytest.MonkeyPatch) -> None:
    right = TorchCompute.apply

    async def apply(self: TorchCompute, gradient: Any, update: Any, turn: Any) -> None:
        await right(self, gradient, update, turn)
        self.clear(update.step + 1)

    patch.setattr(TorchCompute, "apply", apply)


def newcomers_round(patch: pytest.MonkeyPatch) -> None:
    """In the last bit of what they are given."""
    right = StageArithmetic.load_state

    def load(self: StageArithmetic, state: dict[str, Any]) -> None:
        right(self, {k: v * (1 + 2**-22) if k.startswith("model/") else v for k, v in state.items()})

    patch.setattr(StageArithmetic, "load_state", load)


def a_replica_rounds(patch: pytest.MonkeyPatch) -> None:
    """Every second one, in the last bit of each update."""
    count, begun, right = itertools.count(), TorchCompute.__init__, TorchCompute.apply

    def init(self: TorchCompute, *args: Any, **kwargs: Any) -> None:
        begun(self, *args, **kwargs)
        self.rounds = bool(next(count) % 2)  # type: ignore[attr-defined]

    async def apply(self: TorchCompute, gradient: Any, update: Any, turn: Any) -> None:
        await right(self, gradient, update, turn)
        if self.rounds:  # type: ignore[attr-defined]
            self.arithmetic.masters[:5] *= 1 + 2**-22

    patch.setattr(TorchCompute, "__init__", init)
    patch.setattr(TorchCompute, "apply", apply)


def a_death_takes_its_replicas_along(patch: pytest.MonkeyPatch) -> None:
    right = Rollback._ask

    def without_peers(self: Rollback) -> tuple[int, ...]:
        roster, own = self._ctx.roster, self._ctx.roster.own.stage
        dead = {roster.member(p).stage for p in roster.everyone() if not roster.is_alive(p)}
        return tuple(sorted(dead - {own}))

    async def ask(self: Rollback, peer: Any) -> Any:
        return None if self._ctx.roster.member(peer).stage in without_peers(self) else await right(self, peer)

    patch.setattr(Rollback, "without_peers", without_peers)
    patch.setattr(Rollback, "_ask", ask)


def work_goes_on_when_it_is_over(patch: pytest.MonkeyPatch) -> None:
    async def close(self: Tasks) -> None:
        self._background.shutdown(wait=False, cancel_futures=True)

    patch.setattr(Tasks, "close", close)


def counts_what_it_gave_up(patch: pytest.MonkeyPatch) -> None:
    right = Reporting.applied

    def applied(self: Reporting, record: Any, work: Any, not_finite: str) -> None:
        work.counted = dict.fromkeys((e.round for e in record.stages), work.computed)
        right(self, record, work, not_finite)

    patch.setattr(Reporting, "applied", applied)


def anyone_speaks_for_anyone(patch: pytest.MonkeyPatch) -> None:
    """One round entry is the word of all its members."""

    def take_entry(self: StepState, sender: str, entry: Any, *, applied: bool) -> None:
        for member in entry.members:
            self.builder.add(entry.model_copy(update={"holder": member, "without": ()}))

    patch.setattr(StepState, "_take_entry", take_entry)


def waits_have_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(waiting, "MAX_SILENCE", 1 << 60)


PROMISES: dict[str, dict[Callable[[pytest.MonkeyPatch], None], str]] = {
    "each microbatch counts once": {
        retry_accumulates_again: "other weights",
        accumulator_kept: "other weights",
        gaps_ignored: "other weights",
        part_of_the_record: "other weights",
        stale_weights: "other weights",
        attests_before_it_holds: "other weights",
        accumulator_kept_over_a_migration: "other weights",
        newcomers_get_the_newest_weights_only: "other weights",
        the_step_ahead_is_cleared_with_the_one_that_is_over: "other weights",
        shared_tokens_are_read_from_the_end: "other weights",
    },
    "replicas have the same bits": {
        newcomers_round: "replicas of one stage",
        a_replica_rounds: "replicas of one stage",
    },
    "false gradients and lies change no number": {
        nothing_stands_out: "other weights",
        what_is_left_out_is_kept: "other weights",
        no_second_opinion: "a norm of",
        anyone_speaks_for_anyone: "",
    },
    "a lost stage begins where its checkpoint ended": {
        without_moments: "other weights",
        the_beginning_is_near_enough: "other weights",
    },
    "a run begun again goes on as it was": {forgets_moments: "other weights"},
    "nobody steps back while every stage has a peer": {a_death_takes_its_replicas_along: "stepped back, though"},
    "one history stays": {sides_stay_apart: "two lineages"},
    "whoever lives comes to the end": {lost_trainer: "did not survive"},
    "nothing hangs": {waits_have_no_end: "hang", never_stops: "does not know how to stop"},
    "a step takes no longer than its faults": {
        pauses_for_long: "with these faults it may take",
        a_device_is_never_late: "",
    },
    "nothing is left behind": {work_goes_on_when_it_is_over: "a task is left over"},
    "queues and memory have bounds": {
        room_for_one_more: "and has room for",
        keeps_all_gradients: "may keep",
        forgets_no_part: "may keep",
    },
    "a checkpoint is what its manifest says, and no more are kept": {
        writes_the_weights_of_before: "other weights than a single process's",
        damages_what_it_writes: "is not what the manifest says",
        removes_nothing: "keeps checkpoints of",
        a_disk_that_is_full_ends_its_peer: "nobody expected this",
    },
    "reports add up": {sums_losses: "reports a loss of", counts_what_it_gave_up: "microbatches were counted"},
}
"""Bugs of each, and what the fuzzer says of them; empty: anything, for without a bug it says nothing."""
