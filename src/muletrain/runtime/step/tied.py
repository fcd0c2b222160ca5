"""Two stages that share parameters add their gradients of the shared parameters (``optim.tied``).

Once both stages' rounds count, each peer of either stage takes the other stage's part, and states the inner product of
both parts, which the record needs for the global norm. Both copies are updated with the sum, and so stay equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.optim.tied import product
from muletrain.runtime.averaging.mean_gradient import fetch_tied
from muletrain.runtime.core.times import pause_s
from muletrain.runtime.members.row import TiedEntry

if TYPE_CHECKING:
    import asyncio

    from torch import Tensor

    from muletrain.runtime.averaging.mean_gradient import MeanGradient
    from muletrain.runtime.members.row import StageEntry
    from muletrain.runtime.step.exchange import Exchange
    from muletrain.runtime.step.state import Lasting, StepState


class TiedSum:
    """Takes the other stage's part in one step; each step has a new one."""

    def __init__(self, lasting: Lasting, state: StepState, exchange: Exchange) -> None:
        self._ctx, self._downloader, self._state, self._exchange = lasting.ctx, lasting.downloader, state, exchange
        tied, self._own = self._ctx.plan.tied, self._ctx.roster.own.stage
        self._tied = tied if tied is not None and self._own in tied.stages else None
        self._working: asyncio.Task[None] | None = None
        self._stated: tuple[StageEntry, StageEntry] | None = None
        """Our round and the other stage's, for the stated product."""
        self._failed = 0

    @property
    def _theirs(self) -> StageEntry | None:
        """The other stage's round in the record, or the round that counts so far."""
        if self._tied is None:
            return None
        first, second = self._tied.stages
        return self._state.builder.round_of(second if self._own == first else first)

    @property
    def ready(self) -> bool:
        """Is everything here that the update needs? Once there is a record."""
        if self._tied is None:
            return True
        theirs = self._theirs
        return theirs is not None and self._has(theirs)

    def _has(self, theirs: StageEntry) -> bool:
        other = self._state.other
        return other is not None and _same(other.entry, theirs)

    def look_around(self) -> None:
        """Continue after any change."""
        own, theirs = self._state.gradient, self._theirs
        if own is None or theirs is None or (self._working is not None and not self._working.done()):
            return
        if self._stated is None or not all(map(_same, self._stated, (own.for_record, theirs))):
            self._working = self._ctx.spawn(self._work(own, theirs), "tied parameters")

    async def _work(self, own: MeanGradient, theirs: StageEntry) -> None:
        ctx, state = self._ctx, self._state
        if not self._has(theirs) and not await self.take(theirs):
            self._failed += 1
            await ctx.clock.sleep(pause_s(self._failed - 1))
        elif (other := state.other) is not None and (tied := self._tied) is not None:
            found = await ctx.compute.offload(lambda: product(tied.part(own.values, self._own), other.values))
            first, second = sorted((own.for_record, theirs), key=lambda entry: entry.stage)
            rounds = first.round, second.round
            state.tied = TiedEntry(rounds=rounds, product=found)
            self._stated = own.for_record, theirs
            state.builder.add_tied(ctx.net.peer_id, state.tied)
            self._exchange.state(state.audience(), tied=state.tied)
        ctx.news.touched()

    async def take(self, theirs: StageEntry) -> bool:
        """Take the part of round ``theirs`` from any holder. False if no peer gives the part."""
        ctx, roster = self._ctx, self._ctx.roster
        holders = sorted({*self._state.builder.holders(theirs), *roster.stage(theirs.stage), *roster.replicas()})
        first = sum(p < ctx.net.peer_id for p in holders)  # each peer begins with a different holder
        at = self._state.lineage, self._state.step
        found = await fetch_tied(ctx, self._downloader, theirs, at, [*holders[first:], *holders[:first]])
        if found is None:
            return False
        self._state.other = found
        return True

    async def take_agreed(self) -> bool:
        """Take the part that the record needs, if any. False if no peer gives the part (any more)."""
        theirs = self._theirs
        return self.ready or (theirs is not None and await self.take(theirs))

    def update(self) -> list[tuple[int, int, Tensor]]:
        """``Update.tied``."""
        if self._tied is None:
            return []
        assert self.ready, "the record was waited for together with this"
        assert self._state.other is not None
        return self._tied.placed(self._state.other.values, self._own)

    def close(self) -> None:
        """End the step."""
        if self._working is not None:
            self._working.cancel()


def _same(a: StageEntry, b: StageEntry) -> bool:
    """Do both name the same round, with the same tied content?"""
    return (a.round, a.tied) == (b.round, b.tied)
