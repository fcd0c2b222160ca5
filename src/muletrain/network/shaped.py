"""Shaped links: another network's traffic with declared delay, bandwidth, stalls and partitions, to emulate a fleet on
one machine.

Each peer shapes what it *sends*, answers to calls included, so a round trip is shaped once in each direction. Frames go
piece by piece through the queues of the uplink and of the path (``roads``), as granted by the sender's ``Pacer``. A
frame is handed over when the last piece has arrived; calls and notices wait in the same queues. A process does not know
the queue in front of a remote downlink, so the receiver holds frames back until the local downlink has taken every
byte.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from muletrain.clock import LoopClock, loop_time_s
from muletrain.errors import MuletrainError, NetworkError, PeerUnreachable
from muletrain.network.base import (
    Bounds,
    CallHandler,
    Channel,
    FrameHandler,
    Network,
    PeerId,
)
from muletrain.network.jobs import Jobs
from muletrain.network.paced import CALL_OVERHEAD, PacedStreams, Parcel, Stream
from muletrain.network.roads import Road, Roads, at
from muletrain.wire.frame import Frame, frame_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from muletrain.config.fleet_file import FleetPeer, Link, Stall
    from muletrain.network.roads import Route

BEHIND = 2
"""Frames being handed over behind which pieces are not acknowledged."""
PACKET = 1400
"""Largest message [bytes] that slips between two packets of longer frames at our downlink."""


class Stalls:
    """Times in which nothing passes a peer's links, of fixed duration, after exponentially distributed gaps drawn from
    ``seed``."""

    def __init__(self, stall: Stall | None, seed: int, now: float) -> None:
        self._stall, self._rng = stall, random.Random(seed)
        self._begins, self._ends = [now], [now]

    def after(self, time: float) -> float:
        """``time``, or the end of the stall around ``time``."""
        if self._stall is None:
            return time
        while self._ends[-1] <= time:
            self._begins.append(self._ends[-1] + self._rng.expovariate(1 / self._stall.every_s))
            self._ends.append(self._begins[-1] + self._stall.duration_s)
        k = bisect_right(self._ends, time)
        return self._ends[k] if self._begins[k] <= time else time


@dataclass(frozen=True)
class _Arrival:
    """A piece that reached the far side, the last of ``parcel`` if given."""

    parcel: Parcel | None
    nbytes: int
    sent_s: float
    received_s: float


@dataclass(slots=True, eq=False)
class _Stream(Stream):
    """A stream to a real peer. ``arrivals``: pieces not handed over, in order."""

    net: ShapedNetwork
    arrivals: deque[_Arrival] = field(default_factory=deque, init=False)

    def arrived(self, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        if not self.broken and not self.net.cut_off(self.peer):
            self.net.arrived(self, _Arrival(parcel, nbytes, sent_s, loop_time_s()))


class _Streams(PacedStreams):
    def __init__(self, net: ShapedNetwork) -> None:
        super().__init__(net.spawn, lambda peer: None)  # receipts that are emulated are no sign of life
        self._net = net

    def _opened(self, peer: PeerId, channel: Channel) -> Stream:
        return _Stream(peer, channel, self._net.route(peer), self._net)

    async def _awake(self) -> None:
        """Nothing to wait for: a frozen process does not run this."""


class ShapedNetwork:
    """A ``Network`` whose traffic takes as long as on the declared links. ``links`` gives the path to a peer."""

    def __init__(self, inner: Network, links: Callable[[PeerId], Link], own: FleetPeer) -> None:
        self.peer_id = inner.peer_id
        self._inner, self._links, self._own, self._clock = inner, links, own, LoopClock()
        self._stalls = Stalls(own.stall, own.index, self._clock.now())
        self._roads = Roads(lambda sender, receiver: links(receiver).bandwidth_bytes_per_s)
        open_s = None if own.stall is None else self._stalls.after
        self._roads.lay(self.peer_id, Road(own.up_bytes_per_s, queue_s=own.queue_s, open_s=open_s))
        self._routes: dict[PeerId, Route] = {}
        self._down_free_s = -math.inf
        """When our downlink has taken everything that came so far."""
        self._jobs = Jobs()
        self._streams = _Streams(self)
        self._broken: dict[tuple[PeerId, Channel], MuletrainError] = {}
        self._cut: frozenset[PeerId] = frozenset()
        self._cut_changed = asyncio.Event()

    def set_partition(self, unreachable: frozenset[PeerId]) -> None:
        """Cut this peer off from ``unreachable`` until the next call: nothing reaches these peers, and no frame arrives
        from there. The far side must be told, too."""
        before, self._cut = self._cut, unreachable
        for peer in before - unreachable:
            self._streams.broke(peer)
        self._cut_changed.set()
        self._cut_changed = asyncio.Event()

    def cut_off(self, peer: PeerId) -> bool:
        return peer in self._cut

    def route(self, peer: PeerId) -> Route:
        if peer not in self._routes:
            stations = self.peer_id, peer
            self._routes[peer] = self._roads.route(stations, lambda sender, receiver: self._links(receiver).delay_s)
        return self._routes[peer]

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        async def shaped() -> bytes:
            await self._travel(peer, len(payload) + CALL_OVERHEAD)
            answer = await self._inner.call(peer, method, payload, timeout_s=timeout_s)
            await self._take(peer, len(answer) + CALL_OVERHEAD)
            return answer

        return await self._clock.deadline(shaped(), timeout_s, f"{method} to {peer[-6:]}")

    def serve(self, method: str, handler: CallHandler, *, free: bool = False) -> None:
        async def shaped(sender: PeerId, payload: bytes) -> bytes:
            try:
                await self._take(sender, len(payload) + CALL_OVERHEAD)
                answer = await handler(sender, payload)
            except MuletrainError as e:
                await self._travel(sender, len(str(e)) + CALL_OVERHEAD)
                raise
            await self._travel(sender, len(answer) + CALL_OVERHEAD)
            return answer

        self._inner.serve(method, shaped, free=free)

    async def _travel(self, peer: PeerId, nbytes: int) -> None:
        """Wait until the last of ``nbytes`` is with ``peer``. While cut off: until that changes; then raises
        PeerUnreachable."""
        if peer == self.peer_id:
            return
        await self.route(peer).carried(nbytes)
        if peer in self._cut:
            await self._cut_changed.wait()  # lost: the caller's deadline ends this before
            raise PeerUnreachable(f"{peer[-6:]} was cut off")

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        if peer == self.peer_id or self._open_road(peer):
            return await self._inner.send(peer, frame, channel=channel, timeout_s=timeout_s)
        if (error := self._broken.pop((peer, channel), None)) is not None:
            raise error
        nbytes = frame_size(frame)
        await self._streams.send(peer, channel, Parcel(frame, nbytes, 0.0), timeout_s)
        return nbytes

    def _open_road(self, peer: PeerId) -> bool:
        """Does nothing hold up frames to ``peer``?"""
        route = self.route(peer)
        return not route.queues and not route.delay_s and peer not in self._cut

    def arrived(self, by: _Stream, arrival: _Arrival) -> None:
        """Take a piece on the far side of the link."""
        if arrival.parcel is None and len(by.arrivals) < BEHIND:
            self._receipt(by, arrival)
            return
        by.arrivals.append(arrival)
        if len(by.arrivals) == 1:
            self.spawn(self._hand_over(by))

    async def _hand_over(self, by: _Stream) -> None:
        """Hand frames over in order, until none is left."""
        while by.arrivals and not by.broken:
            arrival = by.arrivals[0]
            if arrival.parcel is not None:
                assert isinstance(arrival.parcel.item, Frame)
                try:
                    await self._inner.send(by.peer, arrival.parcel.item, channel=by.channel)
                except MuletrainError as e:  # the next sender learns of it
                    self._broken[by.peer, by.channel] = PeerUnreachable(str(e)) if isinstance(e, NetworkError) else e
                    self._streams.stop(by)
                    return
            by.arrivals.popleft()
            self._receipt(by, arrival)

    def _receipt(self, by: _Stream, of: _Arrival) -> None:
        """Send a receipt back, which takes no bandwidth."""
        if by.channel is not Channel.CONTROL:
            comes_s = self._stalls.after(loop_time_s() + by.route.delay_s)
            at(comes_s, partial(self._streams.acknowledged, by, of.nbytes, of.sent_s, of.received_s))

    def receive(self, handler: FrameHandler, kinds: Collection[str] = (), bounds: Bounds | None = None) -> None:
        async def shaped(sender: PeerId, frame: Frame) -> None:
            if sender not in self._cut:
                await self._take(sender, frame_size(frame))
                await handler(sender, frame)

        self._inner.receive(shaped, kinds, bounds)

    async def _take(self, sender: PeerId, nbytes: int) -> None:
        """Wait until our downlink has taken a message that is here now. A single message was received during sending,
        so this takes no time; several at once share the downlink. A message of one packet slips between larger ones."""
        if sender == self.peer_id:
            return
        now_s, takes_s = loop_time_s(), nbytes / self._own.down_bytes_per_s
        self._down_free_s = self._stalls.after(max(now_s - takes_s, self._down_free_s)) + takes_s
        until_s = self._down_free_s if nbytes > PACKET else self._stalls.after(now_s)
        if until_s > now_s:
            await asyncio.sleep(until_s - now_s)

    def queued_s(self, peer: PeerId) -> float:
        return self._streams.pacer.queued_s(peer)

    def give_up(self, peer: PeerId) -> None:
        self._streams.pacer.give_up(peer)
        self._inner.give_up(peer)

    def moved(self) -> int:
        return self._streams.pacer.moved + self._inner.moved()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._jobs.spawn(work)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner network's."""
        return getattr(self._inner, name)

    async def close(self) -> None:
        for peer in self._routes:
            self._streams.broke(peer)
        await self._jobs.end()
        await self._inner.close()
