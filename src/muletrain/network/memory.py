"""Networks in memory, for tests and virtual worlds: no sockets, no threads, no clock, hence deterministic.

Frames are really packed and read back by ``wire.frame``. Order holds per (sender, receiver, channel); a bounded queue
gives back-pressure. A dead peer is unreachable; a frozen one takes frames until the queue is full and answers nothing.
Over narrow links (``MemoryHub.roads``) frames are sent piece by piece, as the production pacer grants them, and calls
wait in the same queues. A receiver closes a stream after a wrong frame, as a real one does.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from muletrain.clock import loop_time_s
from muletrain.errors import DeadlineExceeded, PeerUnreachable, ProtocolError, Refused
from muletrain.network.answers import Answers
from muletrain.network.base import Bounds, CallHandler, Channel, FrameHandler, LossHandler, PeerId, RefusalHandler
from muletrain.network.delivery import Counters, Delivery
from muletrain.network.jobs import Jobs
from muletrain.network.paced import CALL_OVERHEAD, PacedStreams, Parcel, Stream
from muletrain.network.roads import Piece, Roads
from muletrain.policy.recent import Recent
from muletrain.wire.frame import Frame, frame_size, pack, reread, unpack

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from muletrain.network.roads import Route

DIRECT = ""
"""The way without a relay."""
QUEUE = 64
"""Frames of one sender on one channel that wait for the handler."""


class Barriers:
    """Decides what passes between two peers: frozen machines, cut links, packets that do not pass. Pairs are unordered by
    default."""

    def __init__(self, alive: Collection[PeerId], hub: MemoryHub, *, relays: bool) -> None:
        """``alive``: the peers that live now. ``relays``: members carry between two peers that are cut off."""
        self._alive, self._hub, self._relays = alive, hub, relays
        self._frozen: dict[PeerId, asyncio.Event] = {}
        self._held_up: dict[frozenset[PeerId], asyncio.Event] = {}
        self._cut: Counter[frozenset[PeerId]] = Counter()
        """How often each pair is cut."""
        self._one_way: Counter[tuple[PeerId, PeerId]] = Counter()
        """(sender, receiver) pairs in which the sender does not reach the receiver."""
        self._limits: dict[frozenset[PeerId], int] = {}
        """Bytes of the largest message that passes."""
        self._ways: dict[frozenset[PeerId], PeerId] = {}
        """The relay between two peers that are cut off."""

    # Delays: nothing is lost ----------------------------------------------------------------------------------------

    def freeze(self, peer: PeerId) -> None:
        """Stop ``peer`` like SIGSTOP, without refusals and answers."""
        self._frozen.setdefault(peer, asyncio.Event())

    def thaw(self, peer: PeerId) -> None:
        if event := self._frozen.pop(peer, None):
            event.set()

    async def awake(self, peer: PeerId) -> None:
        """Wait until ``peer`` is not frozen."""
        while (event := self._frozen.get(peer)) is not None:
            await event.wait()

    def hold_up(self, a: PeerId, b: PeerId) -> None:
        """Hold back all traffic of the pair until ``let_pass``; nobody is told. Then all traffic arrives, as with
        TCP."""
        self._held_up.setdefault(frozenset((a, b)), asyncio.Event())

    def let_pass(self, a: PeerId, b: PeerId) -> None:
        if event := self._held_up.pop(frozenset((a, b)), None):
            event.set()

    def takes(self, sender: PeerId, receiver: PeerId) -> bool:
        """Does ``receiver`` take messages of ``sender`` now?"""
        return receiver not in self._frozen and frozenset((sender, receiver)) not in self._held_up

    async def taken(self, sender: PeerId, receiver: PeerId) -> None:
        """Wait until ``receiver`` takes messages of ``sender``."""
        while self._held_up and (event := self._held_up.get(frozenset((sender, receiver)))) is not None:
            await event.wait()
        await self.awake(receiver)

    # Losses ---------------------------------------------------------------------------------------------------------

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Separate the pair until ``mend``: senders find out, and everything under way is lost. Cuts are counted."""
        self._cut[frozenset((a, b))] += 1
        self._broke(a, b)
        self.way(a, b)

    def mend(self, a: PeerId, b: PeerId) -> None:
        """Take one cut back. Both now learn that all streams have ended."""
        pair = frozenset((a, b))
        self._cut[pair] -= 1
        if self._cut[pair]:
            return
        del self._cut[pair]
        if self._ways.pop(pair, None) is None:
            self._lost(a, b)

    def cut_way(self, sender: PeerId, receiver: PeerId) -> None:
        """Cut one direction: ``sender`` does not reach ``receiver``, but still answers calls."""
        self._one_way[sender, receiver] += 1
        self._hub.broke(sender, receiver)

    def mend_way(self, sender: PeerId, receiver: PeerId) -> None:
        self._one_way[sender, receiver] -= 1
        if not self._one_way[sender, receiver]:
            del self._one_way[sender, receiver]
        self._hub.lost(receiver, sender)

    def pass_small(self, pair: tuple[PeerId, ...], limit: int | None) -> None:
        """Swallow the pair's frames, calls and answers of more than ``limit`` bytes; None: swallow nothing."""
        self._limits.pop(frozenset(pair), None)
        if limit is not None:
            self._limits[frozenset(pair)] = limit

    def too_large(self, a: PeerId, b: PeerId, nbytes: int) -> bool:
        return bool(self._limits) and nbytes > self._limits.get(frozenset((a, b)), nbytes)

    # Ways -----------------------------------------------------------------------------------------------------------

    def reaches(self, sender: PeerId, receiver: PeerId) -> bool:
        """Does a message of ``sender`` find a way to ``receiver``, which lives?"""
        return (
            receiver in self._alive
            and self.way(sender, receiver) is not None
            and (sender, receiver) not in self._one_way
        )

    def way(self, a: PeerId, b: PeerId) -> PeerId | None:
        """DIRECT, or the relay between the pair; None: there is no way. A new relay ends the pair's streams."""
        if not self._cut or (pair := frozenset((a, b))) not in self._cut:
            return DIRECT
        if not self._relays:
            return None
        before = self._ways.pop(pair, None)
        able = [r for r in sorted(self._alive) if r not in pair and self.passes(a, b, r)]
        now = before if before in able else next(iter(able), None)
        if now is not None:
            self._ways[pair] = now
        if now != before:
            self._broke(a, b)
            self._lost(a, b)
        return now

    def passes(self, a: PeerId, b: PeerId, way: PeerId) -> bool:
        """Does a message that was sent by ``way`` arrive?"""
        if way == DIRECT:
            return not self._cut or frozenset((a, b)) not in self._cut
        alive = way in self._alive and way not in self._frozen
        return alive and self.passes(a, way, DIRECT) and self.passes(way, b, DIRECT)

    def relay_died(self, peer: PeerId) -> None:
        """Find another relay for each pair that ``peer`` carried for."""
        for pair in [sorted(p) for p, way in self._ways.items() if way == peer]:
            self.way(*pair)

    def _broke(self, a: PeerId, b: PeerId) -> None:
        self._hub.broke(a, b)
        self._hub.broke(b, a)

    def _lost(self, a: PeerId, b: PeerId) -> None:
        self._hub.lost(a, b)
        self._hub.lost(b, a)


