"""The trainer role: builds microbatches and sees them through the stages. It holds no weights; losing one loses nothing."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Protocol

import torch

from muletrain.errors import MuletrainError
from muletrain.policy.claims import claimant
from muletrain.swarm.messages import Gap, Request, TrainerDone
from muletrain.swarm.router import Router, StageLost
from muletrain.wire.codec import encode_ids

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from muletrain.swarm.context import Context

MAX_TRIES = 12
"""Injections of one microbatch before the trainer gives up with an error instead of trying for ever."""


class Source(Protocol):
    """Where microbatches come from: a pure function of (step, index)."""

    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """inputs and targets, int64 [B, T]."""
        ...


class Trainer:
    """Injects the microbatches it claims, within a window."""

    def __init__(self, ctx: Context, source: Source, window: int) -> None:
        self._ctx = ctx
        self._source = source
        self._window = asyncio.Semaphore(window)
        self.router = Router(ctx, stage=0)
        self._attempts: dict[tuple[int, int], itertools.count[int]] = {}
        self._lineage = b""
        self._step = -1

    async def run_step(self, step: int, lineage: bytes) -> None:
        """All microbatches of ``step`` that are ours; then tell everyone."""
        ctx, me = self._ctx, self._ctx.net.peer_id
        self._step, self._lineage = step, lineage
        self._attempts = {}
        self.router.refresh()
        trainers = ctx.roster.trainers()
        mine = [i for i in range(ctx.plan.microbatches) if claimant(step, i, trainers) == me]
        everywhere = tuple(range(ctx.plan.stages))
        losses = await asyncio.gather(*(self._through(i, everywhere) for i in mine))
        if mine:
            done = TrainerDone(lineage=lineage, step=step, indices=tuple(mine), losses=tuple(losses))
            await ctx.tell((*ctx.roster.others(), me), done)

    async def on_gap(self, gap: Gap) -> None:
        """A stage misses microbatches: the trainer they fall to runs them again for that stage alone."""
        trainers = self._ctx.roster.trainers()
        mine = [i for i in gap.indices if claimant(gap.step, i, trainers) == self._ctx.net.peer_id]
        await asyncio.gather(*(self._through(i, (gap.stage,)) for i in mine))

    async def _through(self, index: int, accumulate: tuple[int, ...]) -> float:
        """One microbatch, tried until it is through. Returns its loss [nats/token]."""
        async with self._window:
            inputs, targets = self._source.microbatch(self._step, index)
            tensors = [encode_ids(torch.from_numpy(inputs)), encode_ids(torch.from_numpy(targets))]
            attempts = self._attempts.setdefault((self._step, index), itertools.count())
            for _ in range(MAX_TRIES):
                request = Request(
                    lineage=self._lineage,
                    step=self._step,
                    index=index,
                    attempt=next(attempts),
                    trainer=self._ctx.net.peer_id,
                )
                try:
                    return (await self.router.request(request, accumulate, tensors)).loss
                except StageLost:
                    accumulate = await self._still_missing(index, accumulate)
                    self.router.refresh()
                    if not self._ctx.roster.stage(0):
                        raise MuletrainError(f"step {self._step}: stage 0 has no live peer left") from None
        raise MuletrainError(f"step {self._step}: microbatch {index} could not be finished in {MAX_TRIES} tries")

    async def _still_missing(self, index: int, stages: tuple[int, ...]) -> tuple[int, ...]:
        """Before a retry ask who holds the microbatch already: those stages recompute without accumulating."""
        have = set()
        for peer in self._ctx.roster.others():
            held = await self._ctx.probe(peer, self._lineage, self._step)
            if held is not None and held.current and index in held.held:
                have.add(held.stage)
        return tuple(s for s in stages if s not in have)
