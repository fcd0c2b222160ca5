"""The clients of one server: who they are, what they may send, and what they are told."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from muletrain.config.schema import Codec
from muletrain.errors import AdmissionError, DeadlineExceeded, Malformed, NetworkError, ProtocolError
from muletrain.events import ClientEnlisted, ClientLate, ClientLost
from muletrain.runtime.pool.messages import (
    FROM_CLIENT,
    Accumulated,
    Begun,
    Contents,
    Ended,
    Enlist,
    Enlisted,
    Finished,
    GetState,
    GetWeights,
    Gone,
    Output,
    Ready,
    StillThere,
    Unable,
    WeightsChunk,
)
from muletrain.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.events import Event
    from muletrain.network.base import Frame, Network, PeerId
    from muletrain.policy.pool import Part, Pool
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.runtime.pool.handover import HandedOver
    from muletrain.wire.codec import Encoded

MAX_CLIENTS = 4096
SILENT_S = 20.0
"""Seconds without a word, after which a client is believed gone; each shows every 5 s that it lives."""
SEND_S, FAREWELL_S = 60.0, 5.0
TAKERS = 8
"""Peers that get weights at once."""
FULL = f"this server has {MAX_CLIENTS} clients, as many as it takes; try another one"


class Servers(Protocol):
    """Knows the stage's servers (``members.Roster``)."""

    def stage(self, stage: int) -> tuple[str, ...]:
        """Returns the live servers of ``stage``, sorted."""
        ...


class Desk(Protocol):
    """The pool that the clients work for (``server.PooledCompute``)."""

    stage: int
    n_params: int
    plan: Plan
    pool: Pool

    async def on_result(self, worker: PeerId, message: Output | Finished, tensor: Encoded | None) -> None:
        """A client brings back a part."""
        ...

    def on_unable(self, worker: PeerId, part: Part) -> None:
        """A client does not compute ``part``."""
        ...

    def lose(self, worker: PeerId, why: str) -> None:
        """A client is gone."""
        ...

    def feed(self) -> None:
        """Give parts to all workers that have room."""
        ...

    async def copied_weights(self) -> Tensor:
        """See ``Compute``."""
        ...

    async def offload(self, fn: Callable[..., Encoded], *args: object) -> Encoded:
        """See ``Compute``."""
        ...


@dataclass
class _Client:
    name: str
    since: float


