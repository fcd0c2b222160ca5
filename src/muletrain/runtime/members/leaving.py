"""A peer leaves in order: between two steps, and never as the last replica of a stage (CONTRIBUTING, "How a step
goes", 6).

A peer that wants to leave announces it in its seal, as the request to stop travels. Who leaves is a pure function of
the record (``StepRecord.leavers``), so all members count without it from the same step on: nothing waits for it,
nothing is sent to it, and no number changes. It stays until the other replicas of its stage have that step, since they
may still need something from it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from muletrain.events import LeavePutOff
from muletrain.policy.deadline import backoff_s

if TYPE_CHECKING:
    from muletrain.runtime.members.context import Context

TRIES, PAUSE_S, PAUSE_MAX_S = 60, 0.05, 2.0
"""Times that the other replicas are asked whether they have the step, and the pause between, which doubles [s]. Two
minutes in all: a replica that lost a chunk of the gradient waits for its deadlines before it takes our state."""


class Unsaved(Protocol):
    """What of this peer's work nobody else has yet (``checkpoint.checkpointing``)."""

    def unsafe(self) -> str | None:
        """What would be lost if this peer left now, in words; None: nothing."""
        ...


class Departure:
    """This peer's wishes: to leave, or that the run ends for all. ``Peer`` writes them."""

    def __init__(self, ctx: Context, unsaved: Unsaved) -> None:
        self._ctx, self._unsaved = ctx, unsaved
        self.wanted = False
        self.stop_requested = False
        """The run should end after the current step."""
        self._told: str | None = None

    def announced(self) -> bool:
        """Returns what our seal says: whether we want to leave and are not needed. Emits why we stay, when that
        changes."""
        if not self.wanted:
            return False
        reason = self._ctx.roster.needs_us() or self._unsaved.unsafe()
        if reason is not None and reason != self._told:
            self._ctx.emit(LeavePutOff(name=self._ctx.roster.own.name, reason=reason))
        self._told = reason
        return reason is None

    async def taken_over(self, lineage: bytes, step: int) -> bool:
        """Wait until every replica of our stage that answers has come to ``step``. Returns False if none has in the
        end, so that ours is the last state, or if none answers for half the time after which others adopt the stage.
        Replicas that are down are asked, too: a healed link does not announce itself."""
        ctx = self._ctx
        there, answered_s = False, ctx.clock.now()
        for attempt in range(TRIES):
            answers = await asyncio.gather(*(ctx.detector.probe(p, lineage, step) for p in ctx.roster.replicas()))
            answered = [progress.beyond(step - 1) for progress in answers if progress is not None]
            there = any(answered)
            if answered:
                answered_s = ctx.clock.now()
            if (there and all(answered)) or ctx.clock.now() - answered_s > ctx.plan.adopt_after_s / 2:
                break
            await ctx.clock.sleep(backoff_s(attempt, PAUSE_S, PAUSE_MAX_S))
        return there
