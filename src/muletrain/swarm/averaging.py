"""All-reduce of one stage's gradient among its replicas: reduce-scatter and all-gather in streaming chunks.

Groups are deterministic: every member derives the same ``Round`` from the same announced sets, so there is no matchmaking.
Everything is reduced into scratch; nothing touches weights before the step's record is whole. All members, the reducing one
included, use the shard *as it was sent*, so that replicas stay identical under fp16 and 8-bit averaging too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.config.schema import Codec
from muletrain.errors import DeadlineExceeded, MuletrainError, NetworkError, ProtocolError
from muletrain.optim.norms import square_norm
from muletrain.policy.deadline import Deadline
from muletrain.policy.shards import CHUNK, chunk_ranges, shard_ranges
from muletrain.swarm.messages import Reduced, Shard, ShardEntry
from muletrain.wire.codec import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from torch import Tensor

    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context
    from muletrain.wire.codec import Encoded

MAX_PROBES = 6
"""A member that answers probes but sends nothing for this many (doubling) deadlines is in another round: start a new one."""


class RoundFailed(MuletrainError):
    """This attempt did not complete; accumulators are untouched, so another can follow."""


@dataclass(frozen=True)
class Round:
    """One attempt at reducing a stage's gradient. ``contributors`` have something in their accumulators."""

    id: bytes
    lineage: bytes
    step: int
    stage: int
    members: tuple[PeerId, ...]
    contributors: tuple[PeerId, ...]
    microbatches: int
    n_params: int
    stop: bool
    leaves: PeerId | None = None

    def chunks(self, owner: PeerId) -> list[tuple[int, tuple[int, int]]]:
        """(chunk number, element range) of the shard that ``owner`` reduces; numbers are unique within the round."""
        shards = [chunk_ranges(a, b) for a, b in shard_ranges(self.n_params, len(self.members))]
        k = self.members.index(owner)
        first = sum(len(s) for s in shards[:k])
        return list(enumerate(shards[k], start=first))


@dataclass
class _Inbox:
    """Chunks that arrived, perhaps before we knew the round; bounded by what a stage's members may send in one step."""

    arrived: dict[tuple[bytes, str, PeerId, int], Encoded] = field(default_factory=dict)
    waiting: dict[tuple[bytes, str, PeerId, int], asyncio.Future[Encoded]] = field(default_factory=dict)
    size: int = 0

    def put(self, key: tuple[bytes, str, PeerId, int], tensor: Encoded, limit: int) -> None:
        waiter = self.waiting.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(tensor)
            return
        if key in self.arrived or self.size + tensor.nbytes > limit:
            raise ProtocolError(f"averaging: chunk {key[3]} twice, or more than {limit} bytes waiting")
        self.arrived[key] = tensor
        self.size += tensor.nbytes

    def get(self, key: tuple[bytes, str, PeerId, int]) -> asyncio.Future[Encoded]:
        future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        if key in self.arrived:
            tensor = self.arrived.pop(key)
            self.size -= tensor.nbytes
            future.set_result(tensor)
        else:
            self.waiting[key] = future
        return future


