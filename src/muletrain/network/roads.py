"""Emulated links. All traffic from a machine shares the uplink, all traffic to a machine shares the downlink, and a
queue stands in front of each.

Nothing overtakes in a queue, however small. A queue has a depth: while it is full, connections hold back data, and take
turns when there is room again, as TCP backs off. Nothing is lost or sent twice.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextvars import Context
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from muletrain.clock import loop_time_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import PeerId

PIECE = 1 << 16
"""Bytes that a sender without pacing hands over at once."""
EVENT_S = 0.01
"""Time in which the narrowest link of a way carries a paced piece [s], at least: each piece costs some events."""
_NOBODYS = Context()
"""Context of timers that belong to no machine. Bytes under way arrive even while the sender is frozen
(``sim.loop.MACHINE``)."""
INSTANT_S = 1e-9
"""Error of the loop's clock that is tolerated [s]."""


@dataclass(frozen=True)
class Road:
    """One machine's link to the rest. ``queue_s``: most seconds of data that wait in front of each direction.
    ``open_s``: when the link carries bytes of a given arrival time; None: at once."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    queue_s: float = 0.25
    open_s: Callable[[float], float] | None = None


class Piece:
    """Bytes under way. ``then`` is called when the last byte has arrived. A piece without bytes (an acknowledgement)
    takes no bandwidth, but waits in the same queues."""

    __slots__ = ("_at", "entered", "nbytes", "route", "tail_s", "then", "waits")

    def __init__(self, route: Route, nbytes: int, then: Callable[[], None]) -> None:
        self.route, self.nbytes, self.then = route, nbytes, then
        self._at = 0
        self.tail_s = -math.inf
        """When the last byte reaches the current or next queue."""
        self.waits = False
        """Whether the piece waits for room in a queue."""
        self.entered: asyncio.Future[None] | None = None
        """Set by a caller that waits until the piece is in the first queue."""

    def begin(self) -> None:
        self._goes_on(loop_time_s())

    def comes(self) -> None:
        """Reach the next queue, or the end."""
        if self._at == len(self.route.queues):
            self.then()
        else:
            self.route.queues[self._at].offer(self)

    def leaves(self, head_s: float, tail_s: float) -> None:
        """Leave a queue: the first byte at ``head_s``, the last at ``tail_s``."""
        if self.entered is not None and not self.entered.done():
            self.entered.set_result(None)
        self._at += 1
        self.tail_s = tail_s + self.route.delays[self._at]
        self._goes_on(tail_s if self._at == len(self.route.queues) else head_s)

    def _goes_on(self, leaves_s: float) -> None:
        loop, before = asyncio.get_running_loop(), self.route.on_way[self._at]
        comes_s = leaves_s + self.route.delays[self._at]
        if comes_s <= loop.time() and not before:
            self.comes()
        elif self.nbytes:  # pieces that come at the same time stay in order
            before.append(self)
            loop.call_at(comes_s, _next_comes, before, context=_NOBODYS)
        else:
            loop.call_at(comes_s, self.comes, context=_NOBODYS)


def at(time_s: float, then: Callable[[], None]) -> None:
    """Call ``then`` at ``time_s``, or now if that is past."""
    loop = asyncio.get_running_loop()
    if time_s <= loop.time():
        then()
    else:
        loop.call_at(time_s, then)


def _next_comes(pieces: deque[Piece]) -> None:
    pieces.popleft().comes()


class Queue:
    """The queue in front of one direction of a link. Room for ``depth_s`` seconds of data, or one piece. ``open_s``: as
    in ``Road``."""

    __slots__ = ("_bytes_per_s", "_depth_s", "_free_s", "_lines", "_open_s", "_timer")

    def __init__(self, bytes_per_s: float, depth_s: float, open_s: Callable[[float], float] | None = None) -> None:
        self._bytes_per_s, self._depth_s, self._open_s = bytes_per_s, depth_s, open_s
        self._free_s = -math.inf
        """When everything in the queue has left."""
        self._lines: dict[Route, deque[Piece]] = {}
        """Pieces that wait for room, by connection; the first connection has the next turn."""
        self._timer: asyncio.TimerHandle | None = None

    def queued_s(self) -> float:
        """How long a piece that comes now would wait."""
        return max(0.0, self._free_s - loop_time_s())

    def offer(self, piece: Piece) -> None:
        now_s = loop_time_s()
        if not piece.nbytes or (not self._lines and self._room_s(piece) <= now_s + INSTANT_S):
            self._take(piece, now_s)
            return
        piece.waits = True
        self._lines.setdefault(piece.route, deque()).append(piece)
        if self._timer is None:
            self._wait()

    def _room_s(self, piece: Piece) -> float:
        """When there is room for ``piece``."""
        return self._free_s - max(0.0, self._depth_s - piece.nbytes / self._bytes_per_s)

    def _take(self, piece: Piece, now_s: float) -> None:
        begin_s = max(now_s, self._free_s)
        if self._open_s is not None:
            begin_s = self._open_s(begin_s)
        if piece.nbytes:
            self._free_s = begin_s + piece.nbytes / self._bytes_per_s
        piece.waits = False
        piece.leaves(begin_s, max(begin_s, self._free_s, piece.tail_s))

    def _wait(self) -> None:
        first = next(iter(self._lines.values()))[0]
        self._timer = asyncio.get_running_loop().call_at(self._room_s(first), self._admit, context=_NOBODYS)

    def _admit(self) -> None:
        self._timer = None
        now_s = loop_time_s()
        while self._lines:
            route, line = next(iter(self._lines.items()))
            if self._room_s(line[0]) > now_s + INSTANT_S:
                self._wait()
                return
            del self._lines[route]
            piece = line.popleft()
            if line:
                self._lines[route] = line
            self._take(piece, now_s)


@dataclass(frozen=True, eq=False)
class Route:
    """The way of one connection in one direction: the queues, and the delay before each and after the last."""

    queues: tuple[Queue, ...]
    delays: tuple[float, ...]
    bytes_per_s: float
    """Bandwidth of the narrowest link."""
    on_way: tuple[deque[Piece], ...]
    """Pieces under way to each queue, and to the end."""

    @property
    def delay_s(self) -> float:
        return sum(self.delays)

    @property
    def coarse(self) -> int:
        """Bytes of a piece that is worth simulating."""
        return int(min(EVENT_S * self.bytes_per_s, 1 << 40))

    def carry(self, nbytes: int, then: Callable[[], None]) -> Piece:
        """Send all of ``nbytes`` at once, without pacing, and return the last piece."""
        while nbytes > PIECE:
            Piece(self, PIECE, _nothing).begin()
            nbytes -= PIECE
        last = Piece(self, nbytes, then)
        last.begin()
        return last

    async def carried(self, nbytes: int) -> None:
        """Send ``nbytes``, and wait until all have arrived."""
        arrived = asyncio.Event()
        self.carry(nbytes, arrived.set)
        await arrived.wait()


def _nothing() -> None:
    pass


class Roads:
    """All links of a world: links of machines, and paths that are narrower than the links at both ends."""

    def __init__(self, path_bytes_per_s: Callable[[PeerId, PeerId], float]) -> None:
        """``path_bytes_per_s``: bandwidth of the path from a sender to a receiver."""
        self._path_bytes_per_s = path_bytes_per_s
        self._roads: dict[PeerId, Road] = {}
        self._up: dict[PeerId, Queue] = {}
        self._down: dict[PeerId, Queue] = {}

    def lay(self, peer: PeerId, road: Road) -> None:
        """Give ``peer`` a link, before anything is sent."""
        for queues, bytes_per_s in (self._up, road.up_bytes_per_s), (self._down, road.down_bytes_per_s):
            if bytes_per_s < math.inf or road.open_s is not None:
                queues[peer] = Queue(bytes_per_s, road.queue_s, road.open_s)
        if road != Road(queue_s=road.queue_s):
            self._roads[peer] = road

    def queued_s(self, peer: PeerId) -> tuple[float, float]:
        """How long a piece that comes now would wait in front of the machine's uplink, and of the downlink."""
        up, down = self._up.get(peer), self._down.get(peer)
        return up.queued_s() if up else 0.0, down.queued_s() if down else 0.0

    def narrow(self, a: PeerId, b: PeerId) -> bool:
        """Does anything narrow the traffic between the two, there or back?"""
        return (
            a in self._roads
            or b in self._roads
            or min(self._path_bytes_per_s(a, b), self._path_bytes_per_s(b, a)) < math.inf
        )

    def route(self, stations: tuple[PeerId, ...], delay_s: Callable[[PeerId, PeerId], float]) -> Route:
        """The way from the first station to the last. A path that is narrower than both ends has a separate queue."""
        queues, delays, slowest = list[Queue](), [0.0], math.inf
        for a, b in pairwise(stations):
            own, other, path = self._roads.get(a, WIDE), self._roads.get(b, WIDE), self._path_bytes_per_s(a, b)
            ends = min(own.up_bytes_per_s, other.down_bytes_per_s)
            slowest = min(slowest, ends, path)
            before = [self._up.get(a), Queue(path, own.queue_s) if path < ends else None]
            for queue in filter(None, before):
                queues.append(queue)
                delays.append(0.0)
            delays[-1] += delay_s(a, b)
            if b in self._down:
                queues.append(self._down[b])
                delays.append(0.0)
        on_way = tuple(deque[Piece]() for _ in delays)
        return Route(tuple(queues), tuple(delays), slowest, on_way)


WIDE = Road()
