"""Networks in memory, for tests and virtual worlds: no sockets, no threads, no clock, hence deterministic.

Frames are really packed and read back by ``wire.frame``. Order holds per (sender, receiver, channel); a bounded queue
gives back-pressure. A dead peer is unreachable; a frozen one takes frames until its queue is full and answers nothing.
Where members relay (``MemoryHub.relays``), two that are cut off from each other speak by way of a third. Where links
are narrow (``MemoryHub.roads``), frames are sent piece by piece, as the production pacer grants them, and calls wait in
the same queues.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from muletrain.errors import DeadlineExceeded, MuletrainError, PeerUnreachable, ProtocolError, Refused
from muletrain.network.base import (
    Bounds,
    CallHandler,
    Channel,
    Frame,
    FrameHandler,
    LossHandler,
    PeerId,
    RefusalHandler,
)
from muletrain.network.delivery import Counters, Delivery
from muletrain.network.paced import PacedStreams, Parcel, Stream
from muletrain.network.quota import Quota
from muletrain.network.roads import Piece, Roads
from muletrain.policy.recent import Recent
from muletrain.wire.frame import frame_size, pack, read_frame, reread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.network.roads import Route
    from muletrain.wire.frame import Door

QUEUE = 64
"""Frames of one sender on one channel that wait for the handler."""
DIRECT = ""
"""The way without a relay."""
CALL_OVERHEAD = 128
"""Bytes that a call or an answer costs beside its payload, on a narrow link."""


class MemoryHub:
    """The world that ``MemoryNetwork``s share: who lives, who is cut off, what is in the directory.

    Time, where it matters (deadlines, expiry), is the loop's: virtual on a virtual loop."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, MemoryNetwork] = {}
        self.frozen: dict[PeerId, asyncio.Event] = {}
        self.directory: dict[str, dict[PeerId, tuple[float, bytes]]] = {}
        self.delay_s: Callable[[PeerId, PeerId], float] = lambda sender, receiver: 0.0
        """How long the next message takes; order within a stream holds whatever it says."""
        self.stall_s: Callable[[PeerId, PeerId, Channel], float] = lambda sender, receiver, channel: 0.0
        """How much longer the next frame of a stream takes: what follows in it waits, what goes by other streams
        overtakes."""
        self.damage: Callable[[PeerId, PeerId, bytes], bytes] = lambda sender, receiver, packed: packed
        """What becomes of a frame on its way."""
        self.sending: Callable[[PeerId, str], None] = lambda sender, kind: None
        """Told of every frame before it is sent to another peer; it may kill the sender."""
        self.hands_over = False
        """Frames arrive as they were sent, neither packed nor read back: for worlds that damage none, and count bytes
        elsewhere."""
        self.roads = Roads()
        """Links that are narrow. Along them a connection's delay is asked for once, when it begins."""
        self.weigh: Callable[[PeerId, Frame], int] = lambda sender, frame: frame_size(frame)
        """Bytes that a frame counts for on narrow links."""
        self.relays = False
        """Do members carry for those that are cut off from each other?"""
        self._cut: Counter[frozenset[PeerId]] = Counter()
        self._one_way: Counter[tuple[PeerId, PeerId]] = Counter()
        """(sender, receiver) of whom the one does not reach the other."""
        self._directory_down = False
        self._small: dict[frozenset[PeerId], int] = {}
        """Bytes of the largest frame that passes between two."""
        self._ways: dict[frozenset[PeerId], PeerId] = {}
        """Who carries between two that are cut off."""
        self._held_up: dict[frozenset[PeerId], asyncio.Event] = {}
        self._routes: dict[tuple[PeerId, PeerId], tuple[PeerId, Route | None]] = {}

    def join(self, peer_id: PeerId) -> MemoryNetwork:
        return MemoryNetwork(self, peer_id)

    def kill(self, peer: PeerId) -> None:
        """It stops at once; others find it unreachable."""
        if peer in self.peers:
            gone = self.peers.pop(peer)
            gone._stop()
            self.ended(gone)

    def ended(self, gone: MemoryNetwork) -> None:
        """Those who had streams with ``gone`` see them end."""
        for other in self.peers.values():
            other.streams.broke(gone.peer_id)
            if self.way(gone.peer_id, other.peer_id) is not None:
                self._ended_for(other, gone)
        for pair in [sorted(p) for p, way in self._ways.items() if way == gone.peer_id]:
            self.way(*pair)

    def _ended_for(self, peer: MemoryNetwork, other: MemoryNetwork) -> None:
        if peer.has_stream_of(other.peer_id) or other.has_stream_of(peer.peer_id):
            peer.spawn(peer._lose(other.peer_id))

    def freeze(self, peer: PeerId) -> None:
        """Like SIGSTOP, as others see it: nothing is refused and nothing is answered."""
        self.frozen.setdefault(peer, asyncio.Event())

    def thaw(self, peer: PeerId) -> None:
        if event := self.frozen.pop(peer, None):
            event.set()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Neither reaches the other until ``mend``, and finds out when it tries."""
        self._cut[frozenset((a, b))] += 1
        self._broke(a, b)
        self.way(a, b)

    def _broke(self, a: PeerId, b: PeerId) -> None:
        """What is on its way between the two is lost, and senders find out."""
        self._routes.pop((a, b), None)
        self._routes.pop((b, a), None)
        for peer, other in (a, b), (b, a):
            if peer in self.peers:
                self.peers[peer].streams.broke(other)

    def mend(self, a: PeerId, b: PeerId) -> None:
        """What was under way is lost; that their streams ended, both hear now."""
        pair = frozenset((a, b))
        self._cut[pair] -= 1
        if self._cut[pair]:
            return  # cut twice
        del self._cut[pair]
        if self._ways.pop(pair, None) is not None:
            return
        if a in self.peers and b in self.peers:
            self._ended_for(self.peers[a], self.peers[b])
            self._ended_for(self.peers[b], self.peers[a])

    def cut_way(self, sender: PeerId, receiver: PeerId) -> None:
        """As ``cut``, but what the receiver asks the sender is answered, and what it sends arrives."""
        self._one_way[sender, receiver] += 1
        if sender in self.peers:
            self.peers[sender].streams.broke(receiver)

    def mend_way(self, sender: PeerId, receiver: PeerId) -> None:
        self._one_way[sender, receiver] -= 1
        if not self._one_way[sender, receiver]:
            del self._one_way[sender, receiver]
        if sender in self.peers and receiver in self.peers:
            self._ended_for(self.peers[receiver], self.peers[sender])

    def pass_small(self, pair: tuple[PeerId, ...], limit: int | None) -> None:
        """Frames, questions and answers of more than ``limit`` bytes do not pass between the two, and nobody is told;
        None: all do."""
        self._small.pop(frozenset(pair), None)
        if limit is not None:
            self._small[frozenset(pair)] = limit

    def too_large(self, a: PeerId, b: PeerId, nbytes: int) -> bool:
        return bool(self._small) and nbytes > self._small.get(frozenset((a, b)), nbytes)

    def no_directory(self, down: bool) -> None:
        """Nobody gets an answer from it, for now."""
        self._directory_down = down

    def ask_directory(self) -> None:
        """Raises PeerUnreachable."""
        if self._directory_down:
            raise PeerUnreachable("the directory cannot be reached")

    def hold_up(self, a: PeerId, b: PeerId) -> None:
        """Nothing passes between the two until ``let_pass``, and nobody is told; then what waited arrives, as with
        TCP."""
        self._held_up.setdefault(frozenset((a, b)), asyncio.Event())

    def let_pass(self, a: PeerId, b: PeerId) -> None:
        if event := self._held_up.pop(frozenset((a, b)), None):
            event.set()

    def reach(self, sender: PeerId, receiver: PeerId) -> MemoryNetwork:
        """Raises PeerUnreachable."""
        if receiver not in self.peers or self.way(sender, receiver) is None or (sender, receiver) in self._one_way:
            raise PeerUnreachable(f"{receiver[-6:]} cannot be reached")
        return self.peers[receiver]

    def way(self, a: PeerId, b: PeerId) -> PeerId | None:
        """DIRECT, or who carries between the two; None if they do not reach each other. With another relay their
        streams end."""
        if not self._cut or (pair := frozenset((a, b))) not in self._cut:
            return DIRECT
        if not self.relays:
            return None
        before = self._ways.pop(pair, None)
        able = [r for r in sorted(self.peers) if r not in pair and self.passes(a, b, r)]
        now = before if before in able else next(iter(able), None)
        if now is not None:
            self._ways[pair] = now
        if now != before:
            self._broke(a, b)
        if now != before and a in self.peers and b in self.peers:
            self._ended_for(self.peers[a], self.peers[b])
            self._ended_for(self.peers[b], self.peers[a])
        return now

    def passes(self, a: PeerId, b: PeerId, way: PeerId) -> bool:
        """Does what one sent the other by ``way`` arrive?"""
        if way == DIRECT:
            return not self._cut or frozenset((a, b)) not in self._cut
        alive = way in self.peers and way not in self.frozen
        return alive and self.passes(a, way, DIRECT) and self.passes(way, b, DIRECT)

    def route(self, sender: PeerId, receiver: PeerId) -> Route | None:
        """Between two that reach each other; None: nothing narrows it."""
        way = self.way(sender, receiver) or DIRECT
        known = self._routes.get((sender, receiver))
        if known is None or known[0] != way:
            stations = (sender, way, receiver) if way else (sender, receiver)
            narrow = any(self.roads.narrow(a, b) for a, b in pairwise(stations))
            route = self.roads.route(stations, self.delay_s) if narrow else None
            known = self._routes[sender, receiver] = way, route
        return known[1]

    def takes(self, sender: PeerId, receiver: PeerId) -> bool:
        """Does what arrives now find the receiver awake, and nothing that holds it up?"""
        return receiver not in self.frozen and (not self._held_up or frozenset((sender, receiver)) not in self._held_up)

    async def taken(self, sender: PeerId, receiver: PeerId) -> None:
        """Until nothing holds up what the one sent, and the other is awake."""
        while self._held_up and (event := self._held_up.get(frozenset((sender, receiver)))) is not None:
            await event.wait()
        if self.frozen:
            await self.awake(receiver)

    async def awake(self, peer: PeerId) -> None:
        while (event := self.frozen.get(peer)) is not None:
            await event.wait()


@dataclass(slots=True)
class _Stream:
    """What of one sender waits on one channel: (when it arrives, by whom it was carried, the frame). ``coming``:
    senders that wait for room."""

    frames: asyncio.Queue[tuple[float, PeerId, bytes | Frame]]
    coming: int = 0

    @property
    def empty(self) -> bool:
        return self.frames.empty() and not self.coming

    async def put(self, arrival: tuple[float, PeerId, bytes | Frame]) -> None:
        """Wait for room."""
        self.coming += 1
        try:
            await self.frames.put(arrival)
        finally:
            self.coming -= 1


class MemoryNetwork:
    """``Network`` of one peer of a ``MemoryHub``."""

    def __init__(self, hub: MemoryHub, peer_id: PeerId) -> None:
        self.peer_id, self._hub = peer_id, hub
        self.counters = Counters()
        self._delivery = Delivery()
        self.streams = MemoryStreams(hub, self)
        """Over narrow links."""
        self._heard: Recent[float] = Recent()
        self._moved = 0
        """Bytes that came whole."""
        self._handlers: dict[str, tuple[CallHandler, bool]] = {}
        self._quota = Quota()
        self._inbox: dict[tuple[PeerId, Channel], _Stream] = {}
        self._senders: set[PeerId] = set()
        """Of all streams that were ever opened to us."""
        self._carried: Counter[PeerId] = Counter()
        self._lost: LossHandler = lambda peer: None
        self._tasks: dict[asyncio.Task[Any], None] = {}
        hub.peers[peer_id] = self

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if self._hub.frozen:
            await self._hub.awake(self.peer_id)
        target, way = self._hub.reach(self.peer_id, peer), self._hub.way(self.peer_id, peer)
        # a task of the callee's: it goes on when the caller's patience ends, and dies with the callee
        task = target.spawn(target._answer(self.peer_id, method, bytes(payload)))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if (
            done
            and not task.cancelled()
            and self._hub.too_large(self.peer_id, peer, max(len(payload), len(task.result()[1])))
        ):
            await asyncio.sleep(timeout_s)
            done = set()
        if not done:
            raise DeadlineExceeded(f"{method} to {peer[-6:]}: no answer within {timeout_s:.1f} s")
        if task.cancelled():
            raise PeerUnreachable(f"{method} to {peer[-6:]}: it went away")
        self._hub.reach(self.peer_id, peer)
        if self._hub.way(self.peer_id, peer) != way:
            raise PeerUnreachable(f"{method} to {peer[-6:]}: the answer was lost on its way")
        refused, answer = task.result()
        self.hear(peer)
        if refused:
            raise Refused(answer.decode())
        return bytes(answer)

    async def _answer(self, sender: PeerId, method: str, payload: bytes) -> tuple[bool, bytes]:
        """There, what is answered, and back."""
        hub, own = self._hub, sender == self.peer_id
        there = None if own else hub.route(sender, self.peer_id)
        if there is not None:
            await there.carried(len(payload) + CALL_OVERHEAD)
        elif delay_s := self._delay_s(sender):
            await asyncio.sleep(2 * delay_s)  # there and back
        await hub.taken(sender, self.peer_id)
        self.hear(sender)
        refused, answer = await self._answered(sender, method, payload)
        if not own and hub.way(self.peer_id, sender) is not None and (back := hub.route(self.peer_id, sender)):
            await back.carried(len(answer) + CALL_OVERHEAD)
        return refused, answer

    async def _answered(self, sender: PeerId, method: str, payload: bytes) -> tuple[bool, bytes]:
        if method not in self._handlers:
            return True, f"'{method}' is not served here (not yet, or not any more)".encode()
        handler, free = self._handlers[method]
        try:
            if sender == self.peer_id:
                return False, await handler(sender, payload)
            return False, await self._quota.answer(sender, handler, payload, free=free)
        except MuletrainError as e:
            if isinstance(e, ProtocolError):
                self._delivery.refuse(sender, e, f"{method}: ")
            return True, str(e).encode()

    def _delay_s(self, sender: PeerId) -> float:
        if sender == self.peer_id:
            return 0.0
        relay = self._hub.way(sender, self.peer_id)
        if not relay:
            return self._hub.delay_s(sender, self.peer_id)
        return self._hub.delay_s(sender, relay) + self._hub.delay_s(relay, self.peer_id)

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        self._handlers[method] = handler, free

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        if self._hub.frozen:
            await self._hub.awake(self.peer_id)
        target = self._hub.reach(self.peer_id, peer)
        own = peer == self.peer_id
        if not own:
            self._hub.sending(self.peer_id, frame.kind)
            self._hub.reach(self.peer_id, self.peer_id)  # perhaps we were killed by that
            if self._hub.too_large(self.peer_id, peer, self._hub.weigh(self.peer_id, frame)):
                await asyncio.sleep(timeout_s)
                raise DeadlineExceeded(f"sending to {peer[-6:]}: no receipt within {timeout_s:.1f} s")
        item = self._as_sent(peer, frame)
        if not own and self._hub.route(self.peer_id, peer) is not None:
            nbytes = max(1, self._hub.weigh(self.peer_id, frame))
            self._count(peer, frame, self._hub.way(self.peer_id, peer) or DIRECT, nbytes)
            stall_s = self._hub.stall_s(self.peer_id, peer, channel)
            await self.streams.send(peer, channel, Parcel(item, nbytes, stall_s), timeout_s)
            return nbytes
        way = self._hub.way(self.peer_id, peer) or DIRECT
        on_its_way_s = 0.0 if own else target._delay_s(self.peer_id) + self._hub.stall_s(self.peer_id, peer, channel)
        arrives = asyncio.get_running_loop().time() + on_its_way_s
        stream = target._stream(self.peer_id, channel)
        if stream.frames.full():
            try:
                async with asyncio.timeout(timeout_s):
                    await stream.put((arrives, way, item))
            except TimeoutError:
                raise DeadlineExceeded(f"sending to {peer[-6:]}: not taken within {timeout_s:.1f} s") from None
        else:
            stream.frames.put_nowait((arrives, way, item))
        sent = 0 if own else len(item) if isinstance(item, bytes) else self._hub.weigh(self.peer_id, frame)
        self._count(peer, frame, way, sent)
        return sent

    def _count(self, peer: PeerId, frame: Frame, way: PeerId, sent: int) -> None:
        self.counters.sent[peer, frame.kind] += sent
        if way in self._hub.peers:
            self._hub.peers[way]._carried[peer] += sent

    def heard_s(self, peer: PeerId) -> float:
        return self._heard.get(peer, float("-inf"))

    def hear(self, peer: PeerId) -> None:
        self._heard[peer] = asyncio.get_running_loop().time()

    def queued_s(self, peer: PeerId) -> float:
        return self.streams.pacer.queued_s(peer)

    def give_up(self, peer: PeerId) -> None:
        self.streams.pacer.give_up(peer)

    def moved(self) -> int:
        return self._moved + self.streams.came + self.streams.pacer.moved

    def arrived(self, sender: PeerId, channel: Channel, way: PeerId, parcel: Parcel) -> asyncio.Task[None] | None:
        """All of a frame has, over narrow links. None: it is in its queue; else what waits for room there."""
        stream, loop = self._stream(sender, channel), asyncio.get_running_loop()
        arrival = loop.time() + parcel.stall_s, way, parcel.item
        if stream.frames.full():
            return self.spawn(stream.put(arrival))
        stream.frames.put_nowait(arrival)
        return None

    def _as_sent(self, peer: PeerId, frame: Frame) -> bytes | Frame:
        if self._hub.hands_over:
            return frame
        return reread(frame) if peer == self.peer_id else self._hub.damage(self.peer_id, peer, b"".join(pack(frame)))

    def _stream(self, sender: PeerId, channel: Channel) -> _Stream:
        """In a large fleet most are idle, and take no room."""
        key = (sender, channel)
        if key not in self._inbox:
            stream = self._inbox[key] = _Stream(asyncio.Queue(QUEUE))
            self._senders.add(sender)
            self.spawn(self._drain(sender, channel, stream))
        return self._inbox[key]

    async def _drain(self, sender: PeerId, channel: Channel, stream: _Stream) -> None:
        while not stream.empty:
            arrives, way, item = await stream.frames.get()
            if (wait_s := arrives - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(wait_s)
            await self._hub.taken(sender, self.peer_id)
            if not self._hub.passes(sender, self.peer_id, way):
                continue  # it was on its way when the link broke, or with a relay that died
            door = self._delivery.door(sender)
            try:
                if isinstance(item, bytes):
                    frame = await unpack(item, door)
                else:
                    await door.expect(frame := item)
            except ProtocolError as e:
                self._delivery.refuse(sender, e)
                continue
            self.hear(sender)
            nbytes = sum(t.nbytes for t in frame.tensors)
            self._moved += nbytes
            self.counters.received[sender, frame.kind] += nbytes
            await self._delivery.deliver(sender, frame)
        del self._inbox[sender, channel]

    def has_stream_of(self, sender: PeerId) -> bool:
        return sender in self._senders

    def on_lost(self, handler: LossHandler) -> None:
        self._lost = handler

    async def _lose(self, peer: PeerId) -> None:
        await asyncio.sleep(self._hub.delay_s(peer, self.peer_id))
        await self._hub.taken(peer, self.peer_id)
        self._lost(peer)

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        self._delivery.receive(handler, kinds, bounds)

    def on_refusal(self, handler: RefusalHandler) -> None:
        self._delivery.refused = handler

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        self._hub.ask_directory()
        expires = asyncio.get_running_loop().time() + ttl_s
        self._hub.directory.setdefault(key, {})[self.peer_id] = expires, bytes(value)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        self._hub.ask_directory()
        now = asyncio.get_running_loop().time()
        return {peer: value for peer, (expires, value) in self._hub.directory.get(key, {}).items() if expires > now}

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
        if self._hub.peers.get(self.peer_id) is self:
            del self._hub.peers[self.peer_id]
            self._hub.ended(self)
        self._stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task


class _Bytes:
    """Those of one frame, as a ``Reader``."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    async def readexactly(self, n: int) -> bytes:
        part = self._data[self._at : self._at + n]
        self._at += n
        if len(part) < n:
            raise asyncio.IncompleteReadError(part, n)
        return part