class Conditions:
    """Delays and damage of messages. This base class is calm: no time passes and nothing is damaged; subclasses
    differ."""

    def delay_s(self, sender: PeerId, receiver: PeerId) -> float:
        """How long the next message takes. Order within a stream still holds. On narrow links, queried once per
        connection."""
        return 0.0

    def stall_s(self, sender: PeerId, receiver: PeerId, channel: Channel) -> float:
        """How much longer the next frame of a stream takes: later frames wait, the remaining streams overtake."""
        return 0.0

    def path_bytes_per_s(self, sender: PeerId, receiver: PeerId) -> float:
        """Bandwidth of the path between two machines' own links."""
        return math.inf

    def weight(self, sender: PeerId, frame: Frame) -> int:
        """Bytes that a frame counts for."""
        return frame_size(frame)

    def sending(self, sender: PeerId, frame: Frame) -> None:
        """Called before each frame to another peer; may kill the sender or cut its links."""

    def damage(self, sender: PeerId, receiver: PeerId, packed: bytes) -> bytes:
        """The frame that arrives for ``packed``."""
        return packed


class MemoryDirectory:
    """The directory of a world. ``entries``: by key and peer, when a value expires (the loop's clock), and the value."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[PeerId, tuple[float, bytes]]] = {}
        self.down = False
        """The peer answers nobody."""

    def announce(self, key: str, peer: PeerId, value: bytes, ttl_s: float) -> None:
        """Raises PeerUnreachable while it is down."""
        self._ask()
        expires = loop_time_s() + ttl_s
        self.entries.setdefault(key, {})[peer] = expires, bytes(value)

    def lookup(self, key: str) -> dict[PeerId, bytes]:
        """Raises PeerUnreachable while it is down."""
        self._ask()
        now = loop_time_s()
        return {peer: value for peer, (expires, value) in self.entries.get(key, {}).items() if expires > now}

    def _ask(self) -> None:
        if self.down:
            raise PeerUnreachable("the directory cannot be reached")


class MemoryHub:
    """The world that ``MemoryNetwork``s share: living peers, barriers, and the directory.

    Deadlines and expiry follow the loop's clock: virtual on a virtual loop."""

    def __init__(self, conditions: Conditions | None = None, *, relays: bool = False, hands_over: bool = False) -> None:
        """``relays``: members carry between two peers that are cut off. ``hands_over``: frames arrive as the objects
        that were sent, for worlds that damage none and count bytes elsewhere."""
        self.conditions, self.hands_over = conditions or Conditions(), hands_over
        self.peers: dict[PeerId, MemoryNetwork] = {}
        self.barriers = Barriers(self.peers, self, relays=relays)
        self.directory = MemoryDirectory()
        self.roads = Roads(self.conditions.path_bytes_per_s)
        self._routes: dict[tuple[PeerId, PeerId], tuple[PeerId, Route | None]] = {}

    def join(self, peer_id: PeerId) -> MemoryNetwork:
        """A new peer."""
        return MemoryNetwork(self, peer_id)

    def kill(self, peer: PeerId) -> None:
        """Stop ``peer`` at once, which is unreachable from then on."""
        if peer in self.peers:
            self.peers[peer].stop()

    def ended(self, gone: MemoryNetwork) -> None:
        """Remove ``gone``; peers see the end of streams with ``gone``."""
        if self.peers.get(gone.peer_id) is not gone:
            return
        del self.peers[gone.peer_id]
        for other in self.peers.values():
            other.streams.broke(gone.peer_id)
            if self.barriers.way(gone.peer_id, other.peer_id) is not None:
                self._lost(other, gone)
        self.barriers.relay_died(gone.peer_id)

    def broke(self, sender: PeerId, receiver: PeerId) -> None:
        """Lose everything under way from ``sender`` to ``receiver``."""
        self._routes.pop((sender, receiver), None)
        if sender in self.peers:
            self.peers[sender].streams.broke(receiver)

    def lost(self, peer: PeerId, other: PeerId) -> None:
        """Let ``peer`` see the end of streams with ``other``."""
        if peer in self.peers and other in self.peers:
            self._lost(self.peers[peer], self.peers[other])

    def _lost(self, peer: MemoryNetwork, other: MemoryNetwork) -> None:
        a, b = peer.peer_id, other.peer_id
        if ended := [c for c in Channel if peer.inbox.knows(b, c) or other.inbox.knows(a, c)]:
            peer.spawn(peer.lose(b, ended))

    def reach(self, sender: PeerId, receiver: PeerId) -> MemoryNetwork:
        """Raises PeerUnreachable."""
        if not self.barriers.reaches(sender, receiver):
            raise PeerUnreachable(f"{receiver[-6:]} cannot be reached")
        return self.peers[receiver]

    def route(self, sender: PeerId, receiver: PeerId) -> Route | None:
        """The links between two peers that reach each other; None: all are wide."""
        way = self.barriers.way(sender, receiver) or DIRECT
        known = self._routes.get((sender, receiver))
        if known is None or known[0] != way:
            stations = (sender, way, receiver) if way else (sender, receiver)
            narrow = any(self.roads.narrow(a, b) for a, b in pairwise(stations))
            route = self.roads.route(stations, self.conditions.delay_s) if narrow else None
            known = self._routes[sender, receiver] = way, route
        return known[1]

    def delay_s(self, sender: PeerId, receiver: PeerId) -> float:
        """How long the next message takes, by the current way."""
        if sender == receiver:
            return 0.0
        relay, between_s = self.barriers.way(sender, receiver), self.conditions.delay_s
        return between_s(sender, relay) + between_s(relay, receiver) if relay else between_s(sender, receiver)


