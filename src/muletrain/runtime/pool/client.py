"""The life of a client: it computes parts of microbatches for one server of its stage at a time."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from muletrain.compute.base import Microbatch
from muletrain.compute.slot import Turn
from muletrain.config.schema import Codec
from muletrain.errors import DeadlineExceeded, Malformed, MuletrainError, NetworkError, ProtocolError
from muletrain.policy.deadline import backoff_s
from muletrain.policy.pool import Part, Pass
from muletrain.policy.shards import chunk_ranges
from muletrain.runtime.pool.messages import (
    FROM_SERVER,
    Accumulated,
    Begun,
    Contents,
    Counted,
    Ended,
    Enlist,
    Enlisted,
    Finished,
    GetState,
    GetWeights,
    GiveBoth,
    GiveGradient,
    GiveInputs,
    Gone,
    HandOver,
    Output,
    Ready,
    StillThere,
    Unable,
    WeightsChunk,
    Withdraw,
)
from muletrain.wire.codec import IDS, Encoded, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.network.base import Frame, Network, PeerId
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks

ROOM = 2
"""Parts that a client takes at once: one to compute, one on its way."""
UNCOUNTED = 2
"""Gradients of parts that it holds beside its accumulator, at most: it computes no other until it hears of one."""
ALIVE_S = 5.0
"""Seconds between two calls by which it shows its server that it lives."""
CALL_S, SEND_S = 10.0, 60.0
CHUNK_S = 10.0
"""Seconds without another chunk of the weights, after which other servers are asked for what is missing."""
PAUSE_S, PAUSE_MAX_S = 0.2, 5.0
"""Seconds between two tries to find a server, the first time and at most; doubles."""
PATIENCE_S = 120.0
"""Seconds without a server, after which a client ends."""


class NoServer(MuletrainError):
    """No server of the stage can be reached any more."""


class _Left(MuletrainError):
    """The server is gone, or does not know us."""


class Client:
    """Works for one stage. ``compute``: the stage's, without moments."""

    def __init__(
        self,
        net: Network,
        clock: Clock,
        tasks: Tasks,
        compute: Compute,
        plan: Plan,
        config: bytes,
        name: str,
        servers: tuple[PeerId, ...],
        speed: float = 0.0,
    ) -> None:
        """``servers``: of the stage, as far as known; ``speed``: forward passes of a sequence per second by the device's
        own measure; 0: unknown."""
        self._net, self._clock, self._tasks, self._compute, self._plan = net, clock, tasks, compute, plan
        self._config, self._name, self._servers, self._speed = config, name, servers, speed
        self._home: PeerId | None = None
        self._ended = asyncio.Event()
        self._wanted: bytes | None = None
        """Digest of the server's current weights."""
        self._have: bytes | None = None
        """Digest of ours."""
        self._news = asyncio.Event()
        self._work: dict[Part, asyncio.Task[None]] = {}
        self._generation = -1
        self._accumulated: dict[int, set[tuple[int, int]]] = {}
        """Parts in the accumulator, by step."""
        self._uncounted: dict[Part, Microbatch] = {}
        self._room = asyncio.Condition()
        self._merging = asyncio.Lock()
        """Held while the accumulator is read or changed."""
        self._coming: _Weights | None = None
        self._dismissed = False
        net.receive(self._on_frame, tuple(FROM_SERVER), self)

    def stop(self) -> None:
        """Leave at once."""
        self._ended.set()
        self._news.set()

    async def run(self) -> None:
        """Work until the run ends, or ``stop``. Raises NoServer."""
        lost_at, tries = self._clock.now(), 0
        while not self._ended.is_set():
            try:
                await self._enlist()
                tries = 0
                await self._serve()
            except (_Left, NetworkError):
                self._leave()
            else:
                break
            if tries == 0:
                lost_at = self._clock.now()
            elif self._clock.now() - lost_at > PATIENCE_S:
                raise NoServer(f"no server of stage {self._compute.stage} answers for {PATIENCE_S:.0f} s")
            await self._clock.sleep(backoff_s(tries, PAUSE_S, PAUSE_MAX_S))
            tries += 1
        if self._home is not None:
            with contextlib.suppress(NetworkError):
                await self._send(Gone())
        self._leave()

    # A server ---------------------------------------------------------------------------------------------------------

    async def _enlist(self) -> None:
        """Find the server of our stage whose clients are slowest together. Raises _Left if none answers."""
        speeds = await asyncio.gather(*map(self._speed_at, self._servers))
        ask = Enlist(name=self._name, config=self._config, stage=self._compute.stage).pack()
        found = {s: speed for speed, s in zip(speeds, self._servers, strict=True) if speed is not None}
        for server in sorted(found, key=lambda s: (found[s], -zlib.crc32(f"{self._net.peer_id}/{s}".encode()))):
            self._home = server  # its first words may come before its answer
            try:
                self._heard(Enlisted.unpack(await self._net.call(server, Enlist.KIND, ask, timeout_s=CALL_S)))
            except NetworkError:
                continue
            return
        raise _Left("no server answers")

    async def _speed_at(self, server: PeerId) -> float | None:
        """How fast the clients of ``server`` are together; None: it does not answer."""
        try:
            state = await self._net.call(server, GetState.KIND, GetState().pack(), timeout_s=CALL_S)
        except NetworkError:
            return None
        return Enlisted.unpack(state).speed

    def _heard(self, state: Enlisted) -> None:
        if state.servers:
            self._servers = state.servers
        self._wanted = state.weights
        self._news.set()

    def _leave(self) -> None:
        """Nothing that we have is of use to anyone."""
        self._home = None
        for task in self._work.values():
            task.cancel()
        self._work.clear()
        self._forget(self._generation)

    async def _serve(self) -> None:
        """Work for our server. Raises _Left when it is gone."""
        told: bytes | None = None
        seen = self._clock.now()
        self._dismissed = False
        while not self._ended.is_set():
            self._news.clear()
            if self._dismissed:
                raise _Left("the server dismissed us")
            if self._wanted is not None and self._wanted != self._have:
                await self._take_weights(self._wanted)
            elif self._have != told and self._have is not None:
                told = self._have
                await self._send(Ready(weights=told, speed=self._speed, room=ROOM))
            wait_s = seen + ALIVE_S - self._clock.now()
            if wait_s <= 0:
                assert self._home is not None  # enlisted
                alive = await self._net.call(self._home, StillThere.KIND, StillThere().pack(), timeout_s=CALL_S)
                self._heard(Enlisted.unpack(alive))
                seen = self._clock.now()
                continue
            try:
                await self._clock.deadline(self._news.wait(), wait_s, "news of the server")
            except DeadlineExceeded:
                continue

    async def _send(self, message: Message, tensors: list[Encoded] | None = None) -> None:
        """To our server. Raises NetworkError."""
        if self._home is None:
            raise _Left("there is no server")
        await self._net.send(self._home, message.frame(tensors), channel=message.CHANNEL, timeout_s=SEND_S)

    # Weights ----------------------------------------------------------------------------------------------------------

    async def _take_weights(self, digest: bytes) -> None:
        """Get the weights from all servers of the stage, in equal parts; from others what one does not send. Returns
        early if other weights are wanted."""
        coming = self._coming = _Weights(digest, self._compute.n_params, self._plan.chunk)
        try:
            for turn in range(1 + len(self._servers)):
                await self._ask_for(coming, turn)
                while coming.left and self._wanted == digest and not self._ended.is_set():
                    left = len(coming.left)
                    coming.news.clear()
                    try:
                        await self._clock.deadline(coming.news.wait(), CHUNK_S, "the stage's weights")
                    except DeadlineExceeded:
                        if len(coming.left) == left:
                            break
                if not coming.left or self._wanted != digest:
                    break
            if self._wanted != digest or self._ended.is_set():
                return
            if coming.left or await self._compute.offload(_digest, coming.values) != digest:
                raise _Left("the weights did not come whole")
            async with self._merging:
                await self._compute.load_weights(coming.values)
            self._have = digest
            self._news.set()
        finally:
            self._coming = None

    async def _ask_for(self, coming: _Weights, turn: int) -> None:
        servers = self._servers[turn % len(self._servers) :] + self._servers[: turn % len(self._servers)]
        ask = [
            (server, GetWeights(weights=coming.digest, first=first, every=len(servers)))
            for first, server in enumerate(servers)
            if any(chunk % len(servers) == first for chunk in coming.left)
        ]
        sent = (self._net.send(s, m.frame(), channel=m.CHANNEL, timeout_s=SEND_S) for s, m in ask)
        await asyncio.gather(*sent, return_exceptions=True)

    # What comes -------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        message = FROM_SERVER[kind]
        return 128 + 128 * message.TENSORS + message.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``."""
        frame.message = message = FROM_SERVER[frame.kind].parse(frame)
        if isinstance(message, WeightsChunk):
            if sender not in self._servers:
                raise ProtocolError("weights from a peer that is no server of our stage")
            if self._coming is not None and message.weights == self._coming.digest:
                self._coming.expects(message.chunk, frame.tensors[0])
            elif frame.tensors[0].nbytes > 0 and frame.tensors[0].shape > (self._plan.chunk,):
                raise Malformed("weights that nobody asked for")
            return
        if isinstance(message, GiveInputs | GiveGradient | GiveBoth):
            self._check_shapes(message, frame.tensors)

    def _check_shapes(self, message: GiveInputs | GiveGradient | GiveBoth, tensors: list[Encoded]) -> None:
        """Raises Malformed for a part that this stage does not have."""
        plan, length = self._plan, self._plan.sequence_length(message.step)
        tokens, activations = (message.rows, length), (message.rows, length, plan.width)
        first, last = self._compute.stage == 0, self._compute.stage == self._compute.stages - 1
        inputs = (tokens, IDS) if first else (activations, (plan.activations,))
        other = (tokens, IDS) if last else (activations, (plan.activations,))
        expected = {GiveInputs: [inputs], GiveGradient: [other], GiveBoth: [inputs, other]}[type(message)]
        if message.whole != plan.sequences or message.first + message.rows > plan.sequences:
            raise Malformed(f"{message.KIND}: sequences {message.first} + {message.rows} of {message.whole}")
        for tensor, (shape, codecs) in zip(tensors, expected, strict=True):
            if tensor.shape != shape or tensor.codec not in codecs:
                raise Malformed(f"{message.KIND}: {tensor.codec} {tensor.shape} instead of {shape}")

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        message = FROM_SERVER[frame.kind].parse(frame)
        if isinstance(message, WeightsChunk):
            if self._coming is not None and message.weights == self._coming.digest:
                await self._compute.offload(self._coming.put, message.chunk, frame.tensors[0])
                self._coming.came(message.chunk)
            return
        if sender != self._home:
            return  # of a server that we have left
        match message:
            case Begun():
                self._wanted = message.weights
                self._news.set()
                if self._coming is not None:
                    self._coming.news.set()
            case Ended():
                self._dismissed = True
                if message.over:
                    self._ended.set()
                self._news.set()
            case GiveInputs() | GiveGradient() | GiveBoth():
                self._begin(message, frame.tensors)
            case Counted():
                await self._on_counted(message)
            case Withdraw():
                if (task := self._work.get(message.part)) is not None:
                    task.cancel()
            case HandOver():
                self._tasks.spawn(self._hand_over(message, sender), "hand over")

    # Parts ------------------------------------------------------------------------------------------------------------

    def _begin(self, message: GiveInputs | GiveGradient | GiveBoth, tensors: list[Encoded]) -> None:
        self._forget(message.generation)
        part = message.part
        if part in self._work:
            return
        task = self._work[part] = self._tasks.spawn(self._do(message, tensors), f"part {part}")
        task.add_done_callback(lambda _: self._work.pop(part, None) if self._work.get(part) is task else None)

    def _forget(self, generation: int) -> None:
        """What belongs to an earlier generation is of no use any more."""
        if generation == self._generation and self._home is not None:
            return
        self._generation = generation
        for step in self._accumulated:
            self._compute.clear(step)
        for mb in self._uncounted.values():
            self._compute.discard(mb)
        self._accumulated.clear()
        self._uncounted.clear()

    async def _do(self, message: GiveInputs | GiveGradient | GiveBoth, tensors: list[Encoded]) -> None:
        """Compute one part, and send what comes out."""
        part = message.part
        try:
            answer, sent = await self._compute_part(message, tensors)
        except asyncio.CancelledError:
            if self._home is not None and not self._tasks.closed:
                about = {**part._asdict(), "generation": message.generation}
                self._tasks.spawn(self._try_to_send(Unable(**about, failed=False)), "withdrawn")
            raise
        except (MuletrainError, KeyError):
            answer, sent = Unable(**part._asdict(), generation=message.generation), []
        await self._try_to_send(answer, sent)

    async def _try_to_send(self, message: Message, tensors: list[Encoded] | None = None) -> None:
        try:
            await self._send(message, tensors)
        except (NetworkError, _Left):
            self._news.set()  # the server is asked whether it is there

    async def _compute_part(
        self, message: GiveInputs | GiveGradient | GiveBoth, tensors: list[Encoded]
    ) -> tuple[Output | Finished, list[Encoded]]:
        """Raises MuletrainError, and KeyError if the forward is not here any more."""
        part, compute = message.part, self._compute
        accumulate = not isinstance(message, GiveInputs) and message.accumulate
        mb = Microbatch(part.step, part.index, part.first, message.whole)
        if accumulate:
            async with self._room:
                await self._room.wait_for(lambda: len(self._uncounted) < UNCOUNTED)
        first, *rest = [await compute.offload(decode, tensor) for tensor in tensors]
        begin = self._clock.now()
        loss, result = 0.0, None
        if part.what is Pass.FORWARD:
            compute.discard(mb)
            result = await compute.forward(mb, first, Turn(1))
        elif compute.stage == compute.stages - 1:
            loss, result = await compute.loss_backward(mb, first, rest[0], Turn(1), accumulate=accumulate)
        else:
            if rest:
                compute.discard(mb)
                await compute.forward(mb, first, Turn(0))
            result = await compute.backward(mb, rest[0] if rest else first, Turn(0), accumulate=accumulate)
        busy_s = self._clock.now() - begin
        if accumulate:
            self._uncounted[part] = mb
        about = {**part._asdict(), "generation": message.generation, "loss": loss, "busy_s": busy_s}
        if result is None or part.what is Pass.AGAIN:
            return Finished(**about), []
        return Output(**about), [await compute.offload(encode, await result, self._plan.activations)]

    async def _on_counted(self, message: Counted) -> None:
        """Add the gradient of a part to the accumulator, or drop it."""
        async with self._merging:
            self._settle(message.part, counts=message.counts and message.generation == self._generation)
        async with self._room:
            self._room.notify_all()

    def _settle(self, part: Part, *, counts: bool) -> None:
        if (mb := self._uncounted.pop(part, None)) is None:
            return
        if counts:
            self._compute.count(mb)
            self._accumulated.setdefault(part.step, set()).add((part.index, part.first))
        else:
            self._compute.discard(mb)

    async def _hand_over(self, ask: HandOver, server: PeerId) -> None:
        """Send the accumulator, with all parts that count. It begins anew."""
        async with self._merging:
            self._forget(ask.generation)
            for part in [p for p in self._uncounted if p.step == ask.step and (p.index, p.first) in ask.parts]:
                self._settle(part, counts=True)
            gradient = (await self._compute.gradient(ask.step)).clone()
            parts = tuple(sorted(self._accumulated.pop(ask.step, ())))
            self._compute.clear(ask.step)
        async with self._room:
            self._room.notify_all()
        try:
            await self._send(Contents(step=ask.step, number=ask.number, parts=parts))
            for number, (a, b) in enumerate(chunk_ranges(0, len(gradient), self._plan.chunk)):
                chunk = await self._compute.offload(encode, gradient[a:b], self._plan.gradients)
                await self._send(Accumulated(step=ask.step, number=ask.number, chunk=number), [chunk])
        except (NetworkError, _Left):
            self._news.set()


class _Weights:
    """Weights on their way."""

    def __init__(self, digest: bytes, n_params: int, chunk: int) -> None:
        self.digest, self.values = digest, torch.empty(n_params)
        self.ranges = list(chunk_ranges(0, n_params, chunk))
        self.left = set(range(len(self.ranges)))
        self.news = asyncio.Event()
        """Set when all chunks are here, or others are wanted."""

    def expects(self, chunk: int, tensor: Encoded) -> None:
        """Raises Malformed."""
        if chunk >= len(self.ranges):
            raise Malformed(f"chunk {chunk} of the weights; there are {len(self.ranges)}")
        a, b = self.ranges[chunk]
        if (tensor.codec, tensor.shape) != (Codec.FP32, (b - a,)):
            raise Malformed(f"chunk {chunk} of the weights: {tensor.codec} {tensor.shape}")

    def put(self, chunk: int, tensor: Encoded) -> None:
        a, b = self.ranges[chunk]
        self.values[a:b] = decode(tensor, copy=False)

    def came(self, chunk: int) -> None:
        self.left.discard(chunk)
        if not self.left:
            self.news.set()


def _digest(values: Tensor) -> bytes:
    return blake3(values.numpy().data.cast("B")).digest()
