"""One transport moves all large data between peers: states, gradients, checkpoints' parts, the run's tokens, the
weights beside an adapter, and a hub's weights and accumulators. A copy is immutable, and cut into blocks that a manifest
names by hash.

``Blocks`` is a process' end of the transport: each room registers a reader of the copies that it gives (``offers``),
and takers name a copy by its digest (``AskBlocks``). A ``Downloader`` asks several donors for different blocks at
once and checks each arriving block against the manifest. A donor whose block is wrong or late is dropped, and other
donors are asked for that block. A sole donor is asked again, as the link may have broken. Arrived blocks are kept, so a
break costs only the blocks in flight. Blocks of states travel as ``Channel.BULK``, which yields to the traffic of the
step.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import torch
from blake3 import blake3
from pydantic import FailFast, Field

from muletrain.errors import (
    DeadlineExceeded,
    Malformed,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
)
from muletrain.network.base import Channel
from muletrain.policy.deadline import CEILING_S, Deadline
from muletrain.policy.recent import Recent
from muletrain.runtime.core.messages import Digest, Header, Message, Natural, Text
from muletrain.runtime.core.times import AGAIN_S, GONE_S, PAUSE_S
from muletrain.runtime.core.waiting import unless_done
from muletrain.wire.codec import MAX_DIMENSIONS, RAW, Encoded, decode_raw

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.wire.frame import Frame

BLOCK = 1 << 20
"""Bytes of a block. Blocks of a very large copy are larger, so that the manifest fits into a call's answer."""
MAX_BLOCKS = 1 << 14
"""Most blocks of one copy."""
RUN = 8
"""Most blocks requested in one call."""
LANES = 2
"""Calls in progress with one donor: while one run of blocks arrives, the next is requested."""
MAX_RUNS, ALL_RUNS = 2 * LANES, 256
"""Most waiting runs of blocks, for one taker and for all takers. Runs take turns, so that every taker makes
progress."""
TIMES = 4
"""Number of times that one taker may download a copy: links break, and arrived blocks may be lost."""
HEADERS = 1 << 16
"""Bytes of a copy beside the expected tensors."""
BUSY = "this peer gives that to others now; ask again later"
"""The refusal of a donor that serves enough takers. The taker waits for its turn."""
HASHED_AT_ONCE = 16 << 20
"""Bytes hashed in one job: quantising shares the thread and must not wait long."""
_TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}

K = TypeVar("K")
C = TypeVar("C", bound="StateImage")
Offload = Callable[..., Awaitable[Any]]
"""Runs a function beside the event loop, and returns the result."""


Shape = Annotated[tuple[Natural, ...], Field(max_length=MAX_DIMENSIONS)]


