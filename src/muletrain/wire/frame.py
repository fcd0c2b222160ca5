"""Framing: a fixed prefix, a msgpack header, then the tensors' buffers. Everything is bounded before it is read.

Prefix (16 bytes, big endian): magic 'MT', version, reserved, header length (u32), payload length (u64).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

from muletrain.errors import ProtocolError
from muletrain.network.base import Frame
from muletrain.wire.codec import MAX_DIMENSIONS, Encoded, encoded_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    Buffer = bytes | bytearray | memoryview

MAGIC, VERSION = b"MT", 1
PREFIX = struct.Struct(">2sBBIQ")
MAX_HEADER = 1 << 22
MAX_PAYLOAD = 1 << 30
MAX_TENSORS = 64
MAX_KIND = 64
"""Characters."""
MAX_DEPTH = 8
"""Nesting of a header."""


def pack(frame: Frame) -> list[Buffer]:
    """Prefix and header in one buffer, then the tensors' own buffers, not copied. Raises ProtocolError for more than may travel."""
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
    """Bytes of it, as it travels; looked at once."""
    if frame.nbytes is None:
        frame.nbytes = size(pack(frame))
    return frame.nbytes


def size(buffers: Sequence[Buffer]) -> int:
    return sum(len(b) for b in buffers)


class Reader(Protocol):
    """Where frames come from: asyncio's ``StreamReader``, or anything that reads like it."""

    async def readexactly(self, n: int, /) -> Buffer:
        """Raises IncompleteReadError where the stream ends. The memory used grows with what arrives, not with ``n``."""
        ...


async def read_frame(reader: Reader, max_payload: int = MAX_PAYLOAD) -> Frame:
    """The next frame. Raises ProtocolError for what is no frame, IncompleteReadError where the stream ends.

    Memory grows with what arrives, never with what a header claims."""
    header_size, payload_size = parse_prefix(await reader.readexactly(PREFIX.size), max_payload)
    kind, header, described = parse_header(await reader.readexactly(header_size), payload_size)
    return Frame(kind, header, [Encoded(codec, shape, [await reader.readexactly(n)]) for codec, shape, n in described])


def parse_prefix(prefix: Buffer, max_payload: int) -> tuple[int, int]:
    """(header bytes, payload bytes)."""
    magic, version, reserved, header, payload = PREFIX.unpack(prefix)
    if magic != MAGIC or version != VERSION or reserved:
        raise ProtocolError(f"not a frame of this protocol (it begins with {bytes(prefix[:4])!r})")
    if header > MAX_HEADER or payload > max_payload:
        raise ProtocolError(f"frame of {header} + {payload} bytes; at most {MAX_HEADER} + {max_payload} are accepted")
    return header, payload


def parse_header(data: Buffer, payload: int) -> tuple[str, dict[str, Any], list[tuple[str, tuple[int, ...], int]]]:
    """Kind, header map, and (codec, shape, bytes) of each tensor; their sum is the payload. Raises ProtocolError."""
    try:
        content = msgpack.unpackb(data, strict_map_key=True, max_ext_len=0, ext_hook=_no_extensions)
    except Exception as e:  # msgpack raises a dozen unrelated types on garbage
        raise ProtocolError(f"frame header is malformed ({type(e).__name__})") from None
    if not _well_formed(content):
        raise ProtocolError("frame header is malformed")
    kind, header, described = content
    sized = [(codec, tuple(shape), encoded_size(codec, tuple(shape))) for codec, shape in described]
    if sum(n for _, _, n in sized) != payload:
        raise ProtocolError(f"{kind[:40]}: tensors of {sum(n for _, _, n in sized)} bytes in a payload of {payload}")
    return kind, header, sized


def _well_formed(content: Any) -> bool:
    """[kind, {name: value}, [[codec, [length, ...]], ...]], with the types exactly these and a bounded depth."""
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
    """As a receiver would see it, without copying tensors: for frames that stay inside the process."""
    packed = pack(frame)
    kind, header, _ = parse_header(bytes(packed[0][PREFIX.size :]), size(packed[1:]))
    return Frame(kind, header, frame.tensors)
