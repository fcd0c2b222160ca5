"""A position is the place of a peer in the run. A survey asks all peers for holders of a microbatch, before another try."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.policy.deadline import CEILING_S
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.lifecycle import Lifecycle
from muletrain.runtime.core.times import pause_s
from muletrain.runtime.members.row import Row
from muletrain.runtime.microbatch.inflight import InFlightStep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.network.base import PeerId
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


PATIENCE_S = 15.0
"""Least seconds to wait for a peer that still works on a microbatch."""
PAUSES = 30
"""Least number of checks of such a peer: a long wait costs hardly more questions than a short wait."""


class Survey:
    """The questions of one peer to all other peers. Calls during a question share the next question: a lost peer or a
    lying member leads to questions about many microbatches at once."""

    def __init__(self, ctx: Context, position: Position) -> None:
        self._ctx, self._position = ctx, position
        self._asking: dict[tuple[bytes, int], asyncio.Task[dict[PeerId, Row]]] = {}
        self._next: dict[tuple[bytes, int], asyncio.Task[dict[PeerId, Row]]] = {}
        """Running questions to all peers, and the questions that follow, by lineage and step."""

    async def still_missing(
        self,
        lineage: bytes,
        step: int,
        index: int,
        stages: tuple[int, ...],
        patience_s: Callable[[], float],
        ignored: Callable[[PeerId], bool] = lambda peer: False,
        *,
        silent: Collection[int] = (),
        given: bool = False,
    ) -> tuple[tuple[int, ...], float | None]:
        """Returns the ``stages`` that still lack microbatch ``index``, and the loss [nats/token] if any peer knows it.

        A stage has the microbatch if a peer that is not ``ignored``, ourselves included, holds it in its accumulator;
        that peer recomputes without accumulating. While some peer is still at work, wait: a second accumulation would
        cost a whole accumulator. With ``given``, wait, too, while another trainer has given the microbatch out; of two
        trainers that ask at the same time, the trainer with the higher id waits. (A call on behalf of such a trainer
        must not set ``given``: the trainer would wait for itself.) Ends within ``patience_s`` (at least
        ``PATIENCE_S``) after the awaited peers last accumulated anything, or within ``PATIENCE_S`` if their devices are
        late.

        Once some stage has the microbatch, ``silent`` stages count as well, without a live peer's report: a silent peer
        may come back with its accumulator, and microbatches missing when the stage seals are run again then.
        """
        if not stages:
            return (), None
        clock, me, trainers = self._ctx.clock, self._ctx.net.peer_id, {*self._ctx.roster.trainers()}
        begun_s, since_s, done = clock.now(), clock.now(), -1
        for pause in itertools.count():
            current = await self.everyone(lineage, step)
            counted = [progress for peer, progress in current.items() if progress.stage in stages and not ignored(peer)]
            at_it = [progress for progress in counted if index in progress.in_flight]
            for peer, progress in current.items() if given else ():
                asks = index in progress.given or (index in progress.asking and peer < me)
                if asks and peer != me and peer in trainers and not ignored(peer):
                    at_it.append(progress)
            if (now_done := sum(len(progress.accumulated) for progress in at_it)) > done:
                since_s, done = clock.now(), now_done
            hangs = all(progress.late for progress in at_it)
            longest_s = PATIENCE_S if hangs else max(PATIENCE_S, patience_s())
            over = clock.now() - since_s >= longest_s or clock.now() - begun_s >= max(CEILING_S, longest_s)
            if not at_it or over:
                break
            await clock.sleep(pause_s(pause, longest_s / PAUSES))
        have = {progress.stage for progress in counted if index in progress.accumulated}
        have |= {*silent} if have else set()
        losses = (progress.loss(index) for progress in current.values())
        return tuple(s for s in stages if s not in have), next((loss for loss in losses if loss is not None), None)

    async def everyone(self, lineage: bytes, step: int) -> dict[PeerId, Row]:
        """Returns the progress of every peer at ``step``, this peer included, asked after this call. Ends after
        ``microbatch/position._ask``."""
        key = lineage, step
        if (survey := self._next.get(key)) is None:
            survey = self._ctx.spawn(self._ask(key, self._asking.get(key)), "survey")
            self._next[key] = survey
        return await asyncio.shield(survey)

    async def _ask(self, key: tuple[bytes, int], before: asyncio.Task[dict[PeerId, Row]] | None) -> dict[PeerId, Row]:
        """Ends after ``members/detector.ask_all``, also of the question before."""
        if before is not None:
            await asyncio.wait({before})
        self._asking[key] = self._next.pop(key)
        ctx, (lineage, step) = self._ctx, key
        try:
            answers = await ctx.detector.ask_all(ctx.roster.everyone(), lineage, step)
            answers[ctx.net.peer_id] = self._position.row(step, lineage)
            return {peer: progress for peer, progress in answers.items() if progress.current}
        finally:
            if key not in self._next:
                del self._asking[key]
