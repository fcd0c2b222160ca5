"""All-reduce of one stage's gradient among its replicas: reduce-scatter and all-gather in streaming chunks.

Every member derives the same ``Round`` from the same seals, so there is no matchmaking. The result is scratch memory:
weights stay untouched until the step's record is whole. All members, the shard's owner included, use a shard *as it was
sent*, so replicas stay identical under fp16 and 8-bit averaging, too. A shard's content is the hash of its decoded
values, so any holder can prove and serve the gradient under every codec.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.config.schema import Codec
from muletrain.errors import Malformed, NetworkError, PeerUnreachable, ProtocolError
from muletrain.optim.flat import flat_digest
from muletrain.optim.norms import square_norm
from muletrain.policy.shards import chunk_ranges, shard_ranges
from muletrain.runtime.averaging.messages import Reduced, Shard
from muletrain.runtime.averaging.rounds import Attendance, Round, RoundFailed
from muletrain.runtime.core.times import LAG_S
from muletrain.runtime.members.row import ShardFacts
from muletrain.wire.codec import decode, encode, encoded_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from torch import Tensor

    from muletrain.network.base import Channel, PeerId
    from muletrain.policy.deadline import Usual
    from muletrain.runtime.averaging.rounds import Holders
    from muletrain.runtime.members.context import Context
    from muletrain.wire.codec import Encoded

NORM_TOLERANCE = 1e-3
"""Relative difference allowed between an owner's norm and ours: devices sum in different orders."""
LANES = 4
"""Chunks encoded for sending at once."""


_Key = tuple[bytes, str, str, int]
"""(round, kind, sender, chunk number)"""
_Chunk = tuple["Shard | Reduced", "Encoded"]
ATTEMPTS_WAIT = 2
"""Rounds for which one sender's chunks may wait: the present one and the next."""
ATTEMPTS_SENT = 64
"""Rounds of one step for which a sender may send chunks."""
KEPT_BYTES = 1 << 10
"""Bytes that a chunk costs beside its values: a liar's chunk may have a single value."""


@dataclass(frozen=True)
class Limits:
    """Bounds for one sender in one step: waiting bytes, and sent chunks."""

    waiting: int
    sent: int

    @classmethod
    def of(cls, n_trained: int, chunk: int) -> Limits:
        """Returns the bounds for two members, each of which sends half of its accumulator and half of the mean. With
        more members, each sends less."""
        chunks = n_trained // chunk + 4
        return cls(ATTEMPTS_WAIT * (4 * n_trained + chunks * KEPT_BYTES), ATTEMPTS_SENT * chunks)


@dataclass
class _Waiting:
    """One sender's chunks of a round."""

    nbytes: int = 0
    chunks: dict[_Key, _Chunk] = field(default_factory=dict)


@dataclass
class _Inbox:
    """Owns arrived chunks, also of rounds that are not known yet. Each sender has a separate bound, at which the chunks of
    the sender's oldest round make room for those of a later one: that round failed."""

    arrived: defaultdict[PeerId, dict[bytes, _Waiting]] = field(default_factory=lambda: defaultdict(dict))
    """By sender and round, oldest first."""
    waiting: dict[_Key, asyncio.Future[_Chunk]] = field(default_factory=dict)
    seen: set[_Key] = field(default_factory=set)
    sent: Counter[PeerId] = field(default_factory=Counter)
    """Arrived chunks, by sender."""

    def check(self, key: _Key, nbytes: int, limits: Limits) -> None:
        """Check a chunk of ``nbytes`` before reading. Raises ProtocolError."""
        sender = key[2]
        if key in self.seen:
            raise Malformed(f"averaging: chunk {key[3]} twice")
        if self.sent[sender] >= limits.sent:
            raise Malformed(f"averaging: more than {limits.sent} chunks of one sender in one step")
        before = self.arrived[sender].get(key[0], _Waiting())
        if key not in self.waiting and before.nbytes + nbytes + KEPT_BYTES > limits.waiting:
            raise ProtocolError(f"averaging: more than {limits.waiting} bytes of one sender waiting")

    def put(self, key: _Key, chunk: _Chunk, limits: Limits) -> None:
        """Take in a chunk. Raises ProtocolError."""
        self.check(key, chunk[1].nbytes, limits)
        self.seen.add(key)
        self.sent[key[2]] += 1
        waiter = self.waiting.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(chunk)
            return
        rounds = self.arrived[key[2]]
        waits = rounds.setdefault(key[0], _Waiting())
        waits.nbytes += chunk[1].nbytes + KEPT_BYTES
        waits.chunks[key] = chunk
        while len(rounds) > ATTEMPTS_SENT or sum(w.nbytes for w in rounds.values()) > limits.waiting:
            del rounds[next(iter(rounds))]

    def owing(self) -> dict[PeerId, int]:
        """See ``rounds.Traffic``."""
        found: dict[PeerId, int] = {}
        for (_, kind, sender, _), waiter in self.waiting.items():
            if not waiter.done():
                found[sender] = max(found.get(sender, 0), 2 if kind == Shard.KIND else 1)
        return found

    def get(self, key: _Key) -> asyncio.Future[_Chunk]:
        """Returns a future that is done once the chunk has arrived."""
        future: asyncio.Future[_Chunk] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # the waiter may have given up
        waits = self.arrived[key[2]].get(key[0], _Waiting())
        if key in waits.chunks:
            chunk = waits.chunks.pop(key)
            waits.nbytes -= chunk[1].nbytes + KEPT_BYTES
            future.set_result(chunk)
        else:
            self.waiting[key] = future
        return future


