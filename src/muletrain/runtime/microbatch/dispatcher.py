"""Sends a microbatch onwards: chooses a peer of a stage, pushes the tensors, and waits for the answer.

Trainers (towards stage 0) and peers (towards the next stage) do this alike. Activations travel from peer to peer. The
strategy names the peers that may get the microbatch; each sender then chooses by measurements (``Dispatcher._choose``;
SWARM sec. 3.2, app. C).

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
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from muletrain.errors import DeadlineExceeded, MuletrainError, PeerUnreachable, ProtocolError
from muletrain.events import MicrobatchRerouted
from muletrain.policy.deadline import RetryBudget, Usual
from muletrain.policy.rooms import Rooms
from muletrain.policy.trips import Trips
from muletrain.policy.wiring import GAMMA, Wiring
from muletrain.runtime.core.times import LOOK_S, PAUSE_MAX_S
from muletrain.runtime.core.waiting import unless_done
from muletrain.runtime.microbatch.messages import Backward, Forward, Lost, Why
from muletrain.wire.codec import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from muletrain.network.base import PeerId
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.row import Row
    from muletrain.runtime.microbatch.messages import Attempt
    from muletrain.runtime.microbatch.position import Survey
    from muletrain.wire.codec import Encoded

FLOOR_S = 0.3
"""Seconds of silence, at least, before a peer that owes answers is asked. Of ``LAG_S`` seconds, three times as many
microbatches were computed twice (``tests/test_trainers.py``)."""
TICK_S = 1e-3
"""Shortest pause between two checks (clocks are not exact) [s]."""
Key = tuple[int, int, int, str]


class Declined(NamedTuple):
    """No answer comes from the peer that was asked. ``why``: as the peer says; None: it is not to be reached, or misses
    every deadline."""

    why: Why | None
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


COPIES, COPIES_SHARE = 2.0, 0.1
"""Budget of microbatches that are computed twice because a peer is suspected: at first this multiple of a peer's
capacity, then this share of the answered microbatches."""


class Unfinite(MuletrainError):
    """The activations are not finite. The sender reports this, so that another peer computes the activations again."""


class StageLost(MuletrainError):
    """No peer of the stage could take the microbatch now."""


class Dispatcher:
    """Sends the requests of one peer towards one stage."""

    def __init__(self, ctx: Context, stage: int, survey: Survey) -> None:
        self._ctx, self._stage, self._survey = ctx, stage, survey
        gamma = 1.0 if ctx.plan.strategy.pooled else GAMMA  # a pool reports averages over its present clients
        self._wiring = Wiring(random.Random(f"{ctx.net.peer_id}/{stage}"), gamma)
        self.trips = Trips(ctx.plan.stages - stage, ctx.compute.jobs.longest_s, ctx.queue_s)
        self._rooms, self._room, self._waiting = Rooms(), asyncio.Event(), 0
        self.debtors = Debtors(ctx, stage, self.trips, self._is_overdue)
        self._copies = RetryBudget(COPIES * ctx.plan.capacity, COPIES_SHARE)
        ctx.detector.routes.append(self._on_suspected)

    def begin(self) -> None:
        """A step begins: peers that were full or failed may have room."""
        self._rooms.begin()
        self.refresh()

    def refresh(self) -> None:
        """Take the roster's view of which peers serve the stage."""
        alive = {p: self._device_s(p) for p in self._ctx.roster.stage(self._stage)}
        self._wiring.serve(alive)
        self._rooms.serve(alive)
        self._room.set()

    def welcome(self, peer: PeerId) -> None:
        """``peer`` had gone, and announces its return."""
        if peer in self._ctx.roster.stage(self._stage):
            self._wiring.add(peer, self._device_s(peer))
            self.on_room(peer)

    def _device_s(self, peer: PeerId) -> float:
        """Returns the seconds for a microbatch, both ways, by the device speed that ``peer`` states; 0: not stated."""
        work, flops = self._ctx.plan.work, self._ctx.roster.member(peer).flops
        return 3 * work[self._stage] / flops if work and flops else 0.0

    def on_reply(self, sender: PeerId, reply: Backward | Lost, tensors: list[Encoded]) -> None:
        """Match an answer with its request. Late answers to requests that were given up, or sent elsewhere since, are
        dropped. Raises ProtocolError for an unrequested or missing gradient."""
        pending = self.debtors.owed(sender).get(reply.key)
        if pending is None or pending.reply.done():
            return
        if isinstance(reply, Backward) and bool(tensors) != pending.gradient:
            raise ProtocolError(f"{reply.KIND}: {'a' if pending.gradient else 'no'} gradient was requested")
        self.debtors.heard(sender)
        why = None if isinstance(reply, Backward) else reply.why
        if why not in (Why.FULL, Why.AT_IT):
            self._rooms.answered(sender, took=why is None)
        elif why is Why.FULL and sender in self._wiring.peers():
            each_s = self._wiring.expected_s(sender) if self.trips.known else None
            self._rooms.refused(sender, self._ctx.clock.now(), each_s)
        pending.reply.set_result((reply, tensors))

    def on_room(self, sender: PeerId) -> None:
        """``sender`` was full, and has room now."""
        if self._rooms.offered(sender, self._ctx.clock.now()):
            self._room.set()

    async def request(
        self,
        request: Attempt,
        accumulate: tuple[int, ...],
        tensors: list[Encoded],
        tried: Collection[PeerId] = (),
        *,
        gradient: bool,
        unfinite: bool = False,
    ) -> Answer:
        """Get one microbatch through this stage and all later stages, without the ``tried`` peers. Peers that
        ``request`` leaves out come last.

        ``gradient``: d loss / d input should come back. ``unfinite``: see ``Forward``. If the first peer reports that
        the microbatch does not stay finite, a second peer decides, or the first peer itself if there is no other.
        Raises StageLost when every live peer failed, and Unfinite when our activations are not
        finite, and should be.
        """
        begun_s = full_s = self._ctx.clock.now()
        # left-out peers may still compute copies, and results for comparison
        last = {*request.without} if self._stage in accumulate else set()
        failed, at_it = {*tried}, dict["PeerId", float]()
        while True:
            now_s = self._ctx.clock.now()
            at_it = {p: until_s for p, until_s in at_it.items() if until_s > now_s}
            closed = (self._rooms.full(now_s) | at_it.keys()) & {*self._wiring.peers()} - failed
            full = {p for p in closed if self._ctx.roster.is_alive(p)}
            peer = self._choose(request, failed, last, full, now_s - begun_s)
            if peer is None and full:
                await self._until_room()
                if self._ctx.clock.now() - full_s >= self.trips.long_s():
                    if tried:
                        raise StageLost(f"stage {self._stage}: nobody else has room for long")
                    for overdue in full - at_it.keys():
                        self._ctx.detector.note_overdue(overdue, request.step)
                    full_s, failed = self._ctx.clock.now(), set()
                continue
            if peer is None:
                # peers of the stage that were down or banned, and answer, count again from the next request on
                here = (p for p in self._ctx.roster.everyone() if self._ctx.roster.member(p).stage == self._stage)
                await asyncio.gather(*(self._ctx.detector.probe(p, request.lineage, request.step) for p in here))
                self.refresh()
                raise StageLost(
                    f"stage {self._stage}: no live peer could take microbatch {request.step}/{request.index}"
                )
            pending = Pending(peer, request, tensors, frozenset({*failed, peer}), gradient, unfinite)
            answer = await self._from(pending, accumulate)
            if isinstance(answer, Answer):
                return answer
            if answer.why is Why.FULL:
                continue
            if answer.why is Why.AT_IT:
                now_s, most_s = self._ctx.clock.now(), max(PAUSE_MAX_S, self.trips.usual_s() / 4)
                at_it[peer] = now_s + min(most_s, max(LOOK_S, now_s - begun_s))
                continue
            if answer.why is Why.UNFINITE and not unfinite:
                if not await self._ctx.compute.offload(_finite, tensors[0]):
                    raise Unfinite(f"activations of microbatch {request.step}/{request.index}: not finite")
                unfinite = True
                last.add(peer)
            else:
                self._wiring.ban(peer)
                failed.add(peer)
            self._rerouted(peer, request, answer.reason)
            if answer.why is None:
                self._ctx.detector.mark_down(peer, answer.reason)
            accumulate = await self.missing(request, accumulate)
            full_s = self._ctx.clock.now()  # full peers were not asked during that failure

    async def _until_room(self) -> None:
        """Wait until a peer has room, or until the next check."""
        self._room.clear()
        self._waiting += 1
        try:
            await self._ctx.clock.deadline(self._room.wait(), LOOK_S, "room at a full peer")
        except DeadlineExceeded:
            pass
        finally:
            self._waiting -= 1

    def _choose(
        self, request: Attempt, failed: set[PeerId], last: set[PeerId], full: set[PeerId], waited_s: float
    ) -> PeerId | None:
        """Choose the next peer: the fastest that the strategy allows. A suspected or overdue peer, or one of ``last``,
        is chosen only if all are, even if we have to wait for room elsewhere. ``sim.steps.steps`` copies this for
        peers that never fail."""
        known = set(self._wiring.peers())
        usable = {p for p in known if self._ctx.roster.is_alive(p)} - failed
        trusted = (usable - last - self._ctx.detector.avoided(request.step)) or usable
        there = {name: p for name, p in self._ctx.roster.seated(self._stage).items() if p in trusted}
        index = request.index % self._ctx.plan.microbatches  # held-out microbatches have higher indices
        chosen = self._ctx.plan.strategy.choose(self._stage, index, there.keys())
        excluded = known - ({there[name] for name in chosen} or trusted)
        under_way = {p: len(self.debtors.owed(p)) for p in self.debtors}
        now_s = self._ctx.clock.now()
        return self._wiring.choose(excluded, under_way, full=full, step=request.step, now_s=now_s, waited_s=waited_s)

    async def _from(self, pending: Pending, accumulate: tuple[int, ...]) -> Answer | Declined:
        """Returns the answer of one peer. When the peer is suspected, another peer computes the microbatch, too, but
        accumulates nothing, here and in later stages. If the suspect lives, its accumulator has the microbatch; if not,
        that accumulator is lost anyway, and the stage runs its microbatches again. So a false alarm costs a single
        computation, and no microbatch is ever in two accumulators. Ends after ``microbatch/dispatcher._try``, also of a
        copy."""
        peer, request = pending.peer, pending.request
        if request.key in self.debtors.owed(peer):
            what = f"microbatch {request.step}/{request.index} attempt {request.attempt}"
            raise ProtocolError(f"{what} is already under way")
        self.debtors.add(pending)
        try:
            got = await self._try(pending, accumulate)
            if isinstance(got, Declined) and (copy := pending.copy) is not None:
                await asyncio.wait({copy})
                return got if copy.exception() else copy.result()
            return got
        finally:
            self.debtors.remove(pending)
            if (copy := pending.copy) is not None:
                copy.cancel()
                await asyncio.wait({copy})

    def expects_another_than(self, peer: PeerId) -> bool:
        """Does another, unsuspected peer owe a gradient?"""
        trusted = {*self.debtors} - {peer, *self._ctx.detector.suspected}
        return any(owed.gradient for p in trusted for owed in self.debtors.owed(p).values())

    def _on_suspected(self, peer: PeerId, why: str) -> None:
        if self.debtors.owed(peer):
            self._ctx.spawn(self._have_copied(peer, why), f"copies for {peer[-6:]}")

    async def _have_copied(self, peer: PeerId, why: str) -> None:
        """Let other peers compute the microbatches owed by ``peer``, oldest first, as fast as these peers can: most
        suspects are soon heard again. Ends after ``microbatch/dispatcher._try`` of what the peer owes."""
        while owed := [p for p in self.debtors.owed(peer).values() if p.copy is None and not p.reply.done()]:
            avoided = self._ctx.detector.avoided(owed[0].request.step)
            others = set(self._wiring.peers()) - avoided
            if peer not in avoided or not others or not self._have_one_copied(owed[0], why):
                return
            await self._ctx.clock.sleep(1 / sum(1 / self._wiring.expected_s(p) for p in others))

    def _have_one_copied(self, pending: Pending, why: str) -> bool:
        """Let another peer compute ``pending``, and accumulate nothing. Returns False if no copy is left."""
        p = pending
        if not self._copies.spend():
            return False
        self._rerouted(p.peer, p.request, f"{why}, so another peer computes a copy")

        def copied(copy: asyncio.Task[Answer]) -> None:
            if copy.cancelled() or copy.exception():
                p.copy = None  # another copy may follow
            elif not p.reply.done():
                p.reply.set_result(copy.result())

        copying = self.request(p.request, (), p.tensors, p.tried, gradient=p.gradient, unfinite=p.unfinite)
        p.copy = asyncio.create_task(copying)
        p.copy.add_done_callback(copied)
        return True

    async def missing(self, request: Attempt, accumulate: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the stages that should accumulate a microbatch that failed here. An earlier try may have gone
        through, so stages from ours on that hold the microbatch are left out."""
        r, ours, ignored = request, tuple(s for s in accumulate if s >= self._stage), request.without.__contains__
        still, _ = await self._survey.still_missing(r.lineage, r.step, r.index, ours, self.trips.usual_s, ignored)
        return tuple(s for s in accumulate if s < self._stage or s in still)

    async def _try(self, pending: Pending, accumulate: tuple[int, ...]) -> Answer | Declined:
        """Send to one peer, then wait for the peer's work. Ends after ``microbatch/stage_server._compute_forward`` and
        ``microbatch/stage_server._accumulated`` at this stage and later ones, or earlier if the request is
        overdue."""
        clock, peer, request = self._ctx.clock, pending.peer, pending.request
        message = Forward(
            **request.identity(),
            without=request.without,
            stage=self._stage,
            accumulate=accumulate,
            gradient=pending.gradient,
            unfinite=pending.unfinite,
            more=self._waiting > 0,
        )
        begin = clock.now()
        self._rooms.sent(peer, begin, more=message.more)
        try:
            with self._ctx.detector.awaiting(peer, pending.reply):
                # a frozen receiver takes no more than its buffers hold
                await unless_done(pending.reply, self._ctx.send(peer, message, list(pending.tensors)))
                pending.sent_s = clock.now()
                pending.due_s = pending.sent_s + self.trips.deadline_s()
                got = await pending.reply
        except (PeerUnreachable, DeadlineExceeded) as e:
            return Declined(None, e.why)
        if isinstance(got, Answer | Declined):
            return got
        reply, answer = got
        if isinstance(reply, Lost):
            return Declined(reply.why, reply.reason)
        took = clock.now() - begin
        if request.index < self._ctx.plan.microbatches:  # held-out microbatches take different times
            self._copies.succeeded()
            busy_s, way_s = self.trips.measured(took, reply.busy_s, reply.away_s)
            self._wiring.measured(peer, busy_s, way_s, clock.now())
        return Answer(peer, reply.loss, answer[0] if answer else None, pending.unfinite, took)

    def _is_overdue(self, pending: Pending) -> bool:
        """Route around the peer of an overdue ``pending`` request, and let another peer compute a copy. Returns True if
        no copy is possible although the stage has other peers: then give the request up, and try anew. Before any
        measurement all peers may be slow, so nothing is given up."""
        alone = self._ctx.roster.stage(self._stage) == (pending.peer,)
        if alone or pending.copy is not None or self._ctx.clock.now() - pending.sent_s < self.trips.long_s():
            return False
        detector, step = self._ctx.detector, pending.request.step
        detector.note_overdue(pending.peer, step)
        others = set(self._wiring.peers()) - pending.tried - detector.avoided(step)
        copied = others and self._have_one_copied(pending, "it is overdue")
        return self.trips.known and not copied

    def _rerouted(self, peer: PeerId, request: Attempt, reason: str) -> None:
        reason = f"{self._ctx.roster.name(peer)}: {reason}"
        self._ctx.emit(MicrobatchRerouted(step=request.step, index=request.index, stage=self._stage, reason=reason))


def _finite(tensor: Encoded) -> bool:
    return bool(decode(tensor, copy=False).isfinite().all())
