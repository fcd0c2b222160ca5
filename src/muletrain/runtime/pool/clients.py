"""The clients of one server: membership, answers to their calls, permitted messages, and weights."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from muletrain.clock import loop_time_s
from muletrain.errors import AdmissionError, DeadlineExceeded, MuletrainError, ProtocolError
from muletrain.events import ClientEnlisted, ClientLate, ClientLost, PoolWorked
from muletrain.policy.pool import OWN, Pool
from muletrain.policy.recent import Debts, Recent
from muletrain.policy.worker import Standings
from muletrain.runtime.pool.messages import MAX_KEPT, ROOM, Answer, Ended, Next, Result, Wanted
from muletrain.runtime.pool.parts import Parts, check_result
from muletrain.runtime.pool.weights import WeightsCopy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from muletrain.compute.base import Compute
    from muletrain.events import Event, PoolCount
    from muletrain.network.base import Channel, PeerId
    from muletrain.runtime.core.blocks import Blocks, StateImage
    from muletrain.runtime.core.plan import Plan
    from muletrain.runtime.core.tasks import Tasks
    from muletrain.wire.codec import Encoded
    from muletrain.wire.frame import Frame

MAX_CLIENTS = 4096
MAX_COUNTED = 256
"""Most clients in one event, which must fit into a report to another machine."""
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


class Transfer(NamedTuple):
    """One accumulator on its way. ``begun``: the client makes the copy; ``taking``: ends with the copy, or with what is
    wrong with it."""

    wanted: Wanted
    begun: asyncio.Event
    taking: asyncio.Task[Any]


@dataclass
class _Client:
    """``heard_s``: time of the last call, by the loop's clock; ``calls``: number of calls; ``served``: number of the last
    answer; ``ready``: version of the weights that the client works with; ``unable``: consecutive parts not computed in
    time; ``results``: numbers of results that came since the last call; ``told``: of those, which it heard of with another
    part; ``hurry``: the call is to be answered at once; ``doubted_at``: when the client's silence was noticed; None: it is
    heard; ``doubted_after``: number of the last answer before that; ``named``: servers of the last answer that named
    any; ``news``: set when an answer may be different."""

    name: str
    session: int
    heard_s: float
    calls: int = 0
    served: int = 0
    ready: int = 0
    unable: int = 0
    results: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    hurry: bool = False
    doubted_at: float | None = None
    doubted_after: int = 0
    named: tuple[PeerId, ...] = ()
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Clients:
    """Hears the clients of one server, and knows what each worker of the server has: the parts under way (``pool``), and
    their forwards and gradients (``parts``)."""

    def __init__(
        self,
        inner: Compute,
        plan: Plan,
        blocks: Blocks,
        tasks: Tasks,
        servers: Callable[[int], tuple[PeerId, ...]],
        config: bytes,
        emit: Callable[[Event], None],
        feed: Callable[[], None],
        on_result: Callable[[PeerId, Result, Encoded | None], Awaitable[None]],
    ) -> None:
        """Hear clients from now on, in place of an earlier server of this process. ``servers``: returns the live
        servers of a stage, sorted; ``config``: digest of the run's configuration; ``feed``: gives parts to all workers
        that have room; ``on_result``: takes the part that a client brings back."""
        self.stage, self.inner, self.plan = inner.stage, inner, plan
        self._net, self._clock, self._tasks = blocks.net, blocks.clock, tasks
        self._servers, self._config, self._emit = servers, config, emit
        self.feed, self._on_result = feed, on_result
        self.pool, self.parts = Pool(), Parts()
        self.pool.enlist(OWN)
        self.pool.ready(OWN, 1)
        self._clients: dict[PeerId, _Client] = {}
        self._counts: dict[str, Counter[PoolCount]] = {}
        """What happened to each client since the last step, by name: a client that comes back has another id, but is the
        same machine."""
        self._own = 0
        """Parts that the server itself computed since the last step."""
        self._lately: Recent[_Client] = Recent()
        """Lost clients, which may look for a server at the end of the run."""
        self.standings = Standings()
        """What is remembered of clients, in all of their sessions."""
        self._enlisted = Debts(ENLISTS_PER_S)
        self.transfers: dict[PeerId, Transfer] = {}
        """The accumulators that clients are to hand over."""
        self.news = asyncio.Event()
        """Set when gradients of clients have come or are lost, or a client is no longer busy."""
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
        """Version of the newest weights, from 1."""
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
            return self._answer(sender, ask, None)
        client = self._member(sender, ask)
        if ask.leaves:
            self.lose(sender, "it left")
            raise AdmissionError(UNKNOWN)
        client.heard_s, client.calls = loop_time_s(), client.calls + 1
        client.results.clear()
        client.told.clear()
        client.hurry = False
        call, until = client.calls, self._clock.now() + HOLD_S
        self._take(sender, client, ask)
        client.news.set()  # an earlier call needs no answer any more
        while True:
            answer = self._answer(sender, ask, client)
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
        client.served, client.named = client.served + 1, answer.servers or client.named
        return answer

    def _member(self, sender: PeerId, ask: Next) -> _Client:
        """Returns the client that calls; another session begins anew. Raises AdmissionError."""
        if (ask.config, ask.stage) != (self._config, self.stage):
            raise AdmissionError(f"this server serves stage {self.stage} of another configuration; join again")
        if sender in self._banned:
            raise AdmissionError(
                "this server does without you: results of yours were wrong; check this machine's memory"
            )
        known = self._clients.get(sender)
        if known is not None and known.session == ask.session:
            return known
        if ask.version or ask.leaves or self._digest is None:  # a session that is over
            raise AdmissionError(UNKNOWN)
        if self._enlisted.add(sender, 1.0, self._clock.now()) > ENLISTS:
            raise AdmissionError("this machine enlisted too often; it is taken again in a minute")
        if known is not None:
            self.lose(sender, "it begins anew")
        if len(self._clients) >= MAX_CLIENTS:
            raise AdmissionError(FULL)
        client = self._clients[sender] = _Client(ask.name, ask.session, loop_time_s())
        self.pool.enlist(sender)
        self._emit(ClientEnlisted(peer_id=sender, name=ask.name, stage=self.stage))
        return client

    def _take(self, sender: PeerId, client: _Client, ask: Next) -> None:
        """Take in what a client has."""
        transfer = self.transfers.get(sender)
        if transfer is not None and transfer.wanted.transfer <= ask.handed:
            transfer.begun.set()
        # a call that is older than the doubt does not tell what has come since
        if client.doubted_at is not None and ask.heard > client.doubted_after:
            doubted_at, client.doubted_at = client.doubted_at, None
            if self.pool.reconcile(sender, ask.parts, doubted_at, self._clock.now()):
                self.lapsed(sender)
            self.withdraw()
            self.feed()
        ready = self._copy is not None and self._copy.digest == self._digest == ask.weights
        if ready and client.ready < self._version and not self.standings[sender].left_out(self._version):
            client.ready = self._version
            self.pool.ready(sender, ROOM, self._steps)
            self.feed()

    def _answer(self, sender: PeerId, ask: Next, client: _Client | None) -> Answer:
        """Raises AdmissionError before there are weights, and at the end."""
        if self._digest is None:
            raise AdmissionError("this server does not serve now; try again in some seconds, or another one")
        pool, servers = self.pool, self._servers(self.stage)
        knows = client is None or (ask.version == self._version and client.named == servers)
        numbers = {*ask.parts, *ask.uncounted, *ask.forwards, *client.results} if client is not None else ()
        counts, gone = self.verdicts(sender, numbers) if client is not None else ((), ())
        return Answer(
            number=0 if client is None else client.served + 1,
            weights=self._digest,
            version=self._version,
            steps=self._steps,
            servers=() if knows else servers,
            clients=len(self._clients),
            speed=pool.speed(),
            own=pool.own_speed(),
            helpers=pool.helpers(self.each_s),
            counts=counts,
            gone=gone,
            wanted=(self.transfers[sender].wanted,) if client is not None and sender in self.transfers else (),
        )

    def verdicts(self, client: PeerId, numbers: Collection[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns those of a client's ``numbers`` whose results count, and those whose part, result or forward is of no
        use; of more than ``2 * MAX_KEPT``, the lowest: the client asks about the rest again. The answer about a part
        follows from the ledger, so it is the same however often a client asks."""
        ledger, kept = self.parts.holders().get(client, set()), self.parts.forwards_at(client)
        settled = {n for n in numbers if not self.pool.wants_back(client, n)}
        most = 2 * MAX_KEPT
        return tuple(sorted(settled & ledger)[:most]), tuple(sorted(settled - ledger - kept)[:most])

    def tell(self, client: PeerId) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the verdicts on the results of ``client`` since its last call, which it hears of with its next
        part."""
        if (known := self._clients.get(client)) is None:
            return (), ()
        counts, gone = self.verdicts(client, known.results - known.told)
        known.told |= {*counts}
        return counts, gone

    def wake(self, client: PeerId) -> None:
        """``client`` should hear soon that something is of no use."""
        if (known := self._clients.get(client)) is not None:
            known.hurry = True
            known.news.set()

    def withdraw(self) -> None:
        """Have clients hear which of their parts are no longer needed."""
        for worker, _ in self.pool.unwanted():
            self.wake(worker)

    # Who is there -----------------------------------------------------------------------------------------------------

    def lapsed(self, client: PeerId) -> None:
        """Work of ``client`` was lost."""
        self.standings[client].lapsed(self._version)
        if self.standings[client].left_out(self._version):
            self.pool.ready(client, 0)

    def lose(self, client: PeerId, why: str, *, again_at: PeerId | None = None, lapse: bool = True) -> None:
        """``client`` is gone, with all its work; one that is there after all begins anew. ``again_at``: the worker that
        computes the lost gradients again; ``lapse``: it is the client's fault if work is lost."""
        now, had_parts, again = self._clock.now(), self.pool.has_any(client), self.parts.again(client)
        self.pool.lost(client, now)
        self.parts.lost(client)
        for part in again:
            self.pool.put_part(part, now, again_at)
        if (transfer := self.transfers.pop(client, None)) is not None:
            transfer.taking.cancel()
        if lapse and (had_parts or again):
            self.lapsed(client)
        if (known := self._clients.pop(client, None)) is not None:
            self._lately[client] = known
            self._count(known, "redone", len(again))
            self._emit(ClientLost(peer_id=client, name=known.name, reason=why, parts=len(again)))
            known.news.set()
        self.news.set()
        self.feed()

    def expel(self, client: PeerId, why: str) -> None:
        """``client`` works here no more."""
        self._banned.add(client)
        self.lose(client, why)

    def digest(self, step: int) -> bytes:
        """Returns the digest of the weights for ``step``; empty: clients do not have these weights."""
        return self._digests.get(step, b"") if self._steps else self._digest or b""

    def __len__(self) -> int:
        return len(self._clients)

    def did_part(self, worker: PeerId) -> None:
        """A client, or the server itself, computed a part that counts."""
        if (known := self._clients.get(worker)) is not None:
            known.unable = 0
            self._count(known, "parts")
        else:
            self._own += 1

    def _count(self, client: _Client, what: PoolCount, times: int = 1) -> None:
        """Something happened to ``client``."""
        if times:
            self._counts.setdefault(client.name, Counter())[what] += times

    def report(self, step: int) -> None:
        """A step is applied: tell what each client did, and count anew."""
        busiest = sorted(self._counts, key=lambda name: (-self._counts[name]["parts"], name))[:MAX_COUNTED]
        counts = {name: dict(self._counts[name]) for name in busiest}
        self._emit(PoolWorked(step=step, stage=self.stage, own=self._own, clients=counts))
        self._own, self._counts = 0, {}

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
                self._count(known, "late")
                self._emit(ClientLate(peer_id=client, name=known.name))
                self._unable(client, known)

    def _on_lost(self, peer: PeerId, channel: Channel) -> None:
        """A stream with ``peer`` ended: frames may be lost, or the client is gone."""
        if peer in self._clients:
            self.doubt(peer)

    def doubt(self, client: PeerId) -> None:
        """``client`` takes unusually long, or gives no sign of life. It is to call again, which tells what it has; other
        workers may do its parts until then. Its accumulated gradients are not lost yet."""
        self.pool.doubt(client, self._clock.now())
        if (known := self._clients.get(client)) is not None and known.doubted_at is None:
            known.doubted_at, known.doubted_after = self._clock.now(), known.served
            known.news.set()
        self.feed()

    def silent(self) -> tuple[PeerId, ...]:
        """Returns the clients that were not heard of for long, once. Clients that are silent for as long again are
        lost."""
        now, now_s = self._clock.now(), loop_time_s()
        for peer, client in list(self._clients.items()):
            if client.doubted_at is not None and min(now - client.doubted_at, now_s - client.heard_s) > GONE_S:
                self.lose(peer, f"it has not called for {now_s - client.heard_s:.1f} s")
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
        check_result(self.plan, self.stage, self.pool.part(sender, message.number), message, tensors)

    async def _on_frame(self, sender: PeerId, frame: Frame) -> None:
        message = Result.parse(frame)
        client = self._clients.get(sender)
        if client is None or self.pool.part(sender, message.number) is None:
            return  # the client was lost, or the part taken back, while the frame came
        client.results.add(message.number)
        if not message.problem:
            await self._on_result(sender, message, frame.tensors[0] if frame.tensors else None)
        else:
            if self.pool.wants_back(sender, message.number):
                self._unable(sender, client)
            if client.unable > MAX_UNABLE:
                return self.lose(sender, f"it computes nothing: {message.problem[:200]}")
            self.on_unable(sender, message.number)
        client.news.set()

    def on_unable(self, client: PeerId, number: int) -> None:
        """A client did not compute a part: other workers may, but not from its forward."""
        part = self.pool.part(client, number)
        self.pool.failed(client, number, self._clock.now())
        if part is not None:
            self.parts.forward_lost(client, part)
        self.feed()

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
            self._copy = WeightsCopy(self.inner, (weights, steps))
            self._tasks.spawn(self._name(self._copy, steps), "weights")

    async def _name(self, copy: WeightsCopy, steps: tuple[int, ...]) -> None:
        """Tell clients of new weights."""
        try:
            await copy.name(self.inner.offload)
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
