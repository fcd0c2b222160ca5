"""Checkpoints: one R_t for all stages, written while training goes on (DESIGN "Checkpoints").

One replica of each stage, its writer, copies the state and tells everyone what its part is. Whoever shares the run's place writes its
part there itself; the collector fetches the parts of the others, block by block as newcomers do, and makes the checkpoint complete.
Who collects follows from who is alive, so that the next one takes over where the last one stopped. Where not everyone shares the
place, two peers of other stages fetch each part, too, and keep it on their own disks: the newest, and the one in progress.

A writer keeps one copy of its stage's state: it leaves out a checkpoint that comes due while its part of an earlier one is not safe yet,
and says so. Only the run's last checkpoint waits for its turn.

Trouble (a full disk, one that hangs, a lost part) ends that checkpoint, never the training, and every checkpoint ends in the end. Hashing
and the disk may take seconds: each has a thread of its own (``Context.aside``, ``CheckpointStore.disk``).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import safetensors
import safetensors.torch
from pydantic import Field

from muletrain.errors import CheckpointError, MuletrainError, NetworkError, ProtocolError
from muletrain.events import CheckpointFailed, CheckpointWritten, Note
from muletrain.network.base import Channel
from muletrain.policy.keeping import keepers
from muletrain.runtime.checkpoint.store import Key, PartFacts, PartsGone
from muletrain.runtime.core.messages import Digest, Message, Natural, Text
from muletrain.wire.statefile import state_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.store import CheckpointStore
    from muletrain.runtime.core.messages import Snapshot
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.transfer.donor import Receiver, Snapshots

MAX_OPEN = 8
"""Checkpoints heard of that have not ended."""
MAX_PART = 1 << 42
LOOK_S, LOOK_MAX_S = 1.0, 10.0
"""Between looks at what is missing of a checkpoint, when nothing is heard; doubles."""
TURN_S = 30.0
"""For its turn who asks for a part waits so long."""
LIMIT_S = 600.0
"""After so long without news a checkpoint has failed: of its collector, if there is one, else of its parts."""
SLOWEST_BYTES_PER_S = 125e3
"""After ``LIMIT_S`` and the time that all parts take at this rate a checkpoint has failed, whatever is heard."""
REMEMBERED = 256
"""Checkpoints that have ended."""


class PartReady(Message):
    """The sender has stage ``stage``'s part of the checkpoint of ``step`` steps. ``digest``: SHA-256 of the file; ``place``: where it
    wrote it, if it did."""

    KIND: ClassVar[str] = "part_ready"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    step: Natural
    lineage: Digest
    stage: Natural
    size: Natural
    digest: Digest
    place: Annotated[str, Field(max_length=64)] = ""

    @property
    def key(self) -> Key:
        return Key(self.step, self.lineage)

    @property
    def facts(self) -> PartFacts:
        return PartFacts(self.size, self.digest)


class CheckpointEnd(Message):
    """The checkpoint is complete or, for a ``reason``, never will be. ``left_out``: the sender does not write its stage's part; what comes
    of that its collector says."""

    KIND: ClassVar[str] = "checkpoint_end"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    step: Natural
    lineage: Digest
    reason: Text = ""
    left_out: bool = False

    @property
    def key(self) -> Key:
        return Key(self.step, self.lineage)


class AskPart(Message):
    """Call: offer a copy of this part; the answer is a Snapshot, whose manifest and blocks can be asked for."""

    KIND: ClassVar[str] = "ask_part"
    step: Natural
    lineage: Digest
    stage: Natural

    @property
    def key(self) -> Key:
        return Key(self.step, self.lineage)


@dataclass(frozen=True)
class Book:
    """Where this peer writes checkpoints and what makes them self-contained: the manifest's own fields, and other files. It stays the same
    when the peer moves or begins anew."""

    place: CheckpointStore
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    parts: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """In the place, of checkpoints that need not be complete. Only the event loop touches it."""
    complete: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """What was in the place when it could be read last."""


@dataclass
class _Open:
    """A checkpoint being written, as far as this peer heard of it."""

    begin: float
    news: float
    """When something of it was heard of last."""
    parts: dict[int, PartFacts] = field(default_factory=dict)
    holders: dict[int, set[PeerId]] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    """Stages whose part is in our place."""
    own: tuple[dict[str, Tensor], PartFacts] | None = None
    """Our stage's part, if we are its writer."""
    left_out: str = ""
    """Why a stage's writer does not write its part."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Checkpoints:
    """One peer's part in them."""

    def __init__(
        self, ctx: Context, snapshots: Snapshots, receiver: Receiver, membership: Membership, book: Book | None
    ) -> None:
        self._ctx, self._snapshots, self._receiver, self._book = ctx, snapshots, receiver, book
        self._membership = membership
        self._open: dict[Key, _Open] = {}
        self._ended: dict[Key, str] = {}
        self._parts = {} if book is None else book.parts
        self._writing: Key | None = None
        """Of which we hash or store our part now."""
        self._due: Key | None = None
        """The checkpoint of the step that we applied last; None: the run's last one, which nobody can leave out."""
        self._tidied = False
        self._clearing: set[Key] = set()
        self._over = asyncio.Event()
        self._asking, self._fetching = asyncio.Lock(), asyncio.Lock()
        ctx.net.serve(AskPart.KIND, self._on_ask)

    # The writer -------------------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """States of our stage that are kept for checkpoints."""
        return sum(opened.own is not None for opened in self._open.values())

    def is_writer(self) -> bool:
        return self._writer(self._ctx.roster.own.stage) == self._ctx.net.peer_id

    def _writer(self, stage: int) -> PeerId | None:
        """Of the stage's live peers one that shares the place is the best, then the first."""
        roster, place = self._ctx.roster, self._target()
        return min(roster.stage(stage), key=lambda p: (roster.member(p).place != place, p), default=None)

    def begins(self, key: Key, *, last: bool) -> bool:
        """We applied its step. Is our stage's part of it for us to write, now? While another copy of the state is in use we leave it out
        and say so; the ``last`` waits (``wants``)."""
        self._due = None if last else key
        if key in self._open:
            self._open[key].changed.set()
        if not self.is_writer() or key in self._ended or (collector := self._ctx.roster.collector()) is None:
            return False
        reason = self._busy()
        if reason is not None and not last:
            self._leave_out(key, f"left out: {reason}", collector.id)
        return reason is None

    def _leave_out(self, key: Key, reason: str, collector: PeerId) -> None:
        if self._collects():
            work = self._fail(key, reason)
        else:
            self._end(key, reason)
            end = CheckpointEnd(step=key.step, lineage=key.lineage, reason=reason, left_out=True)
            work = self._ctx.tell((collector,), end)
        self._ctx.spawn(work, f"checkpoint {key.step} is left out")

    def wants(self, key: Key) -> bool:
        """Is our stage's part of the last checkpoint still to be offered? One that shares the place leaves that to the writer: it would
        only write the same once more."""
        if key in self._ended or self._busy() is not None or (self._shares_target() and not self.is_writer()):
            return False
        opened = self._open.get(key)
        return opened is None or self._ctx.roster.own.stage not in opened.here

    def _busy(self) -> str | None:
        """Why there is no room for another copy of the state."""
        earlier = self._writing or next((k for k, o in self._open.items() if o.own is not None), None)
        if earlier is not None:
            return f"checkpoint {earlier.step} is not complete yet (the store is slower than checkpoint.every)"
        if self._shares_target() and self._book is not None and self._book.place.disk.hangs:
            return f"{self._book.place.where(Key(0, b''))}: the disk or store hangs"
        return None

    def unsafe(self) -> str | None:
        """Why this peer should not leave its stage yet: what would be lost of a checkpoint."""
        stage = self._ctx.roster.own.stage
        for key, opened in self._open.items():
            there = (stage in opened.here and self._shares_target()) or self._alive(opened.holders.get(stage, set()))
            if key == self._writing or (opened.own is not None and not there):
                return f"its part of checkpoint {key.step} is on its way"
            if self._collects() and opened.here:
                return f"it collects checkpoint {key.step}"
        return None

    def _alive(self, holders: set[PeerId]) -> bool:
        """Is one of them alive, but us?"""
        return any(self._ctx.roster.is_alive(p) for p in holders - {self._ctx.net.peer_id})

    def _shares_target(self) -> bool:
        return self._book is not None and self._book.place.name == self._target()

    async def write(self, key: Key, state: dict[str, Tensor]) -> None:
        """Our stage's part: into the place, if it is ours, too; then everyone is told."""
        if key in self._ended:
            return
        self._writing = key
        try:
            await self._write(key, state)
        finally:
            self._writing = None

    async def _write(self, key: Key, state: dict[str, Tensor]) -> None:
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        opened = self._opened(key, at_any_rate=True)
        assert opened is not None
        buffers = state_buffers(state)
        facts = PartFacts(sum(map(len, buffers)), await ctx.tasks.aside(_sha256, buffers))
        if self._shares_target():
            await self._store(key, opened, stage, facts, buffers)
        if key not in self._ended:
            opened.own, opened.parts[stage] = (state, facts), facts
            opened.holders.setdefault(stage, set()).add(ctx.net.peer_id)
            await self._tell_of(key, opened, stage, facts)
            opened.changed.set()

    async def _tell_of(self, key: Key, opened: _Open, stage: int, facts: PartFacts) -> None:
        place = self._book.place.name if self._book is not None and stage in opened.here else ""
        ready = PartReady(
            step=key.step, lineage=key.lineage, stage=stage, size=facts.size, digest=facts.digest, place=place
        )
        await self._ctx.tell(
            self._ctx.roster.everyone(), ready
        )  # a partition may be over that both sides still believe in

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_ready(self, sender: PeerId, ready: PartReady) -> None:
        """Raises ProtocolError for a part that cannot be."""
        plan, key = self._ctx.plan, ready.key
        if (
            ready.stage >= plan.stages
            or not 0 < ready.step <= plan.steps
            or not 0 < ready.size <= self._largest(ready.stage)
        ):
            raise ProtocolError(f"checkpoint {ready.step}: stage {ready.stage} of {ready.size} bytes cannot be")
        if key in self._ended:
            if self._collects():  # word of that was lost
                self._ctx.spawn(self._ctx.tell((sender,), _ending(key, self._ended[key])), "end of a checkpoint")
            return
        known = self._open[key].parts.get(ready.stage) if key in self._open else None
        if known is None and self._ctx.roster.member(sender).stage != ready.stage:
            return  # the stage's own word counts; this one comes again
        if known is not None and known != ready.facts:
            return  # the first counts, until it turns out to be false (``_fetch``): whoever contradicts may be right
        opened = self._opened(key)
        if opened is None:
            raise ProtocolError(f"checkpoint {ready.step}: {MAX_OPEN} others are not complete yet")
        if sender not in opened.holders.setdefault(ready.stage, set()):
            opened.news = self._ctx.clock.now()
        opened.parts[ready.stage] = ready.facts
        opened.holders[ready.stage].add(sender)
        if self._book is not None and ready.place == self._book.place.name:
            opened.here.add(ready.stage)
            self._parts.setdefault(key, {})[ready.stage] = ready.facts
        opened.changed.set()
        if self._collects() and sender == self._writer(ready.stage):  # it has one open: of those before nothing comes
            for earlier in [k for k, o in self._open.items() if k.step < key.step and ready.stage not in o.parts]:
                lost = f"no part of stages [{ready.stage}] came before that of a later checkpoint"
                self._ctx.spawn(self._fail(earlier, lost), f"checkpoint {earlier.step} lacks a part")

    async def on_end(self, sender: PeerId, end: CheckpointEnd) -> None:
        """That it is complete, its collector says, and nobody else; that it failed, whoever has the disk on which it did. Raises
        ProtocolError for a checkpoint that cannot be."""
        roster, collector = self._ctx.roster, self._ctx.roster.collector()
        if not 0 < end.step <= self._ctx.plan.steps:
            raise ProtocolError(f"the end of checkpoint {end.step}, which cannot be")
        collected = collector is not None and collector.id == sender
        member = roster.member(sender)
        if end.left_out:
            opened = None if end.key in self._ended or sender != self._writer(member.stage) else self._opened(end.key)
            if opened is not None and member.stage not in opened.parts:
                opened.left_out = end.reason
                opened.changed.set()
        elif collected or (end.reason and member.place == self._target()):
            self._end(end.key, end.reason)

    def _largest(self, stage: int) -> int:
        """Bytes that a part of ``stage`` may have: whoever fetches it makes room for as many as its writer says."""
        known = self._ctx.plan.state_bytes[stage] if self._ctx.plan.state_bytes else 0
        return largest_part(known) if known else MAX_PART

    async def _on_ask(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises MuletrainError when the part is not here, or not for the sender."""
        ask = AskPart.unpack(payload)
        if self._ctx.tasks.closed:
            raise MuletrainError("this peer begins anew; ask again")
        if not await self._may_have(sender, ask.stage):
            raise MuletrainError(
                f"stage {ask.stage}'s part is for peers that serve it, keep it, or collect checkpoints"
            )
        offer = self._snapshots.offered(ask.stage, *ask.key, part=True)
        if offer is None:
            async with self._asking:  # one at a time is read, and held, for all that want it
                offer = await self._offer(ask)
        return self._snapshots.grant(offer, sender)

    async def _may_have(self, peer: PeerId, stage: int) -> bool:
        """By our own roster: ``peer`` collects, or keeps that part, or serves the stage, also because a step back that we know of moved it
        there. Raises ProtocolError for one that is no member, and has none of them."""
        collector = self._ctx.roster.collector()
        if collector is not None and collector.id == peer:
            return True
        return peer in self._keepers(stage, peer) or await self._membership.serves(peer, stage)

    async def _offer(self, ask: AskPart) -> Snapshot:
        until = self._ctx.clock.now() + TURN_S
        while (offer := self._snapshots.offered(ask.stage, *ask.key, part=True)) is None and self._snapshots.crowded():
            if self._ctx.clock.now() > until:
                raise MuletrainError("this peer has enough copies to send; ask again")
            await self._ctx.clock.sleep(LOOK_S)
        if offer is not None:
            return offer
        opened = self._open.get(ask.key)
        if opened is not None and opened.own is not None and ask.stage == self._ctx.roster.own.stage:
            state = opened.own[0]
        else:
            try:
                state = await self.read(ask.key, ask.stage)
            except CheckpointError as e:
                raise MuletrainError(str(e)) from None
        return await self._snapshots.offer(ask.stage, *ask.key, state, part=True)

    async def read(self, key: Key, stage: int) -> dict[str, Tensor]:
        """A part that is in our place, on memory of its own. Raises CheckpointError."""
        if self._book is None:
            raise CheckpointError("this peer keeps no checkpoints")
        try:
            content = await self._book.place.disk.call(self._book.place.read_part, key, stage)
            state: dict[str, Tensor] = await self._ctx.tasks.aside(safetensors.torch.load, content)
        except (OSError, safetensors.SafetensorError) as e:
            raise CheckpointError(f"stage {stage}'s part of checkpoint {key.step} is not here: {e}") from e
        return state

    async def readable(self) -> dict[Key, dict[int, PartFacts]]:
        """What of all checkpoints is in our place."""
        if self._book is None:
            return {}
        if self._ctx.tasks.closed:
            return dict(self._parts)
        complete = self._book.complete
        with suppress(OSError):  # a store that cannot be reached now: what it had
            found = await self._book.place.disk.call(self._book.place.complete)
            complete.clear()
            complete.update(found)
        return {key: {**self._parts.get(key, {}), **complete.get(key, {})} for key in {*self._parts, *complete}}

    async def base(self, key: Key, digest: bytes) -> dict[str, Tensor]:
        """Our stage's part of a checkpoint: from our place, else from whoever has it. Raises CheckpointError, NetworkError or
        ProtocolError."""
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        facts = PartFacts(20 * ctx.compute.n_params, digest)
        try:
            state = await self.read(key, stage)
            if await ctx.tasks.aside(_sha256, state_buffers(state)) == digest:
                return state
        except CheckpointError:
            pass
        return await self.take(key, stage, facts, list(ctx.roster.others()))

    # Seeing it through ------------------------------------------------------------------------------------------------

    def _target(self) -> str:
        """The name of the place that checkpoints go to."""
        collector = self._ctx.roster.collector()
        return "" if collector is None else collector.place

    def _opened(self, key: Key, *, at_any_rate: bool = False) -> _Open | None:
        """None: too many are open already."""
        if key not in self._open:
            if len(self._open) >= MAX_OPEN and not at_any_rate:
                return None
            opened = self._open[key] = _Open(self._ctx.clock.now(), self._ctx.clock.now())
            self._ctx.spawn(self._see_through(key, opened), f"checkpoint {key.step}")
        return self._open[key]

    async def _see_through(self, key: Key, opened: _Open) -> None:
        """Until it has ended: do what falls to us, and look after the collector, since its work may fall to us next."""
        ctx, pause = self._ctx, LOOK_S
        while not self._ended.get(key):
            opened.changed.clear()
            ended = key not in self._open  # the parts that we keep may still be on their way
            if opened.left_out and key == self._due and self._collects():
                await self._fail(key, opened.left_out)
                return
            try:
                await ctx.clock.deadline(self._do_ours(key, opened), self._left_s(opened), "its parts")
            except (NetworkError, ProtocolError, CheckpointError) as e:
                ctx.emit(Note(level="info", message=f"checkpoint {key.step}: {e}"))
            if ended:
                return
            if key not in self._open:
                continue
            try:
                await ctx.clock.deadline(
                    opened.changed.wait(), min(pause, self._left_s(opened)), "news of a checkpoint"
                )
                continue
            except MuletrainError:
                pause = min(LOOK_MAX_S, 2 * pause)
            if any(earlier.step < key.step for earlier in self._open):
                opened.news = ctx.clock.now()  # they go first
            if self._book is not None and await self._is_complete(self._book.place, key):
                self._end(key, "")  # whoever completed it could not say so
            elif ctx.clock.now() - opened.news > LIMIT_S or self._left_s(opened) <= 0:
                lacking = sorted(set(range(ctx.plan.stages)) - opened.parts.keys())
                reason = f"no part of stages {lacking} came" if lacking else "its parts did not come whole"
                if self._collects():
                    await self._fail(key, reason)
                else:
                    self._end(key, reason)
            else:
                # it is for the collector to give up: on slow links parts take their time
                if await self._collector_answers(key):
                    opened.news = ctx.clock.now()
                if opened.own is not None:  # word of it may be lost, or another peer collects
                    await self._tell_of(key, opened, ctx.roster.own.stage, opened.own[1])

    def _left_s(self, opened: _Open) -> float:
        """Until it has failed, whatever is heard [s]."""
        size = sum(self._ctx.plan.state_bytes) or sum(f.size for f in opened.parts.values())
        return max(0.0, opened.begin + LIMIT_S + size / SLOWEST_BYTES_PER_S - self._ctx.clock.now())

    async def _is_complete(self, place: CheckpointStore, key: Key) -> bool:
        try:
            return key in await place.disk.call(place.complete)
        except OSError:
            return False

    async def _do_ours(self, key: Key, opened: _Open) -> None:
        """Fetch what we are to have; as the collector, publish what is whole. Raises NetworkError, ProtocolError or CheckpointError."""
        if self._book is None:
            return
        collects, me = self._collects(), self._ctx.net.peer_id
        for stage in sorted(opened.parts.keys() - opened.here):
            if (collects and key in self._open) or me in self._keepers(stage, me):
                await self._fetch(key, opened, stage)
        if collects and len(opened.here) == self._ctx.plan.stages and key in self._open:
            await self._publish(key, opened)

    async def _collector_answers(self, key: Key) -> bool:
        collector = self._ctx.roster.collector()
        if collector is None or self._collects():
            return False
        return await self._ctx.detector.probe(collector.id, key.lineage, key.step) is not None

    def _collects(self) -> bool:
        collector = self._ctx.roster.collector()
        return collector is not None and collector.id == self._ctx.net.peer_id

    def _keepers(self, stage: int, there: PeerId) -> tuple[PeerId, ...]:
        """Of the live peers, and of ``there``, those that keep ``stage``'s parts beside the place."""
        roster = self._ctx.roster
        members = [m for m in roster.members() if roster.is_alive(m.id) or m.id == there]
        places = {m.id: (m.stage, m.place) for m in members if m.place}
        return keepers(places, stage, self._target())

    async def _fetch(self, key: Key, opened: _Open, stage: int) -> None:
        async with self._fetching:  # one part at a time, of whichever checkpoint, is in our memory
            if self._ended.get(key) or stage in opened.here:
                return
            holders, facts = sorted(opened.holders[stage] - {self._ctx.net.peer_id}), opened.parts[stage]
            try:
                state = await self.take(key, stage, facts, holders)
            except ProtocolError:  # who announced it first did not speak the truth: the next one may
                del opened.parts[stage], opened.holders[stage]
                raise
            if not self._ended.get(key):
                await self._store(key, opened, stage, facts, state_buffers(state))
        if stage in opened.here:
            await self._tell_of(key, opened, stage, facts)

    async def take(self, key: Key, stage: int, facts: PartFacts, holders: list[PeerId]) -> dict[str, Tensor]:
        """A part from those that have it. Raises NetworkError, or ProtocolError if it is not what ``facts`` say."""
        ask = AskPart(step=key.step, lineage=key.lineage, stage=stage)
        state = await self._receiver.take_part(ask, *key, holders, facts.size)
        buffers = state_buffers(state)
        if await self._ctx.tasks.aside(_sha256, buffers) != facts.digest:
            raise ProtocolError(f"stage {stage}'s part of checkpoint {key.step}: its content is not what was announced")
        return state

    async def _store(self, key: Key, opened: _Open, stage: int, facts: PartFacts, buffers: list[memoryview]) -> None:
        assert self._book is not None
        place, failed = self._book.place, None
        if self._tidied:
            return
        try:
            await place.disk.call(place.write_part, key, stage, buffers)
        except OSError as e:
            failed = e
        if self._ended.get(key) or (key in self._ended and self._shares_target()):
            with suppress(OSError):  # it ended while we wrote: whoever tidied up did so too early for this
                await place.disk.call(place.abandon, key)
        elif failed is None:
            opened.here.add(stage)
            self._parts.setdefault(key, {})[stage] = facts
            opened.news = self._ctx.clock.now()
            opened.holders.setdefault(stage, set()).add(self._ctx.net.peer_id)
        elif self._shares_target():
            await self._fail(key, _why(failed, place.where(key)))
        else:
            self._ctx.emit(Note(level="info", message=f"a checkpoint's part is not kept here: {failed}"))
            opened.here.discard(stage)

    async def _publish(self, key: Key, opened: _Open) -> None:
        ctx, book = self._ctx, self._book
        assert book is not None
        try:
            where = await book.place.disk.call(book.place.publish, key, book.about, dict(opened.parts), book.files)
        except PartsGone as e:
            opened.here -= e.stages  # fetched again
            return
        except OSError as e:
            await self._fail(key, _why(e, book.place.where(key)))
            return
        book.complete[key] = dict(opened.parts)
        if key not in self._open:
            return
        size, seconds = sum(f.size for f in opened.parts.values()), ctx.clock.now() - opened.begin
        ctx.emit(CheckpointWritten(step=key.step, path=where, bytes=size, seconds=seconds))
        for overtaken in sorted(k for k in self._open if k.step < key.step):
            lacking = sorted(set(range(ctx.plan.stages)) - self._open[overtaken].parts.keys())
            missing = f"no part of stages {lacking} came" if lacking else "its parts did not come whole"
            await self._fail(overtaken, f"{missing} before a later checkpoint was complete")
        if self._mark(key, ""):
            await self._clear(key, "")
            await ctx.tell(ctx.roster.others(), _ending(key, ""))

    async def _fail(self, key: Key, reason: str) -> None:
        if self._mark(key, reason[:4096]):
            await self._clear(key, reason[:4096])  # a slow disk takes so long that the end may be forgotten by then
            await self._ctx.tell(self._ctx.roster.others(), _ending(key, reason[:4096]))

    def _end(self, key: Key, reason: str) -> None:
        """Nobody waits for the disk."""
        if self._mark(key, reason):
            self._ctx.spawn(self._clear(key, reason), f"after checkpoint {key.step}")

    def _mark(self, key: Key, reason: str) -> bool:
        """That it has ended; True if this is news, and is to be cleared up after."""
        if key in self._ended:
            return False
        self._ended[key] = reason
        self._clearing.add(key)
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        opened = self._open.pop(key, None)
        if opened is not None:
            opened.changed.set()
        if not reason:
            for overtaken in [k for k in self._open if k.step < key.step]:  # word of their end was lost
                self._end(overtaken, "a later checkpoint is complete")
        return True

    async def _clear(self, key: Key, reason: str) -> None:
        collects = self._collects()
        if self._book is not None:
            place, shared = self._book.place, self._shares_target()
            with suppress(OSError):
                if reason:
                    self._parts.pop(key, None)
                    # before anything is said, so that there is room to tell of it; in a shared place the collector may gather them still
                    if not shared or collects:
                        await place.disk.call(place.abandon, key)
                else:  # where the place is shared, its publisher removes what is older
                    for old in [k for k in self._parts if k.step <= key.step - (not shared)]:
                        del self._parts[old]
                    if not shared:
                        await place.disk.call(place.drop, key.step)
        if reason and collects:
            self._ctx.emit(CheckpointFailed(step=key.step, reason=reason))
        self._clearing.discard(key)
        self._over.set()

    async def tidy(self, *, over: bool) -> None:
        """This peer goes, or the run is ``over`` and its last checkpoint complete: no part is needed here any more. In a shared place
        others may still need theirs."""
        self._tidied = True
        if self._book is not None and (over or not self._shares_target()):
            place = self._book.place
            self._parts.clear()
            with suppress(OSError):
                await place.disk.call(place.drop, self._ctx.plan.steps + 1)

    async def ended(self, key: Key) -> bool:
        """Wait for the end of that checkpoint: True if it is complete."""
        if key not in self._ended:
            self._opened(key, at_any_rate=True)  # nobody may have announced a part of it yet
        while key not in self._ended or key in self._clearing:
            self._over.clear()
            await self._over.wait()
        return not self._ended[key]


def _ending(key: Key, reason: str) -> CheckpointEnd:
    return CheckpointEnd(step=key.step, lineage=key.lineage, reason=reason)


def largest_part(state_bytes: int) -> int:
    """Bytes that a stage's part may have as a file: its tensors, and their names, of which layers as small as those of tests have a
    tenth as many."""
    return state_bytes + state_bytes // 4 + (1 << 20)


def _why(error: OSError, where: str) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"{error.strerror or error}: {where} ({'free some space; ' * full}training goes on)"


def _sha256(buffers: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()
