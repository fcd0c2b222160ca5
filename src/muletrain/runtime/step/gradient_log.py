"""The mean gradients of the last steps, kept by the stage's replicas for those that miss them (DESIGN "How a step
goes", 6, and "Joining, moving, leaving").

A gradient travels in the codec of the averaging: what several members reduced are decoded values, and to encode those
again gives the same bits. A newcomer copies the state before one step, and that may take as long as many steps: what
was agreed on meanwhile it takes from here, and applies it in order. The step applied last is always kept; those before
it as long as a replica that may need them is heard of. They travel as state does, from all replicas and in the gaps of
the step under way; the last one, which others may wait for, at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from torch import Tensor

from muletrain.config.schema import Codec
from muletrain.errors import NetworkError, PeerUnreachable, ProtocolError
from muletrain.policy.shards import BLOCK
from muletrain.runtime.core.messages import AskGradient, AskPast
from muletrain.runtime.core.waiting import unless_done
from muletrain.runtime.step.averaging import contents
from muletrain.runtime.transfer.blocks import Manifest, PartialDownload, StateImage
from muletrain.wire.codec import Encoded, decode, encode

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.core.messages import RoundEntry
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.step.record import RecordBuilder
    from muletrain.runtime.transfer.blocks import Downloader

PIECE = 32 * BLOCK
"""Elements in one answer: calls carry at most 1 MiB. Whole quantisation blocks."""
AHEAD = 1
"""Pieces asked for at once: answers to calls are not paced, and more would hold up everything else on a narrow link."""
CALL_S = 60.0
"""Seconds for one piece: a bound for a slow link. A holder that is gone is found out about long before."""
KEPT_S = 60.0
"""Seconds for which gradients are kept for a replica that catches up, after it was last heard of."""
MAX_STEPS = 512
HEADERS = 1 << 16
"""Bytes beside the numbers' own."""


@dataclass(frozen=True)
class MeanGradient:
    """A stage's whole mean gradient, flat fp32 [P], and what its holders say of it. It is never changed."""

    entry: RoundEntry
    values: Tensor

    def piece(self, offset: int, codec: Codec) -> bytes:
        """From element ``offset`` on; ``codec``: the run's, for averaging."""
        return b"".join(encode(self.values[offset : offset + PIECE], travels_as(self.entry, codec)).buffers)


def travels_as(entry: RoundEntry, codec: Codec) -> Codec:
    """The only member of a round sends nothing, so that what it computed was never rounded."""
    return codec if len(entry.members) > 1 else Codec.FP32


@dataclass
class _Past:
    """A step that was applied. ``packed``: its gradient as it travels, in tensors of a piece each, once it lies here
    for longer."""

    builder: RecordBuilder
    agreed: tuple[RoundEntry, ...]
    """The rounds of its record."""
    entry: RoundEntry
    gradient: MeanGradient | None
    packed: StateImage | None = None

    @property
    def nbytes(self) -> int:
        if self.gradient is not None:
            return self.gradient.values.nbytes
        return self.packed.size if self.packed is not None else 0


