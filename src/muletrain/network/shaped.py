"""Shaped links: another network's traffic with declared delay, bandwidth, stalls and partitions, to emulate a fleet on one machine.

Only what this peer *sends* is shaped (its answers to calls are sent, too, by its own wrapper), so a round trip is shaped once in
each direction. Bandwidth is the narrowest of uplink, path and downlink; the uplink is shared by all receivers. Delay does not take
bandwidth: many frames are under way at once, in order per receiver and channel.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING, Any

from muletrain.errors import DeadlineExceeded, NetworkError, PeerUnreachable
from muletrain.network.base import CallHandler, Channel, Frame, FrameHandler, Network, PeerId, RefusalHandler
from muletrain.wire.frame import pack, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.clock import Clock
    from muletrain.config.fleet import FleetPeer, Link

IN_FLIGHT = 256
"""Frames on their way to one receiver on one channel: back-pressure begins here."""
CALL_OVERHEAD = 128
"""Bytes a call costs beside its payload."""


class ShapedNetwork:
    """A ``Network`` whose sends take the time the links would take. ``links`` gives the path to a peer."""

    def __init__(self, inner: Network, links: Callable[[PeerId], Link], own: FleetPeer, clock: Clock) -> None:
        self._inner, self._links, self._own, self._clock = inner, links, own, clock
        self.peer_id = inner.peer_id
        self._uplink_free = 0.0
        self._path_free: dict[PeerId, float] = {}
        self._pipes: dict[tuple[PeerId, Channel], asyncio.Queue[tuple[float, Frame]]] = {}
        self._broken: dict[tuple[PeerId, Channel], NetworkError] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cut: frozenset[PeerId] = frozenset()
        self._rng = random.Random(own.index)
        self._next_stall = self._draw_stall(0.0)

    def set_partition(self, unreachable: frozenset[PeerId]) -> None:
        """Nothing reaches these peers until the next call (the other side must be told, too)."""
        self._cut = unreachable

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        if peer in self._cut:
            await self._clock.sleep(timeout_s)
            raise DeadlineExceeded(f"{method} to {peer[-6:]}: partitioned")
        link = self._links(peer)
        depart = self._occupy(peer, link, len(payload) + CALL_OVERHEAD)

        async def shaped() -> bytes:
            await self._clock.sleep(max(0.0, depart - self._clock.now()) + link.delay_s)
            answer = await self._inner.call(peer, method, payload, timeout_s=timeout_s)
            await self._clock.sleep(link.delay_s)
            return answer

        return await self._clock.deadline(shaped(), timeout_s, f"{method} to {peer[-6:]}")

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        if peer == self.peer_id:
            return await self._inner.send(peer, frame, channel=channel, timeout_s=timeout_s)
        if (error := self._broken.pop((peer, channel), None)) is not None:
            raise error
        link, nbytes = self._links(peer), size(pack(frame))
        depart = self._occupy(peer, link, nbytes)
        wait = depart - self._clock.now()
        if wait > timeout_s:
            raise DeadlineExceeded(f"sending to {peer[-6:]}: the link needs {wait:.1f} s, {timeout_s:.1f} s allowed")
        pipe = self._pipe(peer, channel)
        await pipe.put((depart + link.delay_s, frame))
        await self._clock.sleep(max(0.0, depart - self._clock.now()))  # taken by the uplink: the caller may go on
        return nbytes

    def _occupy(self, peer: PeerId, link: Link, nbytes: int) -> float:
        """Book the uplink and the path; the time at which the last byte has left."""
        begin = max(self._clock.now(), self._uplink_free, self._path_free.get(peer, 0.0))
        if self._own.stall is not None and begin >= self._next_stall:
            begin += self._own.stall.duration_s
            self._next_stall = self._draw_stall(begin)
        uplink = self._own.up_bytes_per_s
        self._uplink_free = begin + (nbytes / uplink if math.isfinite(uplink) else 0.0)
        rate = link.bandwidth_bytes_per_s
        self._path_free[peer] = begin + (nbytes / rate if math.isfinite(rate) else 0.0)
        return max(self._uplink_free, self._path_free[peer])

    def _draw_stall(self, now: float) -> float:
        stall = self._own.stall
        return now + self._rng.expovariate(1 / stall.every_s) if stall is not None else math.inf

    def _pipe(self, peer: PeerId, channel: Channel) -> asyncio.Queue[tuple[float, Frame]]:
        key = (peer, channel)
        if key not in self._pipes:
            self._pipes[key] = asyncio.Queue(IN_FLIGHT)
            task = asyncio.create_task(self._carry(peer, channel, self._pipes[key]))
            self._tasks.add(task)
        return self._pipes[key]

    async def _carry(self, peer: PeerId, channel: Channel, pipe: asyncio.Queue[tuple[float, Frame]]) -> None:
        """Deliver in order, each frame at its time."""
        while True:
            arrival, frame = await pipe.get()
            await self._clock.sleep(max(0.0, arrival - self._clock.now()))
            if peer in self._cut:
                continue
            try:
                await self._inner.send(peer, frame, channel=channel)
            except NetworkError as e:
                self._broken[peer, channel] = PeerUnreachable(str(e))  # the next sender learns of it

    # Everything else is the inner network's -------------------------------------------------------------------------

    def serve(self, method: str, handler: CallHandler) -> None:
        self._inner.serve(method, handler)

    def receive(self, handler: FrameHandler) -> None:
        self._inner.receive(handler)

    def on_refusal(self, handler: RefusalHandler) -> None:
        self._inner.on_refusal(handler)

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._inner.announce(key, value, ttl_s)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        return await self._inner.lookup(key)

    def addresses(self) -> list[str]:
        return self._inner.addresses()

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        return await self._inner.connect(addresses, timeout_s=timeout_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()
