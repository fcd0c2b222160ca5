"""The clients of one server: membership, permitted messages, and notices."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from muletrain.clock import loop_time_s
from muletrain.errors import (
    AdmissionError,
    DeadlineExceeded,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
)
from muletrain.events import ClientEnlisted, ClientLate, ClientLost
from muletrain.policy.deadline import Deadline
from muletrain.policy.recent import Debts, Recent
from muletrain.runtime.pool.checks import check_result
from muletrain.runtime.pool.messages import (
    FROM_CLIENT,
    AccumulatorChunk,
    AreYouThere,
    Begun,
    Checked,
    Contents,
    Ended,
    Enlist,
    Enlisted,
    Finished,
    GetState,
    GetWeights,
    Gone,
    Numbered,
    Output,
    Ready,
    StillThere,
    There,
    Unable,
)
from muletrain.runtime.pool.tally import Tally
from muletrain.runtime.pool.weights import WeightsUpload

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.events import Event
    from muletrain.network.base import Channel, Network, PeerId
    from muletrain.policy.pool import Pool
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.runtime.pool.accumulators import Accumulators
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame

MAX_CLIENTS = 4096
ENLISTS, ENLISTS_PER_S = 20, 0.2
"""Most enlistments of one client at once, and per second after that: each enlistment is an event on the disk."""
MAX_UNABLE = 8
"""Consecutive parts that a client may fail to compute before being dismissed."""
SILENT_S = 3.0
"""Seconds without a message, after which a client is asked for a sign of life; clients show life every second."""
GONE_S, AGAIN_S = 3.0, 0.5
"""Seconds for which a client is unreachable before the client is lost, and seconds between two tries. Accumulated
gradients survive a shorter interruption."""
THERE_S, THERE_FLOOR_S = 3.0, 1.5
"""Seconds for a client to confirm its presence, before any measurement, and at least (see
``members.FailureDetector``)."""
SEND_S, FAREWELL_S = 60.0, 5.0
"""Seconds for a client to take a notice, and to take the last notice."""
RECEIPT_S, LOOK_S = 0.5, 0.01
"""Seconds to wait for a sign that the last notice came, and seconds between two checks."""
FULL = f"this server has {MAX_CLIENTS} clients, as many as it takes; try another one"


class Servers(Protocol):
    """Knows the stage's servers (``members.Roster``)."""

    def stage(self, stage: int) -> tuple[str, ...]:
        """Returns the live servers of ``stage``, sorted."""
        ...


class Desk(Protocol):
    """The server that the clients work for (``desk.PartsDesk``)."""

    stage: int
    inner: Compute
    plan: Plan
    pool: Pool
    accumulators: Accumulators

    async def on_result(self, worker: PeerId, message: Output | Finished | Checked, tensor: Encoded | None) -> None:
        """A client brings back a part."""
        ...

    def on_unable(self, worker: PeerId, number: int) -> None:
        """A client did not compute a part."""
        ...

    def lose(self, worker: PeerId, why: str) -> None:
        """A client is gone."""
        ...

    def feed(self) -> None:
        """Give parts to all workers that have room."""
        ...

    def doubt(self, client: PeerId) -> None:
        """A client cannot be reached."""
        ...

    def there(self, client: PeerId, parts: Collection[int], uncounted: Collection[int], asked_at: float) -> None:
        """A client is there, and had these ``parts`` and ``uncounted`` givings at ``asked_at`` [s]."""
        ...


@dataclass
class _Client:
    """``since``: time of enlistment, by the loop's clock; ``unable``: consecutive parts not computed; ``asked``: the
    client is being asked for a sign of life."""

    name: str
    enlistment: int
    since: float
    unable: int = 0
    asked: bool = False


