"""A stage's weights go to clients in chunks; each client takes chunks from all servers."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING

from muletrain.clock import loop_time_s
from muletrain.config.schema import Codec
from muletrain.errors import Malformed, NetworkError
from muletrain.network.base import Channel
from muletrain.optim.flat import flat_digest
from muletrain.policy.shards import chunk_ranges
from muletrain.runtime.pool.messages import MAX_CHUNKS, SEND_S, Chunk, GetWeights
from muletrain.wire.codec import Encoded, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks

STALLED_S = 30.0
"""Seconds without another chunk, after which missing chunks are requested from other servers, too."""
TRIES = 4
"""Times that the servers are asked."""
TAKERS = 32
"""Peers that get weights at once; further peers wait in line."""
TIMES = 4
"""Number of times that one taker may have the same weights from one server: links break."""


class WeightsUpload:
    """Gives the weights of one server on request. Chunks yield to all traffic of the step (``Channel.BULK``): averaging
    would else wait for clients behind slow links, and parts for the next step's weights under delayed updates."""

    def __init__(self, compute: Compute, chunk: int, net: Network, tasks: Tasks) -> None:
        """``chunk``: elements of a chunk."""
        self._compute, self._chunk, self._net, self._tasks = compute, chunk, net, tasks
        self._digest: bytes | None = None
        """Digest of the current weights; None: about to change."""
        self._takers: dict[PeerId, deque[int]] = {}
        """The chunks that each peer is still to get."""
        self._drawn: Counter[PeerId] = Counter()
        """Chunks of the current weights that each peer asked for."""
        self._turns = asyncio.Semaphore(TAKERS)

    @property
    def open(self) -> bool:
        """Are the weights whole, and may clients have them?"""
        return self._digest is not None

    def close(self) -> None:
        """The weights are about to change."""
        self._digest = None
        self._takers.clear()

    def begin(self, digest: bytes) -> None:
        """The weights have this digest now."""
        self._digest = digest
        self._drawn.clear()

    def on_asked(self, sender: PeerId, ask: GetWeights) -> None:
        """Send the chunks, unless ``sender`` asks for other weights, or too often: a client that always downloads would
        take the link from the others."""
        if self._digest is None or ask.weights != self._digest:
            return
        chunks = -(-self._compute.n_params // self._chunk)
        asked = deque(dict.fromkeys(c for c in ask.chunks if c < chunks))
        if self._drawn[sender] + len(asked) > TIMES * chunks:
            return
        self._drawn[sender] += len(asked)
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
                    message = Chunk(weights=digest, chunk=chunk)
                    await self._net.send(peer, message.frame([tensor]), channel=Channel.BULK, timeout_s=SEND_S)
        except NetworkError:  # a live peer asks again
            return
        finally:
            if self._takers.get(peer) is chunks:
                del self._takers[peer]


class _Coming:
    """Weights on their way. ``by``: senders of the chunks that came; ``left``: chunks that are not stored yet;
    ``wrong``: hash and sender of each chunk of an earlier try whose whole was wrong."""

    def __init__(self, digest: bytes, n_params: int, chunk: int, values: asyncio.Task[Tensor]) -> None:
        self.digest, self.values = digest, values
        self.ranges = chunk_ranges(0, n_params, chunk)
        self.wrong: list[tuple[bytes, PeerId]] = []
        self.since_s = loop_time_s()
        self.left, self.by = set[int](), dict[int, str]()
        self.restart()

    def restart(self) -> None:
        """All chunks are missing."""
        self.left = set(range(len(self.ranges)))
        self.by.clear()

    def hashes(self, values: Tensor) -> list[bytes]:
        """Returns the digest of each chunk of ``values``, flat fp32 [P]."""
        return [flat_digest(values[a:b]) for a, b in self.ranges]


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
        self.wrong: set[PeerId] = set()
        """Servers that gave wrong weights, and are asked for no more."""

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
        ``wanted`` any more. ``known``: the servers of the stage. If a chunk is wrong, one server alone is asked for all:
        then it is known who gave the wrong one."""
        if self._coming is None or self._coming.digest != digest:
            self.begin(digest, known())
        coming = self._coming
        assert coming is not None  # set by ``begin``
        try:
            for turn in range(TRIES):
                if turn:
                    servers = [s for s in known() if s not in self.wrong] or [*known()]
                    first = turn % len(servers)
                    self._ask(coming, (*servers[first:], *servers[:first])[: 1 if coming.wrong else None])
                while coming.left and wanted() and not self._missed:
                    left = len(coming.left)
                    self.news.clear()
                    try:
                        async with asyncio.timeout(STALLED_S):
                            await self.news.wait()
                    except TimeoutError:
                        if len(coming.left) == left:
                            break
                if not wanted():
                    return None
                if not coming.left and await self._whole(coming):
                    return await coming.values if wanted() else None
            return None
        finally:
            self._coming = None
            since_s, came = loop_time_s() - coming.since_s, len(coming.ranges) - len(coming.left)
            self.took_s = since_s * len(coming.ranges) / came if came else max(self.took_s, since_s)

    async def _whole(self, coming: _Coming) -> bool:
        """Are the weights right? If so, whose earlier chunks differ is known; else all chunks are fetched again."""
        values, offload = await coming.values, self._compute.offload
        right = await offload(flat_digest, values) == coming.digest
        if not right or coming.wrong:
            hashes = await offload(coming.hashes, values)
            senders = {*coming.by.values()}
            if right:
                self.wrong |= {who for (other, who), own in zip(coming.wrong, hashes, strict=True) if other != own}
            elif len(senders) == 1:
                self.wrong |= senders
            coming.wrong = [(own, coming.by[chunk]) for chunk, own in enumerate(hashes)]
        if not right:
            coming.restart()
        return right

    def _ask(self, coming: _Coming, servers: Sequence[PeerId]) -> None:
        """Ask each server for an equal part of the missing chunks."""
        self._missed = False
        servers = [s for s in servers if s not in self.wrong] or servers
        missing = sorted(coming.left - coming.by.keys())[:MAX_CHUNKS]
        for k, server in enumerate(servers):
            if chunks := tuple(missing[k :: len(servers)]):
                ask = GetWeights(weights=coming.digest, chunks=chunks)
                self._tasks.spawn(self._send(server, ask), ask.KIND)

    async def _send(self, server: PeerId, ask: GetWeights) -> None:
        try:
            await self._net.send(server, ask.frame(), channel=ask.CHANNEL, timeout_s=SEND_S)
        except NetworkError:  # other servers are asked for the missing chunks
            return

    def expects(self, message: Chunk, tensor: Encoded) -> None:
        """Check a chunk before reading; the chunk may be late. Raises ProtocolError."""
        coming, most = self._coming, self._plan.chunk
        size = tensor.shape[0] if len(tensor.shape) == 1 else most + 1
        if tensor.codec != Codec.FP32 or size > most:
            raise Malformed(f"{tensor.codec} {tensor.shape} is no chunk of weights")
        if coming is not None and message.weights == coming.digest:
            ranges = coming.ranges
            if message.chunk >= len(ranges) or size != ranges[message.chunk][1] - ranges[message.chunk][0]:
                raise Malformed(f"{message.chunk} is no chunk of weights, or not one of {size}")

    async def on_chunk(self, sender: PeerId, message: Chunk, tensor: Encoded) -> None:
        """Take a wanted chunk."""
        coming = self._coming
        if coming is None or message.weights != coming.digest or message.chunk in coming.by:
            return
        coming.by[message.chunk] = sender
        a, b = coming.ranges[message.chunk]
        await self._compute.offload(_store, tensor, (await asyncio.shield(coming.values))[a:b])
        coming.left.discard(message.chunk)
        self.news.set()


def _store(tensor: Encoded, out: Tensor) -> None:
    out.copy_(decode(tensor, copy=False))