class Averager:
    """Reduces the rounds of one step, one at a time, and sends this peer's shard to the other members."""

    def __init__(self, ctx: Context, holders: Holders, usual: Usual) -> None:
        """``usual``: usual duration of the run's rounds."""
        self._ctx, self._holders, self._usual = ctx, holders, usual
        self._tries = 0
        """Rounds of this step so far. Each waits twice as long for late members, because the previous round sent the
        whole gradient."""
        self._inbox = _Inbox()
        self._limits = Limits.of(ctx.compute.n_trained, ctx.plan.chunk)
        self._broken: set[PeerId] = set()
        self._missed: set[PeerId] = set()
        """Members whose stream ended before an awaited chunk, that took no chunk, or whose chunk is wrong."""
        self.gone: set[PeerId] = set()
        """Members of this attempt that were marked down before the arrival of all their chunks."""
        self._attendance: Attendance | None = None
        self._sending: Counter[PeerId] = Counter()
        """Chunks being sent, by member."""
        self.shards: defaultdict[bytes, dict[PeerId, ShardFacts]] = defaultdict(dict)
        """The known reduced shards, by round and owner."""

    def expects(self, sender: PeerId, message: Shard | Reduced, tensors: list[Encoded]) -> None:
        """Check a chunk before reading. Raises ProtocolError for a sender of another stage, and for more chunks than
        rounds can need."""
        plan, (chunk,) = self._ctx.plan, tensors
        if self._ctx.roster.member(sender).stage != self._ctx.roster.own.stage:
            raise ProtocolError(f"averaging: {message.KIND} from a peer of another stage")
        if chunk.codec != plan.gradients or len(chunk.shape) != 1 or not 0 < chunk.shape[0] <= plan.chunk:
            raise Malformed(f"averaging: {chunk.codec} {chunk.shape} is no chunk of a gradient")
        self._inbox.check(_key(sender, message), encoded_size(chunk.codec, chunk.shape), self._limits)

    def on_chunk(self, sender: PeerId, message: Shard | Reduced, tensor: Encoded) -> None:
        """Take in a chunk. Raises ProtocolError as ``expects`` does."""
        self.expects(sender, message, [tensor])
        self._inbox.put(_key(sender, message), (message, tensor), self._limits)
        if self._attendance is not None:
            self._attendance.came(sender)

    def begin(self) -> None:
        """Begin an attempt, of which no chunks have been sent."""
        self._broken.clear()
        self._missed.clear()
        self.gone.clear()
        self._attendance = None

    def owing(self) -> dict[PeerId, int]:
        """See ``rounds.Traffic``."""
        return self._inbox.owing()

    def taking(self) -> set[PeerId]:
        """See ``rounds.Traffic``."""
        return set(self._sending)

    def silent(self) -> dict[PeerId, int]:
        """Live members with long overdue chunks of this attempt, see ``owing``, or with chunks lost in a broken
        stream."""
        overdue = {} if self._attendance is None else self._attendance.silent
        return dict.fromkeys(self._missed, 1) | overdue

    def absent(self) -> tuple[PeerId, ...]:
        """The member of this attempt that is at another step, if any."""
        return () if self._attendance is None else self._attendance.absent

    def broken(self, member: PeerId, channel: Channel) -> None:
        """A stream with ``member`` ended: chunks on the way are lost, unknown to ``member``, which may live. Only one
        channel carries chunks."""
        if channel is not Shard.CHANNEL:
            return
        self._broken.add(member)
        for (_, _, sender, _), waiter in self._inbox.waiting.items():
            if sender == member and not waiter.done():
                waiter.set_exception(_broke(self._ctx.roster.name(member)))

    def close(self) -> None:
        """End the step: cancel waits left over from failed attempts."""
        for waiter in self._inbox.waiting.values():
            waiter.cancel()

    async def reduce(self, round_: Round, gradient: Tensor) -> tuple[Tensor, tuple[ShardFacts, ...]]:
        """The stage's mean gradient, flat fp32 [G], and the facts of each member's shard for the record.

        ``gradient``: this peer's accumulator, flat fp32 [G], a sum. A peer alone computes the mean in place. Raises
        RoundFailed.
        """
        result = gradient if self._ctx.plan.alone else await self._ctx.compute.room(round_.n_trained)
        me = self._ctx.net.peer_id
        self._attendance = Attendance(self._ctx, round_, self, self._holders, self._usual.seconds(self._tries))
        self._tries += 1
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._attendance.watch())
                chunks = self._to_scatter(round_)
                for _ in range(LANES if me in round_.contributors else 0):
                    group.create_task(self._scatter(round_, gradient, chunks))
                tasks = [
                    group.create_task(
                        self._own(round_, gradient, result) if m == me else self._collect(round_, m, result)
                    )
                    for m in round_.members
                ]
                await asyncio.gather(*tasks)
                watching.cancel()
        except BaseExceptionGroup as errors:  # before Python 3.11.4, except* wraps exceptions raised inside
            if errors.split((NetworkError, RoundFailed))[1] is not None:
                raise
            raise RoundFailed("; ".join(_reasons(errors))) from None
        return result, tuple(t.result() for t in tasks)

    def _to_scatter(self, round_: Round) -> Iterator[tuple[PeerId, int, tuple[int, int]]]:
        """Chunks of the other members' shards, in turn, so that all members can begin."""
        others = round_.others(self._ctx.net.peer_id)
        for turn in itertools.zip_longest(*(round_.chunks(m) for m in others)):
            for member, chunk in zip(others, turn, strict=True):
                if chunk is not None:
                    yield member, *chunk

    async def _scatter(
        self, round_: Round, gradient: Tensor, chunks: Iterator[tuple[PeerId, int, tuple[int, int]]]
    ) -> None:
        """Send ``chunks`` of our accumulator to the owners."""
        for member, number, (a, b) in chunks:
            chunk = await self._ctx.compute.offload(encode, gradient[a:b], self._ctx.plan.gradients)
            await self._send(member, Shard(round=round_.id, step=round_.step, chunk=number), chunk)

    async def _own(self, round_: Round, gradient: Tensor, result: Tensor) -> ShardFacts:
        """Reduce our shard, and send the mean to all members."""
        me = self._ctx.net.peer_id
        others = round_.others(me)
        facts: list[ShardFacts] = []
        chunks = round_.chunks(me)
        if not chunks:
            self.shards[round_.id][me] = _of_shard(facts)
        for number, (a, b) in chunks:
            parts: list[Tensor | Encoded] = []
            for member in round_.contributors:  # sorted: every run sums in the same order
                parts.append(
                    gradient[a:b] if member == me else (await self._fitting(round_, Shard, member, number, b - a))[1]
                )
            sent, chunk = await self._ctx.compute.offload(
                _reduce_chunk, parts, round_.microbatches, self._ctx.plan.gradients, result[a:b], len(others) > 0
            )
            facts.append(chunk)
            if len(facts) == len(chunks):  # before any other member can attest to the shard
                self.shards[round_.id][me] = _of_shard(facts)
            if sent is not None:
                message = Reduced(
                    round=round_.id, step=round_.step, chunk=number, square_norm=chunk.square_norm, finite=chunk.finite
                )
                await asyncio.gather(*(self._send(m, message, sent) for m in others))
            self._ctx.reached("averaging", round_.step)
        return self.shards[round_.id][me]

    async def _collect(self, round_: Round, owner: PeerId, result: Tensor) -> ShardFacts:
        """Receive the shard reduced by ``owner``."""
        facts = []
        for number, (a, b) in round_.chunks(owner):
            message, chunk = await self._fitting(round_, Reduced, owner, number, b - a)
            assert isinstance(message, Reduced)  # implied by the key
            try:
                facts.append(await self._ctx.compute.offload(_store_chunk, message, chunk, result[a:b]))
            except ProtocolError:
                self._missed.add(owner)
                raise
        self.shards[round_.id][owner] = _of_shard(facts)
        return self.shards[round_.id][owner]

    async def _fitting(
        self, round_: Round, kind: type[Shard | Reduced], sender: PeerId, number: int, size: int
    ) -> _Chunk:
        """Wait for a chunk of ``sender`` with ``size`` values. Raises as ``_chunk``, and ProtocolError. Ends after
        ``averaging/averager._chunk``."""
        message, chunk = await self._chunk(round_, kind, sender, number)
        if chunk.shape != (size,):
            self._missed.add(sender)
            raise ProtocolError(f"averaging: a chunk of {chunk.shape} elements instead of {size}")
        return message, chunk

    async def _chunk(self, round_: Round, kind: type[Shard | Reduced], sender: PeerId, number: int) -> _Chunk:
        """Wait for a chunk of ``sender``. Raises PeerUnreachable when ``sender`` is marked down, or the stream ended.
        Ends within the limits of ``averaging/rounds.watch``, which fails the round."""
        key = (round_.id, kind.KIND, sender, number)
        arrival = self._inbox.get(key)
        if sender in self._broken and not arrival.done():
            arrival.set_exception(_broke(self._ctx.roster.name(sender)))
        try:
            with self._ctx.detector.awaiting(sender, arrival):
                return await arrival
        except PeerUnreachable:
            await self._ctx.clock.sleep(LAG_S)
            late = self._inbox.get(key)
            if not late.done():
                late.cancel()  # else ``sender`` would owe us a chunk of this round in later rounds, too
                self._missed |= self._broken & {sender}
                self.gone |= {sender} - self._broken
                raise
            return late.result()

    async def _send(self, member: PeerId, message: Shard | Reduced, chunk: Encoded) -> None:
        self._sending[member] += 1
        try:
            await self._ctx.send(member, message, [chunk])
        except NetworkError:
            self._missed.add(member)
            raise
        finally:
            self._sending[member] -= 1
            if not self._sending[member]:
                del self._sending[member]


