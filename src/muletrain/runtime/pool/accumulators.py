"""Accumulators of a server's clients come to the server, as copies (``core.blocks``) that the server takes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from blake3 import blake3

from muletrain.compute.checks import is_finite
from muletrain.compute.estimate import TRANSFERS
from muletrain.config.schema import Codec
from muletrain.errors import DeadlineExceeded, MuletrainError, PeerUnreachable, ProtocolError
from muletrain.optim.sketch import SIZE, sketch
from muletrain.policy.deadline import Usual
from muletrain.policy.outliers import alike
from muletrain.policy.pool import OWN
from muletrain.policy.shards import chunk_ranges
from muletrain.runtime.core.blocks import Downloader, Manifest, PartialDownload
from muletrain.runtime.core.times import AGAIN_S, GONE_S, pause_s
from muletrain.runtime.pool.messages import MAX_PARTS, Wanted
from muletrain.wire.codec import Encoded, decode, encode, encoded_size

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.network.base import PeerId
    from muletrain.policy.pool import Pool
    from muletrain.runtime.core.blocks import Blocks
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.runtime.pool.calls import Calls
    from muletrain.runtime.pool.checks import Checks
    from muletrain.runtime.pool.clients import Clients
    from muletrain.runtime.pool.parts import Parts

CHECKED_S = 0.05
"""Seconds between two checks whether a client's results are still being verified."""


class Lost(MuletrainError):
    """The accumulator does not come, or is wrong. ``here``: the server should compute the lost parts again itself."""

    def __init__(self, message: str, *, here: bool = False) -> None:
        super().__init__(message)
        self.here = here


def _pieces(numbers: int, plan: Plan) -> list[tuple[slice, slice]]:
    """Returns, of each piece of an accumulator that is encoded at once, its elements and its bytes."""
    found, begin = [], 0
    for a, b in chunk_ranges(0, numbers, plan.chunk):
        size = encoded_size(plan.gradients, (b - a,))
        found.append((slice(a, b), slice(begin, begin + size)))
        begin += size
    return found


def packed_size(numbers: int, plan: Plan) -> int:
    """Returns the bytes of an accumulator of so many ``numbers`` in the codec of gradients."""
    pieces = _pieces(numbers, plan)
    return pieces[-1][1].stop if pieces else 0


