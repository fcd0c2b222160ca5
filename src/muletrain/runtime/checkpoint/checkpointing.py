"""A peer's work on checkpoints: writes the stage's part, gives and takes parts, and follows each checkpoint to the end,
ready to take over as the coordinator, which gathers the parts and publishes the checkpoint."""

from __future__ import annotations

import asyncio
import errno
import itertools
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
from blake3 import blake3

from muletrain.errors import (
    CapacityError,
    CheckpointError,
    DeadlineExceeded,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
)
from muletrain.events import CheckpointFailed, CheckpointWritten, PartNotKept, TransferFailed
from muletrain.policy.checkpoints import keepers
from muletrain.policy.deadline import CEILING_S
from muletrain.runtime.checkpoint.messages import CheckpointEnd, PartReady, largest_part
from muletrain.runtime.checkpoint.store import Key, PartFacts
from muletrain.runtime.core.blocks import HEADERS, StateImage
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.times import GONE_S, LAG_S, LOOK_S, pause_s
from muletrain.wire.statefile import StateBuffers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.store import CheckpointStore
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.members.roster import Roster
    from muletrain.runtime.microbatch.position import Position

PARTS = "parts"
"""The name of the copies of parts (``core.blocks.Blocks.offers``)."""
COPIES = 2
"""Copies of parts kept for takers: slow takers of one checkpoint do not hold up the next."""
MAX_OPEN = 8
"""Open checkpoints at once."""
REMEMBERED = 256
"""Number of ended checkpoints with remembered ends."""
SLOWEST_BYTES_PER_S = 125e3
"""Slowest rate [bytes/s]: after ``CEILING_S`` and the time that all parts need at this rate, a checkpoint has failed."""


@dataclass
class Book:
    """This peer's place for checkpoints, and the manifest fields and files for self-contained checkpoints. The book
    outlives moves and restarts of the peer."""

    place: CheckpointStore
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    parts: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """Parts in the place, also of incomplete checkpoints. Used only in the event loop's thread."""
    complete: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """The complete checkpoints at the last read of the place."""
    looked_s: float = -math.inf
    """When the place was last read [s, clock]."""
    missed: set[bytes] = field(default_factory=set)
    """Digests of the parts that this peer could get from nowhere when it began anew, whatever manifests say."""
    reached: int = 0
    """The furthest step that this peer has come to."""
    back_s: float = math.inf
    """When the run first went back since this peer's last step [s, clock]."""


class Roles:
    """Roles follow from the roster at every moment, so another peer takes over when a peer leaves. Owns nothing."""

    def __init__(self, roster: Roster, book: Book) -> None:
        self._roster, self._book = roster, book

    @property
    def coordinator(self) -> PeerId | None:
        """The peer that gathers the parts and publishes the checkpoint."""
        coordinator = self._roster.coordinator()
        return None if coordinator is None else coordinator.id

    def coordinates(self) -> bool:
        """Is this peer the coordinator?"""
        return self.coordinator == self._roster.own.id

    @property
    def target(self) -> str:
        """The name of the run's place for checkpoints."""
        coordinator = self._roster.coordinator()
        return "" if coordinator is None else coordinator.place

    def shares_target(self) -> bool:
        """Does this peer share the run's place?"""
        return self._book.place.name == self.target

    def writer(self, stage: int) -> PeerId | None:
        """The live peer that writes the stage's part: the first that shares the place, else the first."""
        roster, place = self._roster, self.target
        return min(roster.stage(stage), key=lambda p: (roster.member(p).place != place, p), default=None)

    def is_writer(self) -> bool:
        """Is this peer the writer of the stage?"""
        return self.writer(self._roster.own.stage) == self._roster.own.id

    def keepers(self, stage: int, there: PeerId) -> tuple[PeerId, ...]:
        """The peers that also keep ``stage``'s parts: live peers, and ``there``, which counts as live."""
        members = [m for m in self._roster.members() if self._roster.is_alive(m.id) or m.id == there]
        places = {m.id: (m.stage, m.place) for m in members if m.place}
        return keepers(places, stage, self.target)


