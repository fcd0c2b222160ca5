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
from muletrain.wire.codec import decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Any

    from torch import Tensor

    from muletrain.network.base import Channel, PeerId
    from muletrain.policy.deadline import Usual
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


@dataclass
class _Inbox:
    """Owns arrived chunks, also of rounds that are not known yet. Each sender has a separate bound, at which the sender's
    oldest chunks make room for later ones: their round failed."""

    most_bytes: int
    """Bytes of one sender that wait, at most."""
    most_chunks: int
    """Chunks of one sender in a step, at most."""
    arrived: defaultdict[PeerId, dict[_Key, _Chunk]] = field(default_factory=lambda: defaultdict(dict))
    """By sender, oldest first."""
    nbytes: Counter[PeerId] = field(default_factory=Counter)
    """Bytes of ``arrived``, by sender."""
    waiting: dict[_Key, asyncio.Future[_Chunk]] = field(default_factory=dict)
    seen: defaultdict[PeerId, set[_Key]] = field(default_factory=lambda: defaultdict(set))
    """All chunks that came, by sender."""

    def check(self, key: _Key) -> None:
        """Check a chunk before reading. Raises ProtocolError."""
        if key in self.seen[key[2]]:
            raise Malformed(f"averaging: chunk {key[3]} twice")
        if len(self.seen[key[2]]) >= self.most_chunks:
            raise Malformed(f"averaging: more than {self.most_chunks} chunks of one sender in one step")

    def put(self, key: _Key, chunk: _Chunk) -> None:
        """Take in a chunk that was checked."""
        sender = key[2]
        self.seen[sender].add(key)
        waiter = self.waiting.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(chunk)
            return
        self.arrived[sender][key] = chunk
        self.nbytes[sender] += chunk[1].nbytes + KEPT_BYTES
        while self.nbytes[sender] > self.most_bytes:
            self._take(next(iter(self.arrived[sender])))

    def _take(self, key: _Key) -> _Chunk:
        chunk = self.arrived[key[2]].pop(key)
        self.nbytes[key[2]] -= chunk[1].nbytes + KEPT_BYTES
        return chunk

    def get(self, key: _Key) -> asyncio.Future[_Chunk]:
        """Returns a future that is done once the chunk has arrived."""
        future: asyncio.Future[_Chunk] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # the waiter may have given up
        if key in self.arrived[key[2]]:
            future.set_result(self._take(key))
        else:
            self.waiting[key] = future
        return future


class Averager:
    """Reduces the rounds of one step, one at a time, and sends this peer's shard to the other members."""

    def __init__(self, ctx: Context, holders: Callable[[], Collection[object]], usual: Usual) -> None:
        """``holders`` returns the replicas that hold a round of this step, whose gradient we can take. ``usual``:
        usual duration of the run's rounds."""
        self._ctx, self._holders, self._usual = ctx, holders, usual
        self._tries = 0
        """Rounds of this step so far. Each waits twice as long for late members, because the previous round sent the
        whole gradient."""
        n_trained, chunks = ctx.compute.n_trained, ctx.compute.n_trained // ctx.plan.chunk + 4
        # of two members, each sends half of its accumulator and half of the mean; of more members, each sends less
        self._inbox = _Inbox(ATTEMPTS_WAIT * (4 * n_trained + chunks * KEPT_BYTES), ATTEMPTS_SENT * chunks)
        self._broken: set[PeerId] = set()
        self._missed: set[PeerId] = set()
        """Members whose stream ended before an awaited chunk, that took no chunk, or whose chunk is wrong."""
        self._gone: set[PeerId] = set()
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
        self._inbox.check(_key(sender, message))

    def on_chunk(self, sender: PeerId, message: Shard | Reduced, tensor: Encoded) -> None:
        """Take in a chunk. Raises ProtocolError as ``expects`` does."""
        self.expects(sender, message, [tensor])
        self._inbox.put(_key(sender, message), (message, tensor))
        if self._attendance is not None:
            self._attendance.came(sender)

    def begin(self) -> None:
        """Begin an attempt, of which no chunks have been sent."""
        self._broken.clear()
        self._missed.clear()
        self._gone.clear()
        self._attendance = None

    def owing(self) -> dict[PeerId, int]:
        """Members whose chunks we wait for. 2: a chunk of the member's accumulator, so the member causes the delay. 1:
        a reduced chunk, which depends on other members' chunks."""
        found: dict[PeerId, int] = {}
        for (_, kind, sender, _), waiter in self._inbox.waiting.items():
            if not waiter.done():
                found[sender] = max(found.get(sender, 0), 2 if kind == Shard.KIND else 1)
        return found

    def taking(self) -> set[PeerId]:
        """Members to which chunks are being sent."""
        return set(+self._sending)

    def silent(self) -> dict[PeerId, int]:
        """Live members with long overdue chunks of this attempt, see ``owing``, or with chunks lost in a broken
        stream."""
        overdue = {} if self._attendance is None else self._attendance.silent
        return dict.fromkeys(self._missed, 1) | overdue

    def gone(self) -> set[PeerId]:
        """Members of this attempt that were marked down before the arrival of all their chunks, or are at another step."""
        return self._gone | (set() if self._attendance is None else self._attendance.absent)

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
        self._attendance = Attendance(
            self._ctx, round_, self.owing, self.taking, self._holders, self._usual.seconds(self._tries)
        )
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
                    gradient[a:b] if member == me else (await self._chunk(round_, Shard, member, number, b - a))[1]
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
            message, chunk = await self._chunk(round_, Reduced, owner, number, b - a)
            assert isinstance(message, Reduced)  # implied by the key
            try:
                facts.append(await self._ctx.compute.offload(_store_chunk, message, chunk, result[a:b]))
            except ProtocolError:
                self._missed.add(owner)
                raise
        self.shards[round_.id][owner] = _of_shard(facts)
        return self.shards[round_.id][owner]

    async def _chunk(
        self, round_: Round, kind: type[Shard | Reduced], sender: PeerId, number: int, size: int
    ) -> _Chunk:
        """Wait for a chunk of ``sender`` with ``size`` values. Raises PeerUnreachable when ``sender`` is marked down, or the
        stream ended, and ProtocolError. Ends within the limits of ``averaging/rounds.watch``, which fails the round."""
        key = (round_.id, kind.KIND, sender, number)
        arrival = self._inbox.get(key)
        if sender in self._broken and not arrival.done():
            arrival.set_exception(_broke(self._ctx.roster.name(sender)))
        try:
            with self._ctx.detector.awaiting(sender, arrival):
                message, chunk = await arrival
        except PeerUnreachable:
            await self._ctx.clock.sleep(LAG_S)
            late = self._inbox.get(key)
            if not late.done():
                late.cancel()  # else ``sender`` would owe us a chunk of this round in later rounds, too
                self._missed |= self._broken & {sender}
                self._gone |= {sender} - self._broken
                raise
            message, chunk = late.result()
        if chunk.shape != (size,):
            self._missed.add(sender)
            raise ProtocolError(f"averaging: a chunk of {chunk.shape} elements instead of {size}")
        return message, chunk

    async def _send(self, member: PeerId, message: Shard | Reduced, chunk: Encoded) -> None:
        self._sending[member] += 1
        try:
            await self._ctx.send(member, message, [chunk])
        except NetworkError:
            self._missed.add(member)
            raise
        finally:
            self._sending[member] -= 1


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