class MemoryNetwork:
    """The ``Network`` of one peer of a ``MemoryHub``."""

    def __init__(self, hub: MemoryHub, peer_id: PeerId) -> None:
        self.peer_id, self._hub = peer_id, hub
        self.gone = False
        self.counters = Counters()
        self.delivery = Delivery()
        self._answers = Answers(peer_id, self.delivery)
        self.inbox, self.streams = Inbox(self), MemoryStreams(hub, self)
        self._heard: Recent[float] = Recent()
        self._moved = 0
        """Bytes of tensors that came."""
        self._carried: Counter[PeerId] = Counter()
        self._losses: dict[str, LossHandler] = {}
        self._jobs = Jobs(copy_context())  # not the context of the machine that calls: that may be frozen
        hub.peers[peer_id] = self

    # Calls ----------------------------------------------------------------------------------------------------------

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        barriers, what = self._hub.barriers, f"{method} to {peer[-6:]}"
        await barriers.awake(self.peer_id)
        target, way = self._hub.reach(self.peer_id, peer), barriers.way(self.peer_id, peer)
        # the callee's task goes on after the caller's deadline, and dies with the callee
        task = target.spawn(target._answer(self.peer_id, method, bytes(payload)))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if done and not task.cancelled() and self._too_large(peer, max(len(payload), len(task.result()[1]))):
            await asyncio.sleep(timeout_s)
            done = set()
        if not done:
            raise DeadlineExceeded(f"no answer within {timeout_s:.1f} s", what)
        if task.cancelled():
            raise PeerUnreachable("it went away", what)
        self._hub.reach(self.peer_id, peer)
        if barriers.way(self.peer_id, peer) != way:
            raise PeerUnreachable("the answer was lost on its way", what)
        answered, answer = task.result()
        self.hear(peer)
        if not answered:
            raise Refused(answer.decode())
        return bytes(answer)

    async def _answer(self, sender: PeerId, method: str, payload: bytes) -> tuple[bool, bytes]:
        """Carry the question here and the answer back."""
        hub, own = self._hub, sender == self.peer_id
        there = None if own else hub.route(sender, self.peer_id)
        if there is not None:
            await there.carried(len(payload) + CALL_OVERHEAD)
        elif delay_s := hub.delay_s(sender, self.peer_id):
            await asyncio.sleep(2 * delay_s)  # there and back
        await hub.barriers.taken(sender, self.peer_id)
        self.hear(sender)
        answered, answer = await self._answers.answer(sender, method, payload)
        reached = not own and hub.barriers.way(self.peer_id, sender) is not None
        if reached and (back := hub.route(self.peer_id, sender)):
            await back.carried(len(answer) + CALL_OVERHEAD)
        return answered, answer

    def _too_large(self, peer: PeerId, nbytes: int) -> bool:
        return self._hub.barriers.too_large(self.peer_id, peer, nbytes)

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        self._answers.serve(method, handler, free=free)

    # Frames, sent ---------------------------------------------------------------------------------------------------

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        hub, own, conditions = self._hub, self.peer_id, self._hub.conditions
        await hub.barriers.awake(own)
        target = hub.reach(own, peer)
        if peer == own:
            own_frame = frame if hub.hands_over else reread(frame)
            await self._put(target, channel, Arrival(loop_time_s(), DIRECT, own_frame), timeout_s)
            return 0
        conditions.sending(own, frame)
        for station in (own, peer):  # the call may have killed us, or cut the link
            hub.reach(own, station)
        nbytes = conditions.weight(own, frame)
        if self._too_large(peer, nbytes):
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"no receipt within {timeout_s:.1f} s", f"sending to {peer[-6:]}")
        item = frame if hub.hands_over else conditions.damage(own, peer, b"".join(pack(frame)))
        way = hub.barriers.way(own, peer) or DIRECT
        if hub.route(own, peer) is not None:
            nbytes = max(1, nbytes)
            self._count(peer, frame, way, nbytes)
            parcel = Parcel(item, nbytes, conditions.stall_s(own, peer, channel))
            await self.streams.send(peer, channel, parcel, timeout_s)
            return nbytes
        arrives_s = loop_time_s() + hub.delay_s(own, peer) + conditions.stall_s(own, peer, channel)
        await self._put(target, channel, Arrival(arrives_s, way, item), timeout_s)
        sent = len(item) if isinstance(item, bytes) else nbytes
        self._count(peer, frame, way, sent)
        return sent

    async def _put(self, target: MemoryNetwork, channel: Channel, arrival: Arrival, timeout_s: float) -> None:
        room = target.inbox.put(self.peer_id, channel, arrival)
        if room is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await room
            except TimeoutError:
                doing = f"sending to {target.peer_id[-6:]}"
                raise DeadlineExceeded(f"not taken within {timeout_s:.1f} s", doing) from None

    def _count(self, peer: PeerId, frame: Frame, way: PeerId, sent: int) -> None:
        self.counters.sent[peer, frame.kind] += sent
        if way in self._hub.peers:
            self._hub.peers[way]._carried[peer] += sent

    def queued_s(self, peer: PeerId) -> float:
        return self.streams.pacer.queued_s(peer)

    def give_up(self, peer: PeerId) -> None:
        self.streams.pacer.give_up(peer)

    # Frames, received -----------------------------------------------------------------------------------------------

    def arrived(
        self, sender: PeerId, channel: Channel, way: PeerId, parcel: Parcel
    ) -> Coroutine[Any, Any, None] | None:
        return self.inbox.put(sender, channel, Arrival(loop_time_s() + parcel.stall_s, way, parcel.item))

    async def take(self, sender: PeerId, channel: Channel, arrival: Arrival) -> bool:
        """Handle one frame of the inbox. False: refused, and the stream is closed."""
        if (wait_s := arrival.arrives_s - loop_time_s()) > 0:
            await asyncio.sleep(wait_s)
        await self._hub.barriers.taken(sender, self.peer_id)
        if not self._hub.barriers.passes(sender, self.peer_id, arrival.way):
            return True  # the frame was under way when the link broke, or with a relay that died
        if await self._handle(sender, arrival.item) or sender == self.peer_id:
            return True
        self._on_lost(sender, channel)
        if (other := self._hub.peers.get(sender)) is not None:  # frames sent before the news are lost
            await other.lose(self.peer_id, [channel], closed=True)
        return False

    async def _handle(self, sender: PeerId, item: bytes | Frame) -> bool:
        door = self.delivery.door(sender)
        try:
            if isinstance(item, bytes):
                frame = await unpack(item, door)
            else:
                await door.expect(frame := item)
        except ProtocolError as e:
            self.delivery.refuse(sender, e)
            return False
        self.hear(sender)
        nbytes = sum(t.nbytes for t in frame.tensors)
        self._moved += nbytes
        self.counters.received[sender, frame.kind] += nbytes
        return await self.delivery.deliver(sender, frame)

    async def lose(self, peer: PeerId, channels: Collection[Channel], *, closed: bool = False) -> None:
        """See that streams with ``peer`` ended, when the news arrives. ``closed``: ``peer`` closed ours."""
        await asyncio.sleep(self._hub.delay_s(peer, self.peer_id))
        await self._hub.barriers.taken(peer, self.peer_id)
        if closed:
            self.streams.broke(peer, channels)
        for channel in channels:
            self._on_lost(peer, channel)

    def heard_s(self, peer: PeerId) -> float:
        return self._heard.get(peer, float("-inf"))

    def hear(self, peer: PeerId) -> None:
        """Something of ``peer`` came now."""
        self._heard[peer] = loop_time_s()

    def moved(self) -> int:
        return self._moved + self.streams.came + self.streams.pacer.moved

    def on_lost(self, handler: LossHandler, whose: str = "members") -> None:
        self._losses[whose] = handler

    def _on_lost(self, peer: PeerId, channel: Channel) -> None:
        for handler in self._losses.values():
            handler(peer, channel)

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        self.delivery.receive(handler, kinds, bounds)

    def on_refusal(self, handler: RefusalHandler) -> None:
        self.delivery.refused = handler

    # Everything else ------------------------------------------------------------------------------------------------

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        self._hub.directory.announce(key, self.peer_id, value, ttl_s)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        return self._hub.directory.lookup(key)

    def carried(self) -> dict[PeerId, int]:
        carried, self._carried = self._carried, Counter()
        return dict(carried)

    def addresses(self) -> list[str]:
        return [f"/memory/p2p/{self.peer_id}"]

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        peer = addresses[0].rpartition("/p2p/")[2]
        self._hub.reach(self.peer_id, peer)
        return peer

    async def close(self) -> None:
        self.stop()
        await self._jobs.end()

    def stop(self) -> None:
        """Leave the world at once, without waiting for anything."""
        if not self.gone:
            self.gone = True
            self._hub.ended(self)
        self._jobs.cancel()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._jobs.spawn(work)


