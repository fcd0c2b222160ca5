"""The mean gradient of a round, kept by those that hold all of it, for those that miss it (DESIGN "How a step goes", 6).

It travels in the codec of the averaging: what several members reduced are decoded values, and to encode those again gives the same bits.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from muletrain.config.schema import Codec
from muletrain.errors import PeerUnreachable, ProtocolError
from muletrain.policy.shards import BLOCK
from muletrain.runtime.core.messages import AskGradient
from muletrain.runtime.core.waiting import unless_done
from muletrain.runtime.step.averaging import contents
from muletrain.wire.codec import Encoded, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.runtime.core.messages import RoundEntry
    from muletrain.runtime.members.context import Context

PIECE = 32 * BLOCK
"""Elements in one answer: calls carry at most 1 MiB. Whole quantisation blocks."""
AHEAD = 1
"""Pieces asked for at once: answers to calls are not paced, and more would hold up everything else on a narrow link."""
CALL_S = 60.0
"""For a piece: a bound for a slow link. A holder that is gone is found out about long before."""


@dataclass(frozen=True)
class Holding:
    """A whole mean gradient, flat fp32 [P], and what its holders say of it. It is never changed."""

    entry: RoundEntry
    gradient: Tensor

    def piece(self, offset: int, codec: Codec) -> bytes:
        """From element ``offset`` on; ``codec``: the run's, for averaging."""
        return b"".join(encode(self.gradient[offset : offset + PIECE], travels_as(self.entry, codec)).buffers)


def travels_as(entry: RoundEntry, codec: Codec) -> Codec:
    """The only member of a round sends nothing, so that what it computed was never rounded."""
    return codec if len(entry.members) > 1 else Codec.FP32


async def fetch_gradient(ctx: Context, holder: PeerId, entry: RoundEntry) -> Holding:
    """The gradient of ``entry``'s round from ``holder``, checked against the contents of its shards. Raises NetworkError,
    soon when the holder is gone, however slow the link to it may be."""
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
    """What ``Holding.piece`` gave, into ``gradient``. Raises ProtocolError when it does not fit."""
    into = gradient[offset : offset + PIECE]
    codec = travels_as(entry, ctx.plan.gradients)
    into.copy_(decode(Encoded(codec.value, tuple(into.shape), [piece]), copy=False))


async def verified(ctx: Context, entry: RoundEntry, gradient: Tensor) -> Holding:
    """Raises ProtocolError for another gradient than ``entry``'s."""
    if await ctx.compute.offload(contents, gradient, len(entry.members), ctx.plan.chunk) != tuple(
        s.content for s in entry.shards
    ):
        raise ProtocolError("the gradient's content is not what its holders attest")
    return Holding(entry, gradient)


async def _while_there(ctx: Context, holder: PeerId, entry: RoundEntry, work: asyncio.Future[Any]) -> None:
    """Wait for ``work``, and ask ``holder``, who is to do it, now and then whether it is there. Raises PeerUnreachable if not."""
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
