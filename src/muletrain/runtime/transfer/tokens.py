"""The run's tokens reach peers without the data, if the founder agrees (``data.share``), so that a run outlives its
only data owner.

Tokens travel as states do (``core.blocks``): the welcome names a manifest, and blocks yield to all other traffic. While
fewer than ``WANTED`` peers can build microbatches, peers that may take the tokens do so, ``TAKERS`` at a time. Each
taker becomes a trainer once its copy is whole, and gives the copy on. A joiner keeps the tokens in its own cache,
within its own bound.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from blake3 import blake3

from muletrain.data.microbatch import unmarked
from muletrain.data.tokens import digest_of
from muletrain.errors import CapacityError, DataError, MuletrainError, NetworkError, PeerUnreachable, ProtocolError
from muletrain.events import TrainerAdded, TransferFailed
from muletrain.locks import Lock, lock
from muletrain.policy.deadline import backoff_s
from muletrain.runtime.core.blocks import PartialDownload, StateImage
from muletrain.runtime.core.disk import Disk, check_room
from muletrain.runtime.core.times import AGAIN_S, GONE_S
from muletrain.runtime.transfer.messages import Shared
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import numpy.typing as npt
    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.core.blocks import Downloader, Manifest
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.microbatch.microbatches import Microbatches
    from muletrain.runtime.microbatch.position import Position
    from muletrain.runtime.microbatch.trainer import Source

WANTED = 4
"""Peers that can build microbatches, after which no more peers take the tokens."""
TAKERS = 2
"""Takers that a giver serves at once; further takers ask again."""
PIECE = 64 << 20
"""Bytes checked in one job of the background thread."""


class FileCopy(StateImage):
    """A giver's side of a copy that lies in files, of which at most a block is in memory."""

    def __init__(self, state: dict[str, Tensor], disk: Disk) -> None:
        """``state``: views of files."""
        super().__init__(state)
        self._disk = disk

    async def content(self, begin: int, end: int) -> list[memoryview]:
        """Read the bytes beside the event loop. Raises PeerUnreachable where the disk does not answer."""
        try:
            return [memoryview(await self._disk.call(self._read, begin, end))]
        except OSError as e:
            raise PeerUnreachable(f"the copy cannot be read here: {e.strerror}") from None

    def _read(self, begin: int, end: int) -> bytes:
        return b"".join(self.views(begin, end))


@dataclass
class FilePartial(PartialDownload):
    """The blocks that arrived, in a file."""

    file: int
    disk: Disk

    @classmethod
    async def resumed(cls, digest: bytes, manifest: Manifest, file: int, disk: Disk) -> Self:
        """A download into ``file``, which may have blocks already. Raises OSError."""
        partial = cls(digest, manifest, bytearray(), set(range(manifest.blocks)), file, disk)
        for block in sorted(partial.missing):
            begin, end = manifest.span(block)
            content = await disk.call(os.pread, file, end - begin, begin)
            if len(content) < end - begin:
                break
            if blake3(content).digest() == manifest.digest(block):
                partial.missing.discard(block)
        return partial

    def room(self, block: int) -> memoryview:
        begin, end = self.manifest.span(block)
        return memoryview(bytearray(end - begin))

    async def keep(self, block: int, content: memoryview) -> None:
        await self.disk.call(os.pwrite, self.file, content, self.manifest.span(block)[0])
        await super().keep(block, content)


