"""The weights beside an adapter (``Model.base``), which are not trained: each machine reads them itself.

The run's configuration names the copy of each part of the chain by digest (``adapter.digests``). A machine takes a part
from a folder with the model, or from its cache, both checked, and else from other peers, block by block; what came
stays in the cache. Tensors are views of files, whose pages all processes of a machine share. Before it builds a stage a
process may be no member yet, so anyone in the run may ask, and each giver bounds what it sends.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.errors import (
    CapacityError,
    CheckpointError,
    Malformed,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
)
from muletrain.locks import Lock, lock
from muletrain.policy.deadline import backoff_s
from muletrain.runtime.core.disk import Disk, check_room
from muletrain.runtime.transfer.blocks import DTYPES, LANES, MANIFEST_S, Manifest, StateImage, block_size
from muletrain.runtime.transfer.messages import MAX_RUN, AskBase, BaseBlock
from muletrain.runtime.transfer.tokens import FilePartial
from muletrain.units import format_memory
from muletrain.wire.codec import RAW, Encoded, decode_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.model.chain import Model
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.wire.frame import Frame

TAKERS = 8
"""Peers that one giver serves at once; further peers ask again."""
WAITING = 2 * MAX_RUN
"""Most blocks that wait for one taker."""
TIMES = 4
"""Number of times that one taker may have a part from one giver: links break."""
SEND_S = 60.0
"""Seconds for a taker to take a block."""
CALL_S = 30.0
"""Seconds for a giver to confirm the sending of blocks."""
STALLED_S = 120.0
"""Seconds without a block from one giver, after which others are asked for what it should have sent."""
LONGEST_S = 600.0
"""Seconds without a block from anyone, after which the base counts as not to be had."""
PAUSE_S, PAUSE_MAX_S = 1.0, 20.0
"""Seconds between two rounds of questions, at first and at most; doubles."""


@dataclass
class BaseStore:
    """The base on this machine's disks. All methods read or write files, so call them in a thread.

    ``digests``: of each part of the chain. ``readers``: loaders of weights by name from folders that may have the model,
    each with the folder's name. ``cache``: folder of parts that came from peers."""

    model: Model
    digests: tuple[bytes, ...]
    readers: Sequence[tuple[str, Callable[[], Callable[[str], Tensor]]]]
    cache: Path
    problems: list[str] = field(default_factory=list)
    """Why folders were not used."""
    _images: dict[int, tuple[StateImage, Mapping[str, Tensor]]] = field(default_factory=dict)

    def part(self, part: int) -> Mapping[str, Tensor] | None:
        """The weights of ``part`` by name; None: they are not here."""
        found = self._found(part)
        return None if found is None else found[1]

    def image(self, digest: bytes) -> StateImage | None:
        """The copy with that digest; None: it is not here, or no part of this base."""
        found = self._found(self.digests.index(digest)) if digest in self.digests else None
        return None if found is None else found[0]

    def _found(self, part: int) -> tuple[StateImage, Mapping[str, Tensor]] | None:
        if part not in self._images:
            for tensors in self._candidates(part):
                copy = StateImage(dict(tensors))
                copy.named(copy.hashes())
                if copy.digest == self.digests[part]:
                    self._images[part] = copy, tensors
                    break
        return self._images.get(part)

    def _candidates(self, part: int) -> Sequence[Mapping[str, Tensor]]:
        if not (names := self.model.base_in(part)):
            return [{}]
        found: list[Mapping[str, Tensor]] = []
        for where, reader in self.readers:
            try:
                load = reader()
                found.append({name: load(name) for name in names})
            except (CheckpointError, OSError) as e:
                if (why := f"{where} is not used: {e}") not in self.problems:
                    self.problems.append(why)
        try:
            manifest = Manifest.unpack(self.manifest(part).read_bytes())
            self.check(part, manifest)
            size = self.file(part).stat().st_size
            if size == manifest.size:
                found.append(manifest.views(torch.from_file(str(self.file(part)), size=size, dtype=torch.uint8)))
        except (OSError, ProtocolError):  # never came, or not whole
            pass
        return found

    def check(self, part: int, manifest: Manifest) -> None:
        """Raises ProtocolError for a manifest that cannot be that of ``part``."""
        names = self.model.base_in(part)
        wanted = [(name, tuple(self.model.shapes[name])) for name in names]  # type: ignore[attr-defined]
        if [(name, tuple(shape)) for name, _, shape in manifest.tensors] != wanted:
            raise ProtocolError("the manifest of a part of the base names other tensors than the model has")
        manifest.check(max(map(_itemsize, DTYPES)) * sum(_numbers(shape) for _, shape in wanted))
        if manifest.block > block_size(manifest.size):  # blocks lie in our memory
            raise ProtocolError("the manifest of a part of the base has blocks that are too large")

    def manifest(self, part: int) -> Path:
        """The manifest's file in the cache."""
        return self.cache / f"{self.digests[part].hex()[:32]}.manifest"

    def file(self, part: int) -> Path:
        """The weights' file in the cache."""
        return self.cache / f"{self.digests[part].hex()[:32]}.base"

    def open(self, part: int, manifest: Manifest) -> int | None:
        """Open the file of a part that is to come, with all blocks that arrived before. The file is locked until closed;
        None while another process has it. Raises OSError; CapacityError where there is no room."""
        path = self.file(part)
        self.cache.mkdir(parents=True, exist_ok=True)
        self._make_room(path, manifest.size)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if lock(file) is Lock.TAKEN:
            os.close(file)
            return None
        os.ftruncate(file, min(os.fstat(file).st_size, manifest.size))
        self.manifest(part).write_bytes(manifest.pack())
        return file

    def _make_room(self, own: Path, size: int) -> None:
        """Delete the oldest parts of other bases if the disk has no room otherwise. Raises CapacityError."""
        used = {self.file(part) for part in range(len(self.digests))}
        others = sorted((p for p in self.cache.glob("*.base") if p not in used), key=lambda p: p.stat().st_mtime)
        need = size - (own.stat().st_size if own.exists() else 0)
        while True:
            try:
                return check_room(
                    str(self.cache), need, "give the model's folder (join --model), or set XDG_CACHE_HOME"
                )
            except CapacityError:
                if not others:
                    raise
                others[0].with_suffix(".manifest").unlink(missing_ok=True)
                others.pop(0).unlink(missing_ok=True)