async def packed_gradient(gradient: Tensor, compute: Compute, plan: Plan) -> Tensor:
    """Returns ``gradient``, flat fp32, in the codec of gradients: uint8."""
    size = packed_size(len(gradient), plan)
    whole = (await compute.room(-(-size // 4))).view(torch.uint8)[:size]
    for numbers, place in _pieces(len(gradient), plan):
        await compute.offload(_pack, gradient[numbers], plan.gradients, whole[place])
    return whole


async def unpacked_gradient(whole: Tensor, compute: Compute, plan: Plan) -> Tensor:
    """Returns the accumulator, flat fp32, whose ``packed_gradient`` this is; perhaps in the same memory."""
    if plan.gradients is Codec.FP32:
        return whole.view(torch.float32)
    values = await compute.room(compute.n_trained)
    for numbers, place in _pieces(compute.n_trained, plan):
        await compute.offload(_unpack, whole[place], plan.gradients, values[numbers])
    return values


def _pack(numbers: Tensor, codec: Codec, out: Tensor) -> None:
    out.copy_(torch.frombuffer(bytearray(b"".join(encode(numbers, codec).buffers)), dtype=torch.uint8))


def _unpack(piece: Tensor, codec: Codec, out: Tensor) -> None:
    out.copy_(decode(Encoded(codec.value, (len(out),), [piece.numpy().data]), copy=False))


@dataclass(eq=False)
class Transfer:
    """One accumulator on its way. ``begun``: the client makes the copy; ``blocks``: number of blocks that came; ``gone``:
    the client is lost; ``news``: set when any of these may have changed, or the copy is whole."""

    wanted: Wanted
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    blocks: int = 0
    gone: bool = False


@dataclass
class _Coming(PartialDownload):
    """The blocks of ``transfer``."""

    transfer: Transfer

    async def keep(self, block: int, content: memoryview) -> None:
        await super().keep(block, content)
        self.transfer.blocks += 1
        self.transfer.news.set()


class Accumulators:
    """Fetches accumulators of the clients of one server."""

    def __init__(
        self,
        clients: Clients,
        inner: Compute,
        pool: Pool,
        parts: Parts,
        calls: Calls,
        checks: Checks,
        blocks: Blocks,
        tasks: Tasks,
    ) -> None:
        """``inner`` takes the accumulators."""
        self._clients, self._inner, self._pool = clients, inner, pool
        self._parts, self._calls, self._checks = parts, calls, checks
        self._blocks, self._clock, self._tasks = blocks, blocks.clock, tasks
        self._hedged: set[PeerId] = set()
        """Clients whose accumulators take unusually long, so the server computes the contained parts again."""
        self._turns, self._adding = asyncio.Semaphore(TRANSFERS), asyncio.Lock()
        self._transfers: dict[PeerId, Transfer] = {}
        self._numbers = 0
        self._usual = Usual(unmeasured_s=1.0, floor_s=1.0, times=4.0)
        """Seconds between two blocks of a transfer."""
        self.news = asyncio.Event()
        """Set when ``gather`` may have something to do."""
        self._generation = 0
        """Number of times that accumulators began anew."""
        self._generations: dict[int, int] = {}
        """That number when each step's accumulators began."""

    def generation(self, step: int) -> int:
        """Returns the generation of accumulators that clients fill for ``step``; later generations, of any step, have
        larger numbers."""
        return self._generations.setdefault(step, self._generation)

    def begin_anew(self, step: int) -> None:
        """Accumulated gradients of ``step`` do not count."""
        self._generations.pop(step, None)
        self._generation += 1

    async def gather(self, step: int) -> None:
        """Return once all gradients of ``step`` are here. A client that computes a part again, or whose results are
        being checked, is asked afterwards. The call always ends: missing parts are computed again, by the server itself
        if no client does; the server ends if it fails twice at one."""
        self._hedged.clear()
        coming: dict[PeerId, asyncio.Task[None]] = {}
        try:
            while not self._parts.complete(step):
                self.news.clear()
                coming = {client: task for client, task in coming.items() if not task.done()}
                waits = self._checks.concerned(step) | self._unsettled(step)
                for client in sorted(self._parts.holders(step)):
                    if client not in coming and client not in waits and not self._pool.busy(client, step):
                        coming[client] = self._tasks.spawn(self._take_over(client, step), "accumulator")
                await self.news.wait()
        finally:
            for task in coming.values():
                task.cancel()

    def _unsettled(self, step: int) -> set[PeerId]:
        """Returns the clients with gradients of microbatches that may still be given up."""
        holders = (self._parts.holder_at(place) for call in self._calls.of_step(step) for place in call.places)
        return {client for client in holders if client is not None}

    async def _take_over(self, client: PeerId, step: int) -> None:
        """Add a client's accumulator to ours, or have its parts computed again."""
        try:
            async with self._turns:
                await self._add(client, step)
        except Lost as e:
            self._clients.desk.lose(client, str(e), again_at=OWN if e.here else None)
        finally:
            self.news.set()

    async def _add(self, client: PeerId, step: int) -> None:
        """Take, check and add the accumulator of ``client``, if there is any. Raises Lost."""
        if not (givings := self._parts.holders(step).get(client, set())):
            return
        self._numbers += 1
        generation = self.generation(step)
        ask = Wanted(generation=generation, step=step, transfer=self._numbers, givings=tuple(sorted(givings)))
        self._transfers[client] = transfer = Transfer(ask)
        taking = self._tasks.spawn(self._taken(client, transfer), "accumulator")
        try:
            begin, together = self._clock.now(), len(self._transfers)
            self._clients.want(client, ask, transfer.begun)
            await self._arrives(client, step, transfer, taking)
            self._clients.each_s = (self._clock.now() - begin) / max(together, len(self._transfers))
            while client in self._checks.concerned(step) and not transfer.gone:
                await self._clock.sleep(CHECKED_S)  # the client brought back another part meanwhile
            if transfer.gone:
                return  # the client may have enlisted again by now
            if isinstance(copy := taking.result(), str):
                raise Lost(f"its accumulator is wrong: {copy}")
            numbers = {*copy["givings"].tolist()}
            if not givings <= numbers:
                raise Lost("its accumulator lacks parts that it should contain")
            async with self._adding:  # the numbers of one accumulator at a time are in memory
                await self._add_copy(client, step, transfer, numbers, copy["gradient"])
        finally:
            taking.cancel()
            if self._transfers.get(client) is transfer:
                del self._transfers[client]
                self._clients.want(client, None)

    async def _add_copy(
        self, client: PeerId, step: int, transfer: Transfer, numbers: set[int], gradient: Tensor
    ) -> None:
        """Check and add a gradient from ``packed_gradient``, the sum of the givings ``numbers``. Raises Lost."""
        values = await unpacked_gradient(gradient, self._inner, self._clients.desk.plan)
        if not await self._inner.offload(is_finite, values):
            raise Lost("its accumulator is not finite", here=True)
        verify, found = self._clients.desk.plan.verify > 0, np.zeros(SIZE)
        if verify:
            found = await self._inner.offload(sketch, values, self._clients.digest(step))
        if transfer.gone:
            return
        kept = self._parts.holders(step).get(client, set())
        if self.generation(step) != transfer.wanted.generation or not numbers <= kept:
            self._clients.desk.lose(client, "parts in its accumulator were taken back while it came", lapse=False)
        elif verify and not alike(found, self._parts.claimed(client, numbers)):
            self._clients.expel(client, "its accumulator is not the sum of the gradients that it announced")
        else:
            self._arrived(client, step, values, numbers)

    def _arrived(self, client: PeerId, step: int, values: Tensor, numbers: set[int]) -> None:
        """The gradients ``numbers`` are here: their sum is ``values``, flat fp32 [G]."""
        self._inner.add(step, values)
        self._pool.drop_parts(self._parts.again(client, step))
        self._parts.arrived(client, numbers)
        self._hedged.discard(client)
        self._clients.standings[client].kept()
        self._clients.desk.withdraw()

    def _hedge(self, client: PeerId, step: int) -> None:
        """An accumulator takes unusually long: the server itself computes the contained parts again. If the server is
        first, the accumulator is lost. (Another client's accumulator might take as long, and so on for ever.)"""
        if client not in self._hedged:
            self._hedged.add(client)
            for part in self._parts.again(client, step):
                self._pool.put_part(part, self._clock.now(), OWN, only=OWN)
            self._clients.desk.doubt(client)

    async def _taken(self, client: PeerId, transfer: Transfer) -> dict[str, Tensor] | str:
        """Returns the copy of an accumulator, once the client has made the copy, or what is wrong with the copy. Ends
        when cancelled, after ``GONE_S`` without a block."""
        try:
            return await self._whole(client, transfer)
        except ProtocolError as e:  # a task that fails would end the server
            return str(e)

    async def _whole(self, client: PeerId, transfer: Transfer) -> dict[str, Tensor]:
        """Raises ProtocolError for a copy that no accumulator has."""
        await transfer.begun.wait()
        downloader, tries = Downloader(self._blocks, self._inner.offload), 0
        while not (manifests := await downloader.manifests(transfer.wanted.copy_name, [client])):
            await self._clock.sleep(pause_s(tries, AGAIN_S))
            tries += 1
        coming = await self._coming(manifests[0][0], transfer)
        while coming.missing:
            try:
                await downloader.fetch(coming, [client])
            except PeerUnreachable as e:
                if coming.wrong:
                    raise ProtocolError(str(e)) from None
                await self._clock.sleep(pause_s(tries, AGAIN_S))
                tries += 1
        return coming.state()

    async def _coming(self, packed: bytes, transfer: Transfer) -> _Coming:
        """Returns the empty download of the copy with this manifest. Raises ProtocolError for the manifest of anything
        but an accumulator."""
        manifest, size = Manifest.unpack(packed), packed_size(self._inner.n_trained, self._clients.desk.plan)
        manifest.check(size + 8 * MAX_PARTS)
        (_, _, givings), *_ = manifest.tensors or (("", "", ()),)
        listed = ("givings", "int64", givings), ("gradient", "uint8", (size,))
        if len(givings) != 1 or manifest.tensors != listed:
            raise ProtocolError("a manifest of other tensors than an accumulator")
        data = (await self._inner.room(-(-manifest.size // 4))).numpy().data.cast("B")[: manifest.size]
        return _Coming(blake3(packed).digest(), manifest, data, set(range(manifest.blocks)), transfer)

    async def _arrives(self, client: PeerId, step: int, transfer: Transfer, taking: asyncio.Task[Any]) -> None:
        """Wait until the copy is whole, or the client is lost. Raises Lost. Ends within ``GONE_S`` without a block."""
        taking.add_done_callback(lambda _: transfer.news.set())
        last, blocks = self._clock.now(), 0
        while not (taking.done() or transfer.gone):
            transfer.news.clear()
            if (wait_s := last + GONE_S - self._clock.now()) <= 0:
                raise Lost("its accumulator does not come")
            try:
                await self._clock.deadline(transfer.news.wait(), min(wait_s, self._usual.seconds()), "an accumulator")
            except DeadlineExceeded:
                self._hedge(client, step)
            if transfer.blocks > blocks:
                now = self._clock.now()
                self._usual.measured((now - last) / (transfer.blocks - blocks))
                last, blocks = now, transfer.blocks

    def lose(self, client: PeerId) -> None:
        """``client`` is gone."""
        self._hedged.discard(client)
        self.news.set()
        if (transfer := self._transfers.pop(client, None)) is not None:
            transfer.gone = True
            transfer.news.set()
