"""A position is the place of a peer in the run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.members.row import Row
from muletrain.runtime.microbatch.inflight import InFlightStep

if TYPE_CHECKING:
    from muletrain.runtime.members.context import Context


class Behind(MuletrainError):
    """The other peers have gone on without us. ``weights_hold``: our weights still precede this step, so applying the
    agreed update is enough; otherwise the state must come from a replica. ``rival``: another lineage stays, and
    ``renamed`` is a lineage that takes our weights, for lack of peers at our stage."""

    def __init__(
        self, message: str, *, weights_hold: bool = True, rival: bool = False, renamed: Chain | None = None
    ) -> None:
        super().__init__(message)
        self.weights_hold, self.rival, self.renamed = weights_hold, rival, renamed


class Position:
    """The step that a peer agrees on next, the step computed ahead (``inflight``), and the peer's history. Room
    ``step`` writes a position; other rooms read, and may interrupt the step."""

    def __init__(self, ctx: Context, step: int, lineage: bytes, life: Lifecycle | None = None) -> None:
        """``step``: the weights precede this step; while ``life`` has no state, a state must be loaded first."""
        self._ctx, self.life = ctx, life or Lifecycle()
        self._chain, self.begun = Chain(step, (lineage,)), ctx.clock.now()
        self.work = InFlightStep(step, lineage, ctx.plan.microbatches)
        self.ahead: InFlightStep | None = None
        """The next step, if its computation has begun."""
        self.settled = self.life.has_state
        """The weights precede ``step``; false while an update is applied."""
        self.away = not self.life.has_state
        """The other peers go on without us: our work for this step is of no use there."""
        self.others_at = step
        """The furthest step, of our lineage, that another peer is known to have reached."""
        self.interrupted: Behind | None = None
        """Why this step ends at the next look around."""

    @property
    def step(self) -> int:
        return self.work.step

    @property
    def lineage(self) -> bytes:
        return self.work.lineage

    @property
    def serves(self) -> bool:
        """Does this peer have its stage's state, and take part in the step?"""
        return not self.away and self.life.has_state

    @property
    def chain(self) -> Chain:
        """The history that led to this step."""
        return replace(self._chain, over=True) if self.life.finished else self._chain

    @property
    def applied(self) -> bytes:
        """hash(R_{step-1}), or the genesis': the record that made our weights."""
        return self._chain.lineages[-1]

    def under_way(self) -> tuple[InFlightStep, ...]:
        return (self.work,) if self.ahead is None else (self.work, self.ahead)

    def computing(self, step: int) -> InFlightStep | None:
        """Returns the step in flight; None: microbatches of ``step`` are not computed here."""
        return next((work for work in self.under_way() if work.step == step), None)

    def enter(self, chain: Chain) -> None:
        """Go to the step of ``chain``, with the part computed ahead, or from nothing."""
        delayed = self._ctx.plan.delayed and len(chain.lineages) > 1
        step, lineage = chain.step, chain.lineages[-2 if delayed else -1]
        self._chain, self.begun = replace(chain, over=False), self._ctx.clock.now()
        ahead, self.ahead = self.ahead, None
        self.work.end()
        if ahead is not None and (ahead.step, ahead.lineage) == (step, lineage):
            self.work = ahead
            ahead.ledger.reopen(keep=True)
        else:
            assert ahead is None  # let go of before
            self.work = InFlightStep(step, lineage, self._ctx.plan.microbatches)
        self.away, self.interrupted = False, None

    def advance(self, lineage: bytes) -> None:
        """Go to the next step, which begins with ``lineage``."""
        why = self.interrupted
        self.enter(self._chain.then(lineage))
        # the interruption came too late for the previous step; a renamed lineage is no rival at the next step
        if why is not None and why.rival and why.renamed is None:
            self.interrupted = why

    def begin_ahead(self) -> InFlightStep:
        """Compute the next step, too, from now on (delayed updates)."""
        self.ahead = InFlightStep(self.step + 1, self.applied, self._ctx.plan.microbatches)
        return self.ahead

    def interrupt(self, reason: Behind) -> None:
        """End this step with ``reason``, at the next look around."""
        self.interrupted = reason
        self._ctx.news.touched()

    def row(self, step: int, lineage: bytes, *, brief: bool = False, through: bool = False) -> Row:
        """Returns this peer's row of ``step``, without statements. ``brief``: also without microbatches; ``through``: also
        with those that are through all stages."""
        ctx, work = self._ctx, self.computing(step)
        current = work is not None and work.lineage == lineage and not (work is self.work and self.away)
        here = Row(
            current=current,
            stage=ctx.roster.own.stage,
            step=self.step,
            lineage=b"" if self.away and not current else self.applied,
            branch=branch_of(self.lineage),
            round=self.work.round if current else b"",
            moved=ctx.net.moved(),
        )
        if work is None or not current or brief:
            return here
        accumulated, losses = sorted(work.covered), {**work.losses, **work.ledger.losses}
        return here.model_copy(
            update={
                "accumulated": tuple(accumulated),
                "accumulated_losses": tuple(losses.get(i, math.nan) for i in accumulated),
                "in_flight": tuple(sorted(work.serving)),
                "answering": tuple(sorted(work.answering)),
                "given": tuple(sorted(work.given)),
                "asking": tuple(sorted(work.asking)),
                "completed": tuple(work.losses) if through else (),
                "losses": tuple(work.losses.values()) if through else (),
            }
        )
