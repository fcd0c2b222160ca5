"""A stage's weights go to clients as a copy (``core.blocks``), which each client takes from all servers."""

from __future__ import annotations

import asyncio
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
    """Takes weights for one client. ``news``: to be set when other weights may be wanted."""

    def __init__(self, blocks: Blocks, clock: Clock, compute: Compute, tasks: Tasks) -> None:
        self._clock, self._compute, self._tasks = clock, compute, tasks
        self._downloader = Downloader(blocks, compute.offload, refused=lambda server, _: self.wrong.add(server))
        self._digest: bytes | None = None
        """Digest of the weights on their way."""
        self._taking: asyncio.Task[str] | None = None
        """Ends with the problem, if any."""
        self._partial: PartialDownload | None = None
        self._values = torch.empty(0)
        self._since_s = 0.0
        self._missed = False
        """A requested block may not come."""
        self.news = asyncio.Event()
        self.took_s = 0.0
        """Seconds that the last weights took or, of weights that did not come whole, would have taken; 0: unmeasured."""
        self.wrong: set[PeerId] = set()
        """Servers that gave wrong weights, and are asked for no more."""

    def ask_again(self) -> None:
        """A message may have been lost, or other servers have the weights."""
        self._missed = True
        self.news.set()

    def begin(self, digest: bytes, servers: Sequence[PeerId]) -> None:
        """Ask ``servers``, the first of them first, for weights that are to be fetched soon."""
        if self._taking is not None:
            self._taking.cancel()
        self._digest, self._partial, self._since_s, self._missed = digest, None, loop_time_s(), False
        self._take(digest, servers)

    def _take(self, digest: bytes, servers: Sequence[PeerId]) -> None:
        right = [server for server in servers if server not in self.wrong] or [*servers]
        self._taking = self._tasks.spawn(self._taken(digest, right), "weights")
        self._taking.add_done_callback(lambda _: self.news.set())

    async def _taken(self, digest: bytes, servers: list[PeerId]) -> str:
        """Returns the problem; empty: the weights came whole."""
        try:
            if (partial := self._partial) is None:
                manifest = await self._downloader.manifest(digest, servers, self._check)
                self._values = await self._compute.room(self._compute.n_params)
                data = self._values.numpy().data.cast("B")
                self._partial = partial = PartialDownload(digest, manifest, data, set(range(manifest.blocks)))
            await self._downloader.fetch(partial, servers)
        except ProtocolError as e:  # the first server named these weights
            self.wrong.add(servers[0])
            return str(e)
        except NetworkError as e:
            return str(e)
        return ""

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
        if self._digest != digest:
            self.begin(digest, known())
        try:
            tries = 0
            for round_ in itertools.count():
                assert self._taking is not None  # set by ``begin``
                while wanted() and not self._missed and not self._taking.done():
                    self.news.clear()
                    await self.news.wait()
                if not wanted():
                    return None
                if self._missed:
                    self._missed = False
                    self._taking.cancel()
                    await asyncio.wait({self._taking})  # it forgets the blocks that it waits for
                elif not (problem := self._taking.result()):
                    return self._values
                elif (tries := tries + (BUSY not in problem)) == TRIES:
                    return None
                else:
                    await self._clock.sleep(pause_s(round_, AGAIN_S))
                self._take(digest, known())
            return None
        finally:
            self._end()

    def _end(self) -> None:
        partial, since_s = self._partial, loop_time_s() - self._since_s
        came = 0 if partial is None else partial.manifest.blocks - len(partial.missing)
        self.took_s = since_s * partial.manifest.blocks / came if partial and came else max(self.took_s, since_s)
        if self._taking is not None:
            self._taking.cancel()
        self._digest, self._taking, self._partial = None, None, None
        self._values = torch.empty(0)
