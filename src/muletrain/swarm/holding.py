"""The mean gradient of a round, kept by those that hold all of it, for those that miss it (DESIGN "How a step goes", 6)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from muletrain.errors import ProtocolError
from muletrain.swarm.averaging import contents
from muletrain.swarm.messages import AskGradient

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context
    from muletrain.swarm.messages import RoundEntry

PIECE = 512 * 1024
"""Bytes in one answer; calls carry at most 1 MiB."""
AHEAD = 4
"""Pieces asked for at once."""
CALL_S = 60.0
"""For a piece: a bound for a dead holder, not for a slow link."""


@dataclass(frozen=True)
class Holding:
    """A whole mean gradient, flat fp32 [P], and what its holders say of it. It is never changed."""

    entry: RoundEntry
    gradient: Tensor

    def piece(self, offset: int) -> bytes:
        return bytes(self.gradient.numpy().data.cast("B")[offset : offset + PIECE])


async def fetch_gradient(ctx: Context, holder: PeerId, entry: RoundEntry) -> Holding:
    """The gradient of ``entry``'s round from ``holder``, checked against the contents of its shards. Raises NetworkError."""
    gradient = torch.empty(ctx.compute.n_params)
    memory = gradient.numpy().data.cast("B")

    async def piece(offset: int) -> None:
        ask = AskGradient(round=entry.round, offset=offset).pack()
        answer = await ctx.net.call(holder, AskGradient.KIND, ask, timeout_s=CALL_S)
        if len(answer) != min(PIECE, len(memory) - offset):
            raise ProtocolError("the gradient's pieces do not add up to its size")
        memory[offset : offset + len(answer)] = answer

    for begin in range(0, len(memory), AHEAD * PIECE):
        await asyncio.gather(*map(piece, range(begin, min(len(memory), begin + AHEAD * PIECE), PIECE)))
    if await ctx.compute.offload(contents, gradient, len(entry.members)) != tuple(s.content for s in entry.shards):
        raise ProtocolError("the gradient's content is not what its holders attest")
    return Holding(entry, gradient)
