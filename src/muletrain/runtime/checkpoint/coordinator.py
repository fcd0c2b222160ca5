"""The coordinator gathers a checkpoint's parts and publishes them. Every peer follows each checkpoint to its end, ready
to take over."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muletrain.errors import CheckpointError, MuletrainError, NetworkError, ProtocolError
from muletrain.events import CheckpointFailed, CheckpointWritten, TransferFailed
from muletrain.runtime.checkpoint.messages import CheckpointEnd, PartReady, largest_part
from muletrain.runtime.checkpoint.progress import MAX_OPEN
from muletrain.runtime.checkpoint.store import PartsGone
from muletrain.wire.statefile import state_buffers

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.part_exchange import PartExchange
    from muletrain.runtime.checkpoint.part_replicas import PartReplicas
    from muletrain.runtime.checkpoint.progress import Checkpoints, OpenCheckpoint
    from muletrain.runtime.checkpoint.roles import Roles
    from muletrain.runtime.checkpoint.store import Key, PartFacts
    from muletrain.runtime.members.context import Context

LOOK_S, LOOK_MAX_S = 1.0, 10.0
"""Seconds without news, between two checks for missing parts; doubles."""
LIMIT_S = 600.0
"""Seconds without news from its coordinator or of its parts, after which a checkpoint has failed."""
SLOWEST_BYTES_PER_S = 125e3
"""Slowest rate [bytes/s]: after ``LIMIT_S`` and the time that all parts need at this rate, a checkpoint has failed."""


class Coordinator:
    """Owns the course of each checkpoint on this peer, from its first notice to its end. This peer need not be the
    coordinator now."""

    def __init__(
        self, ctx: Context, roles: Roles, replicas: PartReplicas, checkpoints: Checkpoints, exchange: PartExchange
    ) -> None:
        self._ctx, self._roles, self._replicas = ctx, roles, replicas
        self._checkpoints, self._exchange = checkpoints, exchange
        self._due: Key | None = None
        """The checkpoint of our last step; None: the run's last one, which cannot be left out."""
        self._fetching = asyncio.Lock()

    def due(self, key: Key, *, last: bool) -> None:
        """The checkpoint's step was applied here."""
        self._due = None if last else key
        if (opened := self._checkpoints.get(key)) is not None:
            opened.changed.set()

    def open(self, key: Key) -> OpenCheckpoint:
        """That checkpoint, which has not ended. Opens it if it is new."""
        opened = self._checkpoints.get(key)
        if opened is None:
            opened = self._checkpoints.begin(key, self._ctx.clock.now())
            self._ctx.spawn(self._see_through(opened), f"checkpoint {key.step}")
        return opened

    async def announce(self, opened: OpenCheckpoint, stage: int, facts: PartFacts) -> None:
        """Tell everyone that this peer has a part."""
        ctx, key = self._ctx, opened.key
        place = self._replicas.name if stage in opened.here else ""
        ready = PartReady(
            step=key.step, lineage=key.lineage, stage=stage, size=facts.size, digest=facts.digest, place=place
        )
        await ctx.tell(ctx.roster.everyone(), ready)  # also peers that are down: a partition may be over

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_ready(self, sender: PeerId, ready: PartReady) -> None:
        """A peer has a part. Raises ProtocolError for a part that cannot be."""
        plan, key, stage = self._ctx.plan, ready.key, ready.stage
        if stage >= plan.stages or not 0 < ready.step <= plan.steps or not 0 < ready.size <= self._largest(stage):
            raise ProtocolError(f"checkpoint {ready.step}: stage {stage} of {ready.size} bytes cannot be")
        if (reason := self._checkpoints.ended(key)) is not None:
            if self._roles.coordinates():  # our notice was lost
                self._ctx.spawn(self._ctx.tell((sender,), _ending(key, reason)), "end of a checkpoint")
            return
        opened = self._checkpoints.get(key)
        known = None if opened is None else opened.parts.get(stage)
        if known is None and self._ctx.roster.member(sender).stage != stage:
            return  # the stage itself must announce it first; keepers announce it again
        writes = sender == self._roles.writer(stage)
        if opened is not None and known is not None and known != ready.facts:
            if not writes:
                return  # the writer's announcement counts, else the first, until it proves false (``_fetch``)
            opened.holders[stage] = set()
            opened.here.discard(stage)
        if opened is None and self._checkpoints.full():
            raise ProtocolError(f"checkpoint {ready.step}: {MAX_OPEN} others are not complete yet")
        opened = self.open(key)
        if sender not in opened.holders.setdefault(stage, set()):
            opened.news = self._ctx.clock.now()
        opened.parts[stage] = ready.facts
        opened.holders[stage].add(sender)
        if writes and ready.place == self._replicas.name:
            self._replicas.has(opened, stage, ready.facts)
        opened.changed.set()
        if self._roles.coordinates() and writes:
            for earlier in self._checkpoints.before(key.step):  # it writes one at a time: these parts will not come
                if stage not in earlier.parts:
                    lost = f"no part of stages [{stage}] came before that of a later checkpoint"
                    self._ctx.spawn(self.fail(earlier.key, lost), f"checkpoint {earlier.key.step} lacks a part")

    def _largest(self, stage: int) -> int:
        """Largest part of ``stage`` [bytes]: a peer that fetches a part reserves the announced size."""
        return largest_part(self._ctx.plan.state_bytes[stage] if self._ctx.plan.state_bytes else 0)

    async def on_end(self, sender: PeerId, end: CheckpointEnd) -> None:
        """A checkpoint ended. Only its coordinator is believed that it is complete, and a writer that shares the place
        that it failed. Raises ProtocolError for a checkpoint that cannot be."""
        roles, key = self._roles, end.key
        if not 0 < end.step <= self._ctx.plan.steps:
            raise ProtocolError(f"the end of checkpoint {end.step}, which cannot be")
        member = self._ctx.roster.member(sender)
        if not end.left_out:
            fails = end.reason and member.place == roles.target and sender == roles.writer(member.stage)
            if sender == roles.coordinator or fails:
                self.end(key, end.reason)
            return
        known = self._checkpoints.get(key)
        open_to_all = self._checkpoints.ended(key) is None and (known is not None or not self._checkpoints.full())
        if open_to_all and sender == roles.writer(member.stage):
            opened = self.open(key)
            if member.stage not in opened.parts:
                opened.left_out = end.reason
                opened.changed.set()

    # Seeing it through ------------------------------------------------------------------------------------------------

    async def _see_through(self, opened: OpenCheckpoint) -> None:
        """Do our part until the checkpoint has ended, and watch the coordinator, whose work may become ours."""
        ctx, key, pause_s = self._ctx, opened.key, LOOK_S
        while not opened.ended:
            opened.changed.clear()
            complete = opened.ended is not None  # the parts that we keep may still be on their way
            if opened.left_out and key == self._due and self._roles.coordinates():
                return await self.fail(key, opened.left_out)
            try:
                await ctx.clock.deadline(self._do_ours(opened), self._left_s(opened), "its parts")
            except (NetworkError, ProtocolError, CheckpointError) as e:
                if opened.ended is None:  # otherwise the coordinator has all parts, and the holders may have gone
                    ctx.emit(TransferFailed(what=f"a part of checkpoint {key.step}", reason=str(e)))
            if complete:
                return
            if opened.ended is not None:
                continue
            try:
                limit_s = min(pause_s, self._left_s(opened))
                await ctx.clock.deadline(opened.changed.wait(), limit_s, "news of a checkpoint")
            except MuletrainError:
                pause_s = min(LOOK_MAX_S, 2 * pause_s)
                await self._look_after(opened)

    async def _look_after(self, opened: OpenCheckpoint) -> None:
        """No news came for a while: check whether the checkpoint has ended or failed."""
        ctx, key = self._ctx, opened.key
        if self._checkpoints.before(key.step):
            opened.news = ctx.clock.now()  # earlier ones go first
        if await self._replicas.is_complete(key):
            self.end(key, "")  # the notice was lost
        elif ctx.clock.now() - opened.news > LIMIT_S or self._left_s(opened) <= 0:
            reason = opened.lacking(ctx.plan.stages)
            if self._roles.coordinates():
                await self.fail(key, reason)
            else:
                self.end(key, reason)
        else:
            # only the coordinator gives up: parts may take long over slow links
            if await self._coordinator_answers(key):
                opened.news = ctx.clock.now()
            if opened.own is not None:  # our notice may be lost, or the coordinator is new
                await self.announce(opened, ctx.roster.own.stage, opened.own[1])

    def _left_s(self, opened: OpenCheckpoint) -> float:
        """Seconds until it has failed in any case."""
        size = sum(self._ctx.plan.state_bytes) or sum(f.size for f in opened.parts.values())
        return max(0.0, opened.begin + LIMIT_S + size / SLOWEST_BYTES_PER_S - self._ctx.clock.now())

    async def _coordinator_answers(self, key: Key) -> bool:
        coordinator = self._roles.coordinator
        if coordinator is None or self._roles.coordinates():
            return False
        return await self._ctx.detector.probe(coordinator, key.lineage, key.step) is not None

    async def _do_ours(self, opened: OpenCheckpoint) -> None:
        """Fetch the parts that we should have. As the coordinator, publish when all are here. Raises NetworkError,
        ProtocolError or CheckpointError."""
        coordinates, me = self._roles.coordinates(), self._ctx.net.peer_id
        for stage in sorted(opened.parts.keys() - opened.here):
            if (coordinates and opened.ended is None) or me in self._roles.keepers(stage, me):
                await self._fetch(opened, stage)
        if coordinates and len(opened.here) == self._ctx.plan.stages and opened.ended is None:
            await self._publish(opened)

    async def _fetch(self, opened: OpenCheckpoint, stage: int) -> None:
        key = opened.key
        async with self._fetching:  # memory holds one part at a time, of all checkpoints
            if opened.ended or stage in opened.here:
                return
            holders, facts = sorted(opened.holders[stage] - {self._ctx.net.peer_id}), opened.parts[stage]
            try:
                if opened.own is not None and opened.own[1] == facts:
                    state = opened.own[0]
                else:
                    state = await self._exchange.take(key, stage, facts, holders)
            except ProtocolError:  # the announcement was false; forget it, so that another counts
                if opened.parts.get(stage) == facts:
                    del opened.parts[stage], opened.holders[stage]
                raise
            if not opened.ended and (why := await self._replicas.store(opened, stage, facts, state_buffers(state))):
                await self.fail(key, why)
        if stage in opened.here:
            await self.announce(opened, stage, facts)

    async def _publish(self, opened: OpenCheckpoint) -> None:
        ctx, key = self._ctx, opened.key
        try:
            where = await self._replicas.publish(opened)
        except PartsGone as e:
            opened.here -= e.stages  # fetched again
            return
        except CheckpointError as e:
            return await self.fail(key, str(e))
        if opened.ended is not None:
            return
        size, seconds = sum(f.size for f in opened.parts.values()), ctx.clock.now() - opened.begin
        ctx.emit(CheckpointWritten(step=key.step, path=where, bytes=size, seconds=seconds))
        for overtaken in sorted(self._checkpoints.before(key.step), key=lambda o: o.key):
            await self.fail(
                overtaken.key, f"{overtaken.lacking(ctx.plan.stages)} before a later checkpoint was complete"
            )
        await self._end_for_all(key, "")

    # The end ----------------------------------------------------------------------------------------------------------

    def leave_out(self, key: Key, reason: str) -> None:
        """Tell the coordinator that our stage's part is not written."""
        if self._roles.coordinates():
            work = self.fail(key, reason)
        else:
            assert self._roles.coordinator is not None  # else nothing is due
            self.end(key, reason)
            end = CheckpointEnd(step=key.step, lineage=key.lineage, reason=reason, left_out=True)
            work = self._ctx.tell((self._roles.coordinator,), end)
        self._ctx.spawn(work, f"checkpoint {key.step} is left out")

    async def fail(self, key: Key, reason: str) -> None:
        """End the checkpoint as failed, for everyone."""
        await self._end_for_all(key, reason[:4096])

    async def _end_for_all(self, key: Key, reason: str) -> None:
        if self._mark(key, reason):
            await self._clear(key, reason)  # after a slow disk, that end may be forgotten
            await self._ctx.tell(self._ctx.roster.others(), _ending(key, reason))

    def end(self, key: Key, reason: str) -> None:
        """End the checkpoint here, without waiting for the disk."""
        if self._mark(key, reason):
            self._ctx.spawn(self._clear(key, reason), f"after checkpoint {key.step}")

    def _mark(self, key: Key, reason: str) -> bool:
        """Note its end. True if it is news: then it must be cleared up."""
        news = self._checkpoints.end(key, reason)
        if news and not reason:
            for overtaken in self._checkpoints.before(key.step):  # the notices of their ends were lost
                self.end(overtaken.key, "a later checkpoint is complete")
        return news

    async def _clear(self, key: Key, reason: str) -> None:
        coordinates = self._roles.coordinates()
        await self._replicas.clear(key, reason)
        if reason and coordinates:
            self._ctx.emit(CheckpointFailed(step=key.step, reason=reason))
        self._checkpoints.cleared(key)

    async def ended(self, key: Key) -> bool:
        """Wait for the end of that checkpoint: True if it is complete."""
        if self._checkpoints.ended(key) is None:
            self.open(key)  # perhaps no part of it was announced yet
        return await self._checkpoints.over(key)


def _ending(key: Key, reason: str) -> CheckpointEnd:
    return CheckpointEnd(step=key.step, lineage=key.lineage, reason=reason)
