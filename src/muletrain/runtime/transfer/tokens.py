"""The run's tokens, for peers without the data, where its founder shares them (``data.share``): so that a run outlives
its only data owner.

They travel as states do: a copy, blocks, a manifest that the welcome names (``blocks``), after everything else that
waits for the link. A few peers are enough. While fewer than ``WANTED`` can build microbatches, those that may take the
tokens do so, two at a time; each counts as a trainer once its copy is whole, and gives it to others. A joiner keeps the
tokens in its own cache, within its own bound.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch
from blake3 import blake3
from pydantic import Field

from muletrain.data.tokens import digest_of
from muletrain.errors import CapacityError, DataError, MuletrainError, NetworkError, PeerUnreachable, ProtocolError
from muletrain.events import TrainerAdded, TransferFailed
from muletrain.policy.deadline import backoff_s
from muletrain.runtime.core.disk import Disk, check_room
from muletrain.runtime.core.messages import Digest, Message
from muletrain.runtime.transfer.blocks import Manifest, PartialDownload, StateImage, block_size
from muletrain.runtime.transfer.messages import AskManifest
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.membership import Membership
    from muletrain.runtime.microbatch.trainer import Source
    from muletrain.runtime.transfer.blocks import Downloader

WANTED = 4
"""Peers that can build microbatches, before no more take the tokens."""
TAKERS = 2
"""That a giver serves at once; the others ask again."""
TAKING_S = 30.0
"""Seconds after its last question, when a taker has given up."""
LOOK_S, LOOK_MAX_S = 5.0, 60.0
"""Seconds between two looks whether more peers should have the tokens, and between two tries to get them; doubles."""
CALL_S = 60.0
"""Seconds that a donor of tokens has to answer."""
PIECE = 64 << 20
"""Bytes that are checked in one job of the background thread."""


class Shared(Message):
    """What the welcome of such a run says. ``digest``: BLAKE3 of the manifest; ``size``: of the tokens [bytes];
    ``width``: bytes of one. ``heldout``: SHA-256 of the held-out side, which is not shared: with it ``Genesis.data``
    follows from the tokens."""

    KIND: ClassVar[str] = "shared"
    digest: Digest
    size: Annotated[int, Field(gt=0, lt=1 << 44)]
    width: Annotated[int, Field(ge=2, le=4, multiple_of=2)]
    heldout: Digest

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[npt.NBitBase]]:
        return np.dtype(f"<u{self.width}")


class FileCopy(StateImage):
    """The giver's side: a file, of which no more than a block is in memory."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__({"tokens": torch.from_numpy(np.memmap(path, np.uint8, "c"))})
        self._disk = disk

    async def content(self, ctx: Context, begin: int, end: int) -> list[memoryview]:
        """The event loop does not wait for the disk. Raises PeerUnreachable where it does not answer."""
        try:
            return [memoryview(await self._disk.call(self._read, begin, end))]
        except OSError as e:
            raise PeerUnreachable(f"the tokens cannot be read here: {e.strerror}") from None

    def _read(self, begin: int, end: int) -> bytes:
        return b"".join(self.views(begin, end))


@dataclass
class FilePartial(PartialDownload):
    """What arrived, in a file. ``problem``: why it cannot be written."""

    file: int
    disk: Disk
    problem: OSError | None = None

    def room(self, block: int) -> memoryview:
        begin, end = self.manifest.span(block)
        return memoryview(bytearray(end - begin))

    async def keep(self, ctx: Context, block: int, content: memoryview) -> None:
        try:
            await self.disk.call(os.pwrite, self.file, content, self.manifest.span(block)[0])
        except OSError as e:
            self.problem = e
            raise PeerUnreachable(f"the tokens cannot be written: {e.strerror}") from None
        await super().keep(ctx, block, content)

    async def look(self) -> None:
        """What another process took before us need not come again. Raises OSError."""
        for block in sorted(self.missing):
            begin, end = self.manifest.span(block)
            content = await self.disk.call(os.pread, self.file, end - begin, begin)
            if len(content) < end - begin:
                return
            if blake3(content).digest() == self.manifest.digest(block):
                self.missing.discard(block)