async def unpack(data: bytes, door: Door | None = None) -> Frame:
    """One whole frame. Raises ProtocolError."""
    try:
        return await read_frame(_Bytes(data), door=door)
    except asyncio.IncompleteReadError as e:
        raise ProtocolError(f"a frame of {len(data)} bytes is cut short") from e


@dataclass(slots=True, eq=False)
class _Flow(Stream):
    """Between two peers of a hub."""

    sender: MemoryNetwork
    receiver: MemoryNetwork
    way: PeerId

    def arrived(self, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        self.receiver.streams.arrived(self, parcel, nbytes, sent_s)


class MemoryStreams(PacedStreams):
    """Of one peer of a hub, to and from all others."""

    def __init__(self, hub: MemoryHub, net: MemoryNetwork) -> None:
        super().__init__(net.spawn, net.hear)
        self._hub, self._net = hub, net
        self.came = 0
        """Paced bytes that arrived so far."""

    def _opened(self, peer: PeerId, channel: Channel) -> Stream:
        hub, own = self._hub, self._net.peer_id
        receiver, route, way = hub.reach(own, peer), hub.route(own, peer), hub.way(own, peer)
        assert route is not None  # else nobody comes here
        return _Flow(peer, channel, route, self._net, receiver, way or "")

    async def _awake(self) -> None:
        if self._hub.frozen:
            await self._hub.awake(self._net.peer_id)

    def arrived(self, by: _Flow, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        """``nbytes`` at us, the last of ``parcel``, if there is one. The sender hears of them when we take them."""
        hub, own, sender = self._hub, self._net.peer_id, by.sender.peer_id
        if by.broken or hub.peers.get(own) is not self._net:
            return
        room = None if parcel is None else self._net.arrived(sender, by.channel, by.way, parcel)
        if room is not None or not hub.takes(sender, own):
            self._net.spawn(self._take_later(room, by, nbytes, sent_s))
        else:
            self._take(by, nbytes, sent_s)

    async def _take_later(self, room: asyncio.Task[None] | None, by: _Flow, nbytes: int, sent_s: float) -> None:
        if room is not None:
            await room
        await self._hub.taken(by.sender.peer_id, self._net.peer_id)
        self._take(by, nbytes, sent_s)

    def _take(self, by: _Flow, nbytes: int, sent_s: float) -> None:
        hub, own, sender = self._hub, self._net.peer_id, by.sender
        if by.broken or not hub.passes(sender.peer_id, own, by.way):
            return
        self._net.hear(sender.peer_id)
        if by.channel is Channel.CONTROL:
            return
        self.came += nbytes
        received_s = asyncio.get_running_loop().time()
        back = hub.route(own, sender.peer_id)
        if back is None:  # another relay carries from now on, so this stream has ended; nothing narrows the new way
            return
        Piece(back, 0, lambda: sender.streams.acknowledged(by, nbytes, sent_s, received_s)).begin()
