"""Paced streams between the peers of a virtual world, over narrow links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from muletrain.clock import loop_time_s
from muletrain.network.base import Channel
from muletrain.network.paced import PacedStreams, Parcel, Stream
from muletrain.network.roads import Piece

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine

    from muletrain.network.barriers import Barriers
    from muletrain.network.base import PeerId
    from muletrain.network.roads import Route


class End(Protocol):
    """One peer, as seen by the streams from and to this peer. ``gone``: killed or closed."""

    peer_id: PeerId
    streams: MemoryStreams
    gone: bool

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...
    def hear(self, peer: PeerId) -> None: ...

    def arrived(
        self, sender: PeerId, channel: Channel, way: PeerId, parcel: Parcel
    ) -> Coroutine[Any, Any, None] | None:
        """All of a frame is here. None: the frame is queued; else the result waits for room in the queue."""
        ...


class Paths(Protocol):
    """The world, as seen by streams."""

    barriers: Barriers

    def reach(self, sender: PeerId, receiver: PeerId) -> End:
        """Raises PeerUnreachable."""
        ...

    def route(self, sender: PeerId, receiver: PeerId) -> Route | None: ...


@dataclass(slots=True, eq=False)
class _Flow(Stream):
    """A stream of which both ends are known."""

    sender: End
    receiver: End
    way: PeerId

    def arrived(self, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        self.receiver.streams.arrived(self, parcel, nbytes, sent_s)


class MemoryStreams(PacedStreams):
    """Carries the frames of one peer, and acknowledges incoming frames."""

    def __init__(self, paths: Paths, own: End) -> None:
        super().__init__(own.spawn, own.hear)
        self._paths, self._own = paths, own
        self.came = 0
        """Paced bytes that arrived so far."""

    def _opened(self, peer: PeerId, channel: Channel) -> Stream:
        paths, own = self._paths, self._own.peer_id
        receiver, route, way = paths.reach(own, peer), paths.route(own, peer), paths.barriers.way(own, peer)
        assert route is not None  # nothing is paced on a wide link
        return _Flow(peer, channel, route, self._own, receiver, way or "")

    async def _awake(self) -> None:
        await self._paths.barriers.awake(self._own.peer_id)

    def arrived(self, by: _Flow, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        """Take ``nbytes``, the last of ``parcel`` if given. The sender gets an acknowledgement afterwards."""
        if by.broken or self._own.gone:
            return
        sender, own = by.sender.peer_id, self._own.peer_id
        room = None if parcel is None else self._own.arrived(sender, by.channel, by.way, parcel)
        if room is not None or not self._paths.barriers.takes(sender, own):
            waiting = None if room is None else self._own.spawn(room)
            self._own.spawn(self._take_later(waiting, by, nbytes, sent_s))
        else:
            self._take(by, nbytes, sent_s)

    async def _take_later(self, room: asyncio.Task[None] | None, by: _Flow, nbytes: int, sent_s: float) -> None:
        if room is not None:
            await room
        await self._paths.barriers.taken(by.sender.peer_id, self._own.peer_id)
        self._take(by, nbytes, sent_s)

    def _take(self, by: _Flow, nbytes: int, sent_s: float) -> None:
        own, sender = self._own.peer_id, by.sender
        if by.broken or not self._paths.barriers.passes(sender.peer_id, own, by.way):
            return
        self._own.hear(sender.peer_id)
        if by.channel is Channel.CONTROL:
            return
        self.came += nbytes
        received_s = loop_time_s()
        back = self._paths.route(own, sender.peer_id)
        if back is None:  # a new relay, whose links are wide, has ended this stream
            return
        Piece(back, 0, lambda: sender.streams.receipt(by, nbytes, sent_s, received_s)).begin()

    def receipt(self, of: _Flow, nbytes: int, sent_s: float, received_s: float) -> None:
        """Take the acknowledgement of ``nbytes``, once we are not frozen."""
        if self._paths.barriers.takes(of.peer, self._own.peer_id):
            self.acknowledged(of, nbytes, sent_s, received_s)
        else:
            self._own.spawn(self._receipt_later(of, nbytes, sent_s, received_s))

    async def _receipt_later(self, of: _Flow, nbytes: int, sent_s: float, received_s: float) -> None:
        await self._paths.barriers.taken(of.peer, self._own.peer_id)
        self.acknowledged(of, nbytes, sent_s, received_s)
