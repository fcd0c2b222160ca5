"""A stage's weights go to clients as a copy (``core.blocks``), which each client takes from all servers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.clock import loop_time_s
from muletrain.errors import MuletrainError, NetworkError, ProtocolError
from muletrain.network.base import Channel
from muletrain.runtime.core.blocks import BUSY, HASHED_AT_ONCE, HEADERS, Downloader, PartialDownload, StateImage
from muletrain.runtime.core.times import AGAIN_S, pause_s

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.network.base import PeerId
    from muletrain.runtime.core.blocks import Blocks, Manifest, Offload
    from muletrain.runtime.core.tasks import Tasks

SMALL, PARTS = 1 << 14, 16
"""Bytes of a small block, and number of blocks in which weights of a few MB come: each server sends a part."""
TRIES = 4
"""Times that the servers are asked."""


class WeightsCopy(StateImage):
    """The weights of one server, read block by block while they do not change. ``label``: says which weights these
    are."""

    def __init__(self, compute: Compute, label: object) -> None:
        super().__init__({"weights": torch.empty(compute.n_params, device="meta")}, Channel.BULK)
        self.block = min(self.block, max(SMALL, -(-compute.n_params // PARTS) * 4))
        self._compute, self.label = compute, label
        self.closed = False
        """The weights change, or have changed."""

    async def content(self, begin: int, end: int) -> list[memoryview]:
        """See ``StateImage``. Raises MuletrainError once the weights change."""
        part = await self._compute.copied_weights(begin // 4, end // 4)
        if self.closed:
            raise MuletrainError("these weights were replaced")
        return [part.numpy().data.cast("B")]

    async def name(self, offload: Offload) -> None:
        """See ``StateImage``. Raises MuletrainError once the weights change."""
        step = max(1, HASHED_AT_ONCE // self.block) * self.block
        digests = []
        for begin in range(0, self.size, step):
            (data,) = await self.content(begin, min(self.size, begin + step))
            digests.append(await offload(_hashes, data, self.block))
        self.named(b"".join(digests))


def _hashes(data: memoryview, block: int) -> bytes:
    return b"".join(blake3(data[k : k + block]).digest() for k in range(0, len(data), block))


class WeightsDownload:
    """Takes weights for one client. ``news``: to be set when other weights may be wanted; set when weights came."""

    def __init__(self, blocks: Blocks, clock: Clock, compute: Compute, tasks: Tasks, news: asyncio.Event) -> None:
        self._clock, self._compute, self._tasks, self._news = clock, compute, tasks, news
        self._downloader = Downloader(blocks, compute.offload, refused=lambda server, _: self.wrong.add(server))
        self._digest: bytes | None = None
        """Digest of the weights on their way."""
        self._taking: asyncio.Task[Tensor | None] | None = None
        self._partial: PartialDownload | None = None
        self._since_s = 0.0
        self.took_s = 0.0
        """Seconds that the last weights took or, of weights that did not come whole, would have taken; 0: unmeasured."""
        self.wrong: set[PeerId] = set()
        """Servers that gave wrong weights, and are asked for no more."""

    def begin(self, digest: bytes, known: Callable[[], Sequence[PeerId]]) -> asyncio.Task[Tensor | None]:
        """Ask for weights that are to be fetched soon. ``known``: see ``fetch``."""
        if self._taking is not None:
            self._taking.cancel()
        self._digest, self._partial, self._since_s = digest, None, loop_time_s()
        self._taking = self._tasks.spawn(self._taken(digest, known), "weights")
        self._taking.add_done_callback(lambda _: self._news.set())
        return self._taking

    async def _taken(self, digest: bytes, known: Callable[[], Sequence[PeerId]]) -> Tensor | None:
        """Returns the weights, flat fp32 [P]; None: the weights did not come whole."""
        tries, values = 0, None
        for round_ in itertools.count():
            servers = [server for server in known() if server not in self.wrong] or [*known()]
            problem = ""
            try:
                if values is None or self._partial is None:
                    manifest = await self._downloader.manifest(digest, servers, self._check)
                    values = await self._compute.room(self._compute.n_params)
                    data = values.numpy().data.cast("B")
                    self._partial = PartialDownload(digest, manifest, data, set(range(manifest.blocks)))
                await self._downloader.fetch(self._partial, servers)
                return values
            except ProtocolError:  # the first server named these weights
                self.wrong.add(servers[0])
            except NetworkError as e:
                problem = str(e)
            if (tries := tries + (BUSY not in problem)) == TRIES:
                break
            await self._clock.sleep(pause_s(round_, AGAIN_S))
        return None

    def _check(self, manifest: Manifest) -> None:
        """Raises ProtocolError for a manifest of anything but this stage's weights."""
        manifest.check(4 * self._compute.n_params + HEADERS)
        if manifest.tensors != (("weights", "float32", (self._compute.n_params,)),):
            raise ProtocolError("a manifest of other tensors than the stage's weights")

    async def fetch(
        self, digest: bytes, known: Callable[[], Sequence[PeerId]], wanted: Callable[[], bool]
    ) -> Tensor | None:
        """Returns the weights with this ``digest``, flat fp32 [P]; None: the weights did not come, or are not
        ``wanted`` any more. ``known``: the servers of the stage, the one to ask first in front."""
        taking = self._taking
        if taking is None or self._digest != digest:
            taking = self.begin(digest, known)
        try:
            while wanted() and not taking.done():
                self._news.clear()
                await self._news.wait()
            return taking.result() if wanted() else None
        finally:
            partial, since_s = self._partial, loop_time_s() - self._since_s
            came = 0 if partial is None else partial.manifest.blocks - len(partial.missing)
            self.took_s = since_s * partial.manifest.blocks / came if partial and came else max(self.took_s, since_s)
            taking.cancel()
            self._digest, self._taking, self._partial = None, None, None