class Arrival(NamedTuple):
    """A frame, packed or not, that was sent by ``way`` and arrives at ``arrives_s`` (the loop's clock)."""

    arrives_s: float
    way: PeerId
    item: bytes | Frame


@dataclass(eq=False)
class _Stream:
    """``coming``: senders that wait for room."""

    frames: asyncio.Queue[Arrival] = field(default_factory=lambda: asyncio.Queue(QUEUE))
    coming: int = 0

    @property
    def idle(self) -> bool:
        return self.frames.empty() and not self.coming

    async def put(self, arrival: Arrival) -> None:
        self.coming += 1
        try:
            await self.frames.put(arrival)
        finally:
            self.coming -= 1


class Inbox:
    """Queues incoming frames of one peer, and hands each to ``taker`` in order."""

    def __init__(self, taker: MemoryNetwork) -> None:
        self._taker = taker
        self._streams: dict[tuple[PeerId, Channel], _Stream] = {}
        """Only streams in use: in a large fleet most are idle."""
        self._known: set[tuple[PeerId, Channel]] = set()

    def __len__(self) -> int:
        """Streams on which a frame waits or is being handled."""
        return len(self._streams)

    def knows(self, sender: PeerId, channel: Channel) -> bool:
        """Did ``sender`` ever open a stream to us on ``channel``?"""
        return (sender, channel) in self._known

    def put(self, sender: PeerId, channel: Channel, arrival: Arrival) -> Coroutine[Any, Any, None] | None:
        """Queue a frame. None: done; else the queue is full, and the result waits for room."""
        key = sender, channel
        if key not in self._streams:
            self._streams[key] = _Stream()
            self._known.add(key)
            self._taker.spawn(self._drain(sender, channel))
        stream = self._streams[key]
        if stream.frames.full():
            return stream.put(arrival)
        stream.frames.put_nowait(arrival)
        return None

    async def _drain(self, sender: PeerId, channel: Channel) -> None:
        stream = self._streams[sender, channel]
        while not stream.idle:
            if not await self._taker.take(sender, channel, await stream.frames.get()):
                while not stream.frames.empty():
                    stream.frames.get_nowait()
        del self._streams[sender, channel]


