"""Framing: a fixed prefix, a msgpack header, then the tensors' buffers. Everything is bounded before it is read.

Prefix (16 bytes, big endian): magic 'MT', version, reserved, header length (u32), payload length (u64).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgpack

from muletrain.errors import ProtocolError
from muletrain.network.base import Frame
from muletrain.wire.codec import Encoded, encoded_size

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    Buffer = bytes | bytearray | memoryview

MAGIC, VERSION = b"MT", 1
PREFIX = struct.Struct(">2sBBIQ")
MAX_HEADER = 1 << 22
MAX_PAYLOAD = 1 << 30
MAX_TENSORS = 64


def pack(frame: Frame) -> list[Buffer]:
    """Prefix and header in one buffer, then the tensors' own buffers, not copied."""
    tensors = [[t.codec, list(t.shape)] for t in frame.tensors]
    header: bytes = msgpack.packb([frame.kind, frame.header, tensors])
    buffers = [b for t in frame.tensors for b in t.buffers]
    payload = sum(len(b) for b in buffers)
    if len(header) > MAX_HEADER or payload > MAX_PAYLOAD:
        raise ProtocolError(
            f"{frame.kind}: a frame of {len(header)} + {payload} bytes is larger than any receiver accepts"
        )
    return [PREFIX.pack(MAGIC, VERSION, 0, len(header), payload) + header, *buffers]


def size(buffers: Sequence[Buffer]) -> int:
    return sum(len(b) for b in buffers)


async def read_frame(reader: asyncio.StreamReader, max_payload: int = MAX_PAYLOAD) -> Frame:
    """The next frame. Raises ProtocolError for what is no frame, IncompleteReadError where the stream ends."""
    header_size, payload_size = parse_prefix(await reader.readexactly(PREFIX.size), max_payload)
    kind, header, described = parse_header(await reader.readexactly(header_size), payload_size)
    tensors = [Encoded(codec, shape, [await reader.readexactly(n)] if n else [b""]) for codec, shape, n in described]
    return Frame(kind, header, tensors)


def parse_prefix(prefix: bytes, max_payload: int) -> tuple[int, int]:
    """(header bytes, payload bytes)."""
    magic, version, _, header, payload = PREFIX.unpack(prefix)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"not a frame of this protocol (it begins with {prefix[:4]!r})")
    if header > MAX_HEADER or payload > max_payload:
        raise ProtocolError(f"frame of {header} + {payload} bytes; at most {MAX_HEADER} + {max_payload} are accepted")
    return header, payload


def parse_header(data: bytes, payload: int) -> tuple[str, dict[str, Any], list[tuple[str, tuple[int, ...], int]]]:
    """Kind, header map, and (codec, shape, bytes) of each tensor; their sum is the payload."""
    try:
        kind, header, described = msgpack.unpackb(data, strict_map_key=True, max_ext_len=0)
        well_formed = isinstance(kind, str) and isinstance(header, dict) and len(described) <= MAX_TENSORS
        tensors = [(str(codec), tuple(int(n) for n in shape)) for codec, shape in described]
    except Exception as e:  # msgpack and unpacking raise a dozen unrelated types on garbage
        raise ProtocolError(f"frame header is malformed ({type(e).__name__})") from None
    if not well_formed:
        raise ProtocolError("frame header is malformed")
    sized = [(codec, shape, encoded_size(codec, shape)) for codec, shape in tensors]
    if sum(n for _, _, n in sized) != payload:
        raise ProtocolError(f"{kind[:40]}: tensors of {sum(n for _, _, n in sized)} bytes in a payload of {payload}")
    return kind, header, sized
