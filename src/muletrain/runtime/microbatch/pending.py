"""The requests of one sender that peers of a stage have not answered yet.

One task watches all peers that owe answers. A peer that is silent for longer than usual gets a question, which costs
nothing; so does a peer that misses the deadline of a request, or whose stream ended. If that answer takes longer than
usual, the peer is *suspected*: another peer also computes the owed microbatches, and the suspect gets no new work. The
peer is marked down after missing the question's own, patient deadline (``FailureDetector.probe``): from then on its
accumulated microbatches are run again. If the answer shows that the peer lacks a request, the request is lost; if the
peer has had the request for long, it is overdue.

A peer whose event loop answers may have a device that hangs. The peer reports this in its answers
(``members.watchdog``), is then suspected, too, and marked down on refusing to answer. A long queue or a slow link is no
reason.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from muletrain.policy.deadline import Usual
from muletrain.runtime.core.times import LOOK_S
from muletrain.runtime.microbatch.messages import Why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muletrain.network.base import PeerId
    from muletrain.policy.trips import Trips
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.row import Row
    from muletrain.runtime.microbatch.messages import Attempt, Backward, Lost
    from muletrain.wire.codec import Encoded


FLOOR_S = 0.3
"""Seconds of silence, at least, before a peer that owes answers is asked. Of ``LAG_S`` seconds, three times as many
microbatches were computed twice (``tests/test_trainers.py``)."""
TICK_S = 1e-3
"""Shortest pause between two checks (clocks are not exact) [s]."""
Key = tuple[int, int, int, str]


class Declined(NamedTuple):
    """No answer comes from the peer that was asked."""

    why: Why
    reason: str = ""


@dataclass
class Answer:
    """The answer to a request: the loss [nats/token] and, on request, d loss / d output as sent. ``unfinite``: another
    peer had found that the microbatch does not stay finite."""

    peer: PeerId
    loss: float
    gradient: Encoded | None
    unfinite: bool
    took_s: float


Reply = tuple["Backward | Lost", "list[Encoded]"] | Answer | Declined


@dataclass
class Pending:
    """One peer owes the answer to one request."""

    peer: PeerId
    request: Attempt
    tensors: list[Encoded]
    tried: frozenset[PeerId]
    """Peers that compute no copy: ``peer`` has the request, and the rest have failed."""
    gradient: bool
    unfinite: bool
    reply: asyncio.Future[Reply] = field(default_factory=asyncio.Future)
    """The peer's own answer, or the answer of another peer that computed a copy meanwhile."""
    copy: asyncio.Task[Answer] | None = None
    """The copy's answer, once the peer is suspected, or overdue."""
    sent_s: float = math.inf
    """When all of the request had left."""
    due_s: float = math.inf
    """When to ask the peer about the request."""
    attempt: int = 0
    """Missed deadlines."""
    broke: bool = False
    """A stream with the peer ended, which may have carried the request or the answer."""
    again: bool = False
    """The last question followed a broken stream; at the next, everything sent since should have come."""

    def copied_by(self, copy: asyncio.Task[Answer]) -> None:
        """Take the answer of ``copy``, if ``copy`` is first."""
        self.copy = copy
        copy.add_done_callback(self._copied)

    def _copied(self, copy: asyncio.Task[Answer]) -> None:
        if copy.cancelled() or copy.exception():
            self.copy = None  # another copy may follow
        elif not self.reply.done():
            self.reply.set_result(copy.result())


@dataclass(slots=True)
class _Debtor:
    """A peer that owes answers. ``attempt``: questions to the peer since it was last ``heard``."""

    heard: float
    asked: float = -math.inf
    attempt: int = 0
    asking: bool = False
    owed: dict[Key, Pending] = field(default_factory=dict)


