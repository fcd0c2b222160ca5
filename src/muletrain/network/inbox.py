"""Frames that wait at a peer of a virtual world: one bounded queue for each sender and channel, in order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from muletrain.network.base import Channel, PeerId
    from muletrain.wire.frame import Frame

QUEUE = 64
"""Frames of one sender on one channel that wait for the handler."""


class Arrival(NamedTuple):
    """A frame, packed or not, that was sent by ``way`` and arrives at ``arrives_s`` (the loop's clock)."""

    arrives_s: float
    way: PeerId
    item: bytes | Frame


class Taker(Protocol):
    """Takes frames out of an inbox."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...

    async def take(self, sender: PeerId, channel: Channel, arrival: Arrival) -> bool:
        """Handle one frame. False: the stream has ended, and later frames there are lost."""
        ...


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
    """Queues incoming frames of one peer, and hands each to a ``Taker`` in order."""

    def __init__(self, taker: Taker) -> None:
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
