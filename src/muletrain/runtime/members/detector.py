"""The failure detector of one peer decides which other peers to count on, by questions with measured deadlines. A
*suspected* peer is routed around, perhaps wrongly, and so is an *overdue* peer, for some steps: one that has not done
its part for long, whatever it answers. A peer that is *down* is not counted on until the peer is *back*.

Suspicion changes routing alone. A peer is marked down when unreachable, or on missing the patient deadline of a
question while nothing else comes from the peer either (the two levels of SWIM, Das et al. 2002). A peer that owes
answers about microbatches is asked by ``microbatch.dispatcher``.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from muletrain.errors import DeadlineExceeded, NetworkError, PeerUnreachable
from muletrain.events import PeerDown
from muletrain.policy.deadline import RECENT, Deadline, Usual
from muletrain.policy.overdue import Overdue
from muletrain.policy.recent import Recent
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.times import GONE_S, LAG_S, PATIENCE_S, pause_s
from muletrain.runtime.members.messages import Suspected
from muletrain.runtime.members.row import Row, Sync

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from muletrain.clock import Clock
    from muletrain.events import Event
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.waiting import News
    from muletrain.runtime.members.roster import Roster

AT_ONCE = 4
"""Long-gone peers tried at the same time: peers that went together would otherwise be dialled together, again and
again."""
MAX_ALARMS = 3
"""Unanswered questions after which the time for an answer no longer doubles."""
MAX_AGAIN = 4
"""Most repetitions of a missed question to a peer that is heard: nothing else came from the peer for ``LAG_S``."""
QUEUES = 2.0
"""Multiple of the measured queues to wait before a suspicion: queues vary by as much as their length, and repeating a
suspect's work adds load."""
BUSY_S, BURST_S = 0.02, 0.4
"""Links are busy if answers usually wait longer than BUSY_S seconds. A busy peer's uplink may hold BURST_S seconds of
data in front of an answer, from simultaneous flows to other peers, which we cannot measure."""


class Services(Protocol):
    """The parts of a peer that the detector needs (``Context``)."""

    net: Network
    clock: Clock
    roster: Roster
    news: News

    def emit(self, event: Event, /) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]: ...
    async def tell(self, peers: tuple[PeerId, ...], message: Message) -> None: ...


