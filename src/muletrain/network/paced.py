"""Streams of a ``MemoryNetwork`` over narrow links (``roads``), as ``streams`` has them between real machines: frames go piece by piece,
when the production ``Pacer`` grants them, and the receiver acknowledges each piece. What is small (``Channel.CONTROL``) goes at once, and
waits behind what is in the queues already.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import PeerUnreachable
from muletrain.network.base import Channel
from muletrain.network.pacing import Pacer
from muletrain.network.roads import Piece

if TYPE_CHECKING:
    from muletrain.network.base import Frame, PeerId
    from muletrain.network.memory import MemoryHub, MemoryNetwork
    from muletrain.network.roads import Route


@dataclass(slots=True, eq=False)
class Parcel:
    """A frame on its way, and the bytes that it counts for. ``stall_s``: for so long it is held up where it arrives; ``left``: bytes that
    are to be handed over yet."""

    item: bytes | Frame
    nbytes: int
    stall_s: float
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.nbytes

    @property
    def begun(self) -> bool:
        return self.left < self.nbytes


@dataclass(slots=True, eq=False)
class _Stream:
    """To one receiver. ``under_way``: bytes that it has not acknowledged; ``writing``: the frame being sent."""

    sender: MemoryNetwork
    receiver: MemoryNetwork
    channel: Channel
    route: Route
    way: PeerId
    under_way: int = 0
    writing: asyncio.Task[None] | None = None
    broken: bool = False


class PacedStreams:
    """Of one peer, to and from all others."""

    def __init__(self, hub: MemoryHub, net: MemoryNetwork) -> None:
        self._hub, self._net = hub, net
        self.pacer = Pacer()
        self.came = 0
        """Paced bytes that arrived so far."""
        self._turns: dict[tuple[PeerId, Channel], asyncio.Lock] = {}
        self._open: dict[tuple[PeerId, Channel], _Stream] = {}

    async def send(self, peer: PeerId, channel: Channel, parcel: Parcel, timeout_s: float) -> None:
        """Returns when all of it is in the first queue. Raises PeerUnreachable, DeadlineExceeded."""
        if channel is Channel.CONTROL:
            to = self._stream(peer, channel)
            await _entered(to.route.carry(parcel.nbytes, lambda: _arrived(to, parcel, 0, 0.0)))
            return
        writing = self._net.spawn(self._write(peer, channel, parcel))
        await self.pacer.patient(peer, writing, timeout_s, lambda: parcel.begun)

    async def _write(self, peer: PeerId, channel: Channel, parcel: Parcel) -> None:
        turn = self._turns.setdefault((peer, channel), asyncio.Lock())
        async with turn, self.pacer.lane(peer, channel):
            to = self._stream(peer, channel)
            to.writing = asyncio.current_task()
            try:
                await self._write_pieces(to, parcel)
            except BaseException as e:
                if to.broken and isinstance(e, asyncio.CancelledError):
                    raise PeerUnreachable(f"sending to {peer[-6:]}: the stream has ended") from None
                if not to.broken and parcel.begun and parcel.left:
                    self._end(to)  # half a frame is on it
                raise
            finally:
                to.writing = None

    async def _write_pieces(self, to: _Stream, parcel: Parcel) -> None:
        loop, peer, coarse = asyncio.get_running_loop(), to.receiver.peer_id, to.route.coarse
        while parcel.left:
            nbytes = await self.pacer.grant(peer, to.channel, parcel.left, coarse)
            to.under_way += nbytes
            if self._hub.frozen:
                await self._hub.awake(self._net.peer_id)
            parcel.left -= nbytes
            piece = _piece(to, None if parcel.left else parcel, nbytes, loop.time())
            piece.begin()
        await _entered(piece)

    def _stream(self, peer: PeerId, channel: Channel) -> _Stream:
        """Raises PeerUnreachable."""
        to = self._open.get((peer, channel))
        if to is None:
            receiver, route = self._hub.reach(self._net.peer_id, peer), self._hub.route(self._net.peer_id, peer)
            assert route is not None  # else nobody comes here
            way = self._hub.way(self._net.peer_id, peer)
            to = self._open[peer, channel] = _Stream(self._net, receiver, channel, route, way or "")
        return to

    def broke(self, peer: PeerId) -> None:
        """All streams to ``peer``."""
        for channel in Channel:
            if (to := self._open.get((peer, channel))) is not None:
                self._end(to)
                if to.writing is not None:
                    to.writing.cancel()

    def _end(self, to: _Stream) -> None:
        to.broken = True
        del self._open[to.receiver.peer_id, to.channel]
        self.pacer.forget(to.receiver.peer_id, to.under_way)

    def acknowledged(self, to: _Stream, nbytes: int, sent_s: float, received_s: float) -> None:
        if not to.broken:
            self._net.hear(to.receiver.peer_id)
            to.under_way -= nbytes
            self.pacer.acknowledged(to.receiver.peer_id, nbytes, sent_s, received_s)

    def arrived(self, by: _Stream, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        """``nbytes`` at us, the last of ``parcel``, if there is one. The sender hears of them when we take them."""
        hub, own, sender = self._hub, self._net.peer_id, by.sender.peer_id
        if by.broken or hub.peers.get(own) is not self._net:
            return
        room = None if parcel is None else self._net.arrived(sender, by.channel, by.way, parcel)
        if room is not None or not hub.takes(sender, own):
            self._net.spawn(self._take_later(room, by, nbytes, sent_s))
        else:
            self._take(by, nbytes, sent_s)

    async def _take_later(self, room: asyncio.Task[None] | None, by: _Stream, nbytes: int, sent_s: float) -> None:
        if room is not None:
            await room
        await self._hub.taken(by.sender.peer_id, self._net.peer_id)
        self._take(by, nbytes, sent_s)

    def _take(self, by: _Stream, nbytes: int, sent_s: float) -> None:
        hub, own, sender = self._hub, self._net.peer_id, by.sender
        if by.broken or not hub.passes(sender.peer_id, own, by.way):
            return
        self._net.hear(sender.peer_id)
        if by.channel is Channel.CONTROL:
            return
        self.came += nbytes
        received_s = asyncio.get_running_loop().time()
        back = hub.route(own, sender.peer_id)
        assert back is not None  # what narrows the way there is on the way back, too
        Piece(back, 0, lambda: sender.streams.acknowledged(by, nbytes, sent_s, received_s)).begin()


def _piece(to: _Stream, last_of: Parcel | None, nbytes: int, sent_s: float) -> Piece:
    return Piece(to.route, nbytes, lambda: _arrived(to, last_of, nbytes, sent_s))


def _arrived(to: _Stream, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
    to.receiver.streams.arrived(to, parcel, nbytes, sent_s)


async def _entered(piece: Piece) -> None:
    if piece.waits:
        piece.entered = asyncio.get_running_loop().create_future()
        await piece.entered
