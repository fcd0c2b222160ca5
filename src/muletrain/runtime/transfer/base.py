"""Each machine reads the weights beside an adapter (``Model.base``), which are not trained, itself.

The run's configuration names each part of the chain by a digest (``adapter.digests``). A machine reads a part from a
folder with the model or from its cache, and checks the digest. Other peers send a missing part, block by block, and the
part stays in the cache. Tensors are views of files, whose pages all processes of a machine share. A newcomer asks before
it is a member, so any peer of the run may ask, and each giver bounds the number of takers and of blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.errors import (
    CapacityError,
    Malformed,
    MuletrainError,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
    Refused,
)
from muletrain.locks import Lock, lock
from muletrain.policy.deadline import CEILING_S
from muletrain.runtime.core.disk import Disk, check_room
from muletrain.runtime.core.times import GONE_S, pause_s
from muletrain.runtime.transfer.blocks import DTYPES, LANES, Manifest, StateImage, block_size
from muletrain.runtime.transfer.messages import MAX_RUN, AskBase, BaseBlock
from muletrain.runtime.transfer.tokens import FilePartial
from muletrain.units import format_memory
from muletrain.wire.codec import RAW, Encoded, decode_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
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
BYTES_PER_S = 2.5e6
"""At which weights come before any have come: 20 Mb/s, as in a home."""
BUSY = "this peer gives the base to others now; ask again later"
"""The refusal of a giver with ``TAKERS`` takers. The taker waits for its turn."""


@dataclass
class BaseStore:
    """Holds the base on this machine's disks. All methods read or write files, so call them in a thread.

    ``digests``: of each part of the chain. ``readers``: loaders of weights by name from folders that may have the model,
    each with the folder's name. ``cache``: folder of parts that came from peers."""

    model: Model
    digests: tuple[bytes, ...]
    readers: Sequence[tuple[str, Callable[[], Callable[[str], Tensor]]]]
    cache: Path
    problems: list[str] = field(default_factory=list)
    """Why folders were not used."""
    _images: dict[int, tuple[StateImage, Mapping[str, Tensor]]] = field(default_factory=dict)
    _read: set[int] = field(default_factory=set)
    """Parts that the folders do not have. Anyone may ask for them, and reading takes long."""
    _own: set[int] = field(default_factory=set)
    _given: list[int] = field(default_factory=list)
    """Parts that others asked for, the last one first. Weights that are converted (``AdapterConfig.base``) lie in memory,
    which has no room for all parts."""
    _wrong: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Size and time of a part's file in the cache that held something else."""

    def part(self, part: int) -> Mapping[str, Tensor] | None:
        """The weights of ``part`` by name; None: they are not here."""
        if not self.model.quantised:  # else the device holds codes, and these weights are read once
            self._own.add(part)
        found = self._found(part)
        self._let_go()
        return None if found is None else found[1]

    def image(self, digest: bytes) -> StateImage | None:
        """The copy with that digest; None: it is not here, or no part of this base."""
        if digest not in self.digests:
            return None
        part = self.digests.index(digest)
        found = self._found(part)
        self._given = [part, *(p for p in self._given if p != part)][:TAKERS]
        self._let_go()
        return None if found is None else found[0]

    def _let_go(self) -> None:
        for part in self._images.keys() - self._own - {*self._given}:
            del self._images[part]

    def _found(self, part: int) -> tuple[StateImage, Mapping[str, Tensor]] | None:
        if part not in self._images:
            for tensors in itertools.chain(self._in_folders(part), self._in_cache(part)):
                copy = StateImage(dict(tensors))
                copy.named(copy.hashes())
                if copy.digest == self.digests[part]:
                    self._images[part] = copy, tensors
                    break
        return self._images.get(part)

    def _in_folders(self, part: int) -> Iterator[Mapping[str, Tensor]]:
        """What the folders have for ``part``; nothing after that was wrong once."""
        names = self.model.base_in(part)
        if not names:
            yield {}
        if not names or part in self._read:
            return
        for where, reader in self.readers:
            why = "its weights are not those that the run began with"
            try:
                load = reader()
                yield {name: load(name) for name in names}
            except (MuletrainError, OSError) as e:
                why = str(e)
            if (problem := f"{where} is not used: {why}") not in self.problems:  # we come here if the digest differs
                self.problems.append(problem)
        self._read.add(part)

    def _in_cache(self, part: int) -> Iterator[Mapping[str, Tensor]]:
        """What the cache has for ``part``, unless the file is still being written, or was wrong before."""
        try:
            with self.file(part).open("rb") as file:
                if lock(file.fileno(), shared=True) is Lock.TAKEN:
                    return
                found = os.fstat(file.fileno())
                stamp = found.st_size, found.st_mtime_ns
                manifest = Manifest.unpack(self.manifest(part).read_bytes())
                self.check(part, manifest)
                if found.st_size != manifest.size or self._wrong.get(part) == stamp:
                    return
                flat = torch.from_file(file.name, size=manifest.size, dtype=torch.uint8)
            yield manifest.views(flat)
            self._wrong[part] = stamp
        except (OSError, ProtocolError, RuntimeError):  # never came, or is gone again
            return

    def check(self, part: int, manifest: Manifest) -> None:
        """Raises ProtocolError for a manifest that cannot be that of ``part``."""
        names = self.model.base_in(part)
        wanted = [(name, tuple(self.model.shapes[name])) for name in names]  # type: ignore[attr-defined]
        if [(name, tuple(shape)) for name, _, shape in manifest.tensors] != wanted:
            raise ProtocolError("the manifest of a part of the base names other tensors than the model has")
        manifest.check(max(map(_itemsize, DTYPES)) * sum(_numbers(shape) for _, shape in wanted))
        if manifest.block > block_size(manifest.size):  # blocks lie in our memory
            raise ProtocolError("the manifest of a part of the base has blocks that are too large")

    def has(self, part: int) -> bool:
        """Is ``part`` here, as far as is known without reading it?"""
        if part in self._images or not self.model.base_in(part) or (self.readers and part not in self._read):
            return True
        with suppress(OSError):
            return self.file(part).stat().st_size >= self.size(part)
        return False

    def size(self, part: int) -> int:
        """About how many bytes ``part`` has."""
        return self.model.base_params(range(part, part + 1)) * self.model.base_size

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
        try:
            if lock(file) is Lock.TAKEN:
                os.close(file)
                return None
            os.ftruncate(file, min(os.fstat(file).st_size, manifest.size))
            self.manifest(part).write_bytes(manifest.pack())
        except OSError:
            os.close(file)
            raise
        return file

    def _make_room(self, own: Path, size: int) -> None:
        """Delete the oldest parts of other bases, but for those being written, if the disk has no room otherwise. Raises
        CapacityError."""
        used = {self.file(part) for part in range(len(self.digests))}
        others = sorted((p for p in self.cache.glob("*.base") if p not in used), key=_age)
        need = size - (own.stat().st_size if own.exists() else 0)
        while True:
            try:
                return check_room(
                    str(self.cache), need, "give the model's folder (join --model), or set XDG_CACHE_HOME"
                )
            except CapacityError:
                if not others:
                    raise
                _delete(others.pop(0))


