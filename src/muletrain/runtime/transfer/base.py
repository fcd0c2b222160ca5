"""Each machine reads the weights beside an adapter (``Model.base``), which are not trained, itself.

The run's configuration names each part of the chain by a digest (``adapter.digests``). A machine reads a part from a
folder with the model or from its cache, and checks the digest. Other peers send a missing part, block by block, and the
part stays in the cache. Tensors are views of files, whose pages all processes of a machine share. A newcomer asks before
it is a member, so any peer of the run may ask.
"""

from __future__ import annotations

import itertools
import math
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from muletrain.errors import CapacityError, MuletrainError, PeerUnreachable, ProtocolError
from muletrain.locks import Lock, lock
from muletrain.policy.deadline import CEILING_S, Deadline
from muletrain.runtime.core.blocks import BUSY, DTYPES, Downloader, Manifest, StateImage
from muletrain.runtime.core.disk import Disk, check_room
from muletrain.runtime.core.times import GONE_S, pause_s
from muletrain.runtime.transfer.tokens import FileCopy, FilePartial, age, make_room, open_file
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from muletrain.model.chain import Model
    from muletrain.network.base import PeerId
    from muletrain.runtime.core.blocks import Blocks
    from muletrain.runtime.core.tasks import Tasks

TAKERS = 8
"""Peers that one giver serves at once; further peers ask again."""
BYTES_PER_S = 2.5e6
"""At which weights come before any have come: 20 Mb/s, as in a home."""


@dataclass
class BaseStore:
    """Holds the base on this machine's disks. All methods read or write files, so call them in a thread.

    ``digests``: of each part of the chain. ``readers``: loaders of weights by name from folders that may have the model,
    each with the folder's name. ``cache``: folder of parts that came from peers."""

    model: Model
    digests: tuple[bytes, ...]
    readers: Sequence[tuple[str, Callable[[], Callable[[str], Tensor]]]]
    cache: Path
    disk: Disk = field(default_factory=Disk)
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
                copy = FileCopy(dict(tensors), self.disk)
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
        manifest.check(max(t.itemsize for t in DTYPES.values()) * sum(math.prod(shape) for _, shape in wanted))

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
        """Open the file of a part that is to come (``open_file``). Raises OSError; CapacityError where there is no room."""
        path = self.file(part)
        self.cache.mkdir(parents=True, exist_ok=True)
        self._make_room(path, manifest.size)
        file = open_file(path, manifest.size)
        if file is not None:
            try:
                self.manifest(part).write_bytes(manifest.pack())
            except OSError:
                os.close(file)  # with its lock
                raise
        return file

    def _make_room(self, own: Path, size: int) -> None:
        """Delete the oldest parts of other bases, but for those being written, if the disk has no room otherwise. Raises
        CapacityError."""
        used = {self.file(part) for part in range(len(self.digests))}

        def check() -> None:
            need = size - (own.stat().st_size if own.exists() else 0)
            check_room(str(self.cache), need, "give the model's folder (join --model), or set XDG_CACHE_HOME")

        make_room((p for p in self.cache.glob("*.base") if p not in used), check)


@dataclass
class BasePartial(FilePartial):
    """The blocks of a part. ``came`` hears of the bytes of each block."""

    came: Callable[[int], None] = lambda size: None

    async def keep(self, block: int, content: memoryview) -> None:
        await super().keep(block, content)
        self.came(len(content))


