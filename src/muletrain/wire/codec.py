"""Tensor codecs: fp32, fp16, bf16, block-wise 8-bit (SWARM app. J.1, "quantized activations"), token ids, raw bytes.

A tensor travels as its codec's name, its shape and one or two buffers. Decoding checks sizes against shapes before it allocates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muletrain.config.schema import Codec
from muletrain.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Buffer = bytes | bytearray | memoryview

BLOCK = 4096
"""Elements that share one scale."""
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 31
RAW = "raw"
IDS16, IDS32 = "uint16", "int32"
_FLOATS = {Codec.FP32: torch.float32, Codec.FP16: torch.float16, Codec.BF16: torch.bfloat16}
_SIZES = {Codec.FP32: 4, Codec.FP16: 2, Codec.BF16: 2, Codec.INT8: 1, RAW: 1, IDS16: 2, IDS32: 4}


@dataclass(slots=True)
class Encoded:
    """A tensor (or raw bytes) as it travels."""

    codec: str
    shape: tuple[int, ...]
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        return sum(len(b) for b in self.buffers)


def encoded_size(codec: str, shape: tuple[int, ...]) -> int:
    """Bytes the buffers must have. Raises ProtocolError for an unknown codec or an absurd shape."""
    if codec not in _SIZES or len(shape) > MAX_DIMENSIONS or any(not 0 <= n <= MAX_ELEMENTS for n in shape):
        raise ProtocolError(f"tensor with codec {codec[:20]!r} and shape {shape[:MAX_DIMENSIONS]}: no such tensor")
    elements = math.prod(shape)
    if elements > MAX_ELEMENTS:
        raise ProtocolError(f"tensor of {elements} elements; at most {MAX_ELEMENTS} travel at once")
    scales = 4 * -(-elements // BLOCK) if codec == Codec.INT8 else 0
    return elements * _SIZES[codec] + scales


def encode(tensor: Tensor, codec: Codec) -> Encoded:
    """A float tensor for the wire. Non-finite values arrive as non-finite values, so that the receiver can refuse them."""
    values = tensor.detach().contiguous()
    if codec is Codec.INT8:
        return Encoded(codec.value, tuple(tensor.shape), _quantise(values.float().view(-1)))
    return Encoded(codec.value, tuple(tensor.shape), [_bytes(values.to(_FLOATS[codec]))])


def encode_ids(ids: Tensor) -> Encoded:
    """Integers 0 .. 2^31 - 1, as 16 bits where they fit."""
    small = ids.numel() == 0 or int(ids.max()) < 1 << 16
    packed = ids.contiguous().to(torch.uint16 if small else torch.int32)
    return Encoded(IDS16 if small else IDS32, tuple(ids.shape), [_bytes(packed)])


def encode_raw(data: Buffer) -> Encoded:
    """Bytes as they are."""
    return Encoded(RAW, (len(data),), [data])


def decode(encoded: Encoded) -> Tensor:
    """fp32 from the float codecs, int64 from token ids. Raises ProtocolError when sizes do not fit."""
    data = _checked(encoded)
    if encoded.codec == RAW:
        raise ProtocolError("raw bytes where a tensor was expected")
    if encoded.codec == Codec.INT8:
        return _dequantise(data, encoded.shape)
    if encoded.codec in (IDS16, IDS32):
        dtype = torch.uint16 if encoded.codec == IDS16 else torch.int32
        return _tensor(data, dtype).to(torch.int64).view(encoded.shape)
    return _tensor(data, _FLOATS[Codec(encoded.codec)]).float().view(encoded.shape)


def decode_raw(encoded: Encoded) -> memoryview:
    """Raises ProtocolError for anything but raw bytes."""
    if encoded.codec != RAW:
        raise ProtocolError("a tensor where raw bytes were expected")
    return _checked(encoded)


def _checked(encoded: Encoded) -> memoryview:
    expected = encoded_size(encoded.codec, encoded.shape)
    if encoded.nbytes != expected:
        raise ProtocolError(
            f"{encoded.codec} tensor of shape {encoded.shape}: {encoded.nbytes} bytes instead of {expected}"
        )
    only = encoded.buffers[0] if len(encoded.buffers) == 1 else b"".join(encoded.buffers)
    return memoryview(only)


def _quantise(values: Tensor) -> list[Buffer]:
    """[n] -> fp32 scale per block, int8 values: value = scale * q, scale = absmax / 127 (a non-finite block has scale NaN)."""
    whole = values.numel() // BLOCK * BLOCK
    blocks = values[:whole].view(-1, BLOCK)
    low, high = torch.aminmax(blocks, dim=1) if whole else (values[:0], values[:0])
    if whole < values.numel():
        low = torch.cat([low, values[whole:].min().view(1)])
        high = torch.cat([high, values[whole:].max().view(1)])
    scales = torch.maximum(high, -low) / 127
    scales[~torch.isfinite(scales)] = torch.nan
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    quantised = torch.empty(values.numel(), dtype=torch.int8)
    quantised[:whole] = (blocks * inverse[: len(blocks), None]).round_().view(-1)
    if whole < values.numel():
        quantised[whole:] = (values[whole:] * inverse[-1]).round_()
    return [_bytes(scales), _bytes(quantised)]


def _dequantise(data: memoryview, shape: tuple[int, ...]) -> Tensor:
    elements = math.prod(shape)
    n_blocks = -(-elements // BLOCK)
    scales = _tensor(data[: 4 * n_blocks], torch.float32)
    quantised = _tensor(data[4 * n_blocks :], torch.int8)
    whole = elements // BLOCK * BLOCK
    values = quantised.float()
    values[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
    if whole < elements:
        values[whole:] *= scales[-1]
    return values.view(shape)


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, not copied."""
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().data


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Not copied where that is safe: only ever read."""
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    writable = data if not data.readonly else memoryview(bytearray(data))
    return torch.frombuffer(writable, dtype=dtype)
