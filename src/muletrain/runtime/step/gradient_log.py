"""Replicas keep the mean gradients of the last steps for peers that missed them (CONTRIBUTING,
"How a step goes", 5).

A gradient travels in the averaging's codec: members hold decoded values, and encoding them again gives the same bits.
It is taken as a state is, block by block from all replicas that keep it. Copying a state may take a newcomer many
steps; it takes the gradients of these steps from here and applies them in order. The last step's gradient is always
kept. Earlier ones are kept while a replica that may need them is heard of; they yield to the traffic of the step.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from muletrain.config.schema import Codec
from muletrain.errors import NetworkError, PeerUnreachable, ProtocolError, Refused
from muletrain.events import TransferFailed
from muletrain.network.base import Channel
from muletrain.policy.shards import BLOCK
from muletrain.runtime.core.waiting import unless_done
from muletrain.runtime.step.averaging import contents
from muletrain.runtime.step.messages import AskGradient
from muletrain.runtime.transfer.blocks import Manifest, PartialDownload, StateImage
from muletrain.wire.codec import Encoded, decode, encode

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.step.messages import RoundEntry
    from muletrain.runtime.step.record import RecordBuilder
    from muletrain.runtime.transfer.blocks import Downloader

T = TypeVar("T")
PIECE = 32 * BLOCK
"""Elements encoded at once: whole quantisation blocks."""
CALL_S = 60.0
"""Seconds that a holder has to answer with a manifest: it encodes and hashes the gradient first. A holder that is gone
is noticed earlier."""
DONORS = 4
"""Peers asked for a gradient at once."""
KEPT_S = 60.0
"""Seconds after a replica that catches up was last heard of, in which gradients are kept for it."""
MAX_STEPS = 512
"""Steps that are kept at most."""
HEADERS = 1 << 16
"""Bytes of a gradient's copy beside its numbers."""


