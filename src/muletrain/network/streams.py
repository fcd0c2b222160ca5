"""Long-lived one-way streams of frames over libp2p: one per receiver and channel, opened when first needed.

A new stream per message would start with a small flow-control window each time: at 100 ms round trip 8 MB take 741 ms that way,
221 ms on a stream that is kept. A stream begins with a hello that the receiver acknowledges with one byte; after that the
receiver says nothing, so that anything read by the sender means the end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hivemind.p2p import PeerID

from muletrain.errors import PeerUnreachable, ProtocolError
from muletrain.network.base import Channel, Frame
from muletrain.network.gated import GatedP2P, reaching
from muletrain.network.intake import Intake
from muletrain.wire.frame import pack, read_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from muletrain.network.base import LossHandler

FRAMES = "muletrain/frames"
HELLO, ACCEPTED = "hello", b"\1"
HELLO_TIMEOUT_S = 30.0
CHUNK = 1 << 18
"""Bytes handed to the socket at once."""


class Outgoing:
    """Our stream to one peer on one channel."""

    def __init__(self, p2p: GatedP2P, peer: str, channel: Channel, lost: LossHandler) -> None:
        """``lost`` is told when the receiver ends the stream."""
        self._p2p, self._peer, self._channel, self._lost = p2p, peer, channel, lost
        self._lock = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self._handed_over = False

    async def send(self, buffers: Sequence[Any], timeout_s: float) -> None:
        """One frame. A stream found broken is opened anew, once, unless the frame may have gone through whole.

        Raises PeerUnreachable, DeadlineExceeded, AdmissionError."""
        self._p2p.check_daemon()
        await reaching(self._send(buffers), timeout_s, f"sending to {self._peer[-6:]}")

    async def _send(self, buffers: Sequence[Any]) -> None:
        async with self._lock:
            kept = self._writer is not None
            try:
                await self._write(await self._open_writer(), buffers)
            except ConnectionError:
                self.close()
                if not kept or self._handed_over:
                    raise
                await self._write(await self._open_writer(), buffers)
            except BaseException:
                self.close()  # half a frame may be on it
                raise

    async def _open_writer(self) -> asyncio.StreamWriter:
        if self._writer is not None and not self._writer.is_closing():
            return self._writer
        self.close()
        if not await self._open():  # closed before it was accepted: the peer was restarted and does not know us
            self._p2p.gate.forget_entry(self._peer)
            if not await self._open():
                raise PeerUnreachable("the peer closes the stream")
        assert self._writer is not None
        return self._writer

    async def _open(self) -> bool:
        _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(self._peer), FRAMES)
        try:
            await self._write(writer, pack(Frame(HELLO, {"channel": self._channel.value})))
            accepted = await reader.read(1) == ACCEPTED
        except ConnectionError:
            accepted = False
        except BaseException:
            writer.close()
            raise
        if not accepted:
            writer.close()
            return False
        self._writer = writer
        self._watch = asyncio.create_task(self._close_at_end(reader, writer))
        return True

    async def _write(self, writer: asyncio.StreamWriter, buffers: Sequence[Any]) -> None:
        self._handed_over = False
        last = len(buffers) - 1
        for i, buffer in enumerate(buffers):
            view = memoryview(buffer)
            for offset in range(0, len(view), CHUNK):
                writer.write(view[offset : offset + CHUNK])
                self._handed_over = i == last and offset + CHUNK >= len(view)
                await writer.drain()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        watch, self._watch = self._watch, None
        if writer is not None:
            writer.close()
        if watch is not None:
            watch.cancel()

    async def _close_at_end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(1)
        writer.close()
        self._lost(self._peer)


@dataclass
class Incoming:
    """The streams of all senders, at most one for each sender and channel: a newer one waits until what had arrived on the
    older one is handled, so that frames stay in order when a sender reopens."""

    max_payload: int
    _open: dict[tuple[str, str], tuple[asyncio.StreamWriter, asyncio.Event]] = field(default_factory=dict)

    def close(self, sender: str) -> None:
        """All streams of ``sender``."""
        for (whose, _), (writer, _) in self._open.items():
            if whose == sender:
                writer.close()

    async def frames(
        self, sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AsyncGenerator[Frame, None]:
        """Every frame until the stream ends. Raises ProtocolError for what is no frame."""
        done = asyncio.Event()
        key: tuple[str, str] | None = None
        try:
            key = sender, await _greet(reader, writer)
            previous = self._open.get(key)
            self._open[key] = writer, done
            if previous is not None:
                previous[0].close()
                await previous[1].wait()
            intake = Intake.take_over(reader, writer)
            while True:
                yield await read_frame(intake, self.max_payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the sender closed it, or is gone
        finally:
            done.set()
            if key is not None and self._open.get(key, (None, None))[1] is done:
                del self._open[key]


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Read and accept the hello; its channel."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = await read_frame(reader, 0)
            if hello.kind != HELLO or hello.header.get("channel") not in list(Channel):
                raise ProtocolError("a stream of frames must begin with a hello")
            writer.write(ACCEPTED)
            await writer.drain()
    except TimeoutError:
        raise ProtocolError(f"no hello on a new stream within {HELLO_TIMEOUT_S:.0f} s") from None
    return str(hello.header["channel"])
