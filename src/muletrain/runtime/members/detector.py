"""The failure detector of one peer: who is *suspected* (routed around, which may be wrong), who is *down* (not counted
on until it is *back*), by questions whose deadlines are measured.

Suspicion changes routing alone. A peer is marked down when it cannot be reached, or misses a question's own, patient
deadline while nothing else comes from it either (Das et al. 2002, SWIM, has the same two levels).
``runtime.members.silence`` says when a peer that owes answers is asked.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from muletrain.errors import DeadlineExceeded, NetworkError, PeerUnreachable
from muletrain.events import PeerSuspected
from muletrain.policy.deadline import RECENT, Deadline, Usual, backoff_s
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.members.messages import GetProgress, Progress, Suspected

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from muletrain.clock import Clock
    from muletrain.events import Event
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.waiting import News
    from muletrain.runtime.members.roster import Roster

LONG_S, RARELY_S = 60.0, 300.0
"""Seconds after which a peer has been down for long, and the longest pause between two tries of one that has."""
AT_ONCE = 4
"""Of those, tried at the same time: many that went together would else be dialled together, again and again."""
LATE_S, LATE_MAX_S = 1.0, 10.0
"""Seconds between two questions to a peer whose device is late, the first time and at most; doubles."""
MAX_ALARMS = 3
"""After which the time that an answer has does not double any more."""
HEARD_S, MAX_AGAIN = 0.25, 4
"""Seconds within which something came from a peer that is not silent: a question that it did not answer is asked again,
so many times."""
QUEUES = 2.0
"""Times the queues on the way that are added before a peer is suspected: queues change by as much as they are long, and
what a suspicion has computed again is more load."""
BUSY_S, BURST_S = 0.02, 0.25
"""Links are busy where answers usually wait longer than the first [s]. Then a peer's uplink may hold the second [s] of
data in front of an answer, which we cannot measure: its flows to others may have begun together."""


class Services(Protocol):
    """What the detector needs of its peer (``Context``)."""

    net: Network
    clock: Clock
    roster: Roster
    news: News

    @property
    def emit(self) -> Callable[[Event], None]: ...
    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]: ...
    async def tell(self, peers: tuple[PeerId, ...], message: Message) -> None: ...


class FailureDetector:
    """One peer's."""

    def __init__(self, peer: Services) -> None:
        self._peer = peer
        self.deadline = Deadline(unmeasured_s=10.0, floor_s=1.5)
        """Of answers to questions. On a starved machine a living peer's event loop stalls for a second at times
        (imports, garbage collection)."""
        self.suspected: set[PeerId] = set()
        self.on_suspicion: list[Callable[[PeerId], None]] = []
        """Told of those that are suspected from now on."""
        self.on_other_branch: list[Callable[[PeerId, bytes], None]] = []
        """Told of a peer that answers from another branch than ours, and of that branch."""
        self._usual: dict[PeerId, Usual] = {}
        """How long a peer's answers take, for suspicions."""
        self._waited_s: deque[float] = deque(maxlen=RECENT)
        """What recent answers of all peers took beyond each peer's fastest."""
        self._awaited: defaultdict[PeerId, dict[asyncio.Future[Any], None]] = defaultdict(dict)
        """In the order in which they began: sets would have one that depends on addresses."""
        self._looked_after: set[PeerId] = set()
        self._late: set[PeerId] = set()
        """Peers that said so of their devices: suspected, until they say otherwise."""
        self._tried: dict[PeerId, tuple[float, float]] = {}
        """Of those that are down: when they were tried first, and last."""
        self._alarms: Counter[PeerId] = Counter()
        """Questions that peers that are not down did not answer in time, since they last did. Only answers are
        measured, so that where everyone is slow (cores that fleets share) each question would come to the same wrong
        end as the one before (RFC 6298, 5.5)."""

    async def probe(
        self,
        peer: PeerId,
        lineage: bytes,
        step: int,
        attempt: int = 0,
        *,
        hearsay: bool = False,
        brief: bool = False,
    ) -> Progress | None:
        """Ask a silent peer what it holds (``brief``: whether it is there). It is suspected when the answer takes
        longer than such answers do. None, and it is marked down, if it does not answer in time; while something still
        comes from it, it is asked again, a few times. ``hearsay``: others suspect it; they know."""
        with self._suspecting(peer, attempt, partial(self._suspect, peer, lineage, step, hearsay)):
            for again in range(MAX_AGAIN + 1):
                try:
                    progress = await self._get_progress(peer, lineage, step, attempt, brief=brief)
                    break
                except DeadlineExceeded as e:
                    if again == MAX_AGAIN or self.silent_s(peer) > HEARD_S:
                        self.mark_down(peer, str(e))
                        return None
                except PeerUnreachable as e:
                    self.mark_down(peer, str(e))
                    return None
                except NetworkError as e:
                    self.mark_down(peer, f"answered a probe with: {e}", declines=True)
                    return None
        if progress.late:
            self._suspect(peer, lineage, step, hearsay)
            self.look_after(peer, lineage, step)
        if progress.current:  # at another step it is of no use to this one, however well it may be
            self._peer.roster.alive(peer)
        return progress

    @contextmanager
    def _suspecting(self, peer: PeerId, attempt: int, suspect: Callable[[], None]) -> Iterator[None]:
        """``suspect`` is called once the answer of ``peer`` is late, and nothing else comes from it either."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def late() -> None:
            nonlocal timer
            if (more_s := HEARD_S - self.silent_s(peer)) > 0:
                timer = loop.call_later(more_s, late)
            else:
                suspect()

        timer = loop.call_later(self.suspicion_s(peer, attempt), late)
        try:
            yield
        finally:
            timer.cancel()
            if peer not in self._late:
                self.suspected.discard(peer)

    def suspicion_s(self, peer: PeerId, attempt: int = 0) -> float:
        """After how long without an answer ``peer`` is suspected, which costs little: a multiple of what its own
        answers take, for it may be far, where others are next door, and more than what waits on the links between. One
        that never answered is not suspected before it is marked down."""
        usual = self._usual.get(peer)
        own_s = self.deadline.seconds(attempt) if usual is None else usual.seconds(attempt)
        queued_s = self._peer.net.queued_s(peer)
        if queued_s > BUSY_S or (self._waited_s and statistics.median(self._waited_s) > BUSY_S):
            queued_s = max(queued_s, BURST_S)
        return own_s + QUEUES * queued_s

    def _suspect(self, peer: PeerId, lineage: bytes, step: int, hearsay: bool) -> None:
        """Route around ``peer`` until it is heard of, and let the others ask, too, so that all know at the same time
        whether it lives. Only routes change, so suspicions may be wrong."""
        if not self._peer.roster.is_alive(peer) or peer in self.suspected:
            return
        self.suspected.add(peer)
        for told in self.on_suspicion:
            told(peer)
        if not hearsay:
            others = tuple(p for p in self._peer.roster.others() if p != peer)
            self._peer.spawn(self._peer.tell(others, Suspected(lineage=lineage, step=step, peer=peer)), "suspected")

    def look_after(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """Others suspect ``peer``, or a stream with it ended: find out whether it is there, once at a time."""
        asked = (peer in self.suspected and peer not in self._late) or peer in self._looked_after
        if self._peer.roster.is_alive(peer) and peer != self._peer.net.peer_id and not asked:
            self._looked_after.add(peer)
            looking = self._peer.spawn(self._look_after(peer, lineage, step), f"look after {peer[-6:]}")
            looking.add_done_callback(lambda _: self._looked_after.discard(peer))

    async def _look_after(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """Ask again while its device is late: nothing else would end the suspicion, for it gets nothing to do."""
        for times in itertools.count():
            if times or peer not in self._late:
                await self.probe(peer, lineage, step, hearsay=True, brief=True)
            if peer not in self._late:
                return
            await self._peer.clock.sleep(backoff_s(times, LATE_S, LATE_MAX_S))

    async def is_gone(self, peer: PeerId, lineage: bytes, step: int) -> bool:
        """``peer`` cannot be reached at all, which says more than that it does not answer."""
        try:
            await self._get_progress(peer, lineage, step, attempt=0, brief=True)
        except PeerUnreachable:
            return True
        except NetworkError:
            return False
        return False

    async def measure(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """How long the answer to a probe takes, before one is missed. Whoever does not answer yet is not marked down
        for it."""
        with suppress(NetworkError):
            await self._get_progress(peer, lineage, step, attempt=0, brief=True)

    async def _get_progress(self, peer: PeerId, lineage: bytes, step: int, attempt: int, *, brief: bool) -> Progress:
        ask = GetProgress(lineage=lineage, step=step, brief=brief)
        begin, alarms = self._peer.clock.now(), self._alarms[peer]
        waits = alarms if (lives := self._peer.roster.is_alive(peer)) else 0
        limit_s = self.deadline.seconds(attempt + waits) + self._peer.net.queued_s(peer)
        try:
            answer = await self._peer.net.call(peer, GetProgress.KIND, ask.pack(), timeout_s=limit_s)
        except DeadlineExceeded:
            if lives and alarms == self._alarms[peer] < MAX_ALARMS:
                self._alarms[peer] += 1
            raise
        progress = Progress.unpack(answer)
        del self._alarms[peer]
        (self._late.add if progress.late else self._late.discard)(peer)
        took_s = self._peer.clock.now() - begin
        self.deadline.measured(took_s)
        if peer not in self._usual:
            self._usual[peer] = Usual(unmeasured_s=math.inf, floor_s=0.25, times=4.0, slow_times=1.5)
        self._usual[peer].measured(took_s)
        self._waited_s.append(took_s - self._usual[peer].fastest_s)
        if progress.branch != branch_of(lineage):
            for told in self.on_other_branch:
                told(peer, progress.branch)
            progress = progress.model_copy(update={"current": False, "step": 0, "lineage": b"", "rival": False})
        return progress

    def worth_a_try(self, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        """The living; and those that are down and were not tried for a quarter of the time since they are (``RARELY_S``
        at most): they may be back, but a try costs connections, and in a long run many have gone for good. Whoever
        comes back by itself says so."""
        now, worth, long_dead = self._peer.clock.now(), [], 0
        for peer in peers:
            if self._peer.roster.is_alive(peer):
                self._tried.pop(peer, None)
                worth.append(peer)
                continue
            since, last = self._tried.get(peer, (now, -math.inf))
            long = now - since > LONG_S
            if now - last >= min(RARELY_S, (now - since) / 4) and not (long and long_dead == AT_ONCE):
                long_dead += long
                self._tried[peer] = since, now
                worth.append(peer)
        if len(self._tried) > 2 * len(self._peer.roster.members()):  # the roster forgets, too
            self._tried = {p: tried for p, tried in self._tried.items() if self._peer.roster.knows(p)}
            self._alarms = Counter({p: n for p, n in self._alarms.items() if self._peer.roster.knows(p)})
            self._usual = {p: usual for p, usual in self._usual.items() if self._peer.roster.knows(p)}
        return tuple(worth)

    def mark_down(self, peer: PeerId, reason: str, *, declines: bool = False) -> None:
        """Believe ``peer`` dead until it is heard of again. Changes routing and rounds only. ``declines``: see
        ``Roster.dead``."""
        self.clear(peer)
        if self._peer.roster.dead(peer, declines=declines):
            self._peer.emit(PeerSuspected(peer_id=peer, reason=reason))
            self.give_up(peer, reason)
            self._peer.net.give_up(peer)
            self._peer.news.hurry()

    def stand_aside(self, peer: PeerId) -> None:
        """``peer`` says that nobody is to count on it for now. It can be reached, so that what is on its way to it goes
        on."""
        if self._peer.roster.dead(peer, declines=True):
            self.give_up(peer, "it takes a state")
            self._peer.news.hurry()

    def is_late(self, peer: PeerId) -> bool:
        """Did ``peer`` say so of its device?"""
        return peer in self._late

    def clear(self, peer: PeerId) -> None:
        """``peer`` is not suspected any more."""
        self._late.discard(peer)
        self.suspected.discard(peer)

    @contextmanager
    def awaiting(self, peer: PeerId, answer: asyncio.Future[Any]) -> Iterator[None]:
        """``answer`` fails with PeerUnreachable as soon as ``peer``, who owes it, is marked down."""
        answer.add_done_callback(lambda f: f.cancelled() or f.exception())  # whoever waits may have given up already
        self._awaited[peer][answer] = None
        try:
            yield
        finally:
            self._awaited[peer].pop(answer, None)

    def give_up(self, peer: PeerId, reason: str) -> None:
        """Nothing will come from ``peer`` any more."""
        for answer in self._awaited.pop(peer, {}):
            if not answer.done():
                answer.set_exception(PeerUnreachable(f"{peer[-6:]}: {reason}"))

    def silent_s(self, peer: PeerId) -> float:
        """For how long nothing at all has come from ``peer``: no part of a frame, no receipt, no answer."""
        return asyncio.get_running_loop().time() - self._peer.net.heard_s(peer)

    async def ask_all(self, peers: tuple[PeerId, ...], lineage: bytes, step: int) -> dict[PeerId, Progress]:
        """What those of ``peers`` that answer hold. Those that are down are asked, too, for they may be back; but
        nobody waits for them while others live."""
        asked = {p: asyncio.create_task(self.probe(p, lineage, step)) for p in self.worth_a_try(peers)}
        living = [task for p, task in asked.items() if self._peer.roster.is_alive(p)]
        try:
            if asked:
                await asyncio.wait(living or asked.values())
        finally:
            for task in asked.values():
                task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
        return {p: progress for p, t in asked.items() if not t.cancelled() and (progress := t.result()) is not None}
