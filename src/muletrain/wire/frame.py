"""Framing: a fixed prefix, a msgpack header, then the tensors' buffers. Everything is bounded before reading: a
``Door`` is asked about the kind before the rest of the header, and about codecs and shapes before the first byte of a
tensor.

Prefix (16 bytes, big endian): magic 'MT', version, reserved, header length (u32), payload length (u64).
"""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from muletrain.errors import Malformed, ProtocolError
from muletrain.wire.encoded import MAX_DIMENSIONS, Encoded, encoded_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    Buffer = bytes | bytearray | memoryview

MAGIC, VERSION = b"MT", 1
PREFIX = struct.Struct(">2sBBIQ")
MAX_HEADER, MAX_PAYLOAD = 1 << 22, 1 << 30
"""Most bytes of a header, and of all tensors of a frame."""
MAX_TENSORS = 64
"""Most tensors of a frame."""
MAX_KIND = 64
"""Most characters of a kind."""
_KIND_BYTES = 3 + 4 * MAX_KIND
"""First bytes of a header, which hold the whole kind."""
MAX_DEPTH = 8
"""Deepest nesting of a header."""


class Header(Protocol):
    """A message that becomes a frame's header."""

    def model_dump(self, *, exclude_defaults: bool) -> dict[str, Any]: ...


class Frame:
    """One message on a stream: a kind, a msgpack-able header (validated by the actor that handles ``kind``), tensors or
    raw blobs."""

    __slots__ = ("_header", "kind", "message", "nbytes", "tensors")

    def __init__(
        self,
        kind: str,
        header: dict[str, Any] | None,
        tensors: list[Encoded] | None = None,
        message: Header | None = None,
    ) -> None:
        """``header`` None: made from ``message`` on demand."""
        self.kind, self._header, self.message = kind, header, message
        self.tensors = tensors if tensors is not None else []
        self.nbytes: int | None = None
        """Bytes of the packed frame, after a call of ``frame_size``."""

    @property
    def header(self) -> dict[str, Any]:
        if self._header is None:
            assert self.message is not None  # one of the two is there
            self._header = self.message.model_dump(exclude_defaults=True)  # as in calls
        return self._header


def pack(frame: Frame) -> list[Buffer]:
    """The bytes of ``frame``: prefix and header in one buffer, then the tensors' own buffers, not copied. Raises
    ProtocolError for more than any receiver accepts."""
    tensors = [[t.codec, list(t.shape)] for t in frame.tensors]
    header: bytes = msgpack.packb([frame.kind, frame.header, tensors])
    buffers = [b for t in frame.tensors for b in t.buffers if len(b)]
    payload = size(buffers)
    if len(header) > MAX_HEADER or payload > MAX_PAYLOAD or len(tensors) > MAX_TENSORS:
        raise ProtocolError(
            f"{frame.kind}: a frame of {len(header)} + {payload} bytes is larger than any receiver accepts"
        )
    return [PREFIX.pack(MAGIC, VERSION, 0, len(header), payload) + header, *buffers]


def frame_size(frame: Frame) -> int:
    """Bytes of the packed frame, counted once."""
    if frame.nbytes is None:
        frame.nbytes = size(pack(frame))
    return frame.nbytes


def size(buffers: Sequence[Buffer]) -> int:
    return sum(len(b) for b in buffers)


class Reader(Protocol):
    """A source of frames: asyncio's ``StreamReader``, or anything that reads alike."""

    async def readexactly(self, n: int, /) -> Buffer:
        """Raises IncompleteReadError if the stream ends. Memory grows with the received bytes, not with ``n``."""
        ...


class Door(Protocol):
    """Decides which frames are read. Both methods raise ProtocolError to refuse a frame."""

    async def header(self, kind: str, nbytes: int) -> None:
        """Check the kind, and the size of the header."""
        ...

    async def expect(self, frame: Frame) -> None:
        """Check ``frame``, which lacks tensor bytes."""
        ...


async def read_frame(
    reader: Reader, max_payload: int = MAX_PAYLOAD, door: Door | None = None, *, max_header: int = MAX_HEADER
) -> Frame:
    """Read the next frame, if ``door`` agrees (None: always). Raises Malformed for bytes that are no frame,
    IncompleteReadError if the stream ends, and the errors of ``door``.

    Memory grows with the received bytes, never with a header's claims."""
    header_size, payload_size = parse_prefix(await reader.readexactly(PREFIX.size), max_payload, max_header)
    start = bytes(await reader.readexactly(min(header_size, _KIND_BYTES)))
    if door is not None:
        await door.header(_parse_kind(start), header_size)
    rest = await reader.readexactly(header_size - len(start)) if header_size > len(start) else b""
    kind, header, described = parse_header(start + rest if rest else start, payload_size)
    frame = Frame(kind, header, [Encoded(codec, shape, ()) for codec, shape, _ in described])
    if door is not None:
        await door.expect(frame)
    for tensor, (_, _, nbytes) in zip(frame.tensors, described, strict=True):
        tensor.buffers = [await reader.readexactly(nbytes)]
    return frame


