"""Reading a stream straight into the memory of frames.

asyncio's ``StreamReader`` copies each byte four times on the way into a tensor, and averaging moves gigabytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

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
