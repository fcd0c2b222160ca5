"""A client's accumulator comes to its server, in chunks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from muletrain.errors import DeadlineExceeded, Malformed, MuletrainError, NetworkError, ProtocolError
from muletrain.runtime.pool.messages import Accumulated, Contents, HandOver
from muletrain.wire.codec import Encoded, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.pool.kept import Place

AT_ONCE = 4
"""Clients that hand over at once: more of them would fill the server's download."""
SILENT_S, STALLED_S = 10.0, 30.0
"""Seconds without a word, and without another chunk, after which an accumulator is lost with its client."""
SEND_S = 60.0


class Lost(MuletrainError):
    """The accumulator does not come."""


class Stage(Protocol):
    """What is handed over, and to whom (``server.PooledCompute``)."""

    n_params: int
    plan: Plan

    async def offload(self, fn: Callable[..., None], *args: object) -> None:
        """See ``Compute``."""
        ...


@dataclass
class _Coming:
    """One accumulator on its way. ``left``: chunks that have not come yet."""

    number: int
    step: int
    values: Tensor
    left: set[int]
    parts: set[Place] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""


class HandedOver:
    """The accumulators that clients hand over to one server."""

    def __init__(self, stage: Stage, net: Network, clock: Clock) -> None:
        self._stage, self._net, self._clock = stage, net, clock
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._coming: dict[PeerId, _Coming] = {}
        self._numbers = 0

    async def ask(self, client: PeerId, generation: int, step: int, places: set[Place]) -> tuple[Tensor, set[Place]]:
        """Returns the accumulator of ``client``, flat fp32 [P], and the parts in it, of those at ``places``. Raises
        Lost."""
        async with self._turns:
            self._numbers += 1
            chunks = -(-self._stage.n_params // self._stage.plan.chunk)
            coming = _Coming(self._numbers, step, torch.empty(self._stage.n_params), set(range(chunks)))
            self._coming[client] = coming
            ask = HandOver(generation=generation, step=step, number=coming.number, parts=tuple(sorted(places)))
            try:
                await self._net.send(client, ask.frame(), channel=ask.CHANNEL, timeout_s=SEND_S)
                await self._arrival(client, coming)
            except NetworkError as e:
                raise Lost(str(e)) from e
            finally:
                del self._coming[client]
        assert coming.parts is not None  # arrived
        return coming.values, coming.parts

    async def _arrival(self, client: PeerId, coming: _Coming) -> None:
        """Wait for all of it. Raises Lost."""
        last, left = self._clock.now(), len(coming.left)
        while coming.left or coming.parts is None:
            coming.news.clear()
            now = self._clock.now()
            if coming.problem:
                raise Lost(coming.problem)
            if len(coming.left) < left:
                last, left = now, len(coming.left)
            heard = max(last, self._net.heard_s(client))
            wait_s = min(last + STALLED_S, heard + SILENT_S) - now
            if wait_s <= 0:
                raise Lost("its accumulator does not come")
            try:
                await self._clock.deadline(coming.news.wait(), wait_s, "an accumulator")
            except DeadlineExceeded:
                continue

    def expects(self, client: PeerId, message: Accumulated, tensors: list[Encoded]) -> None:
        """Check a chunk before it is read. Raises ProtocolError."""
        coming, plan, (chunk,) = self._coming.get(client), self._stage.plan, tensors
        if coming is None or (message.number, message.step) != (coming.number, coming.step):
            raise ProtocolError(f"{message.KIND}: nothing was asked for, or not this")
        size = min(plan.chunk, self._stage.n_params - message.chunk * plan.chunk)
        if message.chunk not in coming.left or (chunk.codec, chunk.shape) != (plan.gradients, (size,)):
            raise Malformed(f"{message.KIND}: no chunk {message.chunk} of {chunk.codec} {chunk.shape} is expected")

    def on_contents(self, client: PeerId, message: Contents) -> None:
        """Take the list of parts that a client's accumulator has."""
        coming = self._coming.get(client)
        if coming is not None and message.number == coming.number:
            coming.parts = {*message.parts}
            coming.news.set()

    async def on_chunk(self, client: PeerId, message: Accumulated, tensors: list[Encoded]) -> None:
        """Take a chunk. Raises ProtocolError."""
        self.expects(client, message, tensors)
        coming, begin = self._coming[client], message.chunk * self._stage.plan.chunk
        coming.left.discard(message.chunk)
        await self._stage.offload(_store, tensors[0], coming.values[begin : begin + self._stage.plan.chunk])
        coming.news.set()

    def lose(self, client: PeerId) -> None:
        """``client`` is gone."""
        if (coming := self._coming.get(client)) is not None:
            coming.problem = "it is gone"
            coming.news.set()


def _store(chunk: Encoded, out: Tensor) -> None:
    out.copy_(decode(chunk, copy=False))
