"""The form in which tensors travel, and the size. Without torch, for commands that exchange messages only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.config.schema import Codec
from muletrain.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Sequence

    Buffer = bytes | bytearray | memoryview

BLOCK = 4096
"""Elements that share one scale."""
MAX_DIMENSIONS, MAX_ELEMENTS = 8, 1 << 31
"""Largest tensor that travels."""
RAW = "raw"
IDS = IDS16, IDS32 = "uint16", "int32"
_SIZES = {Codec.FP32: 4, Codec.FP16: 2, Codec.BF16: 2, Codec.INT8: 1, Codec.DYNAMIC8: 1, RAW: 1, IDS16: 2, IDS32: 4}


@dataclass(slots=True)
class Encoded:
    """A tensor, or raw bytes, in the form on the wire."""

    codec: str
    shape: tuple[int, ...]
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        return sum(len(b) for b in self.buffers)


def encoded_size(codec: str, shape: tuple[int, ...]) -> int:
    """Bytes that the buffers must have. Raises Malformed for an unknown codec or too large a shape."""
    if codec not in _SIZES or len(shape) > MAX_DIMENSIONS or any(not 0 <= n <= MAX_ELEMENTS for n in shape):
        raise Malformed(f"tensor with codec {codec[:20]!r} and shape {shape[:MAX_DIMENSIONS]}: no such tensor")
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS:
        raise Malformed(f"tensor of {elements} elements; at most {MAX_ELEMENTS} travel at once")
    return elements * _SIZES[codec] + scale_bytes(codec, elements)


def flat_size(codec: str, elements: int) -> int:
    """Bytes of ``elements`` that travel in chunks."""
    return int(encoded_size(codec, (1 << 20,)) / (1 << 20) * elements)


def scale_bytes(codec: str, elements: int) -> int:
    """Bytes of the scales of a block-wise codec; else 0."""
    return 4 * -(-elements // BLOCK) if codec in (Codec.FP16, Codec.INT8, Codec.DYNAMIC8) else 0