class FailureDetector:
    """The failure detector of one peer: the only judge of suspected, down and back."""

    def __init__(self, peer: Services) -> None:
        self._peer = peer
        self.deadline = Deadline(unmeasured_s=10.0, floor_s=1.5)
        """Deadline of answers to questions. On a starved machine a living peer's event loop stalls for a second at
        times (imports, garbage collection)."""
        self.suspected: set[PeerId] = set()
        self._overdue = Overdue()
        self.routes: list[Callable[[PeerId, str], None]] = []
        """Each is told of a peer that is suspected from now on, or overdue, and why: another peer must answer requests."""
        self.met: Callable[[PeerId, bytes], None] = lambda peer, branch: None
        """Is told of each peer that answers from another branch (``Rollback``)."""
        self.known: Callable[[PeerId, bytes, int], int] = lambda peer, lineage, step: 0
        """Returns the version of the statements of a peer that are known here (``StepRunner``); 0: none."""
        self.hear: Callable[[PeerId, bytes, int, Row], None] = lambda peer, lineage, step, row: None
        """Takes in every answer (``StepRunner``), so that no question leaves a lost notice unknown."""
        self._usual: Recent[Usual] = Recent()
        """Usual answer times of each peer, for suspicions."""
        self._waited_s: deque[float] = deque(maxlen=RECENT)
        """Delays of recent answers beyond the fastest answer of the same peer [s]."""
        self._awaited: defaultdict[PeerId, dict[asyncio.Future[Any], None]] = defaultdict(dict)
        """Awaited answers in order of creation: the order of a set would depend on addresses."""
        self._looked_after: set[PeerId] = set()
        self._late: set[PeerId] = set()
        """Peers that reported a late device: suspected until a better report."""
        self._tried: Recent[tuple[float, float]] = Recent()
        """First and last try of each peer that is down."""
        self._arriving: Recent[int] = Recent()
        """Bytes that each peer without a state had moved at its last answer."""
        self._alarms: Recent[int] = Recent()
        """Questions that a live peer has missed since its last answer. Only answers are measured, so without this count
        each question would fail like the previous where all peers are slow, as on cores that fleets share (RFC 6298,
        5.5)."""

    async def probe(
        self,
        peer: PeerId,
        lineage: bytes,
        step: int,
        *,
        hearsay: bool = False,
        brief: bool = False,
        record: bool = False,
    ) -> Row | None:
        """Ask a peer for its row (``Sync``), and suspect the peer if the answer takes longer than usual. Without an
        answer in time, mark the peer down and return None; but while anything still comes from the peer, ask again a
        few times. ``hearsay``: other peers suspect the peer already, and need no notice."""
        with self._suspecting(peer, lineage, step, hearsay):
            for again in range(MAX_AGAIN + 1):
                try:
                    row = await self._sync(peer, lineage, step, brief=brief, record=record)
                    break
                except DeadlineExceeded as e:
                    if again == MAX_AGAIN or self.silent_s(peer) > LAG_S:
                        self.mark_down(peer, e.why)
                        return None
                except PeerUnreachable as e:
                    self.mark_down(peer, e.why)
                    return None
                except NetworkError as e:
                    self.mark_down(peer, f"answered a probe with: {e}", declines=True)
                    return None
        if row.late:
            self._suspect(peer, lineage, step, hearsay)
            self.look_after(peer, lineage, step)
        # a peer at an earlier step is of no use to this step; one at a later step of this history has its record
        if row.current or (row.step > step and row.lineage and not row.rival):
            self.mark_back(peer)
        if row.current or row.lineage:
            self._arriving.pop(peer, None)
        else:
            if row.moved > self._arriving.setdefault(peer, row.moved):
                self._peer.news.arriving_s = self._peer.clock.now()
            self._arriving[peer] = row.moved
        return row

    @contextmanager
    def _suspecting(self, peer: PeerId, lineage: bytes, step: int, hearsay: bool) -> Iterator[None]:
        """Suspect ``peer`` once its answer is late and nothing else comes from ``peer`` either."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def late() -> None:
            nonlocal timer
            if (more_s := LAG_S - self.silent_s(peer)) > 0:
                timer = loop.call_later(more_s, late)
            else:
                self._suspect(peer, lineage, step, hearsay)

        timer = loop.call_later(self.suspicion_s(peer), late)
        try:
            yield
        finally:
            timer.cancel()
            if peer not in self._late:
                self.suspected.discard(peer)

    def suspicion_s(self, peer: PeerId, attempt: int = 0) -> float:
        """Returns the seconds without an answer after which ``peer`` is suspected, which costs little: a multiple of
        the peer's usual answer time, since the peer may be far away, plus the queues on the links. A peer that never
        answered is not suspected before being marked down."""
        usual = self._usual.get(peer)
        own_s = self.deadline.seconds(attempt) if usual is None else usual.seconds(attempt)
        queued_s = self._peer.net.queued_s(peer)
        if queued_s > BUSY_S or (self._waited_s and statistics.median(self._waited_s) > BUSY_S):
            queued_s = max(queued_s, BURST_S)
        return own_s + QUEUES * queued_s

    def _suspect(self, peer: PeerId, lineage: bytes, step: int, hearsay: bool) -> None:
        """Route around ``peer`` until there is news, and let the other peers ask, too, so that all peers learn at the
        same time whether ``peer`` lives. Only routes change, so a suspicion may be wrong."""
        if not self._peer.roster.is_alive(peer) or peer in self.suspected:
            return
        self.suspected.add(peer)
        self._route_around(peer, "its device is late" if peer in self._late else "it is silent")
        if not hearsay:
            others = tuple(p for p in self._peer.roster.others() if p != peer)
            self._peer.spawn(self._peer.tell(others, Suspected(lineage=lineage, step=step, peer=peer)), "suspected")

    def _route_around(self, peer: PeerId, why: str) -> None:
        for tell in self.routes:
            tell(peer, why)

    def note_overdue(self, peer: PeerId, step: int) -> None:
        """``peer`` has not done its part in ``step`` for long, whatever the reason, and whatever ``peer`` reports: other
        peers come first, for a number of steps that doubles. A stage's last peer is used all the same."""
        if self._overdue.note(peer, step):
            self._route_around(peer, "it is overdue")

    def avoided(self, step: int) -> set[PeerId]:
        """Returns the peers that get microbatches of ``step`` only if there are no others."""
        return self.suspected | self._overdue.at(step)

    def look_after(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """Find out whether ``peer`` is there, once at a time: after a suspicion by other peers, or the end of a
        stream."""
        asked = (peer in self.suspected and peer not in self._late) or peer in self._looked_after
        if self._peer.roster.is_alive(peer) and peer != self._peer.net.peer_id and not asked:
            self._looked_after.add(peer)
            looking = self._peer.spawn(self._look_after(peer, lineage, step), f"look after {peer[-6:]}")
            looking.add_done_callback(lambda _: self._looked_after.discard(peer))

    async def _look_after(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """Repeat the question while the peer's device is late: without new work, nothing else would end the suspicion.
        Ends within ``watchdog.hung_s``: then a peer with a late device ends, and answers no question."""
        for times in itertools.count():
            if times or peer not in self._late:
                await self.probe(peer, lineage, step, hearsay=True, brief=True)
            if peer not in self._late:
                return
            await self._peer.clock.sleep(pause_s(times))

    async def is_gone(self, peer: PeerId, lineage: bytes, step: int) -> bool:
        """Ask ``peer`` once, which measures the time of an answer and marks nobody down. Returns True if ``peer`` is
        unreachable, which is stronger evidence than a missing answer."""
        try:
            await self._sync(peer, lineage, step, brief=True)
        except NetworkError as e:
            return isinstance(e, PeerUnreachable)
        return False

    async def _sync(self, peer: PeerId, lineage: bytes, step: int, *, brief: bool = False, record: bool = False) -> Row:
        known, stage = self.known(peer, lineage, step), self._peer.roster.own.stage
        ask = Sync(lineage=lineage, step=step, stage=stage, known=known, brief=brief, record=record)
        begin, alarms = self._peer.clock.now(), self._alarms.get(peer, 0)
        waits = alarms if (lives := self._peer.roster.is_alive(peer)) else 0
        limit_s = self.deadline.seconds(waits) + self._peer.net.queued_s(peer)
        try:
            row = await ask.ask(self._peer.net, peer, timeout_s=limit_s)
        except DeadlineExceeded:
            if lives and alarms == self._alarms.get(peer, 0) < MAX_ALARMS:
                self._alarms[peer] = alarms + 1
            raise
        self._alarms.pop(peer, None)
        (self._late.add if row.late else self._late.discard)(peer)
        if (took_s := self._peer.clock.now() - begin) <= limit_s:  # else this machine has slept
            self.deadline.measured(took_s)
            if peer not in self._usual:
                self._usual[peer] = Usual(unmeasured_s=math.inf, floor_s=LAG_S, times=4.0, slow_times=1.5)
            self._usual[peer].measured(took_s)
            self._waited_s.append(took_s - self._usual[peer].fastest_s)
        if row.branch != branch_of(lineage):
            self.met(peer, row.branch)
            return row.model_copy(update={"current": False, "step": 0, "lineage": b"", "rival": False})
        self.hear(peer, lineage, step, row)
        return row

    def worth_a_try(self, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        """Returns the live ``peers``, and peers that are down but were not tried for a quarter of the time since the
        first try (at most ``PATIENCE_S``). Such peers may be back, but a try costs connections, and in a long run many
        peers are gone for good. A returning peer announces itself."""
        now, worth, long_dead = self._peer.clock.now(), [], 0
        for peer in peers:
            if self._peer.roster.is_alive(peer):
                self._tried.pop(peer, None)
                worth.append(peer)
                continue
            since, last = self._tried.get(peer, (now, -math.inf))
            long = now - since > GONE_S
            if now - last >= min(PATIENCE_S, (now - since) / 4) and not (long and long_dead == AT_ONCE):
                long_dead += long
                self._tried[peer] = since, now
                worth.append(peer)
        return tuple(worth)

    def mark_down(self, peer: PeerId, reason: str, *, declines: bool = False, reached: bool = False) -> None:
        """Stop counting on ``peer`` until news of ``peer``. Only routing and rounds change. ``declines``: see
        ``Roster.mark_dead``. ``reached``: the peer answers, so transfers to the peer continue: the peer may need the
        data to become useful again."""
        self.clear(peer)
        if self._peer.roster.mark_dead(peer, declines=declines, doubtful=not (declines or reached)):
            name, own = self._peer.roster.name(peer), self._peer.roster.own.name
            told = "this peer has taken over its name" if name == own else reason  # how to reach it helps nobody
            self._peer.emit(PeerDown(peer_id=peer, reason=told, name=name))
            self.give_up(peer, reason)
            if not reached:
                self._peer.net.give_up(peer)
            self._peer.news.hurry()

    def mark_back(self, peer: PeerId) -> bool:
        """There is news of ``peer``: count on it. Returns True if ``peer`` was down, or had left."""
        return self._peer.roster.mark_alive(peer)

    def stand_aside(self, peer: PeerId) -> None:
        """``peer`` asked not to be counted on for now. The peer is reachable, so transfers to the peer continue."""
        if self._peer.roster.mark_dead(peer, declines=True):
            self.give_up(peer, "it takes a state")
            self._peer.news.hurry()

    def clear(self, peer: PeerId) -> None:
        """End the suspicion of ``peer``."""
        self._late.discard(peer)
        self.suspected.discard(peer)

    @contextmanager
    def awaiting(self, peer: PeerId, answer: asyncio.Future[Any]) -> Iterator[None]:
        """``answer``, which ``peer`` owes, fails with PeerUnreachable as soon as the peer is marked down."""
        answer.add_done_callback(lambda f: f.cancelled() or f.exception())  # the waiter may have given up already
        self._awaited[peer][answer] = None
        try:
            yield
        finally:
            (answers := self._awaited[peer]).pop(answer, None)
            if not answers:
                del self._awaited[peer]

    def give_up(self, peer: PeerId, reason: str) -> None:
        """Nothing more comes from ``peer``: fail the answers owed by ``peer``."""
        for answer in self._awaited.pop(peer, {}):
            if not answer.done():
                answer.set_exception(PeerUnreachable(reason, self._peer.roster.name(peer)))

    def silent_s(self, peer: PeerId) -> float:
        """Returns the seconds since anything at all came from ``peer``: a part of a frame, a receipt, an answer."""
        return asyncio.get_running_loop().time() - self._peer.net.heard_s(peer)

    async def ask_all(self, peers: tuple[PeerId, ...], lineage: bytes, step: int) -> dict[PeerId, Row]:
        """Returns the rows of the answering ``peers``. Peers that are down are asked, too, since they may be back, but
        only live peers are waited for, if there are any. Ends within a probe's deadline, doubled for peers that are
        heard."""
        asked = {p: asyncio.create_task(self.probe(p, lineage, step)) for p in self.worth_a_try(peers)}
        living = [task for p, task in asked.items() if self._peer.roster.is_alive(p)]
        try:
            if asked:
                await asyncio.wait(living or asked.values())
        finally:
            for task in asked.values():
                task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
        return {p: row for p, t in asked.items() if not t.cancelled() and (row := t.result()) is not None}