@dataclass
class Store:
    """A joiner's own cache of shared tokens: at most ``limit`` bytes for all runs together."""

    folder: Path
    limit: int

    def open(self, shared: Shared) -> int | None:
        """Open the file of ``shared`` tokens (``open_file``). Raises OSError; CapacityError where there is no room."""
        if shared.size > self.limit:
            raise CapacityError(
                f"the tokens need {format_memory(shared.size)}, but only {format_memory(self.limit)} may be used (join --tokens GIB)"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(shared)
        self._make_room(path, shared.size)
        check_room(
            str(self.folder), shared.size - (path.stat().st_size if path.exists() else 0), "join with --tokens 0"
        )
        return open_file(path, shared.size)

    def path(self, shared: Shared) -> Path:
        """The file of ``shared`` tokens."""
        return self.folder / f"{shared.digest.hex()[:32]}.tokens"

    def _make_room(self, own: Path, size: int) -> None:
        """Delete the oldest files that no process uses. Raises CapacityError."""
        others = [p for p in self.folder.glob("*.tokens") if p != own]

        def check() -> None:
            if size + sum(p.stat().st_size for p in others if p.exists()) > self.limit:
                raise CapacityError(f"{self.folder}: it is full of tokens of other running runs; raise --tokens")

        make_room(others, check)


@dataclass
class Sharing:
    """One process' part in sharing the tokens, across the peers that the process becomes in turn.

    ``data``: ``Genesis.data``; ``tokenizer``: as JSON; ``vocab``: of the model. ``source_of`` makes a source of
    microbatches from tokens. ``store``: place for the tokens; None: this process takes none. ``wanted``: enough
    trainers. ``source``, ``copy``: set in a process that has the data."""

    shared: Shared
    data: bytes
    tokenizer: bytes
    vocab: int
    source_of: Callable[[npt.NDArray[np.integer]], Source]
    store: Store | None = None
    wanted: int = WANTED
    source: Source | None = None
    copy: StateImage | None = None
    disk: Disk = field(default_factory=Disk)
    _file: int | None = None
    _partial: FilePartial | None = None
    _said: str = ""

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            os.close(self._file)

    # The giver --------------------------------------------------------------------------------------------------------

    def offer(self, ctx: Context) -> None:
        """Give the tokens to members, once they are here."""

        async def given(taker: PeerId, digest: bytes) -> StateImage | None:
            if digest != self.shared.digest:
                return None
            ctx.roster.member(taker)
            return self.copy

        ctx.blocks.offers("tokens", given, TAKERS)

    # The taker --------------------------------------------------------------------------------------------------------

    async def run(
        self,
        ctx: Context,
        taker: Downloader,
        membership: Membership,
        position: Position,
        microbatches: Microbatches,
    ) -> None:
        """Get the tokens and train, if more trainers are wanted and this peer serves its stage. Ends when cancelled."""
        tries, untold = 0, set[str]()
        while self.source is not None or self.store is not None:
            await ctx.clock.sleep(backoff_s(tries, AGAIN_S, GONE_S))
            untold = await membership.tell({p for p in untold if ctx.roster.knows(p)})
            if not position.serves or ctx.roster.own.trainer or len(ctx.roster.trainers()) >= self.wanted:
                tries = 0
            elif self.source is None and not await self.take(ctx, taker):
                tries += 1
            elif self.source is not None:
                tries = 0
                microbatches.train_too(self.source)
                ctx.emit(TrainerAdded(name=ctx.roster.own.name))
                untold = await membership.tell(ctx.roster.everyone())

    async def take(self, ctx: Context, taker: Downloader) -> bool:
        """Download and check all tokens. False if that failed; each new reason becomes an event."""
        assert self.store is not None
        try:
            if self._file is None:
                self._file = await self.disk.call(self.store.open, self.shared)
            if self._file is None:  # another process of this machine downloads the tokens
                return False
            await self._fetch(ctx, taker, self._file)
            tokens = await self._checked()
            self.source = self.source_of(tokens)
        except NetworkError:  # another giver, or a later try, may do
            return False
        except (OSError, MuletrainError) as e:
            if str(e) != self._said:
                self._said = str(e)
                ctx.emit(TransferFailed(what="the run's tokens", reason=str(e)))
            return False
        return True

    async def _fetch(self, ctx: Context, taker: Downloader, file: int) -> None:
        """Download missing blocks. Raises NetworkError when no peer gives blocks, DataError and OSError."""
        me = ctx.net.peer_id
        givers = [p for p in ctx.roster.trainers() if p != me][:WANTED]
        if self._partial is None:
            try:
                manifest = await taker.manifest(self.shared.digest, givers, self._check)
            except ProtocolError as e:  # no other giver has a different manifest
                raise DataError(f"the welcome names tokens that cannot be: {e}") from None
            self._partial = await FilePartial.resumed(self.shared.digest, manifest, file, self.disk)
        await taker.fetch(self._partial, givers)

    def _check(self, manifest: Manifest) -> None:
        """Raises ProtocolError for a manifest that cannot be the tokens'."""
        manifest.check(self.shared.size)
        if manifest.size != self.shared.size:
            raise ProtocolError("another number of tokens than there are")

    async def _checked(self) -> npt.NDArray[np.integer]:
        """The tokens, checked against ``Genesis.data``, which we give on from now on. Raises DataError."""
        assert self.store is not None
        assert self._partial is not None
        tokens = np.memmap(self.store.path(self.shared), self.shared.dtype, "r")
        digest, most = hashlib.sha256(), 0
        for begin in range(0, len(tokens), PIECE):
            piece = tokens[begin : begin + PIECE]
            await self.disk.call(digest.update, piece.data)
            most = max(most, await self.disk.call(_largest, piece))
        sides = digest.digest(), self.shared.heldout, hashlib.sha256(self.tokenizer).digest()
        if digest_of(sides) != self.data or most >= self.vocab:
            await self.disk.call(self.store.path(self.shared).unlink)
            self.store = None
            raise DataError(
                "the downloaded tokens are not the run's, although its welcome names them: they are not used"
            )
        copy = copy_of(self.store.path(self.shared), self.disk)
        copy.named(self._partial.manifest.digests)
        if copy.digest == self.shared.digest:
            self.copy = copy
        return tokens


def open_file(path: Path, size: int) -> int | None:
    """Open the file of a copy of ``size`` bytes that is to come, with all blocks that arrived before. The file is locked
    until closed; None while another process has it. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if taken := lock(file) is Lock.TAKEN:
            return None
        os.ftruncate(file, min(os.fstat(file).st_size, size))
        os.utime(file)
    except OSError:
        taken = True  # our next try must find no lock of ours
        raise
    finally:
        if taken:
            os.close(file)
    return file


def make_room(files: Iterable[Path], check: Callable[[], None]) -> None:
    """Delete the oldest of ``files`` that no process uses, and their manifests, until ``check`` finds enough room. Raises
    its CapacityError."""
    for path in sorted(files, key=age):
        with suppress(CapacityError):
            return check()
        with suppress(FileNotFoundError), path.open("rb") as file:
            if lock(file.fileno()) is Lock.HELD:
                path.unlink()
                path.with_suffix(".manifest").unlink(missing_ok=True)
    check()


def age(path: Path) -> float:
    """When ``path`` was written; another process may delete the file meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def copy_of(path: Path, disk: Disk) -> FileCopy:
    """The tokens' file, for sending."""
    return FileCopy({"tokens": torch.from_numpy(np.memmap(path, np.uint8, "c"))}, disk)


def _largest(tokens: npt.NDArray[np.integer]) -> int:
    """The largest id."""
    return int(unmarked(tokens)[0].max())


def share(path: Path, width: int, heldout: Path, disk: Disk) -> tuple[Shared, StateImage]:
    """Prepare the file ``path``, of tokens of ``width`` bytes, for sharing. Reads both files, so call this in a thread.
    Raises OSError."""
    copy = copy_of(path, disk)
    copy.named(copy.hashes())
    with heldout.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return Shared(digest=copy.digest, size=copy.size, width=width, heldout=digest), copy