def block_size(size: int) -> int:
    """Bytes of a block in a copy of ``size`` bytes: whole fp32 numbers."""
    return max(BLOCK, -(-size // (4 * MAX_BLOCKS)) * 4)


class Manifest(Header):
    """A manifest lists a copy's tensors (name, dtype, shape) in order, the block size, and every block's BLAKE3."""

    tensors: Annotated[tuple[tuple[Text, Text, Shape], ...], Field(max_length=1 << 16)]
    block: Annotated[int, Field(ge=1, le=1 << 28)]
    digests: Annotated[bytes, Field(max_length=32 * MAX_BLOCKS)]

    @cached_property
    def size(self) -> int:
        """Bytes of all tensors. Raises ProtocolError for a dtype that no copy has."""
        if not {dtype for _, dtype, _ in self.tensors} <= DTYPES.keys():
            raise ProtocolError("a manifest with tensors of an unknown type")
        return sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in self.tensors)

    @property
    def blocks(self) -> int:
        """How many blocks the copy has."""
        return len(self.digests) // 32

    def check(self, limit: int) -> None:
        """Raises ProtocolError unless the blocks fit the tensors, and the copy has at most ``limit`` bytes."""
        if self.block > block_size(self.size):  # blocks lie in our memory
            raise ProtocolError(f"a manifest with blocks of {self.block} bytes")
        if self.size > limit or self.blocks != -(-self.size // self.block) or len(self.digests) % 32:
            raise ProtocolError(f"a manifest of {self.size} bytes in {self.blocks} blocks, of at most {limit} bytes")

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors by name. ``flat``: all bytes of the copy, of which the tensors are views where the place allows."""
        found, begin = {}, 0
        for name, dtype, shape in self.tensors:
            kind = DTYPES[dtype]
            part = flat[begin : begin + math.prod(shape) * kind.itemsize]
            found[name] = (part.clone() if begin % kind.itemsize else part).view(kind).view(shape)
            begin += len(part)
        return found

    def span(self, block: int) -> tuple[int, int]:
        """First byte of ``block``, and the first byte after ``block``."""
        return block * self.block, min(self.size, (block + 1) * self.block)

    def digest(self, block: int) -> bytes:
        """BLAKE3 of ``block``."""
        return self.digests[32 * block : 32 * block + 32]


class AskBlocks(Message):
    """A call that asks for ``blocks`` of the copy with that digest; (): for the manifest. Blocks come as frames, and
    the answer is then empty."""

    KIND: ClassVar[str] = "ask_blocks"
    ANSWER: ClassVar[type[Header] | None] = Manifest
    digest: Digest
    blocks: Annotated[tuple[Natural, ...], Field(max_length=RUN), FailFast()] = ()


class Block(Message):
    """A frame with one requested block."""

    KIND: ClassVar[str] = "block"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    TENSORS: ClassVar[int] = 1
    digest: Digest
    block: Natural


class StateImage:
    """A donor's side of one copy. ``digest``, the hash of the manifest, names the copy."""

    def __init__(self, state: dict[str, Tensor], channel: Channel = Channel.BULK) -> None:
        """``state``: tensors that do not change any more. ``channel``: urgency of the blocks."""
        self.channel = channel
        self.asked = -math.inf
        """When a taker last asked for the copy."""
        self._names = sorted(state)
        self.tensors = [state[n] for n in self._names]
        """In the order of their names."""
        self._begins = [0, *accumulate(t.nbytes for t in self.tensors)]
        self.size = self._begins[-1]
        self.block = block_size(self.size)
        self.manifest = b""
        self.digest = b""

    @cached_property
    def _views(self) -> list[memoryview]:
        return [t.contiguous().reshape(-1).view(torch.uint8).numpy().data for t in self.tensors]

    async def name(self, offload: Offload) -> None:
        """Hash all blocks, and name the copy by the hashes."""
        step = self.block * max(1, HASHED_AT_ONCE // self.block)
        self.named(b"".join([await offload(self.hashes, k, k + step) for k in range(0, self.size, step)]))

    def hashes(self, begin: int = 0, end: int | None = None) -> bytes:
        """BLAKE3 of the blocks of bytes ``begin`` to ``end``, one after the other."""
        found = []
        for a in range(begin, min(self.size, end or self.size), self.block):
            digest = blake3()
            for view in self.views(a, min(self.size, a + self.block)):
                digest.update(view)
            found.append(digest.digest())
        return b"".join(found)

    def named(self, digests: bytes) -> None:
        """Name the copy; ``digests``: the result of ``hashes``."""
        tensors = [
            (n, str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for n, t in zip(self._names, self.tensors, strict=True)
        ]
        self.manifest = Manifest(tensors=tuple(tensors), block=self.block, digests=digests).pack()
        self.digest = blake3(self.manifest).digest()

    def views(self, a: int, b: int) -> list[memoryview]:
        """Bytes ``a`` to ``b`` of the copy, as views of its tensors."""
        pieces = []
        k = bisect_right(self._begins, a) - 1
        while a < b:
            piece = self._views[k][a - self._begins[k] : b - self._begins[k]]
            pieces.append(piece)
            a, k = a + len(piece), k + 1
        return pieces

    async def content(self, begin: int, end: int) -> list[memoryview]:
        """Bytes ``begin`` to ``end`` of the copy, read for sending."""
        return self.views(begin, end)

    async def send(self, by: Blocks, taker: PeerId, block: int) -> None:
        """Send one block to ``taker``. Raises NetworkError."""
        begin, end = block * self.block, min(self.size, (block + 1) * self.block)
        raw = Encoded(RAW, (end - begin,), await self.content(begin, end))
        await by.send(taker, Block(digest=self.digest, block=block), [raw], channel=self.channel)


@dataclass
class PartialDownload:
    """A taker's side of one copy: the blocks that arrived."""

    digest: bytes
    manifest: Manifest
    data: bytearray | memoryview
    missing: set[int]
    wrong: set[PeerId] = field(default_factory=set, kw_only=True)
    """Donors that sent a wrong block."""

    @classmethod
    def of(cls, digest: bytes, manifest: Manifest) -> PartialDownload:
        """An empty download into memory of its own."""
        return cls(digest, manifest, bytearray(manifest.size), set(range(manifest.blocks)))

    def room(self, block: int) -> memoryview:
        """Memory for a block that is asked for."""
        begin, end = self.manifest.span(block)
        return memoryview(self.data)[begin:end]

    async def keep(self, block: int, content: memoryview) -> None:
        """Keep a verified block; ``content``: its ``room``. Raises NetworkError if that fails, and OSError of a disk."""
        self.missing.discard(block)

    def state(self) -> dict[str, Tensor]:
        """The tensors, on the downloaded memory."""
        flat = torch.frombuffer(self.data, dtype=torch.uint8) if self.data else torch.empty(0, dtype=torch.uint8)
        return self.manifest.views(flat)


@dataclass
class _Expected:
    """A requested block, which belongs ``into`` this memory. ``taker`` waits."""

    into: memoryview
    taker: Downloader
    whole: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


Reader = Callable[["PeerId", bytes], Awaitable[StateImage | None]]
"""Returns the copy with a digest or a name for a taker; None: the room does not give that copy. Raises MuletrainError for a copy
that this taker may not have now. Asked again before every block."""


class Blocks:
    """One process' end of the transport, whichever peers the process becomes. Answers requests from the registered
    readers' copies, and hands each arriving block to the waiting ``Downloader``. Bounds what a taker draws, and what a
    sender makes this process read (``network.base.Bounds``)."""

    def __init__(self, net: Network, clock: Clock, tasks: Tasks) -> None:
        self.net, self.clock, self._tasks = net, clock, tasks
        self.send: Callable[..., Awaitable[object]] = self._plainly
        """Sends a frame; a peer counts the bytes (``Context.send``)."""
        self.waiting: dict[tuple[PeerId, bytes, int], _Expected] = {}
        """Requested blocks, by donor and copy."""
        self.largest = BLOCK
        """Bytes of the largest block ever requested."""
        self._readers: dict[str, tuple[Reader, int]] = {}
        self._turns: dict[tuple[str, PeerId], float] = {}
        """When each taker last asked for blocks of a room's copies. A turn lasts ``AGAIN_S`` after that, and while
        blocks are being sent."""
        self._runs: list[tuple[str, PeerId, bytes]] = []
        """Room, taker and copy of each run of blocks being sent."""
        self._sending: set[tuple[PeerId, bytes, int]] = set()
        """Blocks that are being sent, by taker and copy. A block that is requested again is not sent twice."""
        self._drawn: Recent[int] = Recent()
        """Blocks requested, by taker and copy."""
        net.serve(AskBlocks.KIND, self._on_ask)
        net.receive(self._on_frame, (Block.KIND,), self)

    async def _plainly(self, peer: PeerId, message: Block, tensors: list[Encoded], *, channel: Channel) -> None:
        await self.net.send(peer, message.frame(tensors), channel=channel, timeout_s=GONE_S)

    # The giver --------------------------------------------------------------------------------------------------------

    def offers(self, room: str, reader: Reader, takers: int = ALL_RUNS) -> None:
        """From now on, give the copies of ``reader``, to ``takers`` peers at once; in place of the reader that ``room``
        had before."""
        self._readers[room] = reader, takers

    def sends(self, room: str) -> set[bytes]:
        """Returns the digests of the copies of ``room`` that are being sent."""
        return {digest for name, _, digest in self._runs if name == room}

    async def _asked(self, digest: bytes, taker: PeerId) -> tuple[str, StateImage]:
        """The copy ``digest`` for ``taker``, and the copy's room. Raises MuletrainError when no room gives the
        copy to ``taker`` (any more)."""
        for room, (reader, _) in self._readers.items():
            if (copy := await reader(taker, digest)) is not None:
                copy.asked = self.clock.now()
                return room, copy
        raise MuletrainError("this copy is not kept for you (any more); ask for another")

    async def drop_unasked(self, copies: dict[K, C]) -> None:
        """Drop ``copies`` that nobody takes any more. Ends within ``GONE_S`` after the last request."""
        while copies:
            await self.clock.sleep(GONE_S / 2)
            for name in [n for n, copy in copies.items() if self.clock.now() - copy.asked >= GONE_S]:
                del copies[name]

    async def _on_ask(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises MuletrainError for a copy that ``sender`` may not have, and for too many blocks or takers."""
        ask = AskBlocks.unpack(payload)
        room, copy = await self._asked(ask.digest, sender)
        if not ask.blocks:
            return copy.manifest
        count = -(-copy.size // copy.block)
        if max(ask.blocks) >= count:
            raise ProtocolError("blocks that the copy does not have")
        blocks = tuple(k for k in dict.fromkeys(ask.blocks) if (sender, copy.digest, k) not in self._sending)
        if not blocks:
            return b""
        now = self.clock.now()
        running = {(name, taker) for name, taker, _ in self._runs}
        self._turns = {turn: at for turn, at in self._turns.items() if turn in running or now - at < AGAIN_S}
        if (room, sender) not in self._turns and sum(r == room for r, _ in self._turns) >= self._readers[room][1]:
            raise MuletrainError(BUSY)
        self._turns[room, sender] = now
        if [taker for _, taker, _ in self._runs].count(sender) >= MAX_RUNS or len(self._runs) >= ALL_RUNS:
            raise MuletrainError("this donor has enough to send")
        drawn = f"{sender} {copy.digest.hex()}"
        if self._drawn.get(drawn, 0) + len(blocks) > TIMES * max(RUN, count):
            raise MuletrainError(f"this donor has sent that copy to this peer {TIMES} times")
        self._drawn[drawn] = self._drawn.get(drawn, 0) + len(blocks)
        run = room, sender, copy.digest
        self._runs.append(run)
        self._sending |= {(sender, copy.digest, k) for k in blocks}
        self._tasks.spawn(self._give(copy, run, blocks), "blocks")
        return b""

    async def _give(self, copy: StateImage, run: tuple[str, PeerId, bytes], blocks: tuple[int, ...]) -> None:
        """Send ``blocks`` while the copy is kept. A taker that lacks blocks asks another donor, or us again. Ends
        within ``CEILING_S`` for each block: the copy's successor waits until nobody takes it."""
        (_, taker, digest), left = run, list(blocks)
        try:
            while left:
                await self.clock.deadline(copy.send(self, taker, left[0]), CEILING_S, "a block")
                self._sending.discard((taker, digest, left.pop(0)))
                await self._asked(digest, taker)
        except MuletrainError:
            pass
        finally:
            self._sending -= {(taker, digest, k) for k in left}
            self._runs.remove(run)

    # The taker --------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        return 256 + Block.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``. A block may be late, but no larger than any requested block."""
        frame.message = message = Block.parse(frame)
        expected, (block,) = self.waiting.get((sender, message.digest, message.block)), frame.tensors
        if block.codec != RAW or len(block.shape) != 1:
            raise Malformed(f"a block of {block.codec} {block.shape}")
        if expected is not None and block.shape[0] != len(expected.into):
            raise Malformed(f"block {message.block}: {block.shape[0]} bytes instead of {len(expected.into)}")
        if block.shape[0] > self.largest:
            raise ProtocolError(f"a block of {block.shape[0]} bytes, and none was asked for")

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        """Take a block in. A block that is not awaited (any more) is dropped. Raises ProtocolError for a wrong size."""
        message, (tensor,) = Block.parse(frame), frame.tensors
        expected, data = self.waiting.get((sender, message.digest, message.block)), decode_raw(tensor)
        if expected is None or expected.whole.done():
            return
        if len(data) != len(expected.into):
            raise Malformed(f"block {message.block}: {len(data)} bytes instead of {len(expected.into)}")
        expected.into[:] = data
        expected.taker.came = self.clock.now()
        expected.whole.set_result(None)


@dataclass
class Downloader:
    """Takes copies: asks donors for manifests and blocks, and verifies both."""

    blocks: Blocks
    offload: Offload
    """Hashes beside the event loop."""
    awaiting: Callable[[PeerId, asyncio.Future[None]], AbstractContextManager[None]] = lambda donor, block: (
        nullcontext()
    )
    """Fails a block's future once the donor is known to be down."""
    refused: Callable[[PeerId, str], None] = lambda donor, reason: None
    """Hears of donors that sent something wrong."""
    name: Callable[[PeerId], str] = str
    deadline: Deadline = field(default_factory=lambda: Deadline(unmeasured_s=2 * AGAIN_S, floor_s=AGAIN_S))
    """Seconds between two blocks, from any donor: donors share our link."""
    came: float = float("-inf")
    """When the last block arrived."""
    _breaks: int = 0
    _partial: PartialDownload | None = None
    """The copy that ``take`` could not finish: arrived blocks are kept for the next attempt."""

    async def take(self, digest: bytes, donors: list[PeerId], limit: int) -> dict[str, Tensor]:
        """The tensors of the copy ``digest``, of at most ``limit`` bytes. Raises NetworkError or ProtocolError."""
        if self._partial is None or self._partial.digest != digest:
            self._partial = None  # free its memory, which the next download needs
            manifest = await self.manifest(digest, donors, lambda m: m.check(limit))
            self._partial = PartialDownload.of(digest, manifest)
        partial = self._partial
        await self.fetch(partial, donors)
        if self._partial is partial:  # another call may have taken the same copy meanwhile
            self._partial = None
        return partial.state()

    async def manifest(self, digest: bytes, donors: list[PeerId], check: Callable[[Manifest], None]) -> Manifest:
        """The manifest of the copy ``digest`` from the first donor that gives the manifest. Raises PeerUnreachable when
        no donor gives the manifest, and errors of ``check``, which raises ProtocolError if no such copy can be."""
        net, ask = self.blocks.net, AskBlocks(digest=digest).pack()
        for donor in donors:
            try:
                packed = await net.call(donor, AskBlocks.KIND, ask, timeout_s=GONE_S)
            except NetworkError:
                continue
            if blake3(packed).digest() == digest:
                manifest = Manifest.unpack(packed)
                check(manifest)
                return manifest
            self.refused(donor, "a manifest of another copy than the one asked for")
        raise PeerUnreachable("no donor gave the manifest of this copy")

    async def manifests(self, name: bytes, donors: list[PeerId]) -> list[tuple[bytes, list[PeerId]]]:
        """The manifests that ``donors`` give under ``name``, and the donors of each; that of most donors comes
        first. Nothing is checked."""
        net, ask = self.blocks.net, AskBlocks(digest=name).pack()
        found: dict[bytes, list[PeerId]] = {}
        calls = (net.call(donor, AskBlocks.KIND, ask, timeout_s=GONE_S) for donor in donors)
        for donor, packed in zip(donors, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(packed, bytes):
                found.setdefault(packed, []).append(donor)
            elif not isinstance(packed, NetworkError):
                raise packed
        return sorted(found.items(), key=lambda item: -len(item[1]))

    async def fetch(self, partial: PartialDownload, donors: list[PeerId]) -> None:
        """Download until nothing of ``partial`` is missing. Raises PeerUnreachable when every donor failed, and OSError of
        ``PartialDownload.keep``; arrived blocks stay in ``partial``."""
        queue = deque(sorted(partial.missing))
        good = list(donors)
        most = max(1, RUN * BLOCK // partial.manifest.block)  # large blocks come one by one
        reason = "no donor has them"
        failed: OSError | None = None

        async def lane(donor: PeerId) -> None:
            nonlocal reason, failed
            while queue and donor in good:
                share = -(-len(queue) // (LANES * len(good)))  # every donor sends a part of a small copy, too
                run = [queue.popleft() for _ in range(min(RUN, most, share))]
                try:
                    await self._run(partial, donor, run, good)
                except (NetworkError, ProtocolError) as e:
                    reason = reason if BUSY in reason else f"{self.name(donor)}: {e}"
                    if donor in good:
                        good.remove(donor)
                    if isinstance(e, ProtocolError):
                        partial.wrong.add(donor)
                        self.refused(donor, str(e))
                except OSError as e:  # no other donor helps
                    failed = e
                    good.clear()
                finally:
                    queue.extend(k for k in run if k in partial.missing)

        while partial.missing and good:
            await asyncio.gather(*(lane(donor) for donor in list(good) for _ in range(LANES)))
        if failed is not None:
            raise failed
        self._breaks = self._breaks + 1 if partial.missing else 0
        if partial.missing:
            raise PeerUnreachable(
                f"{len(partial.missing)} of {partial.manifest.blocks} blocks did not come from any donor ({reason})"
            )

    async def _run(self, partial: PartialDownload, donor: PeerId, run: list[int], good: list[PeerId]) -> None:
        """Download the blocks of one call, and check each block on arrival. ``good``: donors that have not failed. A slow
        link is no reason to give up while blocks arrive, nor while the only donor lives: the donor may have more urgent
        traffic, or have sent the blocks over a link that broke, and is asked again. Raises NetworkError or ProtocolError.
        Ends within ``CEILING_S`` without a block."""
        blocks, clock = self.blocks, self.blocks.clock
        blocks.largest = max(blocks.largest, partial.manifest.block)
        expected = {k: _Expected(partial.room(k), self) for k in run}
        blocks.waiting |= {(donor, partial.digest, k): e for k, e in expected.items()}
        try:
            with ExitStack() as stack:
                for block in expected.values():
                    stack.enter_context(self.awaiting(donor, block.whole))
                await self._ask(partial.digest, donor, expected, good)
                for k, block in expected.items():
                    begin, tries = clock.now(), 0
                    while not block.whole.done():
                        since, limit_s = max(begin, self.came), self.deadline.seconds(self._breaks)
                        waited_s = clock.now() - since
                        left_s = min(self.deadline.seconds(self._breaks + tries), CEILING_S) - waited_s
                        lives = len(good) == 1 and waited_s < CEILING_S and self._hears(donor)
                        if left_s > 0 and (waited_s < limit_s or lives):
                            look_s = max(PAUSE_S, min(left_s, limit_s))
                            with suppress(DeadlineExceeded):
                                await clock.deadline(asyncio.shield(block.whole), look_s, "a block")
                                self.deadline.measured(clock.now() - since)
                        elif lives:
                            tries += 1
                            await self._ask(partial.digest, donor, expected, good)
                        else:
                            raise DeadlineExceeded(
                                f"block {k} from {self.name(donor)}: nothing came for {waited_s:.1f} s"
                            )
                    await block.whole  # raises once the donor is down
                    if await self.offload(_digest, block.into) != partial.manifest.digest(k):
                        raise ProtocolError(f"block {k} is not what the manifest says")
                    await partial.keep(k, block.into)
        finally:
            for k in run:
                blocks.waiting.pop((donor, partial.digest, k), None)

    def _hears(self, donor: PeerId) -> bool:
        silent_s = asyncio.get_running_loop().time() - self.blocks.net.heard_s(donor)
        return silent_s < self.deadline.seconds(self._breaks)

    async def _ask(self, digest: bytes, donor: PeerId, expected: dict[int, _Expected], good: list[PeerId]) -> None:
        """Ask for the blocks that have not come, unless the first of these comes before the answer. Other donors need not
        wait for the blocks of a dead one."""
        left = [k for k, block in expected.items() if not block.whole.done()]
        packed = AskBlocks(digest=digest, blocks=tuple(left)).pack()
        limit_s = self.deadline.seconds(self._breaks, GONE_S) if len(good) > 1 else GONE_S
        call = self.blocks.net.call(donor, AskBlocks.KIND, packed, timeout_s=limit_s)
        await unless_done(expected[left[0]].whole, call)


def _digest(data: memoryview) -> bytes:
    return blake3(data).digest()
