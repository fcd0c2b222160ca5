"""What every protocol actor of one peer shares: the seams, the run's facts, the roster, and the step's counters."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter, defaultdict
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from muletrain.errors import DeadlineExceeded, NetworkError, PeerUnreachable
from muletrain.events import FrameRefused, PeerSuspected, SlotWorked
from muletrain.policy.deadline import Deadline, Pulse, Usual, backoff_s
from muletrain.policy.shards import CHUNK
from muletrain.runtime.core.branches import branch_of
from muletrain.runtime.core.messages import AskHeld, Doubted, Held, Message

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from torch import Tensor

    from muletrain.clock import Clock
    from muletrain.compute.base import Compute
    from muletrain.config.schema import Codec
    from muletrain.events import Event, TrafficClass
    from muletrain.network.base import Frame, Network, PeerId
    from muletrain.policy.chaos import Phase
    from muletrain.policy.seats import Seats
    from muletrain.runtime.members.roster import Roster

R = TypeVar("R")
TRAFFIC: dict[str, TrafficClass] = {
    "forward": "activation",
    "backward": "gradient",
    "shard": "averaging",
    "reduced": "averaging",
    "block": "state",
}
"""Class of traffic of a frame kind, for the byte counts; everything else is control."""
MAX_PAUSES = 30
"""Waits for a peer that says it still works on a microbatch: doubling up to the longest, 15 s in all."""
PAUSE_S, PAUSE_MAX_S = 0.05, 0.5
LONG_S, RARELY_S = 60.0, 300.0
"""Who is believed dead since then is so for long; between two tries of those that are for longest."""
AT_ONCE = 4
"""Of those, tried at the same time: many that went together would else be dialled together, again and again."""
LATE_S, LATE_MAX_S = 1.0, 10.0
"""Between two questions to a peer whose device is late; doubles."""
MAX_ALARMS = 3
"""After which the time that an answer has does not double any more."""
PULSE = 16.0
"""Of its own microbatches, in times that it usually takes from one to the next: a peer that does one more within that is not held up."""
HEARD_S, MAX_AGAIN = 0.25, 4
"""A peer of which something came within that time is not silent: a question that it did not answer is asked again, so many times."""
QUEUES = 2.0
"""Times the queues that were measured, before a peer is doubted: queues change by as much as they are long, and what a doubt has computed
again is more load."""
SEND_TIMEOUT_S = 120.0
"""Without a receipt for what was sent: a bound for a dead transport, not for a slow link."""


def capacity(stages: int, seats: Seats | None = None) -> int:
    """Requests a peer holds at once, twice of what trainers have under way for each. At least 24, to cover a round trip of several service
    times: at 100 ms and 180 ms of service a fleet kept 0.84 of its throughput with 8 and 0.91 with 16 (benchmarks/slow_links). A
    pipeline computes all the time with as many microbatches under way for each of a stage's peers as there are stages; half as many more
    keep narrow links busy, too, where what a sender has for one receiver often waits for another sender (benchmarks/sim_grid). GPipe has a
    whole step's. With planned membership a peer may have several seats, each of which counts."""
    each = max(24, 9 * stages // 2)
    if seats is None:
        return each
    return max(each, max(seats.microbatches) if seats.schedule == "gpipe" else 0) * seats.most_seats


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(frozen=True)
class Plan:
    """The facts of a run that every peer knows: they never change after genesis."""

    stages: int
    steps: int
    microbatches: int
    sequences: int
    """per microbatch, B"""
    width: int
    vocab: int
    sequence_length: Callable[[int], int]
    """step -> T"""
    activations: Codec
    gradients: Codec
    clip: float | None
    lr: Callable[[int], float]
    checkpoint_every: int
    capacity: int
    """Requests a peer holds at once: admission's bound, with room for each one's backward."""
    adopt_after_s: float = 30.0
    """How long a stage may be without a peer before the run steps back and others adopt it [s]."""
    from_seed: bool = False
    """The first weights are drawn: any peer can make those of any stage."""
    rebalance: Literal["off", "paper", "throughput"] = "off"
    rebalance_s: float = 60.0
    """Period [s]."""
    work: tuple[float, ...] = ()
    """Forward of a microbatch at each stage [FLOP]."""
    state_bytes: tuple[int, ...] = ()
    """What a newcomer to each stage copies."""
    seats: Seats | None = None
    """Strategy 'pipeline'; None: 'swarm'."""
    delayed: bool = False
    """Steps are averaged and applied while the next one computes (``microbatch.inflight``)."""
    chunk: int = CHUNK
    """Elements of a gradient that are averaged, and sent, at a time."""
    trace: bool = False
    """Emit an event for every microbatch taken and served."""


@dataclass
class StepStats:
    """Counted where it happens, since the last applied step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    averaging_s: float = 0.0
    apply_s: float = 0.0
    started: float = 0.0
    services: list[float] = field(default_factory=list)
    """Forward and backward of each [s]."""
    sent: defaultdict[str, Counter[TrafficClass]] = field(default_factory=lambda: defaultdict(Counter))


class PriorityLock:
    """One holder at a time; the waiter with the lowest priority number goes first, then first come."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._held = False

    def __call__(self, priority: int) -> _Turn:
        return _Turn(self, priority)

    async def acquire(self, priority: int) -> None:
        if self._held:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was ours already: pass it on
                    self.release()
                raise
        self._held = True

    def release(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)  # stays held: it passes straight to the next
                return
        self._held = False


class _Turn(NamedTuple):
    """Somebody's turn, from when it comes to its end."""

    lock: PriorityLock
    priority: int

    async def __aenter__(self) -> None:
        await self.lock.acquire(self.priority)

    async def __aexit__(self, *_: object) -> None:
        self.lock.release()


@dataclass
class Context:
    """One peer's actors share this."""

    net: Network
    clock: Clock
    compute: Compute
    roster: Roster
    plan: Plan
    emit: Callable[[Event], None]
    stats: StepStats = field(default_factory=StepStats)
    device: PriorityLock = field(default_factory=PriorityLock)
    """The compute slot: backward before forward when both wait."""
    probe_deadline: Deadline = field(default_factory=lambda: Deadline(unmeasured_s=10.0, floor_s=1.5))
    """On a starved machine a living peer's event loop stalls for a second at times (imports, garbage collection)."""
    doubted: set[PeerId] = field(default_factory=set)
    on_doubt: list[Callable[[PeerId], None]] = field(default_factory=list)
    """Told of those that are doubted from now on."""
    background: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="background"))
    """For work that may take seconds (hashing, the disk): neither the event loop nor ``Compute.offload`` waits for it."""
    changed: Callable[[], None] = lambda: None
    """To be called when something happened that a wait may depend on."""
    trail_bytes: int = 1 << 28
    """What may be kept of gradients for those that catch up (``runtime.step.trail``)."""
    reached: Callable[[Phase, int], None] = lambda phase, step: None
    """Told of each point of a step (numbered from 0) at which ``--chaos`` may hit this peer."""
    patience_s: float = 300.0
    """How long a wait goes on without any news."""
    met: Callable[[PeerId, bytes], None] = lambda peer, branch: None
    """Told of a peer on another branch than ours."""
    own_held: Callable[[int, bytes], Held] = lambda step, lineage: Held(current=False, step=step, stage=0)
    """What this peer itself answers to AskHeld."""
    pulse: Pulse = field(default_factory=lambda: Pulse(PULSE))
    """Of the forward and backward passes of this peer."""
    late: bool = False
    """This peer's device is at something for unusually long (``runtime.members.watchdog``)."""
    works: asyncio.Event = field(default_factory=_set)
    """Not while it is for so long that nobody is to count on this peer."""
    closed: bool = False
    """The peer has left its stage (calls may still come)."""
    _usual: dict[PeerId, Usual] = field(default_factory=dict)
    """How long a peer's answers to probes take, for doubts."""
    _awaited: defaultdict[PeerId, dict[asyncio.Future[Any], None]] = field(default_factory=lambda: defaultdict(dict))
    _surveys: dict[tuple[bytes, int], asyncio.Task[dict[PeerId, Held]]] = field(default_factory=dict)
    _next_surveys: dict[tuple[bytes, int], asyncio.Task[dict[PeerId, Held]]] = field(default_factory=dict)
    """By lineage and step: the questions to everyone under way, and those that follow them."""
    _tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    """In the order in which they began, as the answers awaited: sets would have one that depends on addresses."""
    _looked_after: set[PeerId] = field(default_factory=set)
    _late: set[PeerId] = field(default_factory=set)
    """Peers that said so of their devices: doubted, until they say otherwise."""
    _tried: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """Of those believed dead: when they were tried first, and last."""
    _alarms: Counter[PeerId] = field(default_factory=Counter)
    """Probes that peers, believed alive, did not answer in time, since they last did. Only answers are measured, so that where everyone is
    slow (cores that fleets share) each probe would come to the same wrong end as the one before (RFC 6298, 5.5)."""
    failure: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """A background task whose unexpected failure ends the peer, loudly, instead of being swallowed. Cancelled once the peer has left
        its stage."""
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._finished)
        if self.closed:
            task.cancel()
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def close(self) -> None:
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.background.shutdown(wait=False, cancel_futures=True)
        if not self.failure.done():
            self.failure.cancel()

    async def send(
        self, peer: PeerId, message: Message, tensors: list[Any] | None = None, *, frame: Frame | None = None
    ) -> None:
        """Send a frame and count it. ``frame``: the message's, where it is made already. Raises PeerUnreachable or DeadlineExceeded."""
        if not self.works.is_set():  # until then nobody counts on us, or the watchdog ends us
            await self.works.wait()
        begin = self.clock.now()
        frame = frame or message.frame(tensors)
        sent = await self.net.send(peer, frame, channel=message.CHANNEL, timeout_s=SEND_TIMEOUT_S)
        if sent:
            self.stats.sent[peer][TRAFFIC.get(message.KIND, "control")] += sent
        if tensors and (step := getattr(message, "step", None)) is not None:
            self.worked("send", message.KIND, begin, step, getattr(message, "index", -1))

    def worked(self, slot: str, what: str, begin: float, step: int, index: int = -1) -> None:
        """Since ``begin``, a slot of this peer was busy: for timelines."""
        if self.plan.trace:
            self.emit(SlotWorked(slot=slot, what=what, step=step, index=index, seconds=self.clock.now() - begin))

    async def tell(self, peers: tuple[PeerId, ...], message: Message) -> None:
        """A notice to several peers at once; those that cannot be reached are believed dead, the rest hears it."""
        peers = self.worth_a_try(peers)
        frame = message.frame()
        results = await asyncio.gather(*(self.send(p, message, frame=frame) for p in peers), return_exceptions=True)
        for peer, result in zip(peers, results, strict=True):
            if isinstance(result, NetworkError):
                self.suspect(peer, str(result))
            elif isinstance(result, BaseException):
                raise result

    def worth_a_try(self, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        """The living; and those believed dead that were not tried for a quarter of the time since they are (``RARELY_S`` at most): they
        may be back, but a try costs connections, and in a long run many have gone for good. Whoever comes back by itself says so."""
        now, worth, long_dead = self.clock.now(), [], 0
        for peer in peers:
            if self.roster.is_alive(peer):
                self._tried.pop(peer, None)
                worth.append(peer)
                continue
            since, last = self._tried.get(peer, (now, -math.inf))
            long = now - since > LONG_S
            if now - last >= min(RARELY_S, (now - since) / 4) and not (long and long_dead == AT_ONCE):
                long_dead += long
                self._tried[peer] = since, now
                worth.append(peer)
        if len(self._tried) > 2 * len(self.roster.members()):  # the roster forgets, too
            self._tried = {p: tried for p, tried in self._tried.items() if self.roster.knows(p)}
            self._alarms = Counter({p: n for p, n in self._alarms.items() if self.roster.knows(p)})
            self._usual = {p: usual for p, usual in self._usual.items() if self.roster.knows(p)}
        return tuple(worth)

    def refused(self, peer: PeerId, reason: str) -> None:
        """Report something wrong that arrived."""
        self.emit(FrameRefused(remote=peer, reason=reason))

    def suspect(self, peer: PeerId, reason: str, *, declines: bool = False) -> None:
        """Believe ``peer`` dead until it is heard of again. Changes routing and rounds only. ``declines``: see ``Roster.dead``."""
        self.trust(peer)
        if self.roster.dead(peer, declines=declines):
            self.emit(PeerSuspected(peer_id=peer, reason=reason))
            self.give_up(peer, reason)
            self.net.give_up(peer)
            self.changed()

    def stand_aside(self, peer: PeerId) -> None:
        """``peer`` says that nobody is to count on it for now. It can be reached, so that what is on its way to it goes on."""
        if self.roster.dead(peer, declines=True):
            self.give_up(peer, "it takes a state")
            self.changed()

    def is_late(self, peer: PeerId) -> bool:
        """Did ``peer`` say so of its device?"""
        return peer in self._late

    def trust(self, peer: PeerId) -> None:
        """No doubts about ``peer`` any more."""
        self._late.discard(peer)
        self.doubted.discard(peer)

    @contextmanager
    def awaiting(self, peer: PeerId, answer: asyncio.Future[Any]) -> Iterator[None]:
        """``answer`` fails with PeerUnreachable as soon as ``peer``, who owes it, is believed dead."""
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

    def who_is_there(self) -> str:
        """In words, for errors."""
        lost = [s for s in range(self.plan.stages) if not self.roster.stage(s)]
        gone = f"no peer of stages {lost} can be reached" if lost else "every stage can be reached"
        return gone if self.roster.trainers() else f"{gone}, no trainer can"

    def silent_s(self, peer: PeerId) -> float:
        """For how long nothing at all has come from ``peer``: no part of a frame, no receipt, no answer."""
        return asyncio.get_running_loop().time() - self.net.heard_s(peer)

    async def probe(
        self,
        peer: PeerId,
        lineage: bytes,
        step: int,
        attempt: int = 0,
        *,
        hearsay: bool = False,
        brief: bool = False,
    ) -> Held | None:
        """Ask a silent peer what it holds (``brief``: whether it is there). It is doubted when the answer takes longer than such answers
        do. None, and it is believed dead, if it does not answer in time; while something still comes from it, it is asked again, a few
        times. ``hearsay``: others had doubts; they know."""
        with self._doubting(peer, attempt, partial(self._doubt, peer, lineage, step, hearsay)):
            for again in range(MAX_AGAIN + 1):
                try:
                    held = await self._ask_held(peer, lineage, step, attempt, brief=brief)
                    break
                except DeadlineExceeded as e:
                    if again == MAX_AGAIN or self.silent_s(peer) > HEARD_S:
                        self.suspect(peer, str(e))
                        return None
                except PeerUnreachable as e:
                    self.suspect(peer, str(e))
                    return None
                except NetworkError as e:
                    self.suspect(peer, f"answered a probe with: {e}", declines=True)
                    return None
        if held.late:
            self._doubt(peer, lineage, step, hearsay)
            self.look_after(peer, lineage, step)
        if held.current:  # at another step it is of no use to this one, however well it may be
            self.roster.alive(peer)
        return held

    @contextmanager
    def _doubting(self, peer: PeerId, attempt: int, doubt: Callable[[], None]) -> Iterator[None]:
        """``doubt`` is called once the answer of ``peer`` is late, and nothing else comes from it either."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def late() -> None:
            nonlocal timer
            if (more_s := HEARD_S - self.silent_s(peer)) > 0:
                timer = loop.call_later(more_s, late)
            else:
                doubt()

        timer = loop.call_later(self.doubt_s(peer, attempt), late)
        try:
            yield
        finally:
            timer.cancel()
            if peer not in self._late:
                self.doubted.discard(peer)

    def doubt_s(self, peer: PeerId, attempt: int = 0) -> float:
        """After how long without an answer ``peer`` is doubted, which costs little: a multiple of what its own answers take, for it may be
        far, where others are next door, and more than what waits on the links between. One that never answered is not doubted before it is
        believed dead."""
        usual = self._usual.get(peer)
        own_s = self.probe_deadline.seconds(attempt) if usual is None else usual.seconds(attempt)
        return own_s + QUEUES * self.net.queued_s(peer)

    def _doubt(self, peer: PeerId, lineage: bytes, step: int, hearsay: bool) -> None:
        """Route around ``peer`` until it is heard of, and let the others ask, too, so that all know at the same time whether it lives.
        Only routes change, so doubts may be wrong."""
        if not self.roster.is_alive(peer) or peer in self.doubted:
            return
        self.doubted.add(peer)
        for told in self.on_doubt:
            told(peer)
        if not hearsay:
            others = tuple(p for p in self.roster.others() if p != peer)
            self.spawn(self.tell(others, Doubted(lineage=lineage, step=step, peer=peer)), "doubted")

    def look_after(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """Others have doubts about ``peer``, or a stream with it ended: find out whether it is there, once at a time."""
        asked = (peer in self.doubted and peer not in self._late) or peer in self._looked_after
        if self.roster.is_alive(peer) and peer != self.net.peer_id and not asked:
            self._looked_after.add(peer)
            looking = self.spawn(self._look_after(peer, lineage, step), f"look after {peer[-6:]}")
            looking.add_done_callback(lambda _: self._looked_after.discard(peer))

    async def _look_after(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """Ask again while its device is late: nothing else would end the doubt, for it gets nothing to do."""
        for times in itertools.count():
            if times or peer not in self._late:
                await self.probe(peer, lineage, step, hearsay=True, brief=True)
            if peer not in self._late:
                return
            await self.clock.sleep(backoff_s(times, LATE_S, LATE_MAX_S))

    async def is_gone(self, peer: PeerId, lineage: bytes, step: int) -> bool:
        """``peer`` cannot be reached at all, which says more than that it does not answer."""
        try:
            await self._ask_held(peer, lineage, step, attempt=0, brief=True)
        except PeerUnreachable:
            return True
        except NetworkError:
            return False
        return False

    async def measure(self, peer: PeerId, lineage: bytes, step: int) -> None:
        """How long the answer to a probe takes, before one is missed. Whoever does not answer yet is not believed dead for it."""
        with suppress(NetworkError):
            await self._ask_held(peer, lineage, step, attempt=0, brief=True)

    async def _ask_held(self, peer: PeerId, lineage: bytes, step: int, attempt: int, *, brief: bool) -> Held:
        ask = AskHeld(lineage=lineage, step=step, brief=brief)
        begin, alarms = self.clock.now(), self._alarms[peer]
        waits = alarms if (lives := self.roster.is_alive(peer)) else 0
        limit_s = self.probe_deadline.seconds(attempt + waits) + self.net.queued_s(peer)
        try:
            answer = await self.net.call(peer, AskHeld.KIND, ask.pack(), timeout_s=limit_s)
        except DeadlineExceeded:
            if lives and alarms == self._alarms[peer] < MAX_ALARMS:
                self._alarms[peer] += 1
            raise
        held = Held.unpack(answer)
        del self._alarms[peer]
        (self._late.add if held.late else self._late.discard)(peer)
        took_s = self.clock.now() - begin
        self.probe_deadline.measured(took_s)
        if peer not in self._usual:
            self._usual[peer] = Usual(unmeasured_s=math.inf, floor_s=0.25, times=4.0, slow_times=1.5)
        self._usual[peer].measured(took_s)
        if held.branch != branch_of(lineage):
            self.met(peer, held.branch)
            held = held.model_copy(update={"current": False, "step": 0, "lineage": b"", "rival": False})
        return held

    async def still_missing(
        self,
        lineage: bytes,
        step: int,
        index: int,
        stages: tuple[int, ...],
        counts: Callable[[PeerId], bool] = lambda peer: True,
    ) -> tuple[tuple[int, ...], float | None]:
        """Before a retry: those of ``stages`` in which nobody that ``counts``, ourselves included, has the microbatch in its accumulator
        (those that have, recompute without accumulating), and its loss [nats/token], where one that has it knows. While someone still works
        on it, wait: what is about to be accumulated must not be twice."""
        if not stages:
            return (), None
        for pause in range(MAX_PAUSES):
            current = await self.survey(lineage, step)
            counted = [held for peer, held in current.items() if held.stage in stages and counts(peer)]
            if not any(index in held.running for held in counted):
                break
            await self.clock.sleep(backoff_s(pause, PAUSE_S, PAUSE_MAX_S))
        have = {held.stage for held in counted if index in held.held}
        losses = (held.loss(index) for held in current.values())
        return tuple(s for s in stages if s not in have), next((loss for loss in losses if loss is not None), None)

    async def survey(self, lineage: bytes, step: int) -> dict[PeerId, Held]:
        """What every peer at ``step`` holds, this one included, asked after this call. Calls during a question share the next one: a lost
        peer or a lying member asks about many microbatches at once."""
        key = lineage, step
        if (survey := self._next_surveys.get(key)) is None:
            survey = self.spawn(self._survey(key, self._surveys.get(key)), "survey")
            self._next_surveys[key] = survey
        return await asyncio.shield(survey)

    async def _survey(
        self, key: tuple[bytes, int], before: asyncio.Task[dict[PeerId, Held]] | None
    ) -> dict[PeerId, Held]:
        if before is not None:
            await asyncio.wait({before})
        self._surveys[key] = self._next_surveys.pop(key)
        lineage, step = key
        try:
            answers = await self.ask_held(self.roster.everyone(), lineage, step)
            answers[self.net.peer_id] = self.own_held(step, lineage)
            return {peer: held for peer, held in answers.items() if held.current}
        finally:
            if key not in self._next_surveys:
                del self._surveys[key]

    async def aside(self, fn: Callable[..., R], *args: Any) -> R:
        """Run ``fn`` in the background thread, after what was given to it before."""
        return await asyncio.get_running_loop().run_in_executor(self.background, fn, *args)

    async def ask_held(self, peers: tuple[PeerId, ...], lineage: bytes, step: int) -> dict[PeerId, Held]:
        """What those of ``peers`` that answer hold. Those believed dead are asked, too, for they may be back; but nobody waits for
        them while others live."""
        asked = {p: asyncio.create_task(self.probe(p, lineage, step)) for p in self.worth_a_try(peers)}
        living = [task for p, task in asked.items() if self.roster.is_alive(p)]
        try:
            if asked:
                await asyncio.wait(living or asked.values())
        finally:
            for task in asked.values():
                task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
        return {p: held for p, t in asked.items() if not t.cancelled() and (held := t.result()) is not None}

    async def offload(self, fn: Callable[..., Tensor], *args: Any) -> Tensor:
        return await self.compute.offload(fn, *args)
