"""Accumulators of a server's clients come to the server, in chunks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from muletrain.compute.checks import is_finite
from muletrain.compute.estimate import TRANSFERS
from muletrain.errors import DeadlineExceeded, Malformed, MuletrainError, ProtocolError
from muletrain.optim.sketch import SIZE, sketch
from muletrain.policy.deadline import Usual
from muletrain.policy.outliers import alike
from muletrain.policy.pool import OWN
from muletrain.runtime.core.times import GONE_S
from muletrain.runtime.pool.checks import Court
from muletrain.runtime.pool.messages import Chunk, Wanted
from muletrain.wire.codec import Encoded, decode

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.network.base import PeerId
    from muletrain.policy.pool import Pool
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.runtime.pool.calls import Calls
    from muletrain.runtime.pool.checks import Checks
    from muletrain.runtime.pool.parts import Parts

CHECKED_S = 0.05
"""Seconds between two checks whether a client's results are still being verified."""


class Lost(MuletrainError):
    """The accumulator does not come, or is wrong. ``here``: the server should compute the lost parts again itself."""

    def __init__(self, message: str, *, here: bool = False) -> None:
        super().__init__(message)
        self.here = here


class Receiver(Court, Protocol):
    """The server that clients hand over to (``desk.PartsDesk``)."""

    plan: Plan

    def doubt(self, client: PeerId) -> None:
        """``client`` takes unusually long, or gives no sign of life."""
        ...

    def lose(self, worker: PeerId, why: str, *, again_at: PeerId | None = None, lapse: bool = True) -> None:
        """``worker`` is gone. ``again_at``: the worker that computes the lost parts again; ``lapse``: it is the worker's
        fault."""
        ...

    def wake(self, client: PeerId) -> None:
        """``client`` is to hear which accumulator it should hand over."""
        ...

    def kept(self, client: PeerId) -> None:
        """The accumulator of ``client`` came whole."""
        ...

    def withdraw(self) -> None:
        """Have clients hear which of their parts are no longer needed."""
        ...

    def seed(self, step: int) -> bytes:
        """Returns the seed of the sketches of ``step``."""
        ...


@dataclass
class Transfer:
    """One accumulator on its way. ``begun``: chunks that came; ``left``: chunks that are not stored yet."""

    wanted: Wanted
    values: Tensor
    left: set[int]
    begun: set[int] = field(default_factory=set)
    contents: set[int] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str = ""


