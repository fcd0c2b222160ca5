"""Long-lived streams of frames over libp2p: one per receiver and channel, opened when first needed.

A new stream per message would start with a small flow-control window each time: at 100 ms round trip 8 MB take 741 ms
that way, and 221 ms on a stream that is kept. A stream begins with a hello that the receiver acknowledges with one
byte. Frames go one way. On paced channels the receiver reports now and then how many bytes came, and when
(``network.pacing``).
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from hivemind.p2p import PeerID

from muletrain.clock import loop_time_s
from muletrain.errors import DeadlineExceeded, Malformed, PeerUnreachable
from muletrain.network.base import Channel
from muletrain.network.gated import GatedP2P, reaching
from muletrain.policy.recent import Recent
from muletrain.wire.frame import Frame, pack, read_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from muletrain.network.base import LossHandler, PeerId
    from muletrain.network.pacing import Pacer
    from muletrain.wire.frame import Door

FRAMES = "muletrain/frames"
HELLO, ACCEPTED = "hello", b"\1"
HELLO_TIMEOUT_S = 30.0
"""Longest time until the hello of a new stream [s]."""
MAX_HELLO = 128
"""Most bytes of a hello's header."""
RECEIPT = struct.Struct(">Qd")
"""Bytes that came on the stream since the hello, and when the last byte came, by the receiver's clock."""
RECEIPT_BYTES, RECEIPT_S = 1 << 13, 0.003
"""Bytes after which a receipt is sent, and the time between two receipts and after the last bytes [s]."""