@dataclass(slots=True, eq=False)
class _Flow(Stream):
    """A stream of which both ends are known."""

    sender: MemoryNetwork
    receiver: MemoryNetwork
    way: PeerId

    def arrived(self, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        self.receiver.streams.arrived(self, parcel, nbytes, sent_s)


class MemoryStreams(PacedStreams):
    """Carries the frames of one peer, and acknowledges incoming frames."""

    def __init__(self, hub: MemoryHub, own: MemoryNetwork) -> None:
        super().__init__(own.spawn, own.hear)
        self._hub, self._own = hub, own
        self.came = 0
        """Paced bytes that arrived so far."""

    def _opened(self, peer: PeerId, channel: Channel) -> Stream:
        hub, own = self._hub, self._own.peer_id
        receiver, route, way = hub.reach(own, peer), hub.route(own, peer), hub.barriers.way(own, peer)
        assert route is not None  # nothing is paced on a wide link
        return _Flow(peer, channel, route, self._own, receiver, way or "")

    async def _awake(self) -> None:
        await self._hub.barriers.awake(self._own.peer_id)

    def arrived(self, by: _Flow, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        """Take ``nbytes``, the last of ``parcel`` if given. The sender gets an acknowledgement afterwards."""
        if by.broken or self._own.gone:
            return
        sender, own = by.sender.peer_id, self._own.peer_id
        room = None if parcel is None else self._own.arrived(sender, by.channel, by.way, parcel)
        if room is not None or not self._hub.barriers.takes(sender, own):
            waiting = None if room is None else self._own.spawn(room)
            self._own.spawn(self._take_later(waiting, by, nbytes, sent_s))
        else:
            self._take(by, nbytes, sent_s)

    async def _take_later(self, room: asyncio.Task[None] | None, by: _Flow, nbytes: int, sent_s: float) -> None:
        if room is not None:
            await room
        await self._hub.barriers.taken(by.sender.peer_id, self._own.peer_id)
        self._take(by, nbytes, sent_s)

    def _take(self, by: _Flow, nbytes: int, sent_s: float) -> None:
        own, sender = self._own.peer_id, by.sender
        if by.broken:
            return
        if not self._hub.barriers.passes(sender.peer_id, own, by.way):  # a relay's link ended since the stream began
            self._hub.broke(sender.peer_id, own)
            self._hub.lost(own, sender.peer_id)
            return
        self._own.hear(sender.peer_id)
        if by.channel is Channel.CONTROL:
            return
        self.came += nbytes
        received_s = loop_time_s()
        back = self._hub.route(own, sender.peer_id)
        if back is None:  # a new relay, whose links are wide, has ended this stream
            return
        Piece(back, 0, lambda: sender.streams.receipt(by, nbytes, sent_s, received_s)).begin()

    def receipt(self, of: _Flow, nbytes: int, sent_s: float, received_s: float) -> None:
        """Take the acknowledgement of ``nbytes``, once we are not frozen."""
        if self._hub.barriers.takes(of.peer, self._own.peer_id):
            self.acknowledged(of, nbytes, sent_s, received_s)
        else:
            self._own.spawn(self._receipt_later(of, nbytes, sent_s, received_s))

    async def _receipt_later(self, of: _Flow, nbytes: int, sent_s: float, received_s: float) -> None:
        await self._hub.barriers.taken(of.peer, self._own.peer_id)
        self.acknowledged(of, nbytes, sent_s, received_s)
