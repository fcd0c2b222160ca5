"""At the end of a run all peers wait for the last checkpoint, and dismiss each other."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from muletrain.errors import NetworkError
from muletrain.runtime.checkpoint.store import Key
from muletrain.runtime.core.times import GONE_S, PAUSE_MAX_S, pause_s
from muletrain.runtime.peer.messages import Finished

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.checkpointing import Checkpointing
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.step.runner import StepRunner

LATE = b"late"
"""Answer to ``Finished`` of a peer that has not applied the last step."""


class Ending:
    """The end of the run for one peer."""

    def __init__(self, ctx: Context, position: Position, checkpointing: Checkpointing, runner: StepRunner) -> None:
        self._ctx, self._position, self._checkpointing, self._runner = ctx, position, checkpointing, runner
        self._finished: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Was the last checkpoint written?"""
        self._claims: set[PeerId] = set()
        """Peers that reported the end of the run."""
        ctx.net.serve(Finished.KIND, self._answer_finished)

    @property
    def known(self) -> bool:
        """Has this peer heard whether the last checkpoint was written?"""
        return self._finished.done()

    async def finish(self) -> bool:
        """Wait for the last checkpoint. Returns False if the checkpoint could not be written. Ends after
        ``checkpoint/checkpointing.ended``, or ``peer/ending._weigh`` of another peer's word."""
        ctx, key = self._ctx, Key(self._position.step, self._position.applied)
        if ctx.roster.coordinator() is None and not self._finished.done():  # others may have told us before
            self._finished.set_result(True)
        for work in (self._hear_of_end(key), self._offer_last(key)):
            ctx.spawn(work, "last checkpoint")
        written = await asyncio.shield(self._finished)
        await self._checkpointing.parts.tidy(over=written)
        # every peer passes the news on: the writer may not reach all peers, and does not try again
        everyone, replicas = ctx.roster.everyone(), ctx.roster.replicas()
        await asyncio.gather(*(self._dismiss(p, written, stays=p in replicas) for p in everyone))
        return written

    async def _hear_of_end(self, key: Key) -> None:
        written = await self._checkpointing.ended(key)
        if not self._finished.done():
            self._finished.set_result(written)

    async def _offer_last(self, key: Key) -> None:
        """Offer our stage's part again: the writer may have died, or its message was lost. Ends after
        ``checkpoint/checkpointing.ended``."""
        while not self._finished.done():
            await self._ctx.clock.sleep(PAUSE_MAX_S)
            parts = self._checkpointing
            if parts.wants(key) and (state := await parts.copy(key)) is not None:
                await parts.write(key, state)

    async def _dismiss(self, peer: PeerId, written: bool, *, stays: bool) -> None:
        """Dismiss ``peer``. This is a call, since we go next and a frame could still be in flight. ``stays``: stay until
        ``peer`` has taken the last step's gradient or state from us, if ``peer`` missed that step. Ends within
        ``GONE_S``."""
        ctx, finished = self._ctx, Finished(written=written).pack()
        until = ctx.clock.now() + GONE_S
        for tries in itertools.count():
            timeout_s = ctx.detector.deadline.seconds(1)
            try:
                late = await ctx.net.call(peer, Finished.KIND, finished, timeout_s=timeout_s) == LATE
            except NetworkError:  # the peer is gone, or another peer passes the news on
                late = False
            if not (late and stays) or ctx.clock.now() > until:
                return
            await ctx.clock.sleep(pause_s(tries))

    async def _answer_finished(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises ProtocolError for a peer that is not in the run."""
        finished = Finished.unpack(payload)
        self._ctx.roster.member(sender)
        if not self._position.life.done:  # the sender goes next
            await self._runner.exchange.find_out(sender)
        if sender not in self._claims:
            self._claims.add(sender)
            self._ctx.spawn(self._weigh(sender, finished.written), "word of the end")
        return b"" if self._position.life.done else LATE

    async def _weigh(self, sender: PeerId, written: bool) -> None:
        """Once we have applied the last step, believe the coordinator, or another peer if the coordinator is gone. If
        we coordinate now, believe ``sender`` only when no other peer is left: an earlier coordinator may have ended the
        run. Ends after ``step/runner.run`` of the last step, and the first coordinator's
        ``checkpoint/checkpointing.ended`` or end."""
        roster, me = self._ctx.roster, self._ctx.net.peer_id
        first = roster.coordinator()
        early = itertools.count()
        while not self._position.life.finished:
            await self._ctx.clock.sleep(pause_s(next(early)))
        if first is None or first.id != sender:  # the word came early, and the end is another's to tell
            first = roster.coordinator()
        for tries in itertools.count():
            if self._finished.done() or me == roster.genesis.coordinator:  # no other peer knows better
                return
            now = roster.coordinator()
            if first is not None and first.id == me:
                waits = bool(roster.others())
            else:
                waits = first is not None and now is not None and now.id == first.id != sender
            if not waits:
                return self._finished.set_result(written)
            await self._ctx.clock.sleep(pause_s(tries))