@dataclass(eq=False)
class _Connection:
    """An open stream. ``pieces``: (bytes so far, time) of each piece handed over and not acknowledged."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sent: int = 0
    acknowledged: int = 0
    pieces: deque[tuple[int, float]] = field(default_factory=deque)


class Outgoing:
    """Our stream to one peer on one channel."""

    def __init__(
        self,
        p2p: GatedP2P,
        peer: str,
        channel: Channel,
        pacer: Pacer,
        heard: Callable[[PeerId], None],
        lost: LossHandler,
    ) -> None:
        """``heard`` is told when a receipt comes, ``lost`` when the receiver ends the stream."""
        self._p2p, self._peer, self._channel, self._pacer = p2p, peer, channel, pacer
        self._heard, self._lost = heard, lost
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None
        self._receipts: asyncio.Task[None] | None = None
        self._begun = self._handed_over = False
        """Of the frame being written, a part was written, or all."""
        self._writing: dict[asyncio.Task[None], None] = {}
        """Frames that wait or are written; the first one holds the lock."""

    async def send(self, buffers: Sequence[Any], timeout_s: float) -> None:
        """Send one frame. A broken stream is opened anew, once, unless the whole frame may have gone through. A sender
        that gives up does not break the stream: a frame that was begun is sent completely.

        Raises PeerUnreachable, DeadlineExceeded (nothing was taken for ``timeout_s``), AdmissionError."""
        self._p2p.check_daemon()
        if self._channel is Channel.CONTROL:
            await reaching(self._send(buffers, timeout_s), timeout_s, f"sending to {self._peer[-6:]}")
            return
        what = f"sending to {self._peer[-6:]}"
        writing = asyncio.create_task(reaching(self._paced(buffers, timeout_s), None, what))
        self._writing[writing] = None
        writing.add_done_callback(self._writing.pop)
        await self._pacer.patient(
            self._peer, writing, timeout_s, lambda: self._begun and writing is next(iter(self._writing), None)
        )

    async def _paced(self, buffers: Sequence[Any], timeout_s: float) -> None:
        async with self._lock:
            self._begun, kept = False, self._connection is not None
            await self._opened(timeout_s)  # before taking a lane: the peer may not accept the stream
            async with self._pacer.lane(self._peer, self._channel):
                await self._once_more(buffers, timeout_s, kept=kept)

    async def _send(self, buffers: Sequence[Any], timeout_s: float) -> None:
        async with self._lock:
            await self._once_more(buffers, timeout_s, kept=self._connection is not None)

    async def _once_more(self, buffers: Sequence[Any], timeout_s: float, *, kept: bool) -> None:
        try:
            await self._whole(buffers, timeout_s)
        except ConnectionError:
            if not kept or self._handed_over:
                raise
            await self._whole(buffers, timeout_s)

    async def _whole(self, buffers: Sequence[Any], timeout_s: float) -> None:
        self._begun = self._handed_over = False
        try:
            await self._write(await self._opened(timeout_s), buffers)
        except BaseException as e:
            if isinstance(e, ConnectionError) or (self._begun and not self._handed_over):
                self.close()  # half a frame is on it
            raise

    async def _opened(self, timeout_s: float) -> _Connection:
        if self._connection is not None and not self._connection.writer.is_closing():
            return self._connection
        self.close()
        try:
            async with asyncio.timeout(timeout_s):
                if not await self._open():  # the peer was restarted and does not know us
                    self._p2p.gate.forget_entry(self._peer)
                    if not await self._open():
                        raise PeerUnreachable("the peer closes the stream")
        except TimeoutError:
            raise DeadlineExceeded(f"no stream within {timeout_s:.1f} s") from None
        assert self._connection is not None
        return self._connection

    async def _open(self) -> bool:
        _, reader, writer = await self._p2p.call_binary_stream_handler(PeerID.from_base58(self._peer), FRAMES)
        try:
            writer.writelines(pack(Frame(HELLO, {"channel": self._channel.value})))
            await writer.drain()
            accepted = await reader.read(1) == ACCEPTED
        except ConnectionError:
            accepted = False
        except BaseException:
            writer.close()
            raise
        if not accepted:
            writer.close()
            return False
        self._connection = _Connection(reader, writer)
        self._receipts = asyncio.create_task(self._hear(self._connection))
        return True

    async def _write(self, to: _Connection, buffers: Sequence[Any]) -> None:
        if self._channel is Channel.CONTROL:
            to.writer.writelines(buffers)
            self._begun = self._handed_over = True
            await to.writer.drain()
            return
        loop, left = asyncio.get_running_loop(), sum(len(memoryview(b)) for b in buffers)
        for buffer in buffers:
            view, at = memoryview(buffer), 0
            while at < len(view):
                nbytes = await self._pacer.grant(self._peer, self._channel, len(view) - at)
                if to is not self._connection:  # the end has been counted
                    self._pacer.forget(self._peer, self._channel, nbytes)
                    raise ConnectionResetError("the receiver has ended the stream")
                to.sent += nbytes
                to.pieces.append((to.sent, loop.time()))
                to.writer.write(view[at : at + nbytes])
                at, left = at + nbytes, left - nbytes
                self._begun, self._handed_over = True, not left
                await to.writer.drain()

    def close(self) -> None:
        if self._connection is not None:
            self._end(self._connection)
        receipts, self._receipts = self._receipts, None
        if receipts is not None:
            receipts.cancel()

    def _end(self, connection: _Connection) -> None:
        connection.writer.close()
        self._pacer.forget(self._peer, self._channel, connection.sent - connection.acknowledged)
        connection.acknowledged = connection.sent
        if self._connection is connection:
            self._connection = None

    def stop(self) -> None:
        """Close, and give up all frames."""
        for writing in self._writing:
            writing.cancel()
        self.close()

    async def _hear(self, connection: _Connection) -> None:
        """Take receipts until the receiver ends the stream."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while self._acknowledged(connection, *RECEIPT.unpack(await connection.reader.readexactly(RECEIPT.size))):
                self._heard(self._peer)
        self._end(connection)
        self._lost(self._peer, self._channel)

    def _acknowledged(self, connection: _Connection, total: int, received_s: float) -> bool:
        """False for a receipt that makes no sense."""
        if connection is not self._connection or not math.isfinite(received_s):
            return False
        if not connection.acknowledged <= total <= connection.sent or self._channel is Channel.CONTROL:
            return False
        sent_s, before = None, connection.acknowledged
        while connection.pieces and connection.pieces[0][0] <= total:
            connection.acknowledged, sent_s = connection.pieces.popleft()
        if sent_s is not None:
            nbytes = connection.acknowledged - before
            self._pacer.acknowledged(self._peer, self._channel, nbytes, sent_s, received_s)
        return True