class Clients:
    """Hears the clients of one server. ``begin`` is called before anyone can enlist."""

    def __init__(
        self,
        desk: Desk,
        net: Network,
        clock: Clock,
        tasks: Tasks,
        servers: Servers,
        config: bytes,
        emit: Callable[[Event], None],
    ) -> None:
        self._desk, self._net, self._clock, self._tasks = desk, net, clock, tasks
        self._servers, self._config, self._emit = servers, config, emit
        self._clients: dict[PeerId, _Client] = {}
        self._digest: bytes | None = None
        """Of the current weights."""
        self._weights: asyncio.Task[Tensor] | None = None
        """The current weights, once somebody has asked for them."""
        self._taking: dict[PeerId, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(TAKERS)

    def open(self, handed_over: HandedOver) -> None:
        """Hear clients from now on, in place of an earlier server on this network."""
        self._handed_over = handed_over
        self._net.serve(Enlist.KIND, self._on_enlist)
        self._net.serve(GetState.KIND, self._on_get_state)
        self._net.serve(StillThere.KIND, self._on_still_there)
        self._net.receive(self._on_frame, tuple(FROM_CLIENT), self)

    # Who is there -----------------------------------------------------------------------------------------------------

    async def _on_enlist(self, sender: PeerId, payload: bytes) -> bytes:
        ask = Enlist.unpack(payload)
        if (ask.config, ask.stage) != (self._config, self._desk.stage):
            raise AdmissionError(f"this server serves stage {self._desk.stage} of another configuration; join again")
        if sender in self._clients:
            self._desk.lose(sender, "it begins anew")
        if len(self._clients) >= MAX_CLIENTS:
            raise AdmissionError(FULL)
        self._clients[sender] = _Client(ask.name, self._clock.now())
        self._emit(ClientEnlisted(peer_id=sender, name=ask.name, stage=self._desk.stage))
        return self._state().pack()

    async def _on_get_state(self, sender: PeerId, payload: bytes) -> bytes:
        GetState.unpack(payload)
        return self._state().pack()

    async def _on_still_there(self, sender: PeerId, payload: bytes) -> bytes:
        StillThere.unpack(payload)
        if sender not in self._clients:
            raise AdmissionError("this server does not know this client (any more)")
        return self._state().pack()

    def _state(self) -> Enlisted:
        if self._digest is None:
            raise AdmissionError("this server is not ready yet; try again in some seconds")
        servers = self._servers.stage(self._desk.stage)
        return Enlisted(weights=self._digest, servers=servers, speed=self._desk.pool.speed())

    def gone(self, client: PeerId, why: str, parts: int) -> None:
        """``client`` is lost, and with it the gradients of so many ``parts``."""
        if (known := self._clients.pop(client, None)) is not None:
            self._emit(ClientLost(peer_id=client, name=known.name, reason=why, parts=parts))
            self.tell(client, Ended(over=False))  # perhaps it is there, and begins anew

    async def end(self, *, over: bool) -> None:
        """Tell all clients that this server ends; ``over``: so does the run. Returns when they heard it, or soon."""
        end = Ended(over=over).frame()
        told = (self._net.send(c, end, channel=Ended.CHANNEL, timeout_s=FAREWELL_S) for c in self._clients)
        self._clients = {}
        with contextlib.suppress(DeadlineExceeded):
            await self._clock.deadline(asyncio.gather(*told, return_exceptions=True), FAREWELL_S, "clients")

    def late(self, clients: tuple[PeerId, ...]) -> None:
        """``clients`` take unusually long: others may do what they have."""
        for client in clients:
            if client in self._clients:
                self._emit(ClientLate(peer_id=client, name=self._clients[client].name))

    def silent(self) -> tuple[PeerId, ...]:
        """Returns the clients that were not heard of for long."""
        since = self._clock.now() - SILENT_S
        return tuple(p for p, c in self._clients.items() if max(c.since, self._net.heard_s(p)) < since)

    def tell(self, client: PeerId, message: Message) -> None:
        """Send a notice, and do not wait for that."""
        self._tasks.spawn(self._tell(client, message), message.KIND)

    async def _tell(self, client: PeerId, message: Message) -> None:
        try:
            await self._net.send(client, message.frame(), channel=message.CHANNEL, timeout_s=SEND_S)
        except NetworkError as e:
            self._desk.lose(client, str(e))

    # What comes -------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        message = FROM_CLIENT[kind]
        return 128 + 128 * message.TENSORS + message.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``."""
        frame.message = message = FROM_CLIENT[frame.kind].parse(frame)
        if isinstance(message, GetWeights):
            return
        if sender not in self._clients:
            raise ProtocolError(f"{frame.kind}: from a client that has not enlisted here")
        if isinstance(message, Accumulated):
            self._handed_over.expects(sender, message, frame.tensors)
        if isinstance(message, Output):
            plan, (tensor,) = self._desk.plan, frame.tensors
            shape = message.rows, plan.sequence_length(message.step), plan.width
            if (tensor.shape, tensor.codec) != (shape, plan.activations):
                raise Malformed(f"a result of {tensor.codec} {tensor.shape} that is not {plan.activations} {shape}")

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        match message := FROM_CLIENT[frame.kind].parse(frame):
            case Output() | Finished():
                await self._desk.on_result(sender, message, frame.tensors[0] if frame.tensors else None)
            case Unable():
                self._desk.on_unable(sender, message.part)
            case Ready() if message.weights == self._digest:
                self._desk.pool.enlist(sender, message.speed, message.room)
                self._desk.feed()
            case GetWeights():
                self._give_weights(sender, message)
            case Contents():
                self._handed_over.on_contents(sender, message)
            case Accumulated():
                await self._handed_over.on_chunk(sender, message, frame.tensors)
            case Gone():
                self._desk.lose(sender, "it left")

    # Weights ----------------------------------------------------------------------------------------------------------

    async def begin(self, digest: bytes) -> None:
        """The weights have this digest now. Clients work again once they have them."""
        if digest == self._digest:
            return
        self._digest, self._weights = digest, None
        for client in self._clients:
            self._desk.pool.lost(client)
            self.tell(client, Begun(weights=digest))

    def _give_weights(self, sender: PeerId, ask: GetWeights) -> None:
        if ask.weights != self._digest:
            return  # it hears of the current ones
        if (before := self._taking.get(sender)) is not None:
            before.cancel()
        task = self._taking[sender] = self._tasks.spawn(self._send_weights(sender, ask), "weights")
        task.add_done_callback(lambda t: self._taking.get(sender) is t and self._taking.pop(sender))

    async def _send_weights(self, peer: PeerId, ask: GetWeights) -> None:
        async with self._turns:
            if self._weights is None:
                self._weights = self._tasks.spawn(self._desk.copied_weights(), "weights")
            values, size = await asyncio.shield(self._weights), self._desk.plan.chunk
            for chunk in range(ask.first, -(-len(values) // size), ask.every):
                if ask.weights != self._digest:
                    return
                tensor = await self._desk.offload(encode, values[chunk * size : (chunk + 1) * size], Codec.FP32)
                message = WeightsChunk(weights=ask.weights, chunk=chunk)
                try:
                    await self._net.send(peer, message.frame([tensor]), channel=message.CHANNEL, timeout_s=SEND_S)
                except NetworkError:  # it asks again, if it is there
                    return