@dataclass(eq=False)
class OpenCheckpoint:
    """A checkpoint being written, as far as this peer knows."""

    key: Key
    begin: float
    news: float
    """Time of the last news."""
    parts: dict[int, PartFacts] = field(default_factory=dict)
    holders: dict[int, set[PeerId]] = field(default_factory=dict)
    own: tuple[dict[str, Tensor], PartFacts] | None = None
    """Our stage's part, if we are the writer."""
    left_out: str = ""
    """A stage's writer's reason for leaving out the part."""
    ended: str | None = None
    """None: not yet; empty: complete; else the reason of the failure."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def lacking(self, stages: int) -> str:
        """Describe the missing parts."""
        lacking = sorted(set(range(stages)) - self.parts.keys())
        return f"no part of stages {lacking} came" if lacking else "its parts did not come whole"


class Parts:
    """Owns the book's list of parts in the place, of this peer's stage and of stages that this peer keeps or gathers, and
    the copies that it gives to entitled peers over ``core.blocks``."""

    def __init__(
        self,
        ctx: Context,
        roles: Roles,
        book: Book,
        checkpoints: Mapping[Key, OpenCheckpoint],
        membership: Membership,
    ) -> None:
        self._ctx, self._roles, self._book, self._place = ctx, roles, book, book.place
        self._checkpoints, self._membership, self._downloader = checkpoints, membership, ctx.downloader()
        self._tidied = False
        self._looking: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._copies: dict[tuple[Key, int], StateImage] = {}
        """By checkpoint and stage."""
        ctx.blocks.offers(PARTS, self._given)

    def here(self, opened: OpenCheckpoint) -> set[int]:
        """The stages with announced parts in the place."""
        parts = self._book.parts.get(opened.key, {})
        return {stage for stage, facts in opened.parts.items() if parts.get(stage) == facts}

    def has(self, key: Key, stage: int, facts: PartFacts) -> None:
        """Note that a part is in the place."""
        self._book.parts.setdefault(key, {})[stage] = facts

    async def store(self, opened: OpenCheckpoint, stage: int, facts: PartFacts, buffers: StateBuffers) -> str:
        """Write a part to the place. Returns the reason if the checkpoint fails because of that, else an empty text."""
        place, key, failed = self._place, opened.key, None
        if self._tidied:
            return ""
        try:
            await place.disk.call(place.write_part, key, stage, buffers)
        except OSError as e:
            failed = e
        shared = self._roles.shares_target()
        if opened.ended or (opened.ended is not None and shared):
            with suppress(OSError):  # the checkpoint ended while we wrote, and was tidied up before
                await place.disk.call(place.abandon, key)
        elif failed is None:
            self.has(key, stage, facts)
            opened.news = self._ctx.clock.now()
            opened.holders.setdefault(stage, set()).add(self._ctx.net.peer_id)
        elif shared:
            return self._why(failed, key)
        else:
            self._ctx.emit(PartNotKept(reason=str(failed)))
        return ""

    async def read(self, key: Key, stage: int) -> dict[str, Tensor]:
        """Read a part from the place. Raises CheckpointError."""
        try:
            content = await self._place.disk.call(self._place.read_part, key, stage)
            state: dict[str, Tensor] = await self._ctx.tasks.aside(safetensors.torch.load, content)
        except (OSError, safetensors.SafetensorError) as e:
            raise CheckpointError(f"stage {stage}'s part of checkpoint {key.step} is not here: {e}") from e
        return state

    async def look(self) -> None:
        """Read which checkpoints in the place are complete. If the store cannot be reached now, the last answer stays."""
        book = self._book
        with suppress(OSError):
            book.complete = await self._place.disk.call(self._place.complete)
            book.looked_s = self._ctx.clock.now()
            for key in list(book.parts):  # whose end we slept through: the publisher of a later one has removed these
                if any(k.step > key.step and branch_of(k.lineage) >= branch_of(key.lineage) for k in book.complete):
                    del book.parts[key]

    def known(self) -> dict[Key, dict[int, PartFacts]]:
        """The parts of all checkpoints that were in the place at the last look."""
        parts, complete = self._book.parts, self._book.complete
        return {key: {**parts.get(key, {}), **complete.get(key, {})} for key in {*parts, *complete}}

    async def readable_soon(self) -> dict[Key, dict[int, PartFacts]]:
        """The parts in the place, or the last known parts if the disk takes longer, so that the asking peer need not
        wait. Concurrent calls share one look."""
        if not self._ctx.tasks.closed:
            if self._looking is None or self._looking.done():
                self._looking = self._ctx.spawn(self.look(), "look at checkpoints")
            with suppress(DeadlineExceeded):
                await self._ctx.clock.deadline(asyncio.shield(self._looking), LAG_S, "the checkpoints' place")
        return self.known()

    def reads(self) -> bool:
        """Could the place be read lately?"""
        return self._ctx.clock.now() - self._book.looked_s < GONE_S

    async def publish(self, opened: OpenCheckpoint) -> bool:
        """Complete a checkpoint with all parts here. Returns False if parts are gone, to be fetched again. Raises
        CheckpointError for a failed write."""
        book, key = self._book, opened.key
        try:
            gone = await self._place.disk.call(self._place.publish, key, book.about, dict(opened.parts), book.files)
        except OSError as e:
            raise CheckpointError(self._why(e, key)) from e
        for stage in gone:
            book.parts.get(key, {}).pop(stage, None)
        if not gone:
            book.complete[key] = dict(opened.parts)
        return not gone

    async def is_complete(self, key: Key) -> bool:
        """Has a peer that shares the place completed the checkpoint?"""
        await self.look()
        return key in self._book.complete

    async def clear(self, key: Key, reason: str) -> None:
        """Remove parts that no peer needs after the end of ``key``; ``reason``: of the failure, else empty."""
        place, parts, shared = self._place, self._book.parts, self._roles.shares_target()
        coordinates = self._roles.coordinates()
        with suppress(OSError):
            if reason:
                parts.pop(key, None)
                # first, so that the disk has room for events; in a shared place the coordinator may still gather parts
                if not shared or coordinates:
                    await place.disk.call(place.abandon, key)
            else:  # in a shared place, the publisher removes older checkpoints
                for old in [k for k in parts if k.step <= key.step - (not shared)]:
                    del parts[old]
                if not shared:
                    await place.disk.call(place.drop, key.step)

    async def tidy(self, *, over: bool) -> None:
        """Remove all parts, since this peer leaves, or the run is ``over`` and the last checkpoint complete. In a
        shared place, other peers may still need parts."""
        self._tidied = True
        if over or not self._roles.shares_target():
            self._book.parts.clear()
            with suppress(OSError):
                await self._place.disk.call(self._place.drop, self._ctx.plan.steps + 1)

    def _why(self, error: OSError, key: Key) -> str:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{error.strerror or error}: {self._place.where(key)} ({'free some space; ' * full}training goes on)"

    # Given and taken ---------------------------------------------------------------------------------------------------

    async def base(self, key: Key, digest: bytes) -> dict[str, Tensor]:
        """Our stage's part of a checkpoint, from our place or from another peer. Raises CheckpointError, NetworkError,
        or ProtocolError."""
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        try:
            state = await self.read(key, stage)
            if (await ctx.tasks.aside(PartFacts.of, StateBuffers(state))).digest == digest:
                return state
        except CheckpointError:
            pass
        return await self.take(key, stage, PartFacts(20 * ctx.compute.n_params, digest), list(ctx.roster.others()))

    async def take(self, key: Key, stage: int, facts: PartFacts, holders: list[PeerId]) -> dict[str, Tensor]:
        """Take a part from ``holders``, first from most that give the same copy. Raises NetworkError, or ProtocolError if
        the digest differs from ``facts``."""
        error: NetworkError = PeerUnreachable(f"no peer gives this part of checkpoint {key.step}")
        for packed, donors in await self._downloader.manifests(facts.digest, holders):
            try:
                state = await self._downloader.take(blake3(packed).digest(), donors, facts.size + HEADERS)
            except NetworkError as e:
                error = e
                continue
            if (await self._ctx.tasks.aside(PartFacts.of, StateBuffers(state))).digest == facts.digest:
                return state
            error = ProtocolError(
                f"stage {stage}'s part of checkpoint {key.step}: its content is not what was announced"
            )
        raise error

    async def _given(self, taker: PeerId, digest: bytes) -> StateImage | None:
        """See ``core.blocks.Reader``. The first request for a part, by the digest of its facts, reads the part."""
        held = {f.digest: (key, s) for key, parts in self.known().items() for s, f in parts.items()}
        own = self._ctx.roster.own.stage
        held |= {o.own[1].digest: (o.key, own) for o in self._checkpoints.values() if o.own is not None}
        held |= {copy.digest: of for of, copy in self._copies.items()}
        if (of := held.get(digest)) is None:
            return None
        if self._ctx.tasks.closed:
            raise MuletrainError("this peer begins anew; ask again")
        if not await self._may_have(taker, of[1]):
            raise MuletrainError(f"stage {of[1]}'s part is for the coordinator and for peers that serve or keep it")
        async with self._reading:  # one part at a time is read, for all takers
            return self._copies.get(of) or await self._make(*of)

    async def _may_have(self, peer: PeerId, stage: int) -> bool:
        """Does ``peer`` coordinate, keep the stage's part, or serve the stage, by our own roster? Raises ProtocolError
        for a peer that is no member."""
        if peer == self._roles.coordinator:
            return True
        return peer in self._roles.keepers(stage, peer) or await self._membership.serves(peer, stage)

    async def _make(self, key: Key, stage: int) -> StateImage:
        """Make a copy of a part, once a copy before is not being taken. Raises MuletrainError. Ends within
        ``GONE_S / 2``."""
        clock, copies = self._ctx.clock, self._copies
        until = clock.now() + GONE_S / 2  # the asking peer waits for GONE_S
        while len(copies) >= COPIES:
            sent = self._ctx.blocks.sends(PARTS)
            unused = [k for k, c in copies.items() if c.digest not in sent and clock.now() - c.asked > LOOK_S]
            if unused:
                del copies[min(unused, key=lambda k: copies[k].asked)]
            elif clock.now() > until:
                raise MuletrainError("this peer has enough copies to send; ask again")
            else:
                await clock.sleep(LOOK_S)
        opened = self._checkpoints.get(key)
        if opened is not None and opened.own is not None and stage == self._ctx.roster.own.stage:
            state = opened.own[0]
        else:
            try:
                state = await self.read(key, stage)
            except CheckpointError as e:
                raise MuletrainError(str(e)) from None
        copy = StateImage(state)
        await copy.name(self._ctx.compute.offload)
        if not copies:
            self._ctx.spawn(self._ctx.blocks.drop_unasked(copies), "copies of parts")
        copies[key, stage], copy.asked = copy, clock.now()
        return copy


class Checkpointing:
    """Owns the course of each checkpoint on this peer, from the first notice to the end. This peer need not be the
    coordinator now. Decides whether we write our stage's part, and writes the part. A writer keeps one copy of the
    stage's state, and leaves out a checkpoint that is due while the part of an earlier checkpoint is not safe yet. Only
    the run's last checkpoint waits instead."""

    def __init__(self, ctx: Context, membership: Membership, book: Book) -> None:
        self._ctx, self.book, self._place = ctx, book, book.place
        self.roles = roles = Roles(ctx.roster, book)
        self._open: dict[Key, OpenCheckpoint] = {}
        self.parts = Parts(ctx, roles, book, self._open, membership)
        self._ends: dict[Key, str] = {}
        """The last ends (``OpenCheckpoint.ended``)."""
        self._clearing: set[Key] = set()
        """Ended checkpoints whose parts are being removed."""
        self._cleared = asyncio.Event()
        self._due: Key | None = None
        """The checkpoint of our last step; None: the run's last checkpoint, which cannot be left out."""
        self._fetching = asyncio.Lock()
        self._writing: Key | None = None
        """The checkpoint of the part that we hash or store now."""
        self._written: Key | None = None
        """The last checkpoint that was written because no trainer was left."""

    def open(self, key: Key) -> OpenCheckpoint:
        """The checkpoint ``key``, which has not ended; opened if new."""
        if (opened := self._open.get(key)) is None:
            now = self._ctx.clock.now()
            opened = self._open[key] = OpenCheckpoint(key, begin=now, news=now)
            self._ctx.spawn(self._see_through(opened), f"checkpoint {key.step}")
        return opened

    def end_of(self, key: Key) -> str | None:
        """The end of checkpoint ``key`` (``OpenCheckpoint.ended``)."""
        return self._ends.get(key)

    def _before(self, step: int) -> list[OpenCheckpoint]:
        """Open checkpoints of earlier steps."""
        return [o for k, o in self._open.items() if k.step < step]

    async def announce(self, opened: OpenCheckpoint, stage: int, facts: PartFacts) -> None:
        """Tell all peers that this peer has a part."""
        ctx, key = self._ctx, opened.key
        place = self._place.name if stage in self.parts.here(opened) else ""
        ready = PartReady(**key._asdict(), stage=stage, **facts._asdict(), place=place)
        await ctx.tell(ctx.roster.everyone(), ready)  # also peers that are down: a partition may be over

    # Our own stage's part -------------------------------------------------------------------------------------------

    @property
    def copies(self) -> int:
        """Number of copies of our state that are kept for checkpoints."""
        return sum(opened.own is not None for opened in self._open.values())

    async def due(self, key: Key, *, last: bool) -> None:
        """After the step of ``key`` was applied: write our stage's part while training goes on, if we should. Without memory
        for a copy of the state (``Compute.lends``), training waits until the checkpoint has ended."""
        if (
            (earlier := self._written) is not None
            and self.end_of(earlier) is None
            and self.roles.coordinator is not None
        ):
            self.leave_out(earlier, "left out: the run went on before it was complete")  # that copy would be in the way
        self._written = None
        if self.begins(key, last=last):
            self._spawn(key, await self.copy(key))
            if self._ctx.compute.lends:
                await self.ended(key)

    async def write_what_there_is(self, at: Position) -> None:
        """No trainer is left: write our part of a checkpoint of the weights before this step, once, since the step may
        never be done."""
        key = Key(at.step, at.applied)
        done = key == self._written or not key.step or at.work.all_completed  # otherwise another follows soon
        if done or not at.settled or at.away or not self.begins(key, last=True):
            return
        state = await self.copy(key)
        if at.settled and key == Key(at.step, at.applied):
            self._written = key
            self._spawn(key, state)

    def _spawn(self, key: Key, state: dict[str, Tensor] | None) -> None:
        if state is not None:
            self._ctx.spawn(self.write(key, state), f"part of checkpoint {key.step}")

    def begins(self, key: Key, *, last: bool) -> bool:
        """After the step of ``key`` was applied: should we write our stage's part now? If another copy of the state is
        in use, the checkpoint is left out; the ``last`` checkpoint waits (``wants``)."""
        self._due = None if last else key
        if (opened := self._open.get(key)) is not None:
            opened.changed.set()
        if not self.roles.is_writer() or self.end_of(key) is not None or self.roles.coordinator is None:
            return False
        reason = self.busy()
        if reason is not None and not last:
            self.leave_out(key, f"left out: {reason}")
        return reason is None

    def wants(self, key: Key) -> bool:
        """Should we still offer our stage's part of the last checkpoint? A peer that shares the place leaves the offer
        to the writer."""
        if self.end_of(key) is not None or self.busy() is not None:
            return False
        if self.roles.shares_target() and not self.roles.is_writer():
            return False
        opened = self._open.get(key)
        return opened is None or self._ctx.roster.own.stage not in self.parts.here(opened)

    def busy(self) -> str | None:
        """The reason why there is no room for another copy of the state; None: there is room."""
        earlier = self._writing or next((o.key for o in self._open.values() if o.own is not None), None)
        if earlier is not None:
            return f"checkpoint {earlier.step} is not complete yet (the store is slower than checkpoint.every)"
        if self.roles.shares_target() and self._place.disk.hangs:
            return f"{self._place.where(Key(0, b''))}: the disk or store hangs"
        return None

    def unsafe(self) -> str | None:
        """The reason why this peer should not leave the stage yet, if a checkpoint would lose a part."""
        stage = self._ctx.roster.own.stage
        for opened in self._open.values():
            step, holders, here = opened.key.step, opened.holders.get(stage, set()), self.parts.here(opened)
            others = any(self._ctx.roster.is_alive(p) for p in holders - {self._ctx.net.peer_id})
            there = (stage in here and self.roles.shares_target()) or others
            if opened.key == self._writing or (opened.own is not None and not there):
                return f"its part of checkpoint {step} is on its way"
            if self.roles.coordinates() and here:
                return f"it coordinates checkpoint {step}"
        return None

    async def copy(self, key: Key) -> dict[str, Tensor] | None:
        """A copy of the state for checkpoint ``key``; None without room for a copy: then the checkpoint is left out,
        and training goes on."""
        try:
            return await self._ctx.compute.state()
        except CapacityError as e:
            self.leave_out(key, f"left out: {e}")
            return None

    async def write(self, key: Key, state: dict[str, Tensor]) -> None:
        """Write our stage's part to the place, if shared, and announce the part."""
        if self.end_of(key) is not None:
            return
        self._writing = key
        try:
            await self._write(key, state)
        finally:
            self._writing = None

    async def _write(self, key: Key, state: dict[str, Tensor]) -> None:
        ctx, stage = self._ctx, self._ctx.roster.own.stage
        opened = self.open(key)
        buffers = StateBuffers(state)
        facts = await ctx.tasks.aside(PartFacts.of, buffers)
        if self.roles.shares_target() and (why := await self.parts.store(opened, stage, facts, buffers)):
            self.fail(key, why)
        if opened.ended is None:
            opened.own, opened.parts[stage] = (state, facts), facts
            opened.holders.setdefault(stage, set()).add(ctx.net.peer_id)
            await self.announce(opened, stage, facts)
            opened.changed.set()

    # Messages ---------------------------------------------------------------------------------------------------------

    def on_ready(self, sender: PeerId, ready: PartReady) -> None:
        """A peer has a part. Raises ProtocolError for a part that cannot be."""
        plan, key, stage = self._ctx.plan, ready.key, ready.stage
        if stage >= plan.stages or not 0 < ready.step <= plan.steps or not 0 < ready.size <= self._largest(stage):
            raise ProtocolError(f"checkpoint {ready.step}: stage {stage} of {ready.size} bytes cannot be")
        if (reason := self.end_of(key)) is not None:
            if self.roles.coordinates():  # our notice was lost
                self._ctx.spawn(
                    self._ctx.tell((sender,), CheckpointEnd(**key._asdict(), reason=reason)), "end of a checkpoint"
                )
            return
        opened = self._open.get(key)
        known = None if opened is None else opened.parts.get(stage)
        if known is None and self._ctx.roster.member(sender).stage != stage:
            return  # the stage itself must announce the part first; keepers repeat that
        writes = sender == self.roles.writer(stage)
        if opened is not None and known is not None and known != ready.facts:
            if not writes:
                return  # the writer's announcement counts, else the first, until proven false (``_fetch``)
            opened.holders[stage] = set()
        if opened is None and len(self._open) >= MAX_OPEN:
            raise ProtocolError(f"checkpoint {ready.step}: {MAX_OPEN} others are not complete yet")
        opened = self.open(key)
        if sender not in opened.holders.setdefault(stage, set()):
            opened.news = self._ctx.clock.now()
        opened.parts[stage] = ready.facts
        opened.holders[stage].add(sender)
        if writes and ready.place == self._place.name:
            self.parts.has(key, stage, ready.facts)
        opened.changed.set()
        if self.roles.coordinates() and writes:
            for earlier in self._before(key.step):  # one part at a time is written, so these will not come
                if stage not in earlier.parts:
                    lost = f"no part of stages [{stage}] came before that of a later checkpoint"
                    self.fail(earlier.key, lost)

    def _largest(self, stage: int) -> int:
        """Largest part of ``stage`` [bytes]: a peer that fetches a part reserves the announced size."""
        return largest_part(self._ctx.plan.state_bytes[stage] if self._ctx.plan.state_bytes else 0)

    async def on_end(self, sender: PeerId, end: CheckpointEnd) -> None:
        """A checkpoint ended. Completion is believed only from the coordinator, and a failure also from a writer that
        shares the place. Raises ProtocolError for a checkpoint that cannot be."""
        roles, key = self.roles, end.key
        if not 0 < end.step <= self._ctx.plan.steps:
            raise ProtocolError(f"the end of checkpoint {end.step}, which cannot be")
        member = self._ctx.roster.member(sender)
        if not end.left_out:
            fails = end.reason and member.place == roles.target and sender == roles.writer(member.stage)
            if sender == roles.coordinator or fails:
                self.end(key, end.reason)
            return
        known = self._open.get(key)
        open_to_all = self.end_of(key) is None and (known is not None or len(self._open) < MAX_OPEN)
        if open_to_all and sender == roles.writer(member.stage):
            opened = self.open(key)
            if member.stage not in opened.parts:
                opened.left_out = end.reason
                opened.changed.set()

    # Until the end ----------------------------------------------------------------------------------------------------

    async def _see_through(self, opened: OpenCheckpoint) -> None:
        """Do our part until the checkpoint has ended, and watch the coordinator, since we may have to take over. Ends
        within ``_left_s``: the time that all parts need over a slow link."""
        ctx, key, looks = self._ctx, opened.key, itertools.count()
        while not opened.ended:
            opened.changed.clear()
            complete = opened.ended is not None  # the parts that we keep may still be under way
            if opened.left_out and key == self._due and self.roles.coordinates():
                return self.fail(key, opened.left_out)
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
                limit_s = min(pause_s(next(looks)), self._left_s(opened))
                await ctx.clock.deadline(opened.changed.wait(), limit_s, "news of a checkpoint")
            except MuletrainError:
                await self._look_after(opened)

    async def _look_after(self, opened: OpenCheckpoint) -> None:
        """No news came for a while: check whether the checkpoint has ended or failed."""
        ctx, key = self._ctx, opened.key
        if self._before(key.step):
            opened.news = ctx.clock.now()  # earlier checkpoints go first
        if await self.parts.is_complete(key):
            self.end(key, "")  # the notice was lost
        elif ctx.clock.now() - opened.news > CEILING_S or self._left_s(opened) <= 0:
            reason = opened.lacking(ctx.plan.stages)
            if self.roles.coordinates():
                self.fail(key, reason)
            else:
                self.end(key, reason)
        else:
            # only the coordinator gives up: parts may take long over slow links
            if await self._coordinator_answers(key):
                opened.news = ctx.clock.now()
            if opened.own is not None:  # our notice may be lost, or the coordinator is new
                await self.announce(opened, ctx.roster.own.stage, opened.own[1])

    def _left_s(self, opened: OpenCheckpoint) -> float:
        """Seconds until the checkpoint has failed in any case."""
        size = sum(self._ctx.plan.state_bytes) or sum(f.size for f in opened.parts.values())
        return max(0.0, opened.begin + CEILING_S + size / SLOWEST_BYTES_PER_S - self._ctx.clock.now())

    async def _coordinator_answers(self, key: Key) -> bool:
        coordinator = self.roles.coordinator
        if coordinator is None or self.roles.coordinates():
            return False
        return await self._ctx.detector.probe(coordinator, key.lineage, key.step) is not None

    async def _do_ours(self, opened: OpenCheckpoint) -> None:
        """Fetch the parts that we should have. As the coordinator, publish when all parts are here. Raises
        NetworkError, ProtocolError or CheckpointError."""
        coordinates, me = self.roles.coordinates(), self._ctx.net.peer_id
        for stage in sorted(opened.parts.keys() - self.parts.here(opened)):
            if (coordinates and opened.ended is None) or me in self.roles.keepers(stage, me):
                await self._fetch(opened, stage)
        if coordinates and len(self.parts.here(opened)) == self._ctx.plan.stages and opened.ended is None:
            await self._publish(opened)

    async def _fetch(self, opened: OpenCheckpoint, stage: int) -> None:
        key = opened.key
        async with self._fetching:  # memory holds one part at a time, of all checkpoints
            if opened.ended or stage in self.parts.here(opened):
                return
            holders, facts = sorted(opened.holders[stage] - {self._ctx.net.peer_id}), opened.parts[stage]
            try:
                if opened.own is not None and opened.own[1] == facts:
                    state = opened.own[0]
                else:
                    state = await self.parts.take(key, stage, facts, holders)
            except ProtocolError:  # forget the false announcement, so that another counts
                if opened.parts.get(stage) == facts:
                    del opened.parts[stage], opened.holders[stage]
                raise
            if not opened.ended and (why := await self.parts.store(opened, stage, facts, StateBuffers(state))):
                self.fail(key, why)
        if stage in self.parts.here(opened):
            await self.announce(opened, stage, facts)

    async def _publish(self, opened: OpenCheckpoint) -> None:
        ctx, key = self._ctx, opened.key
        try:
            if not await self.parts.publish(opened) or opened.ended is not None:
                return
        except CheckpointError as e:
            return self.fail(key, str(e))
        size, seconds = sum(f.size for f in opened.parts.values()), ctx.clock.now() - opened.begin
        ctx.emit(CheckpointWritten(step=key.step, path=self._place.where(key), bytes=size, seconds=seconds))
        self.end(key, "", for_all=True)

    # The end ----------------------------------------------------------------------------------------------------------

    def leave_out(self, key: Key, reason: str) -> None:
        """Tell the coordinator that our stage's part is not written."""
        if self.roles.coordinates():
            return self.fail(key, reason)
        assert self.roles.coordinator is not None  # else nothing is due
        self.end(key, reason)
        end = CheckpointEnd(**key._asdict(), reason=reason, left_out=True)
        self._ctx.spawn(self._ctx.tell((self.roles.coordinator,), end), f"checkpoint {key.step} is left out")

    def fail(self, key: Key, reason: str) -> None:
        """End the checkpoint as failed, for all peers."""
        self.end(key, reason[:4096], for_all=True)

    def end(self, key: Key, reason: str, *, for_all: bool = False) -> None:
        """End the checkpoint here or ``for_all`` peers, without waiting for the disk. A complete checkpoint ends the
        earlier ones, too."""
        if self.end_of(key) is not None:
            return
        ends = {}
        for overtaken in () if reason else self._before(key.step):
            lacking = overtaken.lacking(self._ctx.plan.stages)
            ends[overtaken.key] = f"{lacking} before a later checkpoint was complete"
        ends[key] = reason
        for ended, why in ends.items():
            self._ends[ended] = why
            if (opened := self._open.pop(ended, None)) is not None:
                opened.ended = why
                opened.changed.set()
        self._clearing |= ends.keys()
        while len(self._ends) > REMEMBERED:
            del self._ends[next(iter(self._ends))]
        self._ctx.spawn(self._clear(ends, for_all=for_all), f"after checkpoint {key.step}")

    async def _clear(self, ends: dict[Key, str], *, for_all: bool) -> None:
        coordinates = self.roles.coordinates()
        for key, reason in ends.items():
            await self.parts.clear(key, reason)
            if reason and coordinates:
                self._ctx.emit(CheckpointFailed(step=key.step, reason=reason))
            self._clearing.discard(key)
            self._cleared.set()
            if for_all:  # after a slow disk, that end may be forgotten
                await self._ctx.tell(self._ctx.roster.others(), CheckpointEnd(**key._asdict(), reason=reason))

    async def ended(self, key: Key) -> bool:
        """Wait for the end of checkpoint ``key``. True if complete. Ends after ``checkpoint/checkpointing._see_through``."""
        if self.end_of(key) is None:
            self.open(key)  # perhaps no part was announced yet
        while key not in self._ends or key in self._clearing:
            self._cleared.clear()
            await self._cleared.wait()
        return not self._ends[key]