def _age(path: Path) -> float:
    """When ``path`` was written; another process may delete the file meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _delete(path: Path) -> None:
    """Delete a part of the cache, unless a process writes it."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if lock(file.fileno()) is not Lock.TAKEN:
            path.unlink()
            path.with_suffix(".manifest").unlink(missing_ok=True)


def _itemsize(name: str) -> int:
    return DTYPES[name].itemsize


def _numbers(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


class BaseGiver:
    """Gives parts of the base to the peers of the run that ask."""

    def __init__(
        self, net: Network, tasks: Tasks, store: BaseStore, heard: Callable[[PeerId], object] = lambda taker: None
    ) -> None:
        """``heard`` is told whenever a taker asks, or has got a block: the taker goes on, or waits for its turn."""
        self._net, self._tasks, self._store, self._heard = net, tasks, store, heard
        self._queues: dict[PeerId, deque[tuple[StateImage, int]]] = {}
        self._drawn: Counter[tuple[PeerId, bytes]] = Counter()
        net.serve(AskBase.KIND, self._on_ask)

    async def _on_ask(self, sender: PeerId, payload: bytes) -> bytes:
        """Raises MuletrainError for a missing part, and for too many blocks or takers."""
        ask = AskBase.unpack(payload)
        self._heard(sender)
        copy = await self._tasks.aside(self._store.image, ask.digest)
        if copy is None:
            raise MuletrainError("this peer does not have that part of the base")
        if not ask.blocks:
            return copy.manifest
        if any(k * copy.block >= copy.size for k in ask.blocks):
            raise ProtocolError("blocks that the part does not have")
        queue = self._queues.get(sender, deque())
        if sender not in self._queues and len(self._queues) >= TAKERS:
            raise MuletrainError(BUSY)
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
                await self._net.send(taker, frame, channel=message.CHANNEL, timeout_s=GONE_S)
                queue.popleft()
                self._heard(taker)
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
    """When the last block came, or another process or peer let us wait."""
    _left: int = 0
    """Bytes that are still to come."""
    _told: float = float("-inf")
    _written: float = 0.0
    """When another process wrote the part's file."""
    _bytes_per_s: float = BYTES_PER_S
    """At which the last part came."""

    def __post_init__(self) -> None:
        self.net.receive(self._on_frame, (BaseBlock.KIND,), self)

    async def weights(self, parts: range, givers: Callable[[], Sequence[PeerId]]) -> dict[str, Tensor]:
        """The weights of these parts of the chain. ``givers``: peers to ask, the best first. Raises
        PeerUnreachable when nobody has a part that is missing here, and CapacityError without room for the part, or
        where the cache cannot be written."""
        found = {part: await self.tasks.aside(self.store.part, part) for part in parts}
        missing = [part for part in parts if found[part] is None]
        while self.store.problems:
            self.tell(self.store.problems.pop())
        self._left = sum(map(self.store.size, missing))
        for part in missing:
            try:
                begun = self.clock.now()
                await self._fetch(part, givers)
                self._bytes_per_s = max(1.0, self.store.size(part) / max(1e-3, self.clock.now() - begun))
            except OSError as e:
                raise CapacityError(
                    f"the model's weights cannot be kept in {self.store.cache}: {e.strerror or e}; give the model's folder (join "
                    f"--model), or set XDG_CACHE_HOME"
                ) from e
            found[part] = await self.tasks.aside(self.store.part, part)
            if found[part] is None:
                raise PeerUnreachable("a part of the base that came is not what the run's configuration says")
        return {name: tensor for part in found.values() for name, tensor in (part or {}).items()}

    def takes_s(self, parts: range) -> float:
        """About how many seconds pass until the missing weights of these parts have come."""
        return sum(self.store.size(part) for part in parts if not self.store.has(part)) / self._bytes_per_s

    async def _fetch(self, part: int, known: Callable[[], Sequence[PeerId]]) -> None:
        """Take a part into the cache. Raises PeerUnreachable, CapacityError and OSError. Ends within ``CEILING_S``
        without a block."""
        self._came, tries, bad = self.clock.now(), 0, set[str]()
        partial: FilePartial | None = None
        try:
            while self.clock.now() - self._came <= CEILING_S:
                everyone = [p for p in dict.fromkeys(known()) if p != self.net.peer_id]
                if not everyone:  # a founder, before others come to it
                    break
                givers = [p for p in everyone if p not in bad]
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
                await self.clock.sleep(pause_s(tries))
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
                packed = await self.net.call(giver, AskBase.KIND, AskBase(digest=digest).pack(), timeout_s=GONE_S)
                if blake3(packed).digest() != digest:
                    continue
                manifest = Manifest.unpack(packed)
                self.store.check(part, manifest)
            except (NetworkError, ProtocolError):
                continue
            if (file := await self.disk.call(self.store.open, part, manifest)) is None:
                if (written := await self.disk.call(_age, self.store.file(part))) != self._written:
                    self._written, self._came = written, self.clock.now()
                return None
            self._largest = max(self._largest, manifest.block)
            found = FilePartial(digest, manifest, bytearray(), set(range(manifest.blocks)), file, self.disk)
            try:
                await found.look()
            except BaseException:
                os.close(file)
                raise
            self._comes(manifest.size - sum(b - a for a, b in map(manifest.span, found.missing)))
            return found
        return None

    def _comes(self, size: int) -> None:
        """Count bytes that are here now, and tell people now and then what is still to come."""
        self._left = max(0, self._left - size)
        if self._left and self.clock.now() - self._told >= GONE_S:
            self._told = self.clock.now()
            self.tell(f"{format_memory(self._left)} of the model's weights are not here: they come from other peers")

    async def _lane(
        self, partial: FilePartial, giver: PeerId, queue: deque[int], good: list[PeerId], bad: set[PeerId]
    ) -> None:
        """Take blocks from one giver while there are any. A giver that fails is no longer ``good``, and asked again
        later; one that gives wrong blocks is ``bad``. Ends within ``2 * GONE_S`` without a block."""
        while queue and partial.problem is None:
            share = -(-len(queue) // (LANES * max(1, len(good))))  # every giver sends a part
            run = [queue.popleft() for _ in range(min(MAX_RUN, share))]
            futures = {k: asyncio.get_running_loop().create_future() for k in run}
            for k, future in futures.items():
                begin, end = partial.manifest.span(k)
                self._waiting[giver, partial.digest, k] = end - begin, future
            try:
                ask = AskBase(digest=partial.digest, blocks=tuple(run))
                await self.net.call(giver, AskBase.KIND, ask.pack(), timeout_s=GONE_S)
                for k, future in futures.items():
                    content = await self.clock.deadline(future, 2 * GONE_S, f"block {k} of the base")
                    if await self.tasks.aside(_digest, content) != partial.manifest.digest(k):
                        bad.add(giver)
                        return _remove(good, giver)
                    await partial.keep(k, memoryview(content))
                    self._came = self.clock.now()
                    self._comes(len(content))
            except NetworkError as e:
                if isinstance(e, Refused) and BUSY in e.why:
                    self._came = self.clock.now()
                    self._comes(0)
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
