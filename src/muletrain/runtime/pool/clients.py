"""The clients of one server: membership, answers to their calls, and permitted messages."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from muletrain.clock import loop_time_s
from muletrain.errors import AdmissionError, DeadlineExceeded, MuletrainError, ProtocolError
from muletrain.events import ClientEnlisted, ClientLate, ClientLost
from muletrain.policy.recent import Debts, Recent
from muletrain.policy.worker import Standings
from muletrain.runtime.pool.messages import ROOM, Answer, Ended, Next, Result, Wanted, checksum
from muletrain.runtime.pool.parts import check_result
from muletrain.runtime.pool.tally import Tally
from muletrain.runtime.pool.weights import WeightsCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.compute.base import Compute
    from muletrain.events import Event
    from muletrain.network.base import Channel, PeerId
    from muletrain.policy.pool import Pool
    from muletrain.runtime.core.blocks import Blocks, StateImage
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame

MAX_CLIENTS = 4096
TAKERS = 32
"""Peers that get weights at once; further peers ask again."""
ENLISTS, ENLISTS_PER_S = 20, 0.2
"""Most sessions that one client begins at once, and per second after that: each is an event on the disk."""
MAX_UNABLE = 8
"""Consecutive parts that a client may fail to compute before being dismissed."""
HOLD_S = 1.0
"""Longest time that a call waits for news [s]: the calls are the clients' signs of life."""
GONE_S = 3.0
"""Seconds without a sign of life, after which others may compute a client's parts, and after as long again the client is
lost. Accumulated gradients survive a shorter interruption."""
FAREWELL_S = 5.0
"""Seconds for a client to take the last notice."""
RECEIPT_S, LOOK_S = 0.5, 0.01
"""Seconds to wait for a sign that the last notice came, and seconds between two checks."""
FULL = f"this server has {MAX_CLIENTS} clients, as many as it takes; try another one"
UNKNOWN = "this server does not know this client (any more)"