@dataclass(eq=False)
class MeanGradient:
    """A stage's whole mean gradient, flat fp32 [P], and its round entry. Neither changes."""

    entry: RoundEntry
    values: Tensor
    packed: StateImage | None = None
    """The gradient's copy for sending, one tensor a piece, once a peer has asked for it."""
    _packing: asyncio.Task[StateImage] | None = None

    async def image(self, ctx: Context) -> StateImage:
        """Return ``packed``, making it first if necessary."""
        if self._packing is None:
            self._packing = ctx.spawn(self._pack(ctx), "pack")
        return await asyncio.shield(self._packing)

    async def _pack(self, ctx: Context) -> StateImage:
        pieces = dict[str, Tensor]()
        for begin in range(0, len(self.values), PIECE):
            piece = await ctx.compute.offload(encoded_piece, self, begin, ctx.plan.gradients)
            pieces[_name(begin)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        image = StateImage(pieces, Channel.AVERAGE)
        await image.name(ctx)
        self.packed = image
        return image


def encoded_piece(gradient: MeanGradient, begin: int, codec: Codec) -> bytes:
    """Encode ``PIECE`` elements of ``gradient`` from ``begin`` on; ``codec``: the run's, for averaging."""
    return b"".join(encode(gradient.values[begin : begin + PIECE], travels_as(gradient.entry, codec)).buffers)


def travels_as(entry: RoundEntry, codec: Codec) -> Codec:
    """The codec of a gradient's copy. A round of one member was never sent, so its values were never rounded."""
    return codec if len(entry.members) > 1 else Codec.FP32


@dataclass
class _Past:
    """An applied step. ``image`` replaces ``gradient`` once the step is not the last one any more."""

    builder: RecordBuilder
    agreed: tuple[RoundEntry, ...]
    """The rounds of its record."""
    entry: RoundEntry
    gradient: MeanGradient | None
    image: StateImage | None = None

    @property
    def packed(self) -> StateImage | None:
        """The gradient's copy for sending, if it was made."""
        return self.image if self.gradient is None else self.gradient.packed

    @property
    def nbytes(self) -> int:
        if self.gradient is not None:
            return self.gradient.values.nbytes
        return self.image.size if self.image is not None else 0


class GradientLog:
    """Owns one peer's past gradients. ``limit``: bytes of the gradients beside the last."""

    def __init__(self, ctx: Context, limit: int) -> None:
        self._ctx, self._limit = ctx, limit
        self._past: deque[_Past] = deque()
        self._current: StateImage | None = None
        """The copy of the current step's gradient, if a peer asked for it."""
        self._followers: dict[PeerId, tuple[int, float]] = {}
        """Peers that catch up: the first step that each needs, and when it was last heard of."""

    def follow(self, peer: PeerId, step: int) -> None:
        """``peer`` takes the state before ``step``, so it will need the gradients from ``step`` on."""
        self._followers[peer] = step, self._ctx.clock.now()

    def arrived(self, peer: PeerId) -> None:
        """``peer`` takes part again: it needs no past gradients."""
        self._followers.pop(peer, None)

    def add(self, builder: RecordBuilder, gradient: MeanGradient) -> None:
        """Add an applied step, and drop steps that nobody needs."""
        past = self._past
        if past and past[-1].builder.step + 1 != builder.step:  # after a gap earlier steps are useless
            past.clear()
        past.append(_Past(builder, builder.agreed(), gradient.entry, gradient))
        self._current = None
        now = self._ctx.clock.now()
        self._followers = {p: f for p, f in self._followers.items() if now - f[1] < KEPT_S}
        needed = min((step for step, _ in self._followers.values()), default=builder.step)
        while len(past) > 1 and (past[0].builder.step < needed or len(past) > MAX_STEPS or self._excess()):
            past.popleft()
        if len(past) > 1:
            self._ctx.spawn(self._pack(past[-2]), "pack")

    def reaches(self, step: int) -> bool:
        """Are ``step`` and all later steps kept?"""
        return bool(self._past) and self._past[0].builder.step <= step

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients beside the last."""
        return sum(p.nbytes for p in list(self._past)[:-1])

    def _excess(self) -> bool:
        return self.nbytes > self._limit

    async def _pack(self, past: _Past) -> None:
        """Replace a gradient by its copy, which needs a half or a quarter of the memory."""
        if past.gradient is not None:
            past.image = await past.gradient.image(self._ctx)
            past.image.channel, past.gradient = Channel.BULK, None  # it is not urgent any more

    def entries(self, peer: PeerId, step: int, lineage: bytes) -> tuple[RoundEntry, ...]:
        """The round entries of a kept step's record; none for other steps."""
        for past in self._past:
            if (past.builder.step, past.builder.lineage) == (step, lineage):
                self._heard(peer, step)
                return past.agreed
        return ()

    def record(self, step: int) -> bytes:
        """The hash of a kept step's record; empty for other steps."""
        found = (r for past in self._past if past.builder.step == step and (r := past.builder.record()) is not None)
        return next((r.hash for r in found), b"")

    async def manifest(self, peer: PeerId, round_: bytes, current: MeanGradient | None) -> bytes:
        """The manifest of the gradient of ``round_``, if it is kept or is ``current``; else empty."""
        if current is not None and current.entry.round == round_:
            self._current = await current.image(self._ctx)
            return self._current.manifest
        for past in self._past:
            if past.entry.round == round_:
                self._heard(peer, past.builder.step)
                image = past.image if past.gradient is None else await past.gradient.image(self._ctx)
                return b"" if image is None else image.manifest
        return b""

    def copy(self, peer: PeerId, digest: bytes) -> StateImage | None:
        """The gradient's copy with that digest, if ``peer`` is a replica."""
        if not self._is_replica(peer):
            return None
        if self._current is not None and self._current.digest == digest:
            return self._current
        for past in self._past:
            if past.packed is not None and past.packed.digest == digest:
                self._heard(peer, past.builder.step)
                return past.packed
        return None

    def _is_replica(self, peer: PeerId) -> bool:
        roster = self._ctx.roster
        return roster.knows(peer) and roster.member(peer).stage == roster.own.stage

    def _heard(self, peer: PeerId, step: int) -> None:
        if peer in self._followers:
            self.follow(peer, step)


async def fetch_gradient(
    ctx: Context, downloader: Downloader, entry: RoundEntry, holders: list[PeerId]
) -> MeanGradient | None:
    """Take the gradient of ``entry``'s round from ``holders``: live ones first, a few at a time, since they must encode
    and hash it. None if nobody gives it; that is noticed soon if all are gone, even over slow links."""
    alive = ctx.roster.is_alive
    for asked in (*_groups([p for p in holders if alive(p)]), *_groups([p for p in holders if not alive(p)])):
        answers = await asyncio.gather(*(_manifest(ctx, p, entry) for p in asked))
        donors: defaultdict[bytes, list[PeerId]] = defaultdict(list)
        for peer, manifest in zip(asked, answers, strict=True):
            if manifest:
                donors[manifest].append(peer)
        for manifest, givers in sorted(donors.items(), key=lambda item: -len(item[1])):
            try:
                return await _while_there(ctx, givers, entry, _take(ctx, downloader, entry, manifest, givers))
            except ProtocolError as e:
                for peer in givers:
                    ctx.detector.mark_down(peer, f"gave no gradient of step {entry.step + 1}: {e}")
            except NetworkError as e:
                ctx.emit(TransferFailed(what=f"the gradient of step {entry.step + 1}", reason=str(e)))
    return None


def _groups(peers: list[PeerId]) -> list[list[PeerId]]:
    return [peers[k : k + DONORS] for k in range(0, len(peers), DONORS)]


async def _manifest(ctx: Context, holder: PeerId, entry: RoundEntry) -> bytes:
    """The manifest that ``holder`` gives; empty if it has none or is gone."""
    ask = AskGradient(round=entry.round).pack()
    try:
        return await _while_there(ctx, [holder], entry, ctx.net.call(holder, AskGradient.KIND, ask, timeout_s=CALL_S))
    except Refused:  # it is at another step, and well
        return b""
    except NetworkError as e:
        ctx.detector.mark_down(holder, f"gave no gradient of step {entry.step + 1}: {e}")
        return b""


async def _take(
    ctx: Context, downloader: Downloader, entry: RoundEntry, packed: bytes, donors: list[PeerId]
) -> MeanGradient:
    """Download and verify the gradient. Raises ProtocolError for another one than ``entry``'s, and NetworkError."""
    manifest, n_params = Manifest.unpack(packed), ctx.compute.n_params
    manifest.check(5 * n_params + HEADERS)
    pieces = {(_name(begin), "uint8", 1) for begin in range(0, n_params, PIECE)}
    if {(name, dtype, len(shape)) for name, dtype, shape in manifest.tensors} != pieces:
        raise ProtocolError("the pieces of a gradient that no stage has")
    partial = PartialDownload.of(blake3(packed).digest(), manifest)
    await downloader.fetch(partial, donors)
    gradient, codec = await ctx.compute.room(n_params), travels_as(entry, ctx.plan.gradients)
    for name, piece in partial.state().items():
        into = gradient[int(name) : int(name) + PIECE]
        into.copy_(decode(Encoded(codec.value, tuple(into.shape), [piece.numpy().data]), copy=False))
    return await verified(ctx, entry, gradient)


async def verified(ctx: Context, entry: RoundEntry, gradient: Tensor) -> MeanGradient:
    """``gradient`` as a MeanGradient. Raises ProtocolError if it is not ``entry``'s."""
    if await ctx.compute.offload(contents, gradient, len(entry.members), ctx.plan.chunk) != tuple(
        s.content for s in entry.shards
    ):
        raise ProtocolError("the gradient's content is not what its holders attest")
    return MeanGradient(entry, gradient)


async def _while_there(ctx: Context, holders: list[PeerId], entry: RoundEntry, work: Coroutine[Any, Any, T]) -> T:
    """Wait for ``work``, which depends on ``holders``, and probe them meanwhile. Raises PeerUnreachable once none
    answers."""
    task, there = asyncio.ensure_future(work), list(holders)

    async def that_answer() -> list[PeerId]:
        answers = await asyncio.gather(*(ctx.detector.probe(p, entry.lineage, entry.step, brief=True) for p in there))
        return [p for p, answer in zip(there, answers, strict=True) if answer is not None]

    try:
        attempts = itertools.count()
        while there and not task.done():
            attempt = next(attempts)
            await asyncio.wait({task}, timeout=max(ctx.detector.suspicion_s(p, attempt) for p in there))
            answered = None if task.done() else await unless_done(task, that_answer())
            there = there if answered is None else answered
        if not task.done():
            raise PeerUnreachable(f"{', '.join(p[-6:] for p in holders)}: no answer to a probe")
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _name(begin: int) -> str:
    """Name of the piece that begins there; names sort as the pieces do."""
    return f"{begin:016}"