def _broke(name: str) -> PeerUnreachable:
    return PeerUnreachable(f"the stream from {name} ended before all chunks arrived", "averaging")


def _reasons(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [reason for e in error.exceptions for reason in _reasons(e)]
    return [str(error)]


def _key(sender: PeerId, message: Shard | Reduced) -> _Key:
    return message.round, message.KIND, sender, message.chunk


def _reduce_chunk(
    parts: list[Tensor | Encoded], microbatches: int, codec: Any, out: Tensor, shared: bool
) -> tuple[Encoded | None, ShardFacts]:
    """Write the mean of one chunk to ``out`` [size]; if ``shared``, as decoded by the other members."""
    tensors = [part if isinstance(part, torch.Tensor) else decode(part, copy=False) for part in parts]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = torch.add(total, tensor, out=out)
    torch.div(total, microbatches, out=out)
    sent = encode(out, codec) if shared else None
    if sent is not None and codec is not Codec.FP32:
        out.copy_(decode(sent, copy=False))
    return sent, _of_chunk(out)


def _store_chunk(message: Reduced, chunk: Encoded, out: Tensor) -> ShardFacts:
    """Write a reduced chunk to ``out``. All members need the same bits, so the owner's norm counts if our norm is
    near."""
    out.copy_(decode(chunk, copy=False))
    ours = _of_chunk(out)
    apart = abs(ours.square_norm - message.square_norm)
    if ours.finite != message.finite or apart > NORM_TOLERANCE * ours.square_norm:
        raise ProtocolError(f"averaging: chunk {message.chunk} does not have the norm that its sender states")
    return ours.model_copy(update={"square_norm": message.square_norm})


def _of_chunk(values: Tensor) -> ShardFacts:
    """Facts of one chunk. All non-finite values have the same facts, so that replicas agree to skip the step."""
    norm = square_norm(values)
    if not math.isfinite(norm):
        return ShardFacts(content=blake3(b"not finite").digest(), square_norm=0.0, finite=False)
    return ShardFacts(content=flat_digest(values), square_norm=norm, finite=True)


def _of_shard(chunks: list[ShardFacts]) -> ShardFacts:
    finite = all(c.finite for c in chunks)
    return ShardFacts(
        content=blake3(b"".join(c.content for c in chunks)).digest(),
        square_norm=math.fsum(c.square_norm for c in chunks) if finite else 0.0,
        finite=finite,
    )


def contents(gradient: Tensor, members: int, chunk: int) -> tuple[bytes, ...]:
    """The content hashes of the ``members`` shards of a mean gradient, flat fp32 [G], averaged in chunks of ``chunk``
    elements."""
    return tuple(
        _of_shard([_of_chunk(gradient[i:j]) for i, j in chunk_ranges(a, b, chunk)]).content
        for a, b in shard_ranges(gradient.numel(), members)
    )
