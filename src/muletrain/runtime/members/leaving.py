"""A peer leaves in order: between two steps, and never as the last replica of a stage (CONTRIBUTING, "How a step goes",
6).

A peer announces the wish to leave in its seal, like a request to stop. The leavers are a pure function of the record
(``StepRecord.leavers``), so all members stop counting on a leaver from the same step on: no member waits for the leaver
or sends messages there, and no number changes. The leaver stays until the other replicas of its stage have that step,
because these may still need data from the leaver.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from muletrain.events import LeavePutOff
from muletrain.runtime.core.times import GONE_S, pause_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.runtime.members.context import Context

TAKING = 2
"""Multiple of ``GONE_S`` for which a leaver waits at most: a replica that lost a chunk of the gradient waits for its
deadlines before taking our state."""


class Departure:
    """This peer's wishes to leave, or to end the run for all peers. ``Peer`` writes both."""

    def __init__(self, ctx: Context, unsafe: Callable[[], str | None]) -> None:
        """``unsafe`` describes work of this peer that would be lost if the peer left now; None: there is none."""
        self._ctx, self._unsafe = ctx, unsafe
        self.wanted = False
        self.stop_requested = False
        """The run should end after the current step."""
        self._told: str | None = None

    def announced(self) -> bool:
        """Returns whether our seal says that we leave: we want to, and are not needed. Emits each new reason for
        staying."""
        if not self.wanted:
            return False
        reason = self._ctx.roster.needs_us() or self._unsafe()
        if reason is not None and reason != self._told:
            self._ctx.emit(LeavePutOff(name=self._ctx.roster.own.name, reason=reason))
        self._told = reason
        return reason is None

    async def taken_over(self, lineage: bytes, step: int) -> bool:
        """Wait until every answering replica of our stage has come to ``step``. Returns False if none has in the end,
        so that our state is the last, or if no replica answers for half the time after which other peers adopt the
        stage. Replicas that are down are asked, too: a healed link does not announce itself. Ends within ``TAKING *
        GONE_S``."""
        ctx = self._ctx
        begin = answered_s = ctx.clock.now()
        for attempt in itertools.count():
            answers = await asyncio.gather(*(ctx.detector.probe(p, lineage, step) for p in ctx.roster.replicas()))
            answered = [progress.beyond(step - 1) for progress in answers if progress is not None]
            there = any(answered)
            if answered:
                answered_s = ctx.clock.now()
            now = ctx.clock.now()
            silent = now - answered_s > ctx.plan.adopt_after_s / 2
            if (there and all(answered)) or silent or now - begin > TAKING * GONE_S:
                break
            await ctx.clock.sleep(pause_s(attempt))
        return there
