"""Shaped links: another network's traffic with declared delay, bandwidth, stalls and partitions, to emulate a fleet on one machine.

Each peer shapes what it *sends* (its answers to calls, too), so a round trip is shaped once in each direction, and the time at
which its own downlink has taken what it receives. Uplink and downlink are shared by all others; each path has the narrowest
bandwidth on its way. Delay does not take bandwidth: many frames are under way at once, in order per receiver and channel. Calls and
answers that fit into a packet wait for none of it: on real links, too, they come between two packets of what is long
(``tests/test_machines.py``).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muletrain.errors import DeadlineExceeded, MuletrainError, NetworkError, PeerUnreachable
from muletrain.network.base import (
    CallHandler,
    Channel,
    Frame,
    FrameHandler,
    LossHandler,
    Network,
    PeerId,
    RefusalHandler,
)
from muletrain.wire.frame import frame_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from muletrain.clock import Clock
    from muletrain.config.fleet import FleetPeer, Link, Stall

IN_FLIGHT = 256
"""Frames on their way to one receiver on one channel: back-pressure begins here."""
PACKET = 1400
CALL_OVERHEAD = 128
"""Bytes a call or an answer costs beside its payload."""


class Stalls:
    """Times in which nothing passes a peer's links: exponentially distributed gaps, fixed duration, drawn from ``seed``."""

    def __init__(self, stall: Stall | None, seed: int, now: float) -> None:
        self._stall, self._rng = stall, random.Random(seed)
        self._begin = now
        self._end = now
        self._advance()

    def after(self, time: float) -> float:
        """``time``, or the end of the stall it lies in. Times far in the past of an earlier question count as free."""
        if self._stall is None:
            return time
        while self._end <= time:
            self._advance()
        return self._end if time >= self._begin else time

    def _advance(self) -> None:
        if self._stall is not None:
            self._begin = self._end + self._rng.expovariate(1 / self._stall.every_s)
            self._end = self._begin + self._stall.duration_s


class Pipe:
    """One direction of a link that carries one byte after the other; when it is free again [s]."""

    def __init__(self, stalls: Stalls) -> None:
        self._stalls = stalls
        self.free = 0.0

    def begin(self, earliest: float) -> float:
        return self._stalls.after(max(earliest, self.free))


@dataclass(slots=True)
class _OnTheWay:
    """To one receiver on one channel: (arrival, frame), and how many senders are about to add one."""

    frames: asyncio.Queue[tuple[float, Frame]]
    coming: int = 0

    @property
    def empty(self) -> bool:
        return self.frames.empty() and not self.coming


