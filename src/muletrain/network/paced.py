"""Streams over emulated narrow links (``roads``), like ``streams`` between real machines.

Frames go piece by piece, when the production ``Pacer`` grants them, and the receiver acknowledges each piece. Small
frames (``Channel.CONTROL``) go at once, and wait behind everything that is in the queues. In a virtual world
(``network.memory``) both ends are known; ``network.shaped`` knows one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from muletrain.errors import PeerUnreachable
from muletrain.network.base import Channel
from muletrain.network.pacing import Pacer
from muletrain.network.roads import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from typing import Any

    from muletrain.network.base import PeerId
    from muletrain.network.roads import Route
    from muletrain.wire.frame import Frame


CALL_OVERHEAD = 128
"""Bytes that a call or an answer costs beside the payload, on an emulated link."""


@dataclass(slots=True, eq=False)
class Parcel:
    """A frame under way, and the counted bytes. ``stall_s``: delay on arrival; ``left``: bytes not yet handed over."""

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
class Stream(ABC):
    """A stream to one receiver. ``under_way``: bytes not acknowledged; ``writing``: the frame being sent."""

    peer: PeerId
    channel: Channel
    route: Route
    under_way: int = field(default=0, init=False)
    writing: asyncio.Task[None] | None = field(default=None, init=False)
    broken: bool = field(default=False, init=False)

    @abstractmethod
    def arrived(self, parcel: Parcel | None, nbytes: int, sent_s: float) -> None:
        """Take ``nbytes`` at the receiver, the last of ``parcel`` if given."""


class PacedStreams(ABC):
    """The outgoing streams of one peer."""

    def __init__(
        self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], heard: Callable[[PeerId], None]
    ) -> None:
        """``heard`` is told when a receipt comes."""
        self._spawn, self._heard = spawn, heard
        self.pacer = Pacer()
        self._turns: dict[tuple[PeerId, Channel], asyncio.Lock] = {}
        self._open: dict[tuple[PeerId, Channel], Stream] = {}

    @abstractmethod
    def _opened(self, peer: PeerId, channel: Channel) -> Stream:
        """A new stream. Raises PeerUnreachable."""

    @abstractmethod
    async def _awake(self) -> None:
        """Wait while this peer is frozen."""

    async def send(self, peer: PeerId, channel: Channel, parcel: Parcel, timeout_s: float) -> None:
        """Send ``parcel``; return when all bytes are in the first queue. Raises PeerUnreachable, DeadlineExceeded."""
        if channel is Channel.CONTROL:
            to = self._stream(peer, channel)
            await _entered(to.route.carry(parcel.nbytes, partial(to.arrived, parcel, 0, 0.0)))
            return
        writing = self._spawn(self._write(peer, channel, parcel))
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
                    raise PeerUnreachable("the stream has ended", f"sending to {peer[-6:]}") from None
                if not to.broken and parcel.begun and parcel.left:
                    self._end(to)  # half a frame is on it
                raise
            finally:
                to.writing = None

    async def _write_pieces(self, to: Stream, parcel: Parcel) -> None:
        loop = asyncio.get_running_loop()
        while parcel.left:
            nbytes = await self.pacer.grant(to.peer, to.channel, parcel.left, to.route.coarse)
            to.under_way += nbytes
            await self._awake()
            parcel.left -= nbytes
            last_of = None if parcel.left else parcel
            # a real link's pieces are smaller, and the last of them is handed over so much later
            sent_s = loop.time() + max(0, nbytes - self.pacer.window(to.peer).piece) / to.route.bytes_per_s
            piece = Piece(to.route, nbytes, partial(to.arrived, last_of, nbytes, sent_s))
            piece.begin()
        await _entered(piece)

    def _stream(self, peer: PeerId, channel: Channel) -> Stream:
        if (peer, channel) not in self._open:
            self._open[peer, channel] = self._opened(peer, channel)
        return self._open[peer, channel]

    def broke(self, peer: PeerId, channels: Iterable[Channel] = Channel) -> None:
        """End the streams to ``peer`` on ``channels``."""
        for channel in channels:
            if (to := self._open.get((peer, channel))) is not None:
                self.stop(to)

    def stop(self, to: Stream) -> None:
        """End one stream: the frame being sent fails with PeerUnreachable."""
        self._end(to)
        if to.writing is not None:
            to.writing.cancel()

    def _end(self, to: Stream) -> None:
        to.broken = True
        del self._open[to.peer, to.channel]
        self.pacer.forget(to.peer, to.channel, to.under_way)

    def acknowledged(self, to: Stream, nbytes: int, sent_s: float, received_s: float) -> None:
        if not to.broken:
            self._heard(to.peer)
            to.under_way -= nbytes
            self.pacer.acknowledged(to.peer, to.channel, nbytes, sent_s, received_s)


async def _entered(piece: Piece) -> None:
    if piece.waits:
        piece.entered = asyncio.get_running_loop().create_future()
        await piece.entered