class Clients:
    """Hears the clients of one server."""

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
        """Hear clients from now on, in place of an earlier server on this network. ``config``: digest of the run's
        configuration."""
        self._desk, self._net, self._clock, self._tasks = desk, net, clock, tasks
        self._servers, self._config, self._emit = servers, config, emit
        self._clients: dict[PeerId, _Client] = {}
        self._tally = Tally()
        self._lately: Recent[_Client] = Recent()
        """Lost clients, which may look for a server at the end of the run."""
        self._enlisted = Debts(ENLISTS_PER_S)
        self._banned: set[PeerId] = set()
        """Clients whose results were wrong."""
        self._digest: bytes | None = None
        """Digest of the newest weights."""
        self._steps: tuple[int, ...] = ()
        """The steps that compute with the newest weights; (): all steps."""
        self._digests: dict[int, bytes] = {}
        """Digests of the weights that each step in flight computes with."""
        self._version = 0
        self._open = False
        """The weights are whole, and clients may have the weights."""
        self._weights = WeightsUpload(desk.inner, desk.plan.chunk, net, tasks)
        self._there = Deadline(unmeasured_s=THERE_S, floor_s=THERE_FLOOR_S)
        net.serve(Enlist.KIND, self._on_enlist)
        net.serve(GetState.KIND, self._on_get_state)
        net.serve(StillThere.KIND, self._on_still_there)
        net.receive(self._on_frame, tuple(FROM_CLIENT), self)
        net.on_lost(self._on_lost, "clients")

    # Who is there -----------------------------------------------------------------------------------------------------

    async def _on_enlist(self, sender: PeerId, payload: bytes) -> bytes:
        ask = Enlist.unpack(payload)
        if (ask.config, ask.stage) != (self._config, self._desk.stage):
            raise AdmissionError(f"this server serves stage {self._desk.stage} of another configuration; join again")
        if sender in self._banned:
            raise AdmissionError(
                "this server does without you: results of yours were wrong; check this machine's memory"
            )
        state = self._state()
        if self._enlisted.add(sender, 1.0, self._clock.now()) > ENLISTS:
            raise AdmissionError("this machine enlisted too often; it is taken again in a minute")
        if self._clients.pop(sender, None) is not None:
            self._desk.lose(sender, "it begins anew")
        if len(self._clients) >= MAX_CLIENTS:
            raise AdmissionError(FULL)
        self._clients[sender] = _Client(ask.name, ask.enlistment, loop_time_s())
        self._desk.pool.enlist(sender)
        self._emit(ClientEnlisted(peer_id=sender, name=ask.name, stage=self._desk.stage))
        return state.pack()

    async def _on_get_state(self, sender: PeerId, payload: bytes) -> bytes:
        GetState.unpack(payload)
        return self._state().pack()

    async def _on_still_there(self, sender: PeerId, payload: bytes) -> bytes:
        shown, known = StillThere.unpack(payload), self._clients.get(sender)
        if known is None or known.enlistment != shown.enlistment:
            raise AdmissionError("this server does not know this client (any more)")
        if shown.missed:
            self.look_after(sender)
        return self._state().pack()

    def _state(self) -> Enlisted:
        """Raises AdmissionError before there are weights, and at the end."""
        if self._digest is None:
            raise AdmissionError("this server does not serve now; try again in some seconds, or another one")
        servers = self._servers.stage(self._desk.stage)
        return Enlisted(
            weights=self._digest,
            version=self._version,
            steps=self._steps,
            servers=servers,
            clients=len(self._clients),
            speed=self._desk.pool.speed(),
            own=self._desk.pool.own_speed(),
            helpers=self._desk.pool.helpers(self._desk.accumulators.each_s),
        )

    def gone(self, client: PeerId, why: str, parts: int) -> None:
        """``client`` is lost, and with it the gradients of ``parts`` parts. A client that is there after all begins
        anew."""
        if (known := self._clients.pop(client, None)) is not None:
            self._lately[client] = known
            self._tally.count(known.name, "redone", parts)
            self._emit(ClientLost(peer_id=client, name=known.name, reason=why, parts=parts))
            self._tasks.spawn(self._tell(client, Ended(enlistment=known.enlistment, over=False)), Ended.KIND)

    def ban(self, client: PeerId) -> None:
        """``client`` works here no more."""
        self._banned.add(client)

    def digest(self, step: int) -> bytes:
        """Returns the digest of the weights for ``step``; empty: clients do not have these weights."""
        return self._digests.get(step, b"") if self._steps else self._digest or b""

    def __len__(self) -> int:
        return len(self._clients)

    def did_part(self, worker: PeerId) -> None:
        """A client, or the server itself, computed a part that counts."""
        self._tally.done(self._clients[worker].name if worker in self._clients else None)

    def report(self, step: int) -> None:
        """A step is applied."""
        self._emit(self._tally.worked(step, self._desk.stage))

    def late(self, clients: tuple[PeerId, ...]) -> None:
        """``clients`` take unusually long: other workers may repeat their parts."""
        for client in clients:
            if client in self._clients:
                self._tally.count(self._clients[client].name, "late")
                self._emit(ClientLate(peer_id=client, name=self._clients[client].name))

    def _on_lost(self, peer: PeerId, channel: Channel) -> None:
        """A stream with ``peer`` ended: find out now whether the client is gone, not after a missed deadline."""
        if peer in self._clients:
            self.look_after(peer)

    def look_after(self, client: PeerId) -> None:
        """Ask ``client`` whether it is there, and still ours. A client that denies this, or is unreachable for long, is
        lost."""
        if (known := self._clients.get(client)) is not None and not known.asked:
            known.asked = True
            self._tasks.spawn(self._look_after(client, known), "look after a client")

    async def _look_after(self, client: PeerId, known: _Client) -> None:
        since, ask = self._clock.now(), AreYouThere(enlistment=known.enlistment).pack()
        while self._clients.get(client) is known:
            begin = self._clock.now()
            try:
                answer = await self._net.call(
                    client, AreYouThere.KIND, ask, timeout_s=min(self._there.seconds(), GONE_S)
                )
                there = There.unpack(answer)
            except (PeerUnreachable, DeadlineExceeded) as e:
                if self._clock.now() - since < GONE_S:
                    await self._clock.sleep(AGAIN_S)
                    continue
                problem = e.why
            except NetworkError as e:
                problem = e.why
            else:
                self._there.measured(self._clock.now() - begin)
                known.asked = False
                self._desk.there(client, there.parts, there.uncounted, begin)
                return
            if self._clients.get(client) is known:
                self._desk.lose(client, problem)

    def silent(self) -> tuple[PeerId, ...]:
        """Returns the clients that were not heard of for long."""
        since = loop_time_s() - SILENT_S
        return tuple(p for p, c in self._clients.items() if max(c.since, self._net.heard_s(p)) < since)

    def tell(self, client: PeerId, message: Message) -> None:
        """Send a notice without waiting."""
        self._tasks.spawn(self._tell(client, message), message.KIND)

    async def _tell(self, client: PeerId, message: Message) -> None:
        known = self._clients.get(client)
        try:
            await self._net.send(client, message.frame(), channel=message.CHANNEL, timeout_s=SEND_S)
        except NetworkError:
            if known is not None and self._clients.get(client) is known:
                self._desk.doubt(client)

    async def end(self, *, over: bool) -> None:
        """Tell all clients that this server ends; ``over``: so does the run. Returns when the clients heard it, or
        soon."""
        clients = {**self._lately, **self._clients} if over else self._clients
        told = [self._farewell(client, known, over=over) for client, known in clients.items()]
        self._clients, self._digest, self._open = {}, None, False
        with contextlib.suppress(DeadlineExceeded):
            await self._clock.deadline(asyncio.gather(*told, return_exceptions=True), FAREWELL_S, "clients")

    async def _farewell(self, client: PeerId, known: _Client, *, over: bool) -> None:
        frame, begun_s = Ended(enlistment=known.enlistment, over=over).frame(), loop_time_s()
        await self._net.send(client, frame, channel=Ended.CHANNEL, timeout_s=FAREWELL_S)
        until_s = self._clock.now() + RECEIPT_S  # the notice may have come no further than a daemon that ends with us
        while self._net.heard_s(client) < begun_s and self._clock.now() < until_s:
            await self._clock.sleep(LOOK_S)

    # What comes -------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        message = FROM_CLIENT[kind]
        return 128 + 128 * (message.TENSORS + message.MORE) + message.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``."""
        frame.message = message = FROM_CLIENT[frame.kind].parse(frame)
        if isinstance(message, GetWeights | Gone):  # at the end of a run both sides say farewell
            return
        if sender not in self._clients:
            raise ProtocolError(f"{frame.kind}: from a client that is not enlisted here (any more)")
        if isinstance(message, AccumulatorChunk):
            self._desk.accumulators.expects(sender, message, frame.tensors)
        if isinstance(message, Output | Finished | Checked):
            self.check_result(sender, message, frame.tensors)

    def check_result(self, sender: PeerId, message: Output | Finished | Checked, tensors: list[Encoded]) -> None:
        """Raises Malformed for a result that belongs to no part of ``sender``."""
        desk = self._desk
        check_result(desk.plan, desk.stage, desk.pool.part(sender, message.number), message, tensors)

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        message = FROM_CLIENT[frame.kind].parse(frame)
        if isinstance(message, GetWeights):
            self._weights.on_asked(sender, message)
            return
        if (client := self._clients.get(sender)) is None:
            return  # the client was lost while the frame came
        if isinstance(message, Numbered):
            client.unable = client.unable + 1 if isinstance(message, Unable) else 0
        match message:
            case Output() | Finished() | Checked():
                await self._desk.on_result(sender, message, frame.tensors[0] if frame.tensors else None)
            case Unable() if client.unable > MAX_UNABLE:
                self._desk.lose(sender, f"it computes nothing: {message.reason[:200]}")
            case Unable():
                self._desk.on_unable(sender, message.number)
            case Ready() if self._open and message.weights == self._digest:
                self._desk.pool.ready(sender, message.room, message.speed, self._steps)
                self._desk.feed()
            case Contents():
                self._desk.accumulators.on_contents(sender, message)
            case AccumulatorChunk():
                await self._desk.accumulators.on_chunk(sender, message, frame.tensors)
            case Gone():
                self._desk.lose(sender, "it left")

    # Weights ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The weights are about to change."""
        self._open = False
        self._weights.close()

    def begin(self, digest: bytes, steps: tuple[int, ...] = ()) -> None:
        """``digest``: of the newest weights; ``steps``: computed with these weights (see ``Compute.newest_for``).
        Clients work for ``steps`` once they have the weights."""
        if self._open and (digest, steps) == (self._digest, self._steps):
            return
        self._digest, self._steps, self._open = digest, steps, True
        self._digests = {s: d for s, d in self._digests.items() if s + 1 in steps} | dict.fromkeys(steps, digest)
        self._weights.begin(digest)
        self._version += 1
        for client in self._clients:
            self.tell(client, Begun(weights=digest, version=self._version, steps=steps))