class _Receipts:
    """Sends the receipts of one incoming stream."""

    def __init__(self, transport: asyncio.WriteTransport, told: Callable[[int], None], *, paced: bool) -> None:
        """``told`` is told of all bytes that come."""
        self._transport, self._told_of, self._paced = transport, told, paced
        self._come = self._told = 0
        self._come_s = self._told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def came(self, nbytes: int) -> None:
        self._told_of(nbytes)
        if not self._paced:
            return
        loop = asyncio.get_running_loop()
        self._come, self._come_s = self._come + nbytes, loop.time()
        if self._come - self._told >= RECEIPT_BYTES and self._come_s - self._told_s >= RECEIPT_S:
            self._tell()
        elif self._timer is None:
            self._timer = loop.call_later(RECEIPT_S, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._transport.is_closing():
            self._told, self._told_s = self._come, loop_time_s()
            self._transport.write(RECEIPT.pack(self._come, self._come_s))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass
class Incoming:
    """The streams of all senders, at most one per sender and channel. A newer one waits until everything that arrived
    on the older one is handled, so that frames stay in order when a sender reopens."""

    max_payload: int
    heard: Recent[float] = field(default_factory=Recent)
    """When the last bytes of each sender came, by the loop's clock."""
    moved: int = 0
    """Bytes that came on paced channels."""
    _open: dict[tuple[str, Channel], tuple[asyncio.StreamWriter, asyncio.Event]] = field(default_factory=dict)

    def close(self, sender: str) -> None:
        """Close all streams of ``sender``."""
        for (whose, _), (writer, _) in self._open.items():
            if whose == sender:
                writer.close()

    def _came(self, sender: str, nbytes: int) -> None:
        self.heard[sender] = loop_time_s()
        self.moved += nbytes

    async def frames(
        self, sender: str, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, door: Door
    ) -> AsyncGenerator[Frame, None]:
        """Yield each frame after the hello until the stream ends. Raises Malformed for bytes that are no frame, and the
        errors of ``door``."""
        done, key, paced = asyncio.Event(), (sender, channel), channel is not Channel.CONTROL
        previous = self._open.get(key)
        self._open[key] = writer, done
        receipts = _Receipts(writer.transport, lambda nbytes: self._came(sender, nbytes * paced), paced=paced)
        try:
            if previous is not None:
                previous[0].close()
                await previous[1].wait()
            intake = Intake.take_over(reader, writer, receipts.came)
            while True:
                yield await read_frame(intake, self.max_payload, door)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the sender closed the stream, or is gone
        finally:
            done.set()
            receipts.stop()
            if self._open.get(key, (None, None))[1] is done:
                del self._open[key]


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel:
    """Read and accept the hello, and return the channel. Raises Malformed; IncompleteReadError and ConnectionError if
    the stream ends before."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = await read_frame(reader, 0, max_header=MAX_HELLO)
            if hello.kind != HELLO or hello.header.get("channel") not in list(Channel):
                raise Malformed("a stream of frames must begin with a hello")
            writer.write(ACCEPTED)
            await writer.drain()
    except TimeoutError:
        raise Malformed(f"no hello on a new stream within {HELLO_TIMEOUT_S:.0f} s") from None
    return Channel(hello.header["channel"])


AHEAD = 1 << 16
"""Most bytes read in advance: prefixes and headers, and the sender's first chunk of a payload."""


class Intake(asyncio.BufferedProtocol):
    """The receiving end of a stream, for one reader at a time. While the reader takes nothing, the transport is paused
    (back-pressure)."""

    def __init__(
        self, transport: asyncio.Transport, early: bytes = b"", came: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """``early``: bytes that were read from the stream before, and not used. ``came`` is told of all bytes."""
        self._transport, self._came = transport, came
        if early:
            came(len(early))
        self._ahead = bytearray(AHEAD + len(early))
        self._ahead[: len(early)] = early
        self._begin, self._end = 0, len(early)
        self._target: memoryview | None = None
        self._change: asyncio.Future[None] | None = None
        self._over = False

    @classmethod
    def take_over(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        came: Callable[[int], None] = lambda nbytes: None,
    ) -> Intake:
        """Read in place of ``reader``, which must not be used any more."""
        transport = cast("asyncio.Transport", writer.transport)
        transport.pause_reading()
        intake = cls(transport, bytes(reader._buffer), came)  # type: ignore[attr-defined]  # no public way to ask without waiting
        intake._over = reader.at_eof() or reader._eof or transport.is_closing()  # type: ignore[attr-defined]
        transport.set_protocol(intake)
        if not intake._over:
            transport.resume_reading()
        return intake

    async def readexactly(self, n: int) -> memoryview:
        """The next ``n`` bytes, writable. Raises IncompleteReadError if the stream ends before."""
        data = np.empty(n, np.uint8).data  # untouched memory costs nothing: a claimed size is not a used one
        ready = min(n, self._end - self._begin)
        data[:ready] = self._ahead[self._begin : self._begin + ready]
        self._begin += ready
        if self._begin == self._end:
            self._begin = self._end = 0
        self._target = data[ready:]
        try:
            while self._target:
                if self._over:
                    raise asyncio.IncompleteReadError(b"", n)
                self._change = asyncio.get_running_loop().create_future()
                self._transport.resume_reading()
                await self._change
        finally:
            self._target = self._change = None
        return data

    # The transport's side -------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._target if self._target else memoryview(self._ahead)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._came(nbytes)
        if self._target:
            self._target = self._target[nbytes:]
            if not self._target:
                self._wake()
        else:
            self._end += nbytes
            if self._end == len(self._ahead):
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._over = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)
