"""A client takes a stage's weights from all its servers, in chunks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.config.schema import Codec
from muletrain.errors import Malformed, NetworkError
from muletrain.policy.shards import chunk_ranges
from muletrain.runtime.pool.messages import MAX_CHUNKS, GetWeights, WeightsChunk
from muletrain.wire.codec import Encoded, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.plan import Plan

STALLED_S = 30.0
"""Seconds without another chunk, after which what is missing is asked of other servers, too."""
TRIES = 4
"""Times that the servers are asked."""
SEND_S = 60.0
"""Seconds within which a server takes the question."""


class _Coming:
    """Weights on their way. ``begun``: chunks that came; ``left``: those that are not stored yet."""

    def __init__(self, digest: bytes, n_params: int, chunk: int) -> None:
        self.digest, self.values = digest, torch.empty(n_params)
        self.ranges = chunk_ranges(0, n_params, chunk)
        self.left, self.begun = set(range(len(self.ranges))), set[int]()


class WeightsDownload:
    """Takes weights for one client. ``news``: to be set when others may be wanted."""

    def __init__(self, net: Network, compute: Compute, plan: Plan) -> None:
        self._net, self._compute, self._plan = net, compute, plan
        self._coming: _Coming | None = None
        self.news = asyncio.Event()

    async def fetch(self, digest: bytes, servers: tuple[PeerId, ...], wanted: Callable[[], bool]) -> Tensor | None:
        """Returns the weights with this ``digest``, flat fp32 [P]; None: they did not come, or are not ``wanted`` any
        more."""
        coming = self._coming = _Coming(digest, self._compute.n_params, self._plan.chunk)
        try:
            for turn in range(TRIES if servers else 0):
                await self._ask(coming, servers[turn % len(servers) :] + servers[: turn % len(servers)])
                while coming.left and wanted():
                    left = len(coming.left)
                    self.news.clear()
                    try:
                        async with asyncio.timeout(STALLED_S):
                            await self.news.wait()
                    except TimeoutError:
                        if len(coming.left) == left:
                            break
                if not coming.left or not wanted():
                    break
            whole = not coming.left and await self._compute.offload(_digest, coming.values) == digest
            return coming.values if whole and wanted() else None
        finally:
            self._coming = None

    async def _ask(self, coming: _Coming, servers: tuple[PeerId, ...]) -> None:
        """Ask each server for an equal part of what is missing."""
        missing = sorted(coming.left - coming.begun)[:MAX_CHUNKS]
        asked = {
            s: GetWeights(weights=coming.digest, chunks=(*missing[k :: len(servers)],)) for k, s in enumerate(servers)
        }
        sent = [self._send(server, ask) for server, ask in asked.items() if ask.chunks]
        await asyncio.gather(*sent)

    async def _send(self, server: PeerId, ask: GetWeights) -> None:
        try:
            await self._net.send(server, ask.frame(), channel=ask.CHANNEL, timeout_s=SEND_S)
        except NetworkError:  # others are asked for its part
            return

    def expects(self, message: WeightsChunk, tensor: Encoded) -> None:
        """Check a chunk before it is read; it may be late. Raises ProtocolError."""
        coming, most = self._coming, self._plan.chunk
        size = tensor.shape[0] if len(tensor.shape) == 1 else most + 1
        if tensor.codec != Codec.FP32 or size > most:
            raise Malformed(f"{tensor.codec} {tensor.shape} is no chunk of weights")
        if coming is not None and message.weights == coming.digest:
            ranges = coming.ranges
            if message.chunk >= len(ranges) or size != ranges[message.chunk][1] - ranges[message.chunk][0]:
                raise Malformed(f"{message.chunk} is no chunk of weights, or not one of {size}")

    async def on_chunk(self, message: WeightsChunk, tensor: Encoded) -> None:
        """Take a chunk, if it is wanted."""
        coming = self._coming
        if coming is None or message.weights != coming.digest or message.chunk in coming.begun:
            return
        coming.begun.add(message.chunk)
        a, b = coming.ranges[message.chunk]
        await self._compute.offload(_store, tensor, coming.values[a:b])
        coming.left.discard(message.chunk)
        self.news.set()


def _store(tensor: Encoded, out: Tensor) -> None:
    out.copy_(decode(tensor, copy=False))


def _digest(values: Tensor) -> bytes:
    return blake3(values.numpy().data.cast("B")).digest()