class _Bytes:
    """The bytes of one frame as a ``Reader``."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    async def readexactly(self, n: int) -> bytes:
        part = self._data[self._at : self._at + n]
        self._at += n
        if len(part) < n:
            raise asyncio.IncompleteReadError(part, n)
        return part


async def unpack(data: bytes, door: Door | None = None) -> Frame:
    """The frame in the bytes ``data``. Raises ProtocolError."""
    try:
        return await read_frame(_Bytes(data), door=door)
    except asyncio.IncompleteReadError as e:
        raise ProtocolError(f"a frame of {len(data)} bytes is cut short") from e


def parse_prefix(prefix: Buffer, max_payload: int, max_header: int = MAX_HEADER) -> tuple[int, int]:
    """The bytes of the header and of the payload. Raises Malformed."""
    magic, version, reserved, header, payload = PREFIX.unpack(prefix)
    if magic != MAGIC or version != VERSION or reserved:
        raise Malformed(f"not a frame of this protocol (it begins with {bytes(prefix[:4])!r})")
    if header > max_header or payload > max_payload:
        raise Malformed(f"frame of {header} + {payload} bytes; at most {max_header} + {max_payload} are accepted")
    return header, payload


def _parse_kind(start: bytes) -> str:
    """The kind, from the first bytes of a header (a list of three, the kind first): the rest may be large. Raises
    Malformed."""
    match list(start[:3]):
        case [0x93, size, *_] if 0xA0 <= size < 0xC0:
            begin, length = 2, size - 0xA0
        case [0x93, 0xD9, length]:
            begin = 3
        case _:
            raise Malformed("frame header is malformed")
    if begin + length > len(start):
        raise Malformed("frame header is malformed")
    return start[begin : begin + length].decode(errors="replace")


def parse_header(data: Buffer, payload: int) -> tuple[str, dict[str, Any], list[tuple[str, tuple[int, ...], int]]]:
    """The kind, the header map, and (codec, shape, bytes) of each tensor. Raises Malformed, also if the tensors' bytes
    are not ``payload`` in all."""
    try:
        content = msgpack.unpackb(data, strict_map_key=True, max_ext_len=0, ext_hook=_no_extensions)
    except Exception as e:  # msgpack raises a dozen unrelated types on garbage
        raise Malformed(f"frame header is malformed ({type(e).__name__})") from None
    if not _well_formed(content):
        raise Malformed("frame header is malformed")
    kind, header, described = content
    sized = [(codec, tuple(shape), encoded_size(codec, tuple(shape))) for codec, shape in described]
    if sum(n for _, _, n in sized) != payload:
        raise Malformed(f"{kind[:40]}: tensors of {sum(n for _, _, n in sized)} bytes in a payload of {payload}")
    return kind, header, sized


def _well_formed(content: Any) -> bool:
    """Is the header [kind, {name: value}, [[codec, [length, ...]], ...]], of exactly these types and bounded depth?"""
    match content:
        case [str() as kind, dict() as header, list() as tensors] if (
            len(kind) <= MAX_KIND and len(tensors) <= MAX_TENSORS
        ):
            named = all(type(name) is str for name in header)
            return named and _depth_below(header, MAX_DEPTH) and all(_describes_tensor(t) for t in tensors)
    return False


def _describes_tensor(item: Any) -> bool:
    match item:
        case [str(), list() as shape] if len(shape) <= MAX_DIMENSIONS:
            return all(type(n) is int for n in shape)
    return False


def _depth_below(value: dict[Any, Any] | list[Any], limit: int) -> bool:
    children = value.values() if isinstance(value, dict) else value
    nested = (c for c in children if type(c) is list or type(c) is dict)
    return limit > 0 and all(_depth_below(c, limit - 1) for c in nested)


def _no_extensions(code: int, data: bytes) -> Any:
    raise ValueError("msgpack extensions are not accepted")


def reread(frame: Frame) -> Frame:
    """``frame`` as a receiver would see it, without copies of tensors: for frames that stay in the process."""
    packed = pack(frame)
    kind, header, _ = parse_header(bytes(packed[0][PREFIX.size :]), size(packed[1:]))
    return Frame(kind, header, frame.tensors)