class Averager:
    """Reduces rounds, one at a time, and answers for the shard this peer owns."""

    def __init__(self, ctx: Context, publish: Callable[[ShardEntry], Coroutine[Any, Any, None]]) -> None:
        self._ctx = ctx
        self._publish = publish
        self._inbox = _Inbox()
        self._chunk_deadline = Deadline(floor_s=1.0)

    def on_chunk(self, sender: PeerId, message: Shard | Reduced, tensor: Encoded) -> None:
        """Raises ProtocolError for a sender of another stage and for more than a round can need."""
        own = self._ctx.roster.own
        if self._ctx.roster.member(sender).stage != own.stage:
            raise ProtocolError(f"averaging: {message.KIND} from a peer of another stage")
        if tensor.codec != self._ctx.plan.gradients or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= CHUNK:
            raise ProtocolError(f"averaging: {tensor.codec} {tensor.shape} is no chunk of a gradient")
        members = len(self._ctx.roster.members())
        limit = 8 * self._ctx.compute.n_params * max(2, members) + (1 << 20)
        self._inbox.put((message.round, message.KIND, sender, message.chunk), tensor, limit)

    def forget(self) -> None:
        """The step is over: drop what failed attempts left behind."""
        for waiter in self._inbox.waiting.values():
            waiter.cancel()
        self._inbox = _Inbox()

    async def reduce(self, plan: Round, gradient: Tensor) -> tuple[Tensor, tuple[bytes, ...]]:
        """The stage's mean gradient, flat fp32 [P], and the content hash of each member's shard as received.

        ``gradient``: this peer's accumulator, flat fp32 [P], a sum. Raises RoundFailed.
        """
        result = torch.empty(plan.n_params)
        me = self._ctx.net.peer_id
        try:
            async with asyncio.TaskGroup() as group:
                if me in plan.contributors:
                    group.create_task(self._scatter(plan, gradient))
                tasks = [
                    group.create_task(self._own(plan, gradient, result) if m == me else self._collect(plan, m, result))
                    for m in plan.members
                ]
        except* (NetworkError, RoundFailed) as errors:
            raise RoundFailed("; ".join(_reasons(errors))) from None
        return result, tuple(t.result() for t in tasks)

    async def _scatter(self, plan: Round, gradient: Tensor) -> None:
        """Send each other member its shard of our accumulator, a chunk of each in turn so that all can begin."""
        me = plan.members.index(self._ctx.net.peer_id)
        others = [*plan.members[me + 1 :], *plan.members[:me]]  # everyone starts with another receiver
        async with asyncio.TaskGroup() as group:
            for member in others:
                group.create_task(self._scatter_to(plan, member, gradient))

    async def _scatter_to(self, plan: Round, member: PeerId, gradient: Tensor) -> None:
        for number, (a, b) in plan.chunks(member):
            chunk = await self._ctx.compute.offload(encode, gradient[a:b], self._ctx.plan.gradients)
            await self._ctx.send(member, Shard(round=plan.id, step=plan.step, chunk=number), [chunk])

    async def _own(self, plan: Round, gradient: Tensor, result: Tensor) -> bytes:
        """Reduce our shard, return it to everyone, and publish its entry."""
        me = self._ctx.net.peer_id
        others = [m for m in plan.members if m != me]
        content, square_norm, finite = blake3(), 0.0, True
        for number, (a, b) in plan.chunks(me):
            parts: list[Tensor | Encoded] = []
            for member in plan.contributors:  # sorted: every run sums in the same order
                parts.append(gradient[a:b] if member == me else await self._chunk(plan, Shard.KIND, member, number))
            reduced = await self._ctx.compute.offload(
                _reduce_chunk, parts, b - a, plan.microbatches, self._ctx.plan.gradients, result[a:b], len(others) > 0
            )
            content.update(reduced.hash)
            square_norm += reduced.square_norm
            finite &= reduced.finite
            if reduced.sent is not None:
                message = Reduced(round=plan.id, step=plan.step, chunk=number)
                await asyncio.gather(*(self._ctx.send(m, message, [reduced.sent]) for m in others))
        entry = ShardEntry(
            lineage=plan.lineage, step=plan.step, stage=plan.stage, round=plan.id, shard=plan.members.index(me),
            shards=len(plan.members), content=content.digest(), square_norm=square_norm if finite else 0.0,
            finite=finite, stop=plan.stop, leaves=plan.leaves,
        )  # fmt: skip
        await self._publish(entry)
        return entry.content

    async def _collect(self, plan: Round, owner: PeerId, result: Tensor) -> bytes:
        """Receive the shard that ``owner`` reduced."""
        content = blake3()
        for number, (a, b) in plan.chunks(owner):
            chunk = await self._chunk(plan, Reduced.KIND, owner, number)
            content.update(await self._ctx.compute.offload(_store_chunk, chunk, result[a:b]))
        return content.digest()

    async def _chunk(self, plan: Round, kind: str, sender: PeerId, number: int) -> Encoded:
        """The next chunk from ``sender``, with a deadline from measured waits; a silent member is probed."""
        arrival = self._inbox.get((plan.id, kind, sender, number))
        with self._ctx.awaiting(sender, arrival):
            return await self._arrived(plan, arrival, sender, number)

    async def _arrived(self, plan: Round, arrival: asyncio.Future[Encoded], sender: PeerId, number: int) -> Encoded:
        begin = self._ctx.clock.now()
        for attempt in range(MAX_PROBES):
            what = f"averaging step {plan.step}: chunk {number} from {sender[-6:]}"
            try:
                chunk = await self._ctx.clock.deadline(
                    asyncio.shield(arrival), self._chunk_deadline.seconds(attempt), what
                )
            except DeadlineExceeded:
                held = await self._ctx.probe(sender, plan.lineage, plan.step, attempt + 1)
                if held is None:
                    raise
                if not held.current:
                    raise RoundFailed(f"averaging step {plan.step}: {sender[-6:]} is at step {held.step}") from None
            else:
                self._chunk_deadline.measured(self._ctx.clock.now() - begin)
                return chunk
        raise RoundFailed(f"averaging step {plan.step}: {sender[-6:]} is alive but not in this round")


def _reasons(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [reason for e in error.exceptions for reason in _reasons(e)]
    return [str(error)]


@dataclass
class _ReducedChunk:
    sent: Encoded | None
    hash: bytes
    square_norm: float
    finite: bool


def _reduce_chunk(
    parts: list[Tensor | Encoded], size: int, microbatches: int, codec: Any, out: Tensor, shared: bool
) -> _ReducedChunk:
    """Mean of one chunk into ``out`` [size]; as the others will see it when it is ``shared``."""
    tensors = [part if isinstance(part, torch.Tensor) else _decoded(part, size) for part in parts]
    if len(tensors) == 1:
        out.copy_(tensors[0])
    else:
        torch.add(tensors[0], tensors[1], out=out)
        for tensor in tensors[2:]:
            out += tensor
    out /= microbatches
    sent = encode(out, codec) if shared else None
    if sent is not None and codec is not Codec.FP32:
        out.copy_(decode(sent, copy=False))
    return _ReducedChunk(sent, _hash(sent, out), square_norm(out), bool(torch.isfinite(out.sum())))


def _decoded(chunk: Encoded, size: int) -> Tensor:
    tensor = decode(chunk, copy=False)
    if tensor.shape != (size,):
        raise ProtocolError(f"averaging: a chunk of {tuple(tensor.shape)} elements instead of {size}")
    return tensor


def _store_chunk(chunk: Encoded, out: Tensor) -> bytes:
    out.copy_(_decoded(chunk, out.numel()))
    return _hash(chunk, out)


def _hash(sent: Encoded | None, values: Tensor) -> bytes:
    """Of the bytes as sent; of the values where nothing was sent (a stage with one replica)."""
    digest = blake3()
    for buffer in sent.buffers if sent is not None else [values.numpy().data.cast("B")]:
        digest.update(buffer)
    return digest.digest()
