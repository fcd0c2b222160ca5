"""A stage's weights go to clients in chunks; each client takes chunks from all servers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from muletrain.clock import loop_time_s
from muletrain.config.schema import Codec
from muletrain.errors import Malformed, NetworkError
from muletrain.optim.flat import flat_digest
from muletrain.policy.shards import chunk_ranges
from muletrain.runtime.pool.messages import MAX_CHUNKS, GetWeights, WeightsChunk
from muletrain.wire.codec import Encoded, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks

STALLED_S = 30.0
"""Seconds without another chunk, after which missing chunks are requested from other servers, too."""
TRIES = 4
"""Times that the servers are asked."""
SEND_S = 60.0
"""Seconds for a server to take the question."""


TAKERS = 32
"""Peers that get weights at once; further peers wait in line."""


class WeightsUpload:
    """Gives the weights of one server on request."""

    def __init__(self, compute: Compute, chunk: int, net: Network, tasks: Tasks) -> None:
        """``chunk``: elements of a chunk."""
        self._compute, self._chunk, self._net, self._tasks = compute, chunk, net, tasks
        self._digest: bytes | None = None
        """Digest of the current weights; None: about to change."""
        self._takers: dict[PeerId, deque[int]] = {}
        """The chunks that each peer is still to get."""
        self._turns = asyncio.Semaphore(TAKERS)

    def close(self) -> None:
        """The weights are about to change."""
        self._digest = None
        self._takers.clear()

    def begin(self, digest: bytes) -> None:
        """The weights have this digest now."""
        self._digest = digest

    def on_asked(self, sender: PeerId, ask: GetWeights) -> None:
        """Send the chunks, unless ``sender`` asks for other weights: the current weights are announced anyway."""
        if self._digest is None or ask.weights != self._digest:
            return
        chunks = -(-self._compute.n_params // self._chunk)
        asked = deque(dict.fromkeys(c for c in ask.chunks if c < chunks))
        if (taker := self._takers.get(sender)) is not None:
            taker.clear()
            taker.extend(asked)
            return
        self._takers[sender] = asked
        self._tasks.spawn(self._give(sender, asked, ask.weights), "weights")

    async def _give(self, peer: PeerId, chunks: deque[int], digest: bytes) -> None:
        try:
            async with self._turns:
                while chunks and self._takers.get(peer) is chunks:
                    chunk, size = chunks.popleft(), self._chunk
                    part = await self._compute.copied_weights(chunk * size, (chunk + 1) * size)
                    if self._takers.get(peer) is not chunks:  # the weights may have changed
                        return
                    tensor = await self._compute.offload(encode, part, Codec.FP32)
                    message = WeightsChunk(weights=digest, chunk=chunk)
                    await self._net.send(peer, message.frame([tensor]), channel=message.CHANNEL, timeout_s=SEND_S)
        except NetworkError:  # a live peer asks again
            return
        finally:
            if self._takers.get(peer) is chunks:
                del self._takers[peer]


class _Coming:
    """Weights on their way. ``begun``: chunks that came; ``left``: chunks that are not stored yet."""

    def __init__(self, digest: bytes, n_params: int, chunk: int, values: asyncio.Task[Tensor]) -> None:
        self.digest, self.values = digest, values
        self.ranges = chunk_ranges(0, n_params, chunk)
        self.left, self.begun = set(range(len(self.ranges))), set[int]()
        self.since_s = loop_time_s()


class WeightsDownload:
    """Takes weights for one client. ``news``: to be set when other weights may be wanted."""

    def __init__(self, net: Network, compute: Compute, plan: Plan, tasks: Tasks) -> None:
        self._net, self._compute, self._plan, self._tasks = net, compute, plan, tasks
        self._coming: _Coming | None = None
        self._missed = False
        """A requested chunk may not come."""
        self.news = asyncio.Event()
        self.took_s = 0.0
        """Seconds that the last weights took or, of weights that did not come whole, would have taken; 0: unmeasured."""

    def ask_again(self) -> None:
        """A message may have been lost."""
        self._missed = True
        self.news.set()

    def begin(self, digest: bytes, servers: tuple[PeerId, ...]) -> None:
        """Ask ``servers`` for weights that are to be fetched soon."""
        numbers = self._compute.n_params
        values = self._tasks.spawn(self._compute.room(numbers), "room for weights")
        self._coming = _Coming(digest, numbers, self._plan.chunk, values)
        self._ask(self._coming, servers)

    async def fetch(
        self, digest: bytes, known: Callable[[], tuple[PeerId, ...]], wanted: Callable[[], bool]
    ) -> Tensor | None:
        """Returns the weights with this ``digest``, flat fp32 [P]; None: the weights did not come, or are not
        ``wanted`` any more. ``known``: the servers of the stage."""
        if self._coming is None or self._coming.digest != digest:
            self.begin(digest, known())
        coming = self._coming
        assert coming is not None  # set by ``begin``
        try:
            for turn in range(TRIES):
                if turn:
                    servers = known()
                    self._ask(coming, servers[turn % len(servers) :] + servers[: turn % len(servers)])
                while coming.left and wanted() and not self._missed:
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
            if coming.left:
                return None
            values = await coming.values
            whole = await self._compute.offload(flat_digest, values) == digest
            return values if whole and wanted() else None
        finally:
            self._coming = None
            since_s, came = loop_time_s() - coming.since_s, len(coming.ranges) - len(coming.left)
            self.took_s = since_s * len(coming.ranges) / came if came else max(self.took_s, since_s)

    def _ask(self, coming: _Coming, servers: tuple[PeerId, ...]) -> None:
        """Ask each server for an equal part of the missing chunks."""
        self._missed = False
        missing = sorted(coming.left - coming.begun)[:MAX_CHUNKS]
        for k, server in enumerate(servers):
            if chunks := tuple(missing[k :: len(servers)]):
                ask = GetWeights(weights=coming.digest, chunks=chunks)
                self._tasks.spawn(self._send(server, ask), ask.KIND)

    async def _send(self, server: PeerId, ask: GetWeights) -> None:
        try:
            await self._net.send(server, ask.frame(), channel=ask.CHANNEL, timeout_s=SEND_S)
        except NetworkError:  # other servers are asked for the missing chunks
            return

    def expects(self, message: WeightsChunk, tensor: Encoded) -> None:
        """Check a chunk before reading; the chunk may be late. Raises ProtocolError."""
        coming, most = self._coming, self._plan.chunk
        size = tensor.shape[0] if len(tensor.shape) == 1 else most + 1
        if tensor.codec != Codec.FP32 or size > most:
            raise Malformed(f"{tensor.codec} {tensor.shape} is no chunk of weights")
        if coming is not None and message.weights == coming.digest:
            ranges = coming.ranges
            if message.chunk >= len(ranges) or size != ranges[message.chunk][1] - ranges[message.chunk][0]:
                raise Malformed(f"{message.chunk} is no chunk of weights, or not one of {size}")

    async def on_chunk(self, message: WeightsChunk, tensor: Encoded) -> None:
        """Take a wanted chunk."""
        coming = self._coming
        if coming is None or message.weights != coming.digest or message.chunk in coming.begun:
            return
        coming.begun.add(message.chunk)
        a, b = coming.ranges[message.chunk]
        await self._compute.offload(_store, tensor, (await asyncio.shield(coming.values))[a:b])
        coming.left.discard(message.chunk)
        self.news.set()


def _store(tensor: Encoded, out: Tensor) -> None:
    out.copy_(decode(tensor, copy=False))