class Debtors:
    """Watches the peers of one stage that owe us answers. One task serves all peers, because answers are many, and
    silences rare."""

    def __init__(self, ctx: Context, stage: int, trips: Trips, is_overdue: Callable[[Pending], bool]) -> None:
        """``is_overdue`` is called after each question about a request that the peer still has, and returns True to
        give the request up."""
        self._ctx, self._stage, self._trips, self._is_overdue = ctx, stage, trips, is_overdue
        self._usual = Usual(unmeasured_s=10.0, floor_s=FLOOR_S, times=2.0)
        """Seconds between two answers of a peer that owes us some. To ask once too often is better than to wait."""
        self._debtors: dict[PeerId, _Debtor] = {}
        self._listening = False

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._debtors)

    def owed(self, peer: PeerId) -> dict[Key, Pending]:
        """Returns the requests that ``peer`` has not answered, the oldest first."""
        return self._debtors[peer].owed if peer in self._debtors else {}

    def add(self, pending: Pending) -> None:
        """``pending.peer`` is about to owe us an answer."""
        debtor = self._debtors.setdefault(pending.peer, _Debtor(self._ctx.clock.now()))
        debtor.owed[pending.request.key] = pending
        if not self._listening:
            self._listening = True
            self._ctx.spawn(self._listen(), f"listen to stage {self._stage}")

    def remove(self, pending: Pending) -> None:
        """Nothing more is owed for ``pending``."""
        owed = self._debtors[pending.peer].owed
        del owed[pending.request.key]
        if not owed:
            del self._debtors[pending.peer]

    def sent(self, pending: Pending) -> None:
        """All of the request has left."""
        pending.sent_s = self._ctx.clock.now()
        pending.due_s = pending.sent_s + self._trips.deadline_s()

    def heard(self, peer: PeerId) -> None:
        """``peer`` answered."""
        now, debtor = self._ctx.clock.now(), self._debtors[peer]
        self._usual.measured(now - debtor.heard)
        debtor.heard, debtor.attempt = now, 0
        self._ctx.detector.clear(peer)

    def broken(self, peer: PeerId) -> None:
        """A stream with ``peer`` ended: ask at once what ``peer`` still has."""
        for pending in self.owed(peer).values():
            if pending.sent_s < math.inf:
                pending.broke, pending.due_s = True, self._ctx.clock.now()
        if peer in self._debtors and not self._debtors[peer].asking:
            self._begin(peer, self._debtors[peer])

    async def _listen(self) -> None:
        """Check while any peer owes us answers. The deadline of a request, which may wait in a queue, would reveal a
        frozen peer much later. Ends after ``microbatch/dispatcher._try`` of every request."""
        try:
            while self._debtors:
                await self._ctx.clock.sleep(self._ask_the_late())
        finally:
            self._listening = False

    def _ask_the_late(self) -> float:
        """Ask the peers that are due. Returns the seconds until the next peer is due; a peer that begins to owe an
        answer later is not due before that."""
        now, wait_s = self._ctx.clock.now(), min(LOOK_S, self._usual.seconds())
        for peer, debtor in list(self._debtors.items()):
            if not debtor.asking and (due_s := self._due_s(peer, debtor)) > now:
                wait_s = min(wait_s, due_s - now)
            elif not debtor.asking:
                self._begin(peer, debtor)
        return max(wait_s, TICK_S)

    def _due_s(self, peer: PeerId, debtor: _Debtor) -> float:
        """Returns when to ask ``peer``. A stage's last peer is asked about requests, and not given up for being
        silent."""
        requests_s = min((p.due_s for p in debtor.owed.values() if not p.reply.done()), default=math.inf)
        if self._ctx.roster.stage(self._stage) == (peer,):
            return requests_s
        return min(requests_s, max(debtor.asked, debtor.heard) + self._usual.seconds(debtor.attempt))

    def _begin(self, peer: PeerId, debtor: _Debtor) -> None:
        """Ask ``peer`` for a sign of life and, where deadlines of requests are over, which of these it works on."""
        now = self._ctx.clock.now()
        due = [p for p in debtor.owed.values() if p.due_s <= now and not p.reply.done()]
        request = (due or [*debtor.owed.values()])[0].request
        due = [p for p in due if p.request.step == request.step]
        debtor.asked, debtor.attempt, debtor.asking = now, debtor.attempt + 1, True
        self._ctx.spawn(self._ask(peer, debtor, request, due), f"listen to {peer[-6:]}")

    async def _ask(self, peer: PeerId, debtor: _Debtor, request: Attempt, due: list[Pending]) -> None:
        detector = self._ctx.detector
        row = await detector.probe(peer, request.lineage, request.step, brief=not due)
        if row is None:
            detector.give_up(peer, "it is silent, and answers no probe")
        else:
            for pending in due:
                if not pending.reply.done():
                    self._judge(pending, row)
        debtor.asking = False

    def _judge(self, pending: Pending, row: Row) -> None:
        """Give up a request that its peer lacks, by its ``row``, or has had for too long. A question overtakes a long
        request, and a long answer."""
        index, detector = pending.request.index, self._ctx.detector
        what = f"microbatch {pending.request.step}/{index} at stage {self._stage}"
        at_it = index in row.in_flight or index in row.answering
        on_its_way = not row.current if pending.again else pending.attempt == 0 and index in row.accumulated
        if not (at_it or pending.broke or on_its_way):
            pending.reply.set_result(Declined(Why.GONE, f"{what}: it is not working on it"))
        elif self._is_overdue(pending):
            pending.reply.set_result(Declined(Why.GONE, f"{what}: it is overdue"))
        else:
            pending.attempt += not (pending.broke or pending.again)
            pending.again, pending.broke = pending.broke and not at_it, False
            limit_s = detector.deadline.seconds() + self._ctx.net.queued_s(pending.peer)
            limit_s = limit_s if pending.again else self._trips.deadline_s(pending.attempt)
            pending.due_s = self._ctx.clock.now() + limit_s
