"""A stage's whole mean gradient, and its transfer from holders to a peer, block by block like a state.

The gradient travels in the averaging's codec: members hold decoded values, and a second encoding gives the same bits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from muletrain.config.schema import Codec
from muletrain.errors import NetworkError, PeerUnreachable, ProtocolError, Refused
from muletrain.events import TransferFailed
from muletrain.network.base import Channel
from muletrain.optim.tied import content
from muletrain.policy.shards import BLOCK
from muletrain.runtime.averaging.averager import contents
from muletrain.runtime.core.blocks import AskBlocks, Manifest, PartialDownload, StateImage
from muletrain.runtime.core.times import GONE_S
from muletrain.runtime.core.waiting import unless_done
from muletrain.wire.codec import Encoded, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from muletrain.network.base import PeerId
    from muletrain.runtime.core.blocks import Downloader
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.row import RoundEntry, StageEntry

T = TypeVar("T")
PIECE = 32 * BLOCK
"""Elements encoded at once: whole quantisation blocks."""
DONORS = 4
"""Peers asked for a gradient at once."""
HEADERS = 1 << 16
"""Bytes of a gradient's copy beside its values."""


@dataclass(eq=False)
class MeanGradient:
    """A stage's whole mean gradient, flat fp32 [G], and its round entry. Neither changes, until ``pack``."""

    entry: RoundEntry
    values: Tensor
    _packed: dict[bool, asyncio.Task[StateImage]] = field(default_factory=dict)
    """Copies for sending, one tensor per piece, made on first request: the whole gradient (False), and the pieces with
    tied parameters (True)."""
    _freed: bool = False
    """Only the copy of the whole gradient is left."""

    @property
    def step(self) -> int:
        return self.entry.step

    @property
    def nbytes(self) -> int:
        """Bytes of the values, or of the copy if only that is left."""
        return self._packed[False].result().size if self._freed else self.values.nbytes

    @cached_property
    def for_record(self) -> StageEntry:
        """The round's facts for the step record."""
        return self.entry.for_record()

    def has(self, name: bytes, *, tied: bool) -> bool:
        """Does ``name``, by round or by digest, name this gradient's copy, which is here or can be made?"""
        round_, made = self.entry.round, self._packed.get(tied)
        done = made is not None and made.done() and not made.cancelled() and made.exception() is None
        if made is not None and done and name == made.result().digest:
            return True
        return name == (tied_name(round_) if tied else round_) and (made is not None or not self._freed)

    async def image(self, ctx: Context, *, tied: bool = False) -> StateImage:
        """Return one of ``_packed``. Ends within the time of this peer's own work."""
        if tied not in self._packed:
            self._packed[tied] = ctx.spawn(self._pack(ctx, tied=tied), "pack")
        return await asyncio.shield(self._packed[tied])

    async def pack(self, ctx: Context) -> None:
        """Keep only the copy of the whole gradient, for sending in the background. Ends within the time of this peer's own
        work."""
        image = await self.image(ctx)
        while making := [task for task in self._packed.values() if not task.done()]:  # of the tied part
            await asyncio.wait(making)
        self._packed.pop(True, None)
        image.channel, self.values, self._freed = Channel.BULK, self.values.new_empty(0), True

    async def _pack(self, ctx: Context, *, tied: bool) -> StateImage:
        pieces = dict[str, Tensor]()
        for begin in _tied_pieces(ctx, self.entry.stage) if tied else range(0, len(self.values), PIECE):
            piece = await ctx.compute.offload(encoded_piece, self, begin, ctx.plan.gradients)
            pieces[_name(begin)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        image = StateImage(pieces, Channel.AVERAGE)
        await image.name(ctx.compute.offload)
        return image


@dataclass(frozen=True, eq=False)
class TiedPart:
    """The part of the mean gradient of another stage's round ``entry`` for the parameters shared with our stage."""

    entry: StageEntry
    values: Tensor
    """fp32 [T], see ``optim.tied``."""
    packed: StateImage
    """The received copy, for sending."""
    step: int

    def has(self, name: bytes, *, tied: bool) -> bool:
        """Does ``name`` name this copy?"""
        return tied and name in (tied_name(self.entry.round), self.packed.digest)

    async def image(self, ctx: Context, *, tied: bool) -> StateImage:
        """See ``MeanGradient``."""
        return self.packed


def _tied_pieces(ctx: Context, stage: int) -> dict[int, int]:
    assert ctx.plan.tied is not None, "nobody else asks"
    return ctx.plan.tied.pieces(stage, PIECE)


def encoded_piece(gradient: MeanGradient, begin: int, codec: Codec) -> bytes:
    """Encode ``PIECE`` elements of ``gradient`` from ``begin`` on; ``codec``: the run's, for averaging."""
    codec = travels_as(len(gradient.entry.members), codec)
    return b"".join(encode(gradient.values[begin : begin + PIECE], codec).buffers)


def travels_as(members: int, codec: Codec) -> Codec:
    """The codec of a gradient's copy. Values of a round with one member were never sent, and so never rounded."""
    return codec if members > 1 else Codec.FP32


def tied_name(round_: bytes) -> bytes:
    """The name of the tied part of a round's gradient. The name of the whole gradient is the round's id."""
    return blake3(b"tied" + round_).digest()


async def fetch_gradient(
    ctx: Context, downloader: Downloader, entry: RoundEntry, holders: list[PeerId]
) -> MeanGradient | None:
    """Take the gradient of ``entry``'s round from ``holders``; None: no holder gives the gradient."""
    n_trained = ctx.compute.n_trained
    sizes = {k: min(PIECE, n_trained - k) for k in range(0, n_trained, PIECE)}

    async def take(packed: bytes, donors: list[PeerId]) -> MeanGradient:
        pieces, gradient = await _pieces(downloader, packed, sizes, donors), await ctx.compute.room(n_trained)
        _decode(pieces, sizes, travels_as(len(entry.members), ctx.plan.gradients), ((0, n_trained),), gradient)
        told = tuple(s.content for s in entry.shards)
        if await ctx.compute.offload(contents, gradient, len(entry.members), ctx.plan.chunk) != told:
            raise ProtocolError("the gradient's content is not what its holders attest")
        if await tied_content(ctx, entry.stage, gradient) != entry.tied:
            raise ProtocolError("what is tied in the gradient is not what its holders attest")
        return MeanGradient(entry, gradient)

    return await _from_holders(ctx, entry.round, (entry.lineage, entry.step), holders, take)


async def fetch_tied(
    ctx: Context, downloader: Downloader, entry: StageEntry, at: tuple[bytes, int], holders: list[PeerId]
) -> TiedPart | None:
    """Take the part of the gradient for parameters that two stages share. ``at``: lineage and step. ``holders``: peers of
    both stages."""
    assert ctx.plan.tied is not None, "nobody else asks"
    sizes, ranges = _tied_pieces(ctx, entry.stage), ctx.plan.tied.ranges_of(entry.stage)

    async def take(packed: bytes, donors: list[PeerId]) -> TiedPart:
        pieces, values = await _pieces(downloader, packed, sizes, donors), torch.empty(sum(b - a for a, b in ranges))
        await ctx.compute.offload(_decode, pieces, sizes, travels_as(entry.size, ctx.plan.gradients), ranges, values)
        if await ctx.compute.offload(content, values) != entry.tied:
            raise ProtocolError("what is tied in the gradient is not what its holders attest")
        image = StateImage({_name(k): piece for k, piece in pieces.items()}, Channel.AVERAGE)
        await image.name(ctx.compute.offload)
        return TiedPart(entry, values, image, at[1])

    return await _from_holders(ctx, tied_name(entry.round), at, holders, take)


async def _from_holders(
    ctx: Context,
    name: bytes,
    at: tuple[bytes, int],
    holders: list[PeerId],
    take: Callable[[bytes, list[PeerId]], Coroutine[Any, Any, T]],
) -> T | None:
    """``take`` the gradient with this ``name`` from ``holders``: live holders first, a few at a time, because of the encoding and hashing.
    The absence of all holders is noticed soon, even over slow links. ``take`` raises ProtocolError for another gradient,
    and NetworkError."""
    alive = [p for p in holders if ctx.roster.is_alive(p)]
    down = [p for p in holders if p not in alive]
    for asked in [each[k : k + DONORS] for each in (alive, down) for k in range(0, len(each), DONORS)]:
        answers = await asyncio.gather(*(_manifest(ctx, p, name, at) for p in asked))
        donors: dict[bytes, list[PeerId]] = defaultdict(list)
        for peer, manifest in zip(asked, answers, strict=True):
            if manifest:
                donors[manifest].append(peer)
        for manifest, givers in sorted(donors.items(), key=lambda item: -len(item[1])):
            try:
                return await _while_there(ctx, givers, at, take(manifest, givers))
            except ProtocolError as e:
                for peer in givers:
                    ctx.detector.mark_down(peer, f"gave no gradient of step {at[1] + 1}: {e.why}")
            except NetworkError as e:
                ctx.emit(TransferFailed(what=f"the gradient of step {at[1] + 1}", reason=str(e)))
    return None


async def _manifest(ctx: Context, holder: PeerId, name: bytes, at: tuple[bytes, int]) -> bytes:
    """The manifest from ``holder``; empty if ``holder`` has none or is gone."""
    call = ctx.net.call(holder, AskBlocks.KIND, AskBlocks(digest=name).pack(), timeout_s=GONE_S)
    try:
        return await _while_there(ctx, [holder], at, call)
    except Refused:  # the holder is at another step, and well
        return b""
    except NetworkError as e:
        ctx.detector.mark_down(holder, f"gave no gradient of step {at[1] + 1}: {e.why}")
        return b""


async def _pieces(
    downloader: Downloader, packed: bytes, begins: Collection[int], donors: list[PeerId]
) -> dict[int, Tensor]:
    """Download a gradient's encoded pieces at ``begins``. Raises ProtocolError for other pieces, and NetworkError."""
    manifest = Manifest.unpack(packed)
    manifest.check(5 * PIECE * len(begins) + HEADERS)
    if {(n, d, len(shape)) for n, d, shape in manifest.tensors} != {(_name(k), "uint8", 1) for k in begins}:
        raise ProtocolError("the pieces of a gradient that no stage has")
    partial = PartialDownload.of(blake3(packed).digest(), manifest)
    await downloader.fetch(partial, donors)
    return {int(name): piece for name, piece in partial.state().items()}


def _decode(
    pieces: dict[int, Tensor], sizes: dict[int, int], codec: Codec, ranges: tuple[tuple[int, int], ...], into: Tensor
) -> None:
    """Write the values of the gradient's ``ranges`` to ``into``, from the encoded ``pieces``, which have ``sizes`` values:
    piece by piece, to avoid a second copy of everything."""
    at = 0
    for begin, end in ranges:
        for k in range(begin // PIECE * PIECE, end, PIECE):
            piece = decode(Encoded(codec.value, (sizes[k],), [pieces[k].numpy().data]), copy=False)
            found = piece[max(begin, k) - k : min(end, k + PIECE) - k]
            into[at : at + len(found)] = found
            at += len(found)


async def tied_content(ctx: Context, stage: int, gradient: Tensor) -> bytes:
    """``RoundEntry.tied`` of ``stage`` with this ``gradient``."""
    tied = ctx.plan.tied
    if tied is None or stage not in tied.stages:
        return b""
    return await ctx.compute.offload(lambda: content(tied.part(gradient, stage)))


async def _while_there(ctx: Context, holders: list[PeerId], at: tuple[bytes, int], work: Coroutine[Any, Any, T]) -> T:
    """Wait for ``work``, which depends on ``holders``, with probes meanwhile. Raises PeerUnreachable once no holder
    answers. Ends within a probe's deadline after the last holder fell silent."""
    task, there = asyncio.ensure_future(work), list(holders)

    async def that_answer() -> list[PeerId]:
        answers = await asyncio.gather(*(ctx.detector.probe(p, *at, brief=True) for p in there))
        return [p for p, answer in zip(there, answers, strict=True) if answer is not None]

    attempts = itertools.count()
    try:
        while there:
            attempt = next(attempts)
            await asyncio.wait({task}, timeout=max(ctx.detector.suspicion_s(p, attempt) for p in there))
            if (answered := await unless_done(task, that_answer())) is None:
                return task.result()
            there = answered
        if task.done():
            return task.result()
        raise PeerUnreachable("no answer to a probe", ", ".join(map(ctx.roster.name, holders)))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _name(begin: int) -> str:
    """Name of the piece from ``begin`` on; names sort as the pieces do."""
    return f"{begin:016}"