class GradientLog:
    """One peer's. ``limit``: bytes of the gradients that are kept beside the last."""

    def __init__(self, ctx: Context, limit: int) -> None:
        self._ctx, self._limit = ctx, limit
        self._past: deque[_Past] = deque()
        self._followers: dict[PeerId, tuple[int, float]] = {}
        """What they need is from that step on; when they were heard of."""

    def follow(self, peer: PeerId, step: int) -> None:
        """``peer`` gets the state before ``step``, and will need what follows."""
        self._followers[peer] = step, self._ctx.clock.now()

    def arrived(self, peer: PeerId) -> None:
        """``peer`` takes part again."""
        self._followers.pop(peer, None)

    def add(self, builder: RecordBuilder, gradient: MeanGradient) -> None:
        """This step was applied."""
        past = self._past
        if past and past[-1].builder.step + 1 != builder.step:  # a gap: what lies before it leads nowhere
            past.clear()
        past.append(_Past(builder, builder.agreed(), gradient.entry, gradient))
        now = self._ctx.clock.now()
        self._followers = {p: f for p, f in self._followers.items() if now - f[1] < KEPT_S}
        needed = min((step for step, _ in self._followers.values()), default=builder.step)
        while len(past) > 1 and (past[0].builder.step < needed or len(past) > MAX_STEPS or self._excess()):
            past.popleft()
        if len(past) > 1:
            self._ctx.spawn(self._pack(past[-2]), "pack")

    def reaches(self, step: int) -> bool:
        """Is ``step`` kept, and all that followed?"""
        return bool(self._past) and self._past[0].builder.step <= step

    @property
    def nbytes(self) -> int:
        """Of the gradients beside the last."""
        return sum(p.nbytes for p in list(self._past)[:-1])

    def _excess(self) -> bool:
        return self.nbytes > self._limit

    async def _pack(self, past: _Past) -> None:
        """A half or a quarter of the memory, and a copy that can be taken as a state is."""
        if (gradient := past.gradient) is not None:
            ctx, pieces = self._ctx, dict[str, Tensor]()
            for begin in range(0, len(gradient.values), PIECE):
                piece = await ctx.compute.offload(gradient.piece, begin, ctx.plan.gradients)
                pieces[_name(begin)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            packed = StateImage(pieces)
            await packed.name(ctx)
            past.packed, past.gradient = packed, None

    def entries(self, peer: PeerId, step: int, lineage: bytes) -> tuple[RoundEntry, ...]:
        """The rounds that made the record of a step that is kept; none for any other."""
        for past in self._past:
            if (past.builder.step, past.builder.lineage) == (step, lineage):
                self._heard(peer, step)
                return past.agreed
        return ()

    def record(self, step: int) -> bytes:
        """The hash of a record that is kept."""
        found = (r for past in self._past if past.builder.step == step and (r := past.builder.record()) is not None)
        return next((r.hash for r in found), b"")

    def piece(self, peer: PeerId, round_: bytes, offset: int) -> bytes:
        """Raises ProtocolError for a round that is not kept."""
        for past in self._past:
            if past.entry.round == round_:
                self._heard(peer, past.builder.step)
                if past.gradient is not None:
                    return past.gradient.piece(offset, self._ctx.plan.gradients)
                if past.packed is not None and offset % PIECE == 0 and offset < self._ctx.compute.n_params:
                    return bytes(past.packed.tensor(offset // PIECE))
        raise ProtocolError("the gradient of this round is not held here (not yet, or not any more)")

    def manifest(self, peer: PeerId, round_: bytes) -> bytes:
        """Of the gradient of a step before the last; empty for any other."""
        for past in self._past:
            if past.entry.round == round_ and past.packed is not None:
                self._heard(peer, past.builder.step)
                return past.packed.manifest
        return b""

    def copy(self, peer: PeerId, digest: bytes) -> StateImage | None:
        """That of which ``peer``, a replica, got the manifest."""
        for past in self._past:
            if past.packed is not None and past.packed.digest == digest and self._is_replica(peer):
                self._heard(peer, past.builder.step)
                return past.packed
        return None

    def _is_replica(self, peer: PeerId) -> bool:
        roster = self._ctx.roster
        return roster.knows(peer) and roster.member(peer).stage == roster.own.stage

    def _heard(self, peer: PeerId, step: int) -> None:
        if peer in self._followers:
            self.follow(peer, step)


async def fetch_gradient(ctx: Context, holder: PeerId, entry: RoundEntry) -> MeanGradient:
    """The gradient of ``entry``'s round from ``holder``, checked against the contents of its shards. Raises
    NetworkError, soon when the holder is gone, however slow the link to it may be."""
    gradient = torch.empty(ctx.compute.n_params)

    async def piece(offset: int) -> None:
        ask = AskGradient(round=entry.round, offset=offset).pack()
        answer = await ctx.net.call(holder, AskGradient.KIND, ask, timeout_s=CALL_S)
        decode_piece(ctx, entry, gradient, offset, answer)

    for begin in range(0, len(gradient), AHEAD * PIECE):
        pieces = asyncio.gather(*map(piece, range(begin, min(len(gradient), begin + AHEAD * PIECE), PIECE)))
        await _while_there(ctx, holder, entry, pieces)
    return await verified(ctx, entry, gradient)


def decode_piece(ctx: Context, entry: RoundEntry, gradient: Tensor, offset: int, piece: bytes | memoryview) -> None:
    """What ``MeanGradient.piece`` gave, into ``gradient``. Raises ProtocolError when it does not fit."""
    into = gradient[offset : offset + PIECE]
    codec = travels_as(entry, ctx.plan.gradients)
    into.copy_(decode(Encoded(codec.value, tuple(into.shape), [piece]), copy=False))


async def verified(ctx: Context, entry: RoundEntry, gradient: Tensor) -> MeanGradient:
    """Raises ProtocolError for another gradient than ``entry``'s."""
    if await ctx.compute.offload(contents, gradient, len(entry.members), ctx.plan.chunk) != tuple(
        s.content for s in entry.shards
    ):
        raise ProtocolError("the gradient's content is not what its holders attest")
    return MeanGradient(entry, gradient)


async def _while_there(ctx: Context, holder: PeerId, entry: RoundEntry, work: asyncio.Future[Any]) -> None:
    """Wait for ``work``, and ask ``holder``, who is to do it, now and then whether it is there. Raises PeerUnreachable
    if not."""
    try:
        for attempt in itertools.count():
            await asyncio.wait({work}, timeout=ctx.detector.suspicion_s(holder, attempt))
            if work.done():
                work.result()
                return
            if (
                await unless_done(work, ctx.detector.probe(holder, entry.lineage, entry.step, brief=True)) is None
                and not work.done()
            ):
                raise PeerUnreachable(f"{holder[-6:]} answers no probe")
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def take_past(ctx: Context, taker: Downloader, entry: RoundEntry) -> MeanGradient | None:
    """The gradient of ``entry``'s round, of a step that lies back, from all replicas that are believed alive and keep
    it; None where none does. Raises NetworkError."""
    ask = AskPast(round=entry.round).pack()

    async def manifest(peer: PeerId) -> bytes:
        try:
            return await ctx.net.call(peer, AskPast.KIND, ask, timeout_s=ctx.detector.deadline.seconds(1))
        except NetworkError:
            return b""

    replicas = [p for p in ctx.roster.replicas() if ctx.roster.is_alive(p)]
    answers = dict(zip(replicas, await asyncio.gather(*map(manifest, replicas)), strict=True))
    kept = Counter(answer for answer in answers.values() if answer)
    if not kept:
        return None
    packed = kept.most_common(1)[0][0]
    named = Manifest.unpack(packed)
    n_params = ctx.compute.n_params
    named.check(5 * n_params + HEADERS)
    pieces = {(_name(begin), "uint8", 1) for begin in range(0, n_params, PIECE)}
    if {(name, dtype, len(shape)) for name, dtype, shape in named.tensors} != pieces:
        raise ProtocolError("the pieces of a gradient that no stage has")
    partial = PartialDownload.of(blake3(packed).digest(), named)
    await taker.fetch(partial, [p for p, answer in answers.items() if answer == packed])
    gradient = torch.empty(n_params)
    for name, piece in partial.state().items():
        decode_piece(ctx, entry, gradient, int(name), piece.numpy().data)
    return await verified(ctx, entry, gradient)


def _name(begin: int) -> str:
    """Of the piece that begins there, in a copy whose tensors are sorted by name."""
    return f"{begin:016}"