class ShapedNetwork:
    """A ``Network`` whose traffic takes the time the links would take. ``links`` gives the path to a peer."""

    def __init__(
        self,
        inner: Network,
        links: Callable[[PeerId], Link],
        own: FleetPeer,
        clock: Clock,
        weigh: Callable[[Frame], int] = frame_size,
    ) -> None:
        """``weigh``: bytes that a frame counts for."""
        self._weigh = weigh
        self._inner, self._links, self._own, self._clock = inner, links, own, clock
        self.peer_id = inner.peer_id
        self._stalls = Stalls(own.stall, own.index, clock.now())
        self._up, self._down = Pipe(self._stalls), Pipe(self._stalls)
        self._stalls_now = Stalls(own.stall, own.index, clock.now())
        """The same ones, never asked about later."""
        self._paths: dict[PeerId, Pipe] = {}
        self._pipes: dict[tuple[PeerId, Channel], _OnTheWay] = {}
        self._broken: dict[tuple[PeerId, Channel], MuletrainError] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._cut: frozenset[PeerId] = frozenset()
        self._cut_changed = asyncio.Event()

    def set_partition(self, unreachable: frozenset[PeerId]) -> None:
        """Nothing reaches these peers, or arrives from them in frames, until the next call (the other side must be told, too)."""
        self._cut = unreachable
        self._cut_changed.set()
        self._cut_changed = asyncio.Event()

    async def call(self, peer: PeerId, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        async def shaped() -> bytes:
            await self._travel(peer, len(payload) + CALL_OVERHEAD)
            answer = await self._inner.call(peer, method, payload, timeout_s=timeout_s)
            if peer != self.peer_id:
                taken = self._booked(len(answer) + CALL_OVERHEAD)
                if len(answer) > PACKET:  # what fits into a packet comes between two of another's
                    await self._sleep_until(taken)
            return answer

        return await self._clock.deadline(shaped(), timeout_s, f"{method} to {peer[-6:]}")

    def serve(self, method: str, handler: CallHandler) -> None:
        async def shaped(sender: PeerId, payload: bytes) -> bytes:
            try:
                answer = await handler(sender, payload)
            except MuletrainError as e:
                await self._travel(sender, len(str(e)) + CALL_OVERHEAD)
                raise
            await self._travel(sender, len(answer) + CALL_OVERHEAD)
            return answer

        self._inner.serve(method, shaped)

    async def _travel(self, peer: PeerId, nbytes: int) -> None:
        """The time until the last of ``nbytes`` is with ``peer``. When it is cut off: until that changes, then PeerUnreachable."""
        if peer == self.peer_id:
            return
        link = self._links(peer)
        departure = self._book(peer, link, nbytes) if nbytes > PACKET else self._between(peer, link, nbytes)
        await self._sleep_until(departure + link.delay_s)
        if peer in self._cut:
            await self._cut_changed.wait()  # lost: the caller's deadline ends this before
            raise PeerUnreachable(f"{peer[-6:]} was cut off")

    async def send(
        self, peer: PeerId, frame: Frame, *, channel: Channel = Channel.PIPE, timeout_s: float = 60.0
    ) -> int:
        if peer == self.peer_id:
            return await self._inner.send(peer, frame, channel=channel, timeout_s=timeout_s)
        if (error := self._broken.pop((peer, channel), None)) is not None:
            raise error
        link, nbytes = self._links(peer), self._weigh(frame)
        depart, up, there = self._departure(peer, link, nbytes)
        if depart > self._clock.now() + timeout_s:
            await self._clock.sleep(timeout_s)
            raise DeadlineExceeded(f"sending to {peer[-6:]}: not taken within {timeout_s:.1f} s")
        self._up.free, self._path(peer).free = up, there
        if depart + link.delay_s <= self._clock.now() and (peer, channel) not in self._pipes and peer not in self._cut:
            # nothing holds it up, or goes before it
            await self._inner.send(peer, frame, channel=channel, timeout_s=timeout_s)
            return nbytes
        pipe = self._pipe(peer, channel)
        pipe.coming += 1
        try:
            await pipe.frames.put((depart + link.delay_s, frame))
        finally:
            pipe.coming -= 1
        await self._sleep_until(depart)  # taken by the uplink: the caller may go on
        return nbytes

    def _departure(self, peer: PeerId, link: Link, nbytes: int) -> tuple[float, float, float]:
        """When the last byte would have left, and when uplink and path would be free again."""
        now, path = self._clock.now(), self._path(peer)
        up = self._up.begin(now) + nbytes / self._own.up_bytes_per_s
        there = path.begin(now) + nbytes / link.bandwidth_bytes_per_s
        return max(up, there), up, there

    def _book(self, peer: PeerId, link: Link, nbytes: int) -> float:
        """Occupy uplink and path; when the last byte has left. A slow path leaves the uplink to others meanwhile."""
        depart, self._up.free, self._path(peer).free = self._departure(peer, link, nbytes)
        return depart

    def _between(self, peer: PeerId, link: Link, nbytes: int) -> float:
        """When a packet has left that the others let pass: they are later by as much."""
        self._book(peer, link, nbytes)
        slowest = min(self._own.up_bytes_per_s, link.bandwidth_bytes_per_s)
        return self._stalls_now.after(self._clock.now()) + nbytes / slowest

    def _path(self, peer: PeerId) -> Pipe:
        if peer not in self._paths:
            self._paths[peer] = Pipe(self._stalls)
        return self._paths[peer]

    async def _sleep_until(self, time: float) -> None:
        if (wait := time - self._clock.now()) > 0:
            await self._clock.sleep(wait)

    def _pipe(self, peer: PeerId, channel: Channel) -> _OnTheWay:
        key = (peer, channel)
        if key not in self._pipes:
            pipe = self._pipes[key] = _OnTheWay(asyncio.Queue(IN_FLIGHT))
            task = asyncio.create_task(self._carry(peer, channel, pipe))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)
        return self._pipes[key]

    async def _carry(self, peer: PeerId, channel: Channel, pipe: _OnTheWay) -> None:
        """Deliver in order, each frame at its time, as long as there are some."""
        while not pipe.empty:
            arrival, frame = await pipe.frames.get()
            await self._sleep_until(arrival)
            if peer in self._cut:
                continue
            try:
                await self._inner.send(peer, frame, channel=channel)
            except MuletrainError as e:  # the next sender learns of it
                self._broken[peer, channel] = PeerUnreachable(str(e)) if isinstance(e, NetworkError) else e
        del self._pipes[peer, channel]

    def receive(self, handler: FrameHandler, kinds: Collection[str] = ()) -> None:
        async def shaped(sender: PeerId, frame: Frame) -> None:
            if sender != self.peer_id:
                if sender in self._cut:
                    return
                await self._take(self._weigh(frame))
            await handler(sender, frame)

        self._inner.receive(shaped, kinds)

    async def _take(self, nbytes: int) -> None:
        """Until the downlink has taken a frame that is here now. Alone it came in while the sender sent it, so that this takes no
        time; several at once share the downlink."""
        await self._sleep_until(self._booked(nbytes))

    def _booked(self, nbytes: int) -> float:
        """Occupy the downlink; when it has taken ``nbytes``."""
        duration = nbytes / self._own.down_bytes_per_s
        self._down.free = self._down.begin(self._clock.now() - duration) + duration
        return self._down.free

    # Everything else is the inner network's -------------------------------------------------------------------------

    def on_refusal(self, handler: RefusalHandler) -> None:
        self._inner.on_refusal(handler)

    def on_lost(self, handler: LossHandler) -> None:
        self._inner.on_lost(handler)

    def heard_s(self, peer: PeerId) -> float:
        return self._inner.heard_s(peer)

    def give_up(self, peer: PeerId) -> None:
        self._inner.give_up(peer)

    def moved(self) -> int:
        return self._inner.moved()

    async def announce(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._inner.announce(key, value, ttl_s)

    async def lookup(self, key: str) -> dict[PeerId, bytes]:
        return await self._inner.lookup(key)

    def carried(self) -> dict[PeerId, int]:
        return self._inner.carried()

    def addresses(self) -> list[str]:
        return self._inner.addresses()

    async def connect(self, addresses: list[str], *, timeout_s: float) -> PeerId:
        return await self._inner.connect(addresses, timeout_s=timeout_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._inner.close()
