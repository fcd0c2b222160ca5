"""Frames over libp2p: outgoing and incoming traffic of one peer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from muletrain.clock import loop_time_s
from muletrain.errors import AdmissionError, ProtocolError, Refused
from muletrain.network.delivery import Counters
from muletrain.network.gated import reaching
from muletrain.network.jobs import Jobs
from muletrain.network.pacing import Pacer
from muletrain.network.streams import FRAMES, Incoming, Outgoing, greet
from muletrain.wire.frame import pack, reread, size

if TYPE_CHECKING:
    from muletrain.network.base import Channel, LossHandler, PeerId
    from muletrain.network.delivery import Delivery
    from muletrain.network.gated import GatedP2P
    from muletrain.wire.frame import Buffer, Frame

SELF_QUEUE = 1024
"""Most frames to ourselves that wait for the handler."""


class Traffic:
    """The streams of one peer, by peer and channel."""

    def __init__(self, p2p: GatedP2P, own: PeerId, delivery: Delivery, max_frame_bytes: int) -> None:
        self._p2p, self._own_id, self._delivery = p2p, own, delivery
        self.counters, self.pacer = Counters(), Pacer()
        self.losses: dict[str, LossHandler] = {}
        """See ``Network.on_lost``."""
        self._incoming = Incoming(max_frame_bytes)
        self._outgoing: dict[tuple[PeerId, Channel], Outgoing] = {}
        self._own: dict[Channel, asyncio.Queue[Frame]] = {}
        self._jobs = Jobs()
        self._damaging = False

    async def open(self) -> None:
        """Accept streams from now on."""
        await self._p2p.add_binary_stream_handler(FRAMES, self._on_stream)

    async def send(self, peer: PeerId, frame: Frame, channel: Channel, timeout_s: float) -> int:
        """Raises as ``Network.send``."""
        if peer == self._own_id:
            await reaching(self._own_queue(channel).put(reread(frame)), timeout_s, f"{frame.kind} to ourselves")
            return 0
        buffers = self._damaged(pack(frame))
        outgoing = self._outgoing.get((peer, channel))
        if outgoing is None:
            outgoing = self._outgoing[peer, channel] = Outgoing(
                self._p2p, peer, channel, self.pacer, self.hear, self._ended
            )
        try:
            await outgoing.send(buffers, timeout_s)
        except AdmissionError as e:
            raise Refused(str(e)) from e
        self.counters.sent[peer, frame.kind] += size(buffers)
        return size(buffers)

    def damage_next(self) -> None:
        """Flip a bit in the prefix of the next frame to another peer, as if the transport's check had failed."""
        self._damaging = True

    def _damaged(self, buffers: list[Buffer]) -> list[Buffer]:
        if not self._damaging:
            return buffers
        self._damaging = False
        first = bytes(buffers[0])
        return [bytes([first[0] ^ 1]) + first[1:], *buffers[1:]]

    def heard_s(self, peer: PeerId) -> float:
        return self._incoming.heard.get(peer, float("-inf"))

    def hear(self, peer: PeerId) -> None:
        """Something of ``peer`` came now."""
        self._incoming.heard[peer] = loop_time_s()

    def moved(self) -> int:
        return self._incoming.moved + self.pacer.moved

    def cut(self, peer: PeerId) -> None:
        """Close all streams with ``peer``."""
        self._incoming.close(peer)
        for key in [k for k in self._outgoing if k[0] == peer]:
            self._outgoing.pop(key).stop()

    async def close(self) -> None:
        self._jobs.cancel()
        for outgoing in self._outgoing.values():
            outgoing.stop()
        await self._jobs.end()

    def _ended(self, peer: PeerId, channel: Channel) -> None:
        if not self._jobs.over:
            for handler in self.losses.values():
                handler(peer, channel)

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive until the stream ends or brings something wrong; a correct peer opens another."""
        sender = info.peer_id.to_base58()
        with self._jobs.serving():
            try:
                channel = await greet(reader, writer)
            except ProtocolError as e:
                self._delivery.refuse(sender, e)
                return
            except (asyncio.IncompleteReadError, ConnectionError):
                return  # no frame was sent on it
            await self._receive(sender, channel, reader, writer)
            self._ended(sender, channel)

    async def _receive(
        self, sender: PeerId, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            frames = self._incoming.frames(sender, channel, reader, writer, self._delivery.door(sender))
            async with aclosing(frames):
                async for frame in frames:
                    if not self._p2p.gate.admitted(sender):
                        return
                    self.counters.received[sender, frame.kind] += sum(t.nbytes for t in frame.tensors)
                    if not await self._delivery.deliver(sender, frame):
                        return
        except ProtocolError as e:
            self._delivery.refuse(sender, e)

    def _own_queue(self, channel: Channel) -> asyncio.Queue[Frame]:
        if channel not in self._own:
            self._own[channel] = asyncio.Queue(SELF_QUEUE)
            self._jobs.spawn(self._drain_own(self._own[channel]))
        return self._own[channel]

    async def _drain_own(self, queue: asyncio.Queue[Frame]) -> None:
        while True:
            await self._delivery.deliver(self._own_id, await queue.get())
