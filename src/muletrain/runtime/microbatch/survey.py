"""Asks all peers for holders of a microbatch, before another try."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from muletrain.policy.deadline import CEILING_S
from muletrain.runtime.core.times import pause_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.row import Row
    from muletrain.runtime.microbatch.position import Position

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
        losses = (progress.loss(index) for progress in current.values())
        return tuple(s for s in stages if s not in have), next((loss for loss in losses if loss is not None), None)

    async def everyone(self, lineage: bytes, step: int) -> dict[PeerId, Row]:
        """Returns the progress of every peer at ``step``, this peer included, asked after this call. Ends after
        ``microbatch/survey._ask``."""
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