class Desk(Protocol):
    """The server that the clients work for (``desk.PartsDesk``)."""

    stage: int
    plan: Plan
    inner: Compute
    pool: Pool

    async def on_result(self, worker: PeerId, message: Result, tensor: Encoded | None) -> None:
        """A client brings back a part."""
        ...

    def on_unable(self, worker: PeerId, number: int) -> None:
        """A client did not compute a part."""
        ...

    def verdicts(self, client: PeerId, numbers: Collection[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns those of a client's ``numbers`` whose results count, and those whose part, result or forward is of no
        use; of more than ``2 * MAX_KEPT``, the lowest."""
        ...

    def there(self, client: PeerId, parts: Collection[int], doubted_at: float) -> None:
        """A client that was doubted at ``doubted_at`` [s] is there, and computes ``parts``."""
        ...

    def doubt(self, client: PeerId) -> None:
        """``client`` takes unusually long, or gives no sign of life."""
        ...

    def lose(self, worker: PeerId, why: str, *, again_at: PeerId | None = None, lapse: bool = True) -> None:
        """``worker`` is gone. ``again_at``: the worker that computes the lost parts again; ``lapse``: it is the worker's
        fault."""
        ...

    def withdraw(self) -> None:
        """Have clients hear which of their parts are no longer needed."""
        ...

    def feed(self) -> None:
        """Give parts to all workers that have room."""
        ...


@dataclass
class _Client:
    """``heard_s``: time of the last call, by the loop's clock; ``served``: number of the last answer; ``calls``: number
    of calls; ``ready``: version of the weights that the client works with; ``unable``: consecutive parts not computed in
    time; ``results``: numbers of results that came since the last call; ``told``: of those, which it heard of with
    another part; ``hurry``: the call is to be answered at once; ``doubted_at``: when the client's silence was noticed;
    None: it is heard; ``doubted_after``: number of the last answer before that; ``news``: set when an answer may be
    different."""

    name: str
    session: int
    heard_s: float
    served: int = 0
    calls: int = 0
    ready: int = 0
    unable: int = 0
    results: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    hurry: bool = False
    doubted_at: float | None = None
    doubted_after: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Clients:
    """Hears the clients of one server."""

    def __init__(
        self,
        desk: Desk,
        blocks: Blocks,
        tasks: Tasks,
        servers: Callable[[int], tuple[PeerId, ...]],
        config: bytes,
        emit: Callable[[Event], None],
    ) -> None:
        """Hear clients from now on, in place of an earlier server of this process. ``servers``: returns the live
        servers of a stage, sorted; ``config``: digest of the run's configuration."""
        self.desk, self._net, self._clock, self._tasks = desk, blocks.net, blocks.clock, tasks
        self._servers, self._config, self._emit = servers, config, emit
        self._clients: dict[PeerId, _Client] = {}
        self._tally = Tally()
        self._lately: Recent[_Client] = Recent()
        """Lost clients, which may look for a server at the end of the run."""
        self.standings = Standings()
        """What is remembered of clients, in all of their sessions."""
        self._enlisted = Debts(ENLISTS_PER_S)
        self._wanted: dict[PeerId, tuple[Wanted, asyncio.Event]] = {}
        """The accumulators that clients are to hand over, and whether they have begun."""
        self.each_s = 0.0
        """Mean seconds for each accumulator while transfers run; 0: none has come."""
        self._banned: set[PeerId] = set()
        """Clients whose results were wrong."""
        self._digest: bytes | None = None
        """Digest of the newest weights' copy."""
        self._steps: tuple[int, ...] = ()
        """The steps that compute with the newest weights; (): all steps."""
        self._digests: dict[int, bytes] = {}
        """Digests of the weights that each step in flight computes with."""
        self._version = 0
        self._copy: WeightsCopy | None = None
        """The weights that clients may have; None: they are about to change."""
        blocks.offers("weights", self._given, TAKERS)
        Next.serve(self._net, self._on_next)
        self._net.receive(self._on_frame, (Result.KIND,), self)
        self._net.on_lost(self._on_lost, "clients")

    # Calls ------------------------------------------------------------------------------------------------------------

    async def _on_next(self, sender: PeerId, ask: Next) -> Answer:
        """Answer at once if the client's state should be another one, or as soon as it should."""
        if ask.session == 0:
            return self._answer(sender, ask, 0)
        client = self._member(sender, ask)
        if ask.leaves:
            self.desk.lose(sender, "it left")
            raise AdmissionError(UNKNOWN)
        client.heard_s, client.calls = loop_time_s(), client.calls + 1
        client.results.clear()
        client.told.clear()
        client.hurry = False
        call, until = client.calls, self._clock.now() + HOLD_S
        self._take(sender, client, ask)
        client.news.set()  # an earlier call needs no answer any more
        while True:
            answer = self._answer(sender, ask, client.served + 1, client.results)
            left_s = until - self._clock.now()
            new = {*answer.counts} - client.told or any(wanted.transfer > ask.handed for wanted in answer.wanted)
            new = new or answer.version != ask.version or client.hurry
            if new or call != client.calls or left_s <= 0 or client.doubted_at is not None:
                break
            client.news.clear()
            with contextlib.suppress(DeadlineExceeded):
                await self._clock.deadline(client.news.wait(), left_s, "news for a client")
            if self._clients.get(sender) is not client:
                raise AdmissionError(UNKNOWN)
        client.served += 1
        return answer

    def _member(self, sender: PeerId, ask: Next) -> _Client:
        """Returns the client that calls; another session begins anew. Raises AdmissionError."""
        if (ask.config, ask.stage) != (self._config, self.desk.stage):
            raise AdmissionError(f"this server serves stage {self.desk.stage} of another configuration; join again")
        if sender in self._banned:
            raise AdmissionError(
                "this server does without you: results of yours were wrong; check this machine's memory"
            )
        known = self._clients.get(sender)
        if known is not None and known.session == ask.session:
            return known
        if ask.heard or ask.leaves or self._digest is None:  # a session that is over
            raise AdmissionError(UNKNOWN)
        if self._enlisted.add(sender, 1.0, self._clock.now()) > ENLISTS:
            raise AdmissionError("this machine enlisted too often; it is taken again in a minute")
        if known is not None:
            self.desk.lose(sender, "it begins anew")
        if len(self._clients) >= MAX_CLIENTS:
            raise AdmissionError(FULL)
        client = self._clients[sender] = _Client(ask.name, ask.session, loop_time_s())
        self.desk.pool.enlist(sender)
        self._emit(ClientEnlisted(peer_id=sender, name=ask.name, stage=self.desk.stage))
        return client

    def _take(self, sender: PeerId, client: _Client, ask: Next) -> None:
        """Take in what a client has."""
        wanted, begun = self._wanted.get(sender, (None, None))
        if wanted is not None and begun is not None and wanted.transfer <= ask.handed:
            begun.set()
        if client.doubted_at is not None and ask.heard > client.doubted_after:
            doubted_at, client.doubted_at = client.doubted_at, None
            self.desk.there(sender, ask.parts, doubted_at)
        ready = self._copy is not None and self._copy.digest == self._digest == ask.weights
        if ready and client.ready < self._version and not self.standings[sender].left_out(self._version):
            client.ready = self._version
            self.desk.pool.ready(sender, ROOM, self._steps)
            self.desk.feed()

    def _answer(self, sender: PeerId, ask: Next, number: int, results: Collection[int] = ()) -> Answer:
        """Raises AdmissionError before there are weights, and at the end."""
        if self._digest is None:
            raise AdmissionError("this server does not serve now; try again in some seconds, or another one")
        servers, pool = self._servers(self.desk.stage), self.desk.pool
        numbers = {*ask.parts, *ask.uncounted, *ask.forwards, *results}
        counts, gone = self.desk.verdicts(sender, numbers) if number else ((), ())
        return Answer(
            number=number,
            weights=self._digest,
            version=self._version,
            steps=self._steps,
            servers=() if checksum(servers) == ask.servers else servers,
            clients=len(self._clients),
            speed=pool.speed(),
            own=pool.own_speed(),
            helpers=pool.helpers(self.each_s),
            counts=counts,
            gone=gone,
            wanted=(self._wanted[sender][0],) if number and sender in self._wanted else (),
        )

    def tell(self, client: PeerId) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the verdicts on the results of ``client`` since its last call, which it hears of with its next
        part."""
        if (known := self._clients.get(client)) is None:
            return (), ()
        counts, gone = self.desk.verdicts(client, known.results - known.told)
        known.told |= {*counts}
        return counts, gone

    def wake(self, client: PeerId) -> None:
        """``client`` should hear soon that something is of no use."""
        if (known := self._clients.get(client)) is not None:
            known.hurry = True
            known.news.set()

    def want(self, client: PeerId, wanted: Wanted | None, begun: asyncio.Event | None = None) -> None:
        """``client`` is to hand over an accumulator, and sets ``begun`` when it hears that; None: the server has it."""
        if wanted is None or begun is None:
            self._wanted.pop(client, None)
        else:
            self._wanted[client] = wanted, begun
        self.wake(client)

    # Who is there -----------------------------------------------------------------------------------------------------

    def lapsed(self, client: PeerId) -> None:
        """Work of ``client`` was lost."""
        self.standings[client].lapsed(self._version)
        if self.standings[client].left_out(self._version):
            self.desk.pool.ready(client, 0)

    def gone(self, client: PeerId, why: str, parts: int) -> None:
        """``client`` is lost, and with it the gradients of ``parts`` parts. A client that is there after all begins
        anew."""
        if (known := self._clients.pop(client, None)) is not None:
            self._lately[client] = known
            self._wanted.pop(client, None)
            self._tally.count(known.name, "redone", parts)
            self._emit(ClientLost(peer_id=client, name=known.name, reason=why, parts=parts))
            known.news.set()

    def expel(self, client: PeerId, why: str) -> None:
        """``client`` works here no more."""
        self._banned.add(client)
        self.desk.lose(client, why)

    def digest(self, step: int) -> bytes:
        """Returns the digest of the weights for ``step``; empty: clients do not have these weights."""
        return self._digests.get(step, b"") if self._steps else self._digest or b""

    def __len__(self) -> int:
        return len(self._clients)

    def did_part(self, worker: PeerId) -> None:
        """A client, or the server itself, computed a part that counts."""
        if (known := self._clients.get(worker)) is not None:
            known.unable = 0
        self._tally.done(None if known is None else known.name)

    @property
    def version(self) -> int:
        """Version of the newest weights, from 1."""
        return self._version

    def report(self, step: int) -> None:
        """A step is applied."""
        self._emit(self._tally.worked(step, self.desk.stage))

    def _unable(self, client: PeerId, known: _Client) -> None:
        """``client`` did not compute a part in time: that is a lapse if no result has counted since the last one. (An
        honest one may be late before its speed is known.)"""
        known.unable += 1
        if known.unable > 1:
            self.lapsed(client)

    def late(self, clients: tuple[PeerId, ...]) -> None:
        """``clients`` take unusually long: other workers may repeat their parts."""
        for client in clients:
            if (known := self._clients.get(client)) is not None:
                self._tally.count(known.name, "late")
                self._emit(ClientLate(peer_id=client, name=known.name))
                self._unable(client, known)

    def _on_lost(self, peer: PeerId, channel: Channel) -> None:
        """A stream with ``peer`` ended: frames may be lost, or the client is gone."""
        if peer in self._clients:
            self.desk.doubt(peer)

    def doubt(self, client: PeerId) -> None:
        """``client`` is to call again, which tells what it has."""
        if (known := self._clients.get(client)) is not None and known.doubted_at is None:
            known.doubted_at, known.doubted_after = self._clock.now(), known.served
            known.news.set()

    def silent(self) -> tuple[PeerId, ...]:
        """Returns the clients that were not heard of for long, once. Clients that are silent for as long again are
        lost."""
        now, now_s = self._clock.now(), loop_time_s()
        for peer, client in list(self._clients.items()):
            if client.doubted_at is not None and min(now - client.doubted_at, now_s - client.heard_s) > GONE_S:
                self.desk.lose(peer, f"it has not called for {now_s - client.heard_s:.1f} s")
        return tuple(
            peer
            for peer, client in self._clients.items()
            if client.doubted_at is None and max(client.heard_s, self._net.heard_s(peer)) < now_s - GONE_S
        )

    def next_look(self) -> float:
        """Returns when ``silent`` may find a client that is lost; inf: never."""
        return min(
            (c.doubted_at + GONE_S for c in self._clients.values() if c.doubted_at is not None), default=math.inf
        )

    async def end(self, *, over: bool) -> None:
        """This server ends; ``over``: so does the run, and all clients are told. Returns when they heard it, or
        soon."""
        self.close()
        clients = {**self._lately, **self._clients}
        ended, self._clients, self._digest = self._clients, {}, None
        for client in ended.values():
            client.news.set()
        with contextlib.suppress(DeadlineExceeded):
            told = [self._farewell(client) for client in clients if over]
            await self._clock.deadline(asyncio.gather(*told, return_exceptions=True), FAREWELL_S, "clients")

    async def _farewell(self, client: PeerId) -> None:
        frame, begun_s = Ended().frame(), loop_time_s()
        await self._net.send(client, frame, channel=Ended.CHANNEL, timeout_s=FAREWELL_S)
        until_s = self._clock.now() + RECEIPT_S  # the notice may have come no further than a daemon that ends with us
        while self._net.heard_s(client) < begun_s and self._clock.now() < until_s:
            await self._clock.sleep(LOOK_S)

    # What comes -------------------------------------------------------------------------------------------------------

    def header(self, kind: str) -> int:
        """See ``network.base.Bounds``."""
        return 128 + 128 * Result.MORE + Result.most()

    async def expect(self, sender: PeerId, frame: Frame) -> None:
        """See ``network.base.Bounds``."""
        frame.message = message = Result.parse(frame)
        if sender not in self._clients:
            raise ProtocolError(f"{frame.kind}: from a client that is not enlisted here (any more)")
        self.check_result(sender, message, frame.tensors)

    def check_result(self, sender: PeerId, message: Result, tensors: list[Encoded]) -> None:
        """Raises Malformed for a result that belongs to no part of ``sender``."""
        desk = self.desk
        check_result(desk.plan, desk.stage, desk.pool.part(sender, message.number), message, tensors)

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        message = Result.parse(frame)
        client = self._clients.get(sender)
        if client is None or self.desk.pool.part(sender, message.number) is None:
            return  # the client was lost, or the part taken back, while the frame came
        client.results.add(message.number)
        if not message.problem:
            await self.desk.on_result(sender, message, frame.tensors[0] if frame.tensors else None)
        else:
            if self.desk.pool.wants_back(sender, message.number):
                self._unable(sender, client)
            if client.unable > MAX_UNABLE:
                return self.desk.lose(sender, f"it computes nothing: {message.problem[:200]}")
            self.desk.on_unable(sender, message.number)
        client.news.set()

    # Weights ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The weights are about to change."""
        if self._copy is not None:
            self._copy.closed, self._copy = True, None

    def begin(self, weights: bytes, steps: tuple[int, ...] = ()) -> None:
        """``weights``: digest of the newest; ``steps``: computed with these weights (see ``Compute.newest_for``).
        Clients work for ``steps`` once they have the weights."""
        if self._copy is None or self._copy.label != (weights, steps):
            self.close()
            self._copy = WeightsCopy(self.desk.inner, (weights, steps))
            self._tasks.spawn(self._name(self._copy, steps), "weights")

    async def _name(self, copy: WeightsCopy, steps: tuple[int, ...]) -> None:
        """Tell clients of new weights."""
        try:
            await copy.name(self.desk.inner.offload)
        except MuletrainError:  # the weights change again
            return
        if copy.closed:
            return
        self._digest, self._steps = copy.digest, steps
        self._digests = {s: d for s, d in self._digests.items() if s + 1 in steps} | dict.fromkeys(steps, copy.digest)
        self._version += 1
        for client in self._clients.values():
            client.news.set()

    async def _given(self, taker: PeerId, digest: bytes) -> StateImage | None:
        """See ``core.blocks.Reader``. Anyone in the run may have the weights: a client asks before this server has
        enlisted it."""
        return self._copy if self._copy is not None and self._copy.digest == digest else None