class BaseExchange:
    """Gives parts of the base to the peers of the run that ask, and takes missing parts."""

    def __init__(
        self,
        blocks: Blocks,
        tasks: Tasks,
        store: BaseStore,
        tell: Callable[[str], None] = lambda text: None,
        heard: Callable[[PeerId], object] = lambda taker: None,
    ) -> None:
        """``tell`` gets remarks for people. ``heard`` is told whenever a taker asks, or has got a block: the taker goes
        on, or waits for its turn."""
        self.blocks, self.tasks, self.store = blocks, tasks, store
        self._tell, self._heard = tell, heard
        self._came = float("-inf")
        """When the last block came, or another process or peer let us wait."""
        self._left = 0
        """Bytes that are still to come."""
        self._told = float("-inf")
        self._written = 0.0
        """When another process wrote the part's file."""
        self._bytes_per_s = BYTES_PER_S
        """At which the last part came."""
        slow = Deadline(unmeasured_s=2 * GONE_S, floor_s=2 * GONE_S)  # many take from few, whose links are a home's
        self._downloader = Downloader(blocks, tasks.aside, deadline=slow)
        blocks.offers("base", self._given, TAKERS)

    async def _given(self, taker: PeerId, digest: bytes) -> StateImage | None:
        """See ``core.blocks.Reader``."""
        if digest not in self.store.digests:
            return None
        self._heard(taker)
        return await self.tasks.aside(self.store.image, digest)

    async def weights(self, parts: range, givers: Callable[[], Sequence[PeerId]]) -> dict[str, Tensor]:
        """The weights of these parts of the chain. ``givers``: peers to ask, the best first. Raises
        PeerUnreachable when nobody has a part that is missing here, and CapacityError without room for the part, or
        where the cache cannot be written."""
        found = {part: await self.tasks.aside(self.store.part, part) for part in parts}
        missing = [part for part in parts if found[part] is None]
        while self.store.problems:
            self._tell(self.store.problems.pop())
        self._left = sum(map(self.store.size, missing))
        for part in missing:
            try:
                begun = self.blocks.clock.now()
                await self._fetch(part, givers)
                self._bytes_per_s = max(1.0, self.store.size(part) / max(1e-3, self.blocks.clock.now() - begun))
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
        clock, tries = self.blocks.clock, 0
        self._came = clock.now()
        partial: BasePartial | None = None
        try:
            while clock.now() - self._came <= CEILING_S:
                everyone = [p for p in dict.fromkeys(known()) if p != self.blocks.net.peer_id]
                if not everyone:  # a founder, before others come to it
                    break
                partial = partial or await self._begin(part, everyone)
                if partial is not None:
                    before = len(partial.missing)
                    try:
                        return await self._downloader.fetch(partial, [p for p in everyone if p not in partial.wrong])
                    except PeerUnreachable as e:
                        if BUSY in e.why:
                            self._comes(0)
                    tries = 0 if len(partial.missing) < before else tries
                elif await self.tasks.aside(self.store.part, part) is not None:
                    return  # another process of this machine has taken it
                tries += 1
                await clock.sleep(pause_s(tries))
        finally:
            if partial is not None:
                os.close(partial.file)
        raise PeerUnreachable(
            "no peer gives the weights beside the adapter; give this machine the model's folder (join --model FOLDER)"
        )

    async def _begin(self, part: int, givers: list[PeerId]) -> BasePartial | None:
        """The part's file, with the blocks that are there already; None: nobody gives its manifest now, or another process
        takes it."""
        digest, store = self.store.digests[part], self.store
        try:
            manifest = await self._downloader.manifest(digest, givers, lambda found: store.check(part, found))
        except PeerUnreachable:
            return None
        if (file := await store.disk.call(store.open, part, manifest)) is None:
            if (written := await store.disk.call(age, store.file(part))) != self._written:
                self._written, self._came = written, self.blocks.clock.now()
            return None
        try:
            found = await BasePartial.resumed(digest, manifest, file, self.store.disk)
        except BaseException:
            os.close(file)
            raise
        self._comes(manifest.size - sum(b - a for a, b in map(manifest.span, found.missing)))
        found.came = self._comes
        return found

    def _comes(self, size: int) -> None:
        """Count bytes that are here now, and tell people now and then what is still to come."""
        now = self.blocks.clock.now()
        self._came, self._left = now, max(0, self._left - size)
        if self._left and now - self._told >= GONE_S:
            self._told = now
            self._tell(f"{format_memory(self._left)} of the model's weights are not here: they come from other peers")