def _itemsize(name: str) -> int:
    return DTYPES[name].itemsize


def _numbers(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


class BaseGiver:
    """Gives parts of the base to whoever in the run asks."""

    def __init__(
        self, net: Network, tasks: Tasks, store: BaseStore, gave: Callable[[PeerId], object] = lambda taker: None
    ) -> None:
        """``gave`` is told whenever a block has gone to a taker."""
        self._net, self._tasks, self._store, self._gave = net, tasks, store, gave
        self._queues: dict[PeerId, deque[tuple[StateImage, int]]] = {}
        self._drawn: Counter[tuple[PeerId, bytes]] = Counter()
        net.serve(AskBase.KIND, self._on_ask, free=True)

    async def _on_ask(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises MuletrainError for a part that is not here, and for more than a taker may have."""
        ask = AskBase.unpack(payload)
        queue = self._queues.get(sender, deque())
        if sender not in self._queues and len(self._queues) >= TAKERS:
            raise MuletrainError("this peer gives the base to others now; ask again later")
        copy = await self._tasks.aside(self._store.image, ask.digest)
        if copy is None:
            raise MuletrainError("this peer does not have that part of the base")
        if not ask.blocks:
            return copy.manifest
        if any(k * copy.block >= copy.size for k in ask.blocks):
            raise ProtocolError("blocks that the part does not have")
        blocks = [k for k in dict.fromkeys(ask.blocks) if (copy, k) not in queue]
        if len(queue) + len(blocks) > WAITING:
            raise MuletrainError("this peer has enough to send")
        self._drawn[sender, ask.digest] += len(blocks)
        if self._drawn[sender, ask.digest] > TIMES * max(MAX_RUN, -(-copy.size // copy.block)):
            raise MuletrainError(f"this peer has sent that part {TIMES} times")
        queue = self._queues.setdefault(sender, queue)
        waits = bool(queue)
        queue.extend((copy, k) for k in blocks)
        if not waits and queue:
            self._tasks.spawn(self._give(sender, queue), "base")
        return b""

    async def _give(self, taker: PeerId, queue: deque[tuple[StateImage, int]]) -> None:
        try:
            while queue:
                copy, block = queue[0]
                begin, end = block * copy.block, min(copy.size, (block + 1) * copy.block)
                content = await self._tasks.aside(_read, copy, begin, end)
                message = BaseBlock(digest=copy.digest, block=block)
                frame = message.frame([Encoded(RAW, (end - begin,), [memoryview(content)])])
                await self._net.send(taker, frame, channel=message.CHANNEL, timeout_s=SEND_S)
                queue.popleft()
                self._gave(taker)
        except NetworkError:  # a live taker asks again
            pass
        finally:
            if self._queues.get(taker) is queue:
                del self._queues[taker]


def _read(copy: StateImage, begin: int, end: int) -> bytes:
    """Beside the event loop: pages may come from a disk."""
    return b"".join(copy.views(begin, end))


@dataclass
class BaseTaker:
    """Takes missing parts of the base. ``tell``: gets remarks for people."""

    net: Network
    clock: Clock
    tasks: Tasks
    store: BaseStore
    tell: Callable[[str], None] = lambda text: None
    disk: Disk = field(default_factory=Disk)
    _waiting: dict[tuple[PeerId, bytes, int], tuple[int, asyncio.Future[bytes]]] = field(default_factory=dict)
    """Requested blocks: their sizes, and contents to come."""
    _largest: int = 0
    _came: float = float("-inf")

    def __post_init__(self) -> None:
        self.net.receive(self._on_frame, (BaseBlock.KIND,), self)

    async def weights(self, parts: range, givers: Callable[[], Sequence[PeerId]]) -> dict[str, Tensor]:
        """The weights of these parts of the chain. ``givers``: peers to ask, the best first. Raises
        PeerUnreachable when nobody has a part that is missing here, and CapacityError without room for it."""
        found: dict[str, Tensor] = {}
        for part in parts:
            tensors = await self.tasks.aside(self.store.part, part)
            if tensors is None:
                await self._fetch(part, givers)
                tensors = await self.tasks.aside(self.store.part, part)
            if tensors is None:
                raise PeerUnreachable("a part of the base that came is not what the run's configuration says")
            found |= tensors
        return found

    async def _fetch(self, part: int, known: Callable[[], Sequence[PeerId]]) -> None:
        """Take a part into the cache. Raises PeerUnreachable, CapacityError and OSError."""
        self._came, tries, bad = self.clock.now(), 0, set[str]()
        partial: FilePartial | None = None
        try:
            while self.clock.now() - self._came <= LONGEST_S:
                givers = [p for p in dict.fromkeys(known()) if p != self.net.peer_id and p not in bad]
                partial = partial or await self._begin(part, givers)
                if partial is not None:
                    before = len(partial.missing)
                    while partial.missing and givers and partial.problem is None:
                        queue = deque(sorted(partial.missing))
                        await asyncio.gather(
                            *(self._lane(partial, giver, queue, givers, bad) for giver in LANES * givers)
                        )
                    if not partial.missing:
                        return
                    if partial.problem is not None:
                        raise partial.problem
                    tries = 0 if len(partial.missing) < before else tries
                elif await self.tasks.aside(self.store.part, part) is not None:
                    return  # another process of this machine has taken it
                tries += 1
                await self.clock.sleep(backoff_s(tries, PAUSE_S, PAUSE_MAX_S))
        finally:
            if partial is not None:
                os.close(partial.file)
        raise PeerUnreachable(
            "no peer gives the weights beside the adapter; give this machine the model's folder (join --model FOLDER)"
        )

    async def _begin(self, part: int, givers: Sequence[PeerId]) -> FilePartial | None:
        """The part's file, with the blocks that are there already; None: nobody gives its manifest now, or another process
        takes it."""
        digest = self.store.digests[part]
        for giver in givers:
            try:
                packed = await self.net.call(giver, AskBase.KIND, AskBase(digest=digest).pack(), timeout_s=MANIFEST_S)
                if blake3(packed).digest() != digest:
                    continue
                manifest = Manifest.unpack(packed)
                self.store.check(part, manifest)
            except (NetworkError, ProtocolError):
                continue
            if (file := await self.disk.call(self.store.open, part, manifest)) is None:
                return None
            self._largest = max(self._largest, manifest.block)
            found = FilePartial(digest, manifest, bytearray(), set(range(manifest.blocks)), file, self.disk)
            await found.look()
            left = sum(b - a for a, b in map(manifest.span, found.missing))
            self.tell(f"{format_memory(left)} of the model's weights are not here: they come from other peers")
            return found
        return None

    async def _lane(
        self, partial: FilePartial, giver: PeerId, queue: deque[int], good: list[PeerId], bad: set[PeerId]
    ) -> None:
        """Take blocks from one giver while there are any. A giver that fails is no longer ``good``, and asked again later;
        one that gives wrong blocks is ``bad``."""
        while queue and partial.problem is None:
            share = -(-len(queue) // (LANES * max(1, len(good))))  # every giver sends a part
            run = [queue.popleft() for _ in range(min(MAX_RUN, share))]
            futures = {k: asyncio.get_running_loop().create_future() for k in run}
            for k, future in futures.items():
                begin, end = partial.manifest.span(k)
                self._waiting[giver, partial.digest, k] = end - begin, future
            try:
                ask = AskBase(digest=partial.digest, blocks=tuple(run))
                await self.net.call(giver, AskBase.KIND, ask.pack(), timeout_s=CALL_S)
                for k, future in futures.items():
                    content = await self.clock.deadline(future, STALLED_S, f"block {k} of the base")
                    if await self.tasks.aside(_digest, content) != partial.manifest.digest(k):
                        bad.add(giver)
                        return _remove(good, giver)
                    await partial.keep(k, memoryview(content))
                    self._came = self.clock.now()
            except NetworkError:
                return _remove(good, giver)
            finally:
                for k in run:
                    self._waiting.pop((giver, partial.digest, k), None)
                queue.extend(k for k in run if k in partial.missing)

    # What comes -------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        return 256 + BaseBlock.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``. A block may be late, but no larger than any that was asked for."""
        frame.message = message = BaseBlock.parse(frame)
        (block,) = frame.tensors
        size, _ = self._waiting.get((sender, message.digest, message.block), (None, None))
        if block.codec != RAW or len(block.shape) != 1 or (size is not None and block.shape[0] != size):
            raise Malformed(f"a block of the base as {block.codec} {block.shape}")
        if block.shape[0] > self._largest:
            raise ProtocolError(f"a block of the base of {block.shape[0]} bytes, and none was asked for")

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        message = BaseBlock.parse(frame)
        _, future = self._waiting.get((sender, message.digest, message.block), (None, None))
        if future is not None and not future.done():
            future.set_result(bytes(decode_raw(frame.tensors[0])))


def _remove(good: list[PeerId], giver: PeerId) -> None:
    if giver in good:
        good.remove(giver)


def _digest(content: bytes) -> bytes:
    return blake3(content).digest()
