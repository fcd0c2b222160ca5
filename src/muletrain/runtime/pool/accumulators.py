"""Accumulators of a server's clients come to the server, as copies (``core.blocks``) that the server takes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

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
from muletrain.runtime.core.blocks import Downloader, Manifest, PartialDownload, block_size
from muletrain.runtime.core.times import AGAIN_S, GONE_S, PAUSE_S, pause_s
from muletrain.runtime.pool.clients import Transfer
from muletrain.runtime.pool.messages import MAX_PARTS, Wanted
from muletrain.wire.codec import Encoded, decode, encode, encoded_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.compute.base import Compute
    from muletrain.network.base import PeerId
    from muletrain.runtime.core.blocks import Blocks
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.runtime.pool.checks import Checks
    from muletrain.runtime.pool.clients import Clients

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


class Accumulators:
    """Fetches accumulators of the clients of one server."""

    def __init__(
        self,
        clients: Clients,
        checks: Checks,
        unsettled: Callable[[int], set[PeerId]],
        blocks: Blocks,
        tasks: Tasks,
    ) -> None:
        """``unsettled``: returns the clients with gradients of a step's microbatches that may still be given up."""
        self._clients, self._checks, self._unsettled = clients, checks, unsettled
        self._inner, self._plan, self._parts = clients.inner, clients.plan, clients.parts
        self._blocks, self._clock, self._tasks = blocks, blocks.clock, tasks
        self._turns, self._adding = asyncio.Semaphore(TRANSFERS), asyncio.Lock()
        self._numbers = 0
        self._usual = Usual(unmeasured_s=1.0, floor_s=1.0, times=4.0)
        """Seconds between two blocks of a transfer."""
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
        coming: dict[PeerId, asyncio.Task[None]] = {}
        try:
            while not self._parts.complete(step):
                self._clients.news.clear()
                coming = {client: task for client, task in coming.items() if not task.done()}
                waits = self._checks.concerned(step) | self._unsettled(step)
                for client in sorted(self._parts.holders(step)):
                    if client not in coming and client not in waits and not self._clients.pool.busy(client, step):
                        coming[client] = self._tasks.spawn(self._take_over(client, step), "accumulator")
                await self._clients.news.wait()
        finally:
            for task in coming.values():
                task.cancel()

    async def _take_over(self, client: PeerId, step: int) -> None:
        """Add a client's accumulator to ours, or have its parts computed again."""
        try:
            async with self._turns:
                await self._add(client, step)
        except Lost as e:
            self._clients.lose(client, str(e), again_at=OWN if e.here else None)
        finally:
            self._clients.news.set()

    async def _add(self, client: PeerId, step: int) -> None:
        """Take, check and add the accumulator of ``client``, if there is any. Raises Lost."""
        if not (givings := self._parts.holders(step).get(client, set())):
            return
        self._numbers += 1
        generation, clients = self.generation(step), self._clients
        ask = Wanted(generation=generation, step=step, transfer=self._numbers, givings=tuple(sorted(givings)))
        downloader, begun = Downloader(self._blocks, self._inner.offload), asyncio.Event()
        taking = self._tasks.spawn(self._taken(client, ask, begun, downloader), "accumulator")
        clients.transfers[client] = transfer = Transfer(ask, begun, taking)
        clients.wake(client)
        try:
            begin, together = self._clock.now(), len(clients.transfers)
            await self._arrives(client, transfer, downloader)
            clients.each_s = (self._clock.now() - begin) / max(together, len(clients.transfers))
            while client in self._checks.concerned(step) and self._goes_on(client, transfer):
                await self._clock.sleep(CHECKED_S)  # the client brought back another part meanwhile
            if not self._goes_on(client, transfer):
                return  # the client may have enlisted again by now
            if isinstance(copy := taking.result(), str):
                raise Lost(f"its accumulator is wrong: {copy}")
            numbers = {*copy["givings"].tolist()}
            if not givings <= numbers:
                raise Lost("its accumulator lacks parts that it should contain")
            async with self._adding:  # the numbers of one accumulator at a time are in memory
                await self._add_copy(client, transfer, numbers, copy["gradient"])
        finally:
            taking.cancel()
            if self._goes_on(client, transfer):
                del clients.transfers[client]
                clients.wake(client)

    def _goes_on(self, client: PeerId, transfer: Transfer) -> bool:
        """Has ``client`` not been lost since ``transfer`` began?"""
        return self._clients.transfers.get(client) is transfer

    async def _add_copy(self, client: PeerId, transfer: Transfer, numbers: set[int], gradient: Tensor) -> None:
        """Check and add a gradient from ``packed_gradient``, the sum of the givings ``numbers``. Raises Lost."""
        step = transfer.wanted.step
        values = await unpacked_gradient(gradient, self._inner, self._plan)
        if not await self._inner.offload(is_finite, values):
            raise Lost("its accumulator is not finite", here=True)
        verify, found = self._plan.verify > 0, np.zeros(SIZE)
        if verify:
            found = await self._inner.offload(sketch, values, self._clients.digest(step))
        if not self._goes_on(client, transfer):
            return
        kept = self._parts.holders(step).get(client, set())
        if self.generation(step) != transfer.wanted.generation or not numbers <= kept:
            self._clients.lose(client, "parts in its accumulator were taken back while it came", lapse=False)
        elif verify and not alike(found, self._parts.claimed(client, numbers)):
            self._clients.expel(client, "its accumulator is not the sum of the gradients that it announced")
        else:
            self._arrived(client, step, values, numbers)

    def _arrived(self, client: PeerId, step: int, values: Tensor, numbers: set[int]) -> None:
        """The gradients ``numbers`` are here: their sum is ``values``, flat fp32 [G]."""
        self._inner.add(step, values)
        self._clients.pool.drop_parts(self._parts.again(client, step))
        self._parts.arrived(client, numbers)
        self._clients.standings[client].kept()
        self._clients.withdraw()

    async def _taken(
        self, client: PeerId, ask: Wanted, begun: asyncio.Event, downloader: Downloader
    ) -> dict[str, Tensor] | str:
        """Returns the copy of an accumulator, once the client has made the copy, or what is wrong with the copy: a task
        that fails would end the server. Ends when cancelled, after ``GONE_S`` without a block."""
        await begun.wait()
        try:
            tries = 0
            while not (manifests := await downloader.manifests(ask.copy_name, [client])):
                await self._clock.sleep(pause_s(tries, AGAIN_S))
                tries += 1
            coming = await self._coming(manifests[0][0])
            while coming.missing:
                try:
                    await downloader.fetch(coming, [client])
                except PeerUnreachable as e:
                    if coming.wrong:
                        return str(e)
                    await self._clock.sleep(pause_s(tries, AGAIN_S))
                    tries += 1
        except ProtocolError as e:
            return str(e)
        return coming.state()

    async def _coming(self, packed: bytes) -> PartialDownload:
        """Returns the empty download of the copy with this manifest. Raises ProtocolError for the manifest of anything
        but an accumulator."""
        manifest, size = Manifest.unpack(packed), packed_size(self._inner.n_trained, self._plan)
        manifest.check(size + 8 * MAX_PARTS)
        (_, _, givings), *_ = manifest.tensors or (("", "", ()),)
        listed = ("givings", "int64", givings), ("gradient", "uint8", (size,))
        if len(givings) != 1 or manifest.tensors != listed:
            raise ProtocolError("a manifest of other tensors than an accumulator")
        data = (await self._inner.room(-(-manifest.size // 4))).numpy().data.cast("B")[: manifest.size]
        return PartialDownload(blake3(packed).digest(), manifest, data, set(range(manifest.blocks)))

    async def _arrives(self, client: PeerId, transfer: Transfer, downloader: Downloader) -> None:
        """Wait until the copy is whole, or the client is lost. If the copy takes unusually long, the server itself
        computes the contained parts again. If the server is first, the accumulator is lost. (Another client's
        accumulator might take as long, and so on for ever.) Raises Lost. Ends within ``GONE_S`` without a block."""
        begin, hedged, usual_s = self._clock.now(), False, min(GONE_S, self._usual.seconds())
        while not transfer.taking.done():
            quiet_s = self._clock.now() - max(begin, downloader.came)
            if quiet_s >= GONE_S:
                raise Lost("its accumulator does not come")
            if not hedged and quiet_s >= usual_s:
                hedged = True
                for part in self._parts.again(client, transfer.wanted.step):
                    self._clients.pool.put_part(part, self._clock.now(), OWN, only=OWN)
                self._clients.doubt(client)
            wait_s = (GONE_S if hedged else usual_s) - quiet_s
            with contextlib.suppress(DeadlineExceeded):
                waiting = asyncio.wait({transfer.taking})
                await self._clock.deadline(waiting, max(PAUSE_S, wait_s), "an accumulator")
        if self._goes_on(client, transfer):
            size = packed_size(self._inner.n_trained, self._plan)
            self._usual.measured((self._clock.now() - begin) / (size // block_size(size) + 1))
