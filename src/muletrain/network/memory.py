"""Networks in memory, for tests and virtual worlds: no sockets, no threads, no clock, hence deterministic.

Frames are really packed and read back by ``wire.frame``. Order holds per (sender, receiver, channel); a bounded queue
gives back-pressure. A dead peer is unreachable; a frozen one takes frames until the queue is full and answers nothing.
Over narrow links (``MemoryHub.roads``) frames are sent piece by piece, as the production pacer grants them, and calls
wait in the same queues. A receiver closes a stream after a wrong frame, as a real one does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextvars import copy_context
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from muletrain.clock import loop_time_s
from muletrain.errors import DeadlineExceeded, PeerUnreachable, ProtocolError, Refused
from muletrain.network.answers import Answers
from muletrain.network.barriers import DIRECT, Barriers
from muletrain.network.base import Bounds, CallHandler, Channel, FrameHandler, LossHandler, PeerId, RefusalHandler
from muletrain.network.conditions import Conditions
from muletrain.network.delivery import Counters, Delivery
from muletrain.network.inbox import Arrival, Inbox
from muletrain.network.jobs import Jobs
from muletrain.network.memory_streams import MemoryStreams
from muletrain.network.paced import CALL_OVERHEAD, Parcel
from muletrain.network.roads import Roads
from muletrain.policy.recent import Recent
from muletrain.wire.frame import Frame, pack, reread, unpack

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine

    from muletrain.network.roads import Route


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
        conditions.sending(own, frame.kind)
        hub.reach(own, own)  # the call may have killed us
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