@dataclass
class Store:
    """A joiner's own cache of tokens that others shared: at most ``limit`` bytes of them, whatever runs it was in."""

    folder: Path
    limit: int

    def open(self, shared: Shared) -> int | None:
        """The file of its tokens, ours alone until it is closed: with all that came of them before. None while another
        process has it. Raises OSError; CapacityError where there is no room."""
        if shared.size > self.limit:
            raise CapacityError(
                f"they are {format_memory(shared.size)}, and {format_memory(self.limit)} may be (join --tokens GIB)"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(shared)
        self._make_room(path, shared.size)
        check_room(
            str(self.folder), shared.size - (path.stat().st_size if path.exists() else 0), "join with --tokens 0"
        )
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if _locked(file):
            os.ftruncate(file, min(os.fstat(file).st_size, shared.size))
            os.utime(file)
            return file
        os.close(file)
        return None

    def path(self, shared: Shared) -> Path:
        return self.folder / f"{shared.digest.hex()[:32]}.tokens"

    def _make_room(self, own: Path, size: int) -> None:
        """The oldest go that no process uses."""
        others = sorted((p for p in self.folder.glob("*.tokens") if p != own), key=lambda p: p.stat().st_mtime)
        for path in others:
            if size + sum(p.stat().st_size for p in others if p.exists()) <= self.limit:
                break
            file = os.open(path, os.O_RDWR)
            try:
                if _locked(file):
                    path.unlink()
            finally:
                os.close(file)
        if size + sum(p.stat().st_size for p in others if p.exists()) > self.limit:
            raise CapacityError(f"{self.folder}: tokens of other runs that go on fill it; raise --tokens")


@dataclass
class Sharing:
    """One process' part in it: it outlives the peers that the process is, one after the other.

    ``data``: ``Genesis.data``; ``tokenizer``: its JSON; ``vocab``: of the model. ``source_of``: makes the source of
    microbatches of tokens. ``store``: where they go; None: we do not take them. ``wanted``: trainers at which no more
    are needed. ``source``, ``copy``: of one that has the data."""

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
    _takers: dict[PeerId, float] = field(default_factory=dict)
    _said: str = ""

    def close(self) -> None:
        """The file is another's to use."""
        if self._file is not None:
            os.close(self._file)

    # The giver --------------------------------------------------------------------------------------------------------

    def given(self, ctx: Context, taker: PeerId) -> StateImage:
        """The copy, for a member. Raises MuletrainError where there is none, and while enough others take it."""
        ctx.roster.member(taker)
        now = ctx.clock.now()
        self._takers = {p: asked for p, asked in self._takers.items() if now - asked < TAKING_S}
        if self.copy is None or (taker not in self._takers and len(self._takers) >= TAKERS):
            raise MuletrainError("this peer does not give the run's tokens now; ask again later")
        self._takers[taker] = now
        return self.copy

    # The taker --------------------------------------------------------------------------------------------------------

    async def run(
        self,
        ctx: Context,
        taker: Downloader,
        membership: Membership,
        serves: Callable[[], bool],
        train: Callable[[Source], None],
    ) -> None:
        """Until cancelled: where more peers should be able to build microbatches, get the tokens, and be one
        (``train``). But first of all the state of its stage, so that it ``serves``."""
        tries, untold = 0, set[str]()
        while self.source is not None or self.store is not None:
            await ctx.clock.sleep(backoff_s(tries, LOOK_S, LOOK_MAX_S))
            untold = await membership.tell({p for p in untold if ctx.roster.knows(p)})
            if not serves() or ctx.roster.own.trainer or len(ctx.roster.trainers()) >= self.wanted:
                tries = 0
            elif self.source is None and not await self.take(ctx, taker):
                tries += 1
            elif self.source is not None:
                tries = 0
                train(self.source)
                ctx.emit(TrainerAdded(name=ctx.roster.own.name))
                untold = await membership.tell(ctx.roster.everyone())

    async def take(self, ctx: Context, taker: Downloader) -> bool:
        """All of it, checked. Says why not, once."""
        assert self.store is not None
        try:
            if self._file is None:
                self._file = await self.disk.call(self.store.open, self.shared)
            if self._file is None:  # another process of this machine takes them
                return False
            await self._fetch(ctx, taker, self._file)
            tokens = await self._checked()
            self.source = self.source_of(tokens)
        except NetworkError:  # others may give it, or later
            return False
        except (OSError, MuletrainError) as e:
            if str(e) != self._said:
                self._said = str(e)
                ctx.emit(TransferFailed(what="the run's tokens", reason=str(e)))
            return False
        return True

    async def _fetch(self, ctx: Context, taker: Downloader, file: int) -> None:
        """Raises NetworkError while nobody gives them, and OSError."""
        me = ctx.net.peer_id
        givers = [p for p in ctx.roster.trainers() if p != me][:WANTED]
        if self._partial is None:
            self._partial = await self._begun(ctx, givers, file)
        try:
            await taker.fetch(self._partial, givers)
        except PeerUnreachable:
            problem, self._partial.problem = self._partial.problem, None
            if problem is not None:
                raise problem from None
            raise

    async def _begun(self, ctx: Context, givers: list[PeerId], file: int) -> FilePartial:
        """The manifest that the welcome names, and what is here already."""
        ask = AskManifest(digest=self.shared.digest).pack()
        for giver in givers:
            try:
                packed = await ctx.net.call(giver, AskManifest.KIND, ask, timeout_s=CALL_S)
            except NetworkError:
                continue
            if blake3(packed).digest() == self.shared.digest:
                return await self._partly(Manifest.unpack(packed), file)
            ctx.refused(giver, "a manifest of other tokens than the welcome names")
        raise PeerUnreachable("nobody gives the run's tokens now")

    async def _partly(self, manifest: Manifest, file: int) -> FilePartial:
        """Raises DataError for what cannot be: no other giver has another one. Raises OSError."""
        try:
            manifest.check(self.shared.size)
        except ProtocolError as e:
            raise DataError(f"the welcome names what cannot be tokens: {e}") from None
        if manifest.size != self.shared.size or manifest.block > block_size(manifest.size):  # blocks lie in our memory
            raise DataError("the welcome names another number of tokens than there are, or blocks that are too large")
        partial = FilePartial(self.shared.digest, manifest, bytearray(), set(range(manifest.blocks)), file, self.disk)
        await partial.look()
        return partial

    async def _checked(self) -> npt.NDArray[np.integer]:
        """The tokens, which ``Genesis.data`` follows from; we give them to others, too. Raises DataError."""
        assert self.store is not None
        assert self._partial is not None
        tokens = np.memmap(self.store.path(self.shared), self.shared.dtype, "r")
        digest, most = hashlib.sha256(), 0
        for begin in range(0, len(tokens), PIECE):
            piece = tokens[begin : begin + PIECE]
            await self.disk.call(digest.update, piece.data)
            most = max(most, int(await self.disk.call(piece.max)))
        sides = digest.digest(), self.shared.heldout, hashlib.sha256(self.tokenizer).digest()
        if digest_of(sides) != self.data or most >= self.vocab:
            await self.disk.call(self.store.path(self.shared).unlink)
            self.store = None
            raise DataError(
                "the tokens that came are not the run's, although its welcome names them: they are not used"
            )
        copy = FileCopy(self.store.path(self.shared), self.disk)
        copy.named(self._partial.manifest.digests)
        if copy.digest == self.shared.digest:
            self.copy = copy
        return tokens


def share(path: Path, width: int, heldout: Path, disk: Disk) -> tuple[Shared, StateImage]:
    """What a peer that has the data gives of it: the file ``path`` of tokens of ``width`` bytes. Reads both files; for
    a thread of its own. Raises OSError."""
    copy = FileCopy(path, disk)
    copy.named(copy.hashes())
    with heldout.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return Shared(digest=copy.digest, size=copy.size, width=width, heldout=digest), copy


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