class Accumulators:
    """Fetches accumulators of the clients of one server."""

    def __init__(
        self,
        receiver: Receiver,
        inner: Compute,
        pool: Pool,
        parts: Parts,
        calls: Calls,
        checks: Checks,
        clock: Clock,
        tasks: Tasks,
    ) -> None:
        """``inner`` takes the accumulators."""
        self._receiver, self._inner, self._pool = receiver, inner, pool
        self._parts, self._calls, self._checks = parts, calls, checks
        self._clock, self._tasks = clock, tasks
        self._hedged: set[PeerId] = set()
        """Clients whose accumulators take unusually long, so the server computes the contained parts again."""
        self._turns = asyncio.Semaphore(TRANSFERS)
        self._transfers: dict[PeerId, Transfer] = {}
        self._numbers = 0
        self._usual = Usual(unmeasured_s=1.0, floor_s=1.0, times=4.0)
        """Seconds between two chunks of a transfer."""
        self.each_s = 0.0
        """Mean seconds for each accumulator while transfers run; 0: none has come."""
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
        if no client does."""
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
            self._receiver.lose(client, str(e), again_at=OWN if e.here else None)
        finally:
            self.news.set()

    async def _add(self, client: PeerId, step: int) -> None:
        """Fetch, check and add the accumulator of ``client``, if there is any. Raises Lost."""
        generation = self.generation(step)
        if (transfer := await self.fetch(client, generation, step)) is None:
            return
        verify, found = self._receiver.plan.verify > 0, np.zeros(SIZE)
        if verify:
            found = await self._inner.offload(sketch, transfer.values, self._receiver.seed(step))
        while client in self._checks.concerned(step) and not transfer.problem:
            await self._clock.sleep(CHECKED_S)  # the client brought back another part meanwhile
        numbers = transfer.contents or set()
        if transfer.problem:
            return  # the client was lost, and may have enlisted again by now
        if self.generation(step) != generation or not numbers <= self._parts.holders(step).get(client, set()):
            self._receiver.lose(client, "parts in its accumulator were taken back while it came", lapse=False)
        elif verify and not alike(found, self._parts.claimed(client, numbers)):
            self._receiver.expel(client, "its accumulator is not the sum of the gradients that it announced")
        else:
            self._arrived(client, step, transfer.values, numbers)

    def _arrived(self, client: PeerId, step: int, values: Tensor, numbers: set[int]) -> None:
        """The gradients ``numbers`` are here: their sum is ``values``, flat fp32 [G]."""
        self._inner.add(step, values)
        self._pool.drop_parts(self._parts.again(client, step))
        self._parts.arrived(client, numbers)
        self._hedged.discard(client)
        self._receiver.kept(client)
        self._receiver.withdraw()

    def _hedge(self, client: PeerId, step: int) -> None:
        """An accumulator takes unusually long: the server itself computes the contained parts again. If the server is
        first, the accumulator is lost. (Another client's accumulator might take as long, and so on for ever.)"""
        if client not in self._hedged:
            self._hedged.add(client)
            for part in self._parts.again(client, step):
                self._pool.put_part(part, self._clock.now(), OWN, only=OWN)
            self._receiver.doubt(client)

    async def fetch(self, client: PeerId, generation: int, step: int) -> Transfer | None:
        """Returns the accumulator of ``client``: the gradients that the client should have, and gradients that have
        come to count meanwhile. None: nothing is left to hand over, or the client is lost meanwhile. Raises Lost."""
        values = await self._inner.room(self._inner.n_trained)
        givings = self._parts.holders(step).get(client, set())
        if not givings:
            return None
        self._numbers += 1
        chunks = range(max(1, -(-self._inner.n_trained // self._receiver.plan.chunk)))
        ask = Wanted(generation=generation, step=step, transfer=self._numbers, givings=tuple(sorted(givings)))
        self._transfers[client] = transfer = Transfer(ask, values, set(chunks))
        try:
            begin, together = self._clock.now(), len(self._transfers)
            self._receiver.wake(client)
            if not await self._arrives(client, step, transfer):
                return None
            self.each_s = (self._clock.now() - begin) / max(together, len(self._transfers))
        finally:
            if self._transfers.get(client) is transfer:
                del self._transfers[client]
        if not givings <= (transfer.contents or set()):
            raise Lost("its accumulator lacks parts that it should contain")
        if not await self._inner.offload(is_finite, transfer.values):
            raise Lost("its accumulator is not finite", here=True)
        return transfer

    def wanted(self, client: PeerId, handed: int) -> tuple[Wanted, ...]:
        """Returns the accumulators that ``client`` should hand over, after the hand-over number ``handed``."""
        transfer = self._transfers.get(client)
        return () if transfer is None or transfer.wanted.transfer <= handed else (transfer.wanted,)

    async def _arrives(self, client: PeerId, step: int, transfer: Transfer) -> bool:
        """Wait for the whole transfer. Returns False if the client is lost meanwhile. Raises Lost."""
        last, left = self._clock.now(), len(transfer.left)
        while transfer.left or transfer.contents is None:
            if transfer.problem:
                return False
            transfer.news.clear()
            begin = self._clock.now()
            if len(transfer.left) < left:
                last, left = begin, len(transfer.left)
            if (wait_s := last + GONE_S - begin) <= 0:
                raise Lost("its accumulator does not come")
            try:
                await self._clock.deadline(transfer.news.wait(), min(wait_s, self._usual.seconds()), "an accumulator")
            except DeadlineExceeded:
                if not transfer.problem:
                    self._hedge(client, step)
                continue
            self._usual.measured(self._clock.now() - begin)
        return True

    def expects(self, client: PeerId, message: Chunk, tensors: list[Encoded]) -> None:
        """Check a chunk before reading. Raises ProtocolError."""
        transfer, plan, (chunk,) = self._transfers.get(client), self._receiver.plan, tensors
        if transfer is None or message.transfer != transfer.wanted.transfer:
            raise ProtocolError(f"{message.KIND}: nothing was asked for, or not this")
        size = min(plan.chunk, self._inner.n_trained - message.chunk * plan.chunk)
        if (chunk.codec, chunk.shape) != (plan.gradients, (size,)) or message.chunk in transfer.begun:
            raise Malformed(f"{message.KIND}: no chunk {message.chunk} of {chunk.codec} {chunk.shape} is expected")

    async def on_chunk(self, client: PeerId, message: Chunk, tensors: list[Encoded]) -> None:
        """Take a chunk. Raises ProtocolError."""
        self.expects(client, message, tensors)
        transfer, begin = self._transfers[client], message.chunk * self._receiver.plan.chunk
        transfer.begun.add(message.chunk)
        if message.chunk == 0:
            transfer.contents = {*message.givings}
        out = transfer.values[begin : begin + self._receiver.plan.chunk]
        await self._inner.offload(_store, tensors[0], out)
        transfer.left.discard(message.chunk)
        transfer.news.set()

    def lose(self, client: PeerId) -> None:
        """``client`` is gone."""
        self._hedged.discard(client)
        self.news.set()
        if (transfer := self._transfers.pop(client, None)) is not None:
            transfer.problem = "it is gone"
            transfer.news.set()


def _store(chunk: Encoded, out: Tensor) -> None:
    out.copy_(decode(chunk, copy=False))
