"""Tensor codecs: fp32, bf16, block-wise fp16 and 8-bit (SWARM app. J.1, "quantized activations"), token ids, raw bytes.

Two 8-bit codecs differ in the spacing of their numbers. ``INT8`` is linear. ``DYNAMIC8`` is dynamic tree quantisation
(Dettmers et al. 2021, sec. 1.3): 2 ** i numbers from 10 ** (i - 7) to 10 ** (i - 6) for i in 0 to 6, so small numbers
beside a large one keep their relative precision, and the large ones have half of it (benchmarks/compression).

In the block-wise codecs every ``BLOCK`` numbers have a scale, so a number's error is relative to the largest one in the
block, at any order of magnitude that fp32 has.

A tensor travels as the codec's name, the shape and one or two buffers. Decoding checks sizes against shapes before
allocating. Both directions return fresh memory, because an encoded tensor may wait in a queue, or be sent again, while
the original changes.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from muletrain.config.schema import Codec
from muletrain.errors import ProtocolError
from muletrain.wire.encoded import (
    BLOCK,
    IDS,
    IDS16,
    IDS32,
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    RAW,
    Encoded,
    encoded_size,
    scale_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Buffer = bytes | bytearray | memoryview

__all__ = [
    "BLOCK",
    "IDS",
    "IDS16",
    "IDS32",
    "MAX_DIMENSIONS",
    "MAX_ELEMENTS",
    "RAW",
    "Encoded",
    "decode",
    "decode_raw",
    "encode",
    "encode_ids",
    "encode_raw",
    "encode_samples",
    "encoded_size",
    "sample_codecs",
]

_FLOATS = {Codec.FP32: torch.float32, Codec.BF16: torch.bfloat16}
_SCALED = {Codec.FP16: torch.float16, Codec.INT8: torch.int8, Codec.DYNAMIC8: torch.uint8}
_ROWS = 64
"""Blocks quantised at a time: the scratch memory stays in the cache, which halves the time."""
_TINY = 1e-37
"""Scales of 8 bits below count as zero, because the inverse would overflow."""
_LEAST, _MOST, _BIAS = -126, 113, 127
"""Exponents of the scales of fp16: the least of a normal fp32 number, and of the largest ones; and the exponent bias of
fp32."""
_TOP = 15
"""The largest number of a block lies below 2 ** _TOP in fp16, where the largest number is 65504."""


def encode(tensor: Tensor, codec: Codec) -> Encoded:
    """Encode a float tensor. Non-finite values arrive as such, so that the receiver can refuse them."""
    values = tensor.detach()
    if codec in _SCALED:
        return Encoded(codec.value, tuple(tensor.shape), _scaled(values.float().reshape(-1), codec))
    packed = values.to("cpu", _FLOATS[codec], copy=True, memory_format=torch.contiguous_format)
    return Encoded(codec.value, tuple(tensor.shape), [_bytes(packed)])


def encode_ids(ids: Tensor) -> Encoded:
    """Encode integers of up to 32 bits, in 16 bits if all fit. Raises ValueError for larger ones."""
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if low < -(1 << 31) or high >= 1 << 31:
        raise ValueError(f"ids from {low} to {high} do not fit into 32 bits")
    small = low >= 0 and high < 1 << 16
    dtype = torch.uint16 if small else torch.int32
    packed = ids.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
    return Encoded(IDS16 if small else IDS32, tuple(ids.shape), [_bytes(packed)])


def encode_samples(values: Tensor) -> Encoded:
    """Encode inputs or targets without loss: integers as by ``encode_ids``, other numbers in fp32."""
    return encode(values, Codec.FP32) if values.is_floating_point() else encode_ids(values)


def sample_codecs(dtype: str) -> tuple[str, ...]:
    """How inputs or targets of a ``dtype`` travel: 'int64' or 'float32'."""
    return IDS if dtype == "int64" else (Codec.FP32.value,)


def encode_raw(data: Buffer) -> Encoded:
    """Encode bytes unchanged, without a copy."""
    return Encoded(RAW, (len(data),), [data])


def decode(encoded: Encoded, *, copy: bool = True) -> Tensor:
    """Decode float codecs to fp32, token ids to int64. Without ``copy`` the result may lie in the encoded tensor's own
    memory, to be read at once. Raises ProtocolError if sizes do not fit."""
    parts = _checked(encoded)
    if encoded.codec == RAW:
        raise ProtocolError("raw bytes where a tensor was expected")
    if encoded.codec in _SCALED:
        return _unscaled(parts[0], parts[1], _SCALED[Codec(encoded.codec)]).view(encoded.shape)
    if encoded.codec in (IDS16, IDS32):
        dtype, target = (torch.uint16 if encoded.codec == IDS16 else torch.int32), torch.int64
    else:
        dtype, target = _FLOATS[Codec(encoded.codec)], torch.float32
    return _tensor(parts[0], dtype).to(target, copy=copy and not parts[0].readonly).view(encoded.shape)


def decode_raw(encoded: Encoded) -> memoryview:
    """The raw bytes. Raises ProtocolError for a tensor."""
    if encoded.codec != RAW:
        raise ProtocolError("a tensor where raw bytes were expected")
    return _checked(encoded)[0]


def _checked(encoded: Encoded) -> list[memoryview]:
    """The codec's parts (scales and values if block-wise), each in one piece. Raises ProtocolError."""
    expected = encoded_size(encoded.codec, encoded.shape)
    if encoded.nbytes != expected:
        raise ProtocolError(
            f"{encoded.codec} tensor of shape {encoded.shape}: {encoded.nbytes} bytes instead of {expected}"
        )
    scales = scale_bytes(encoded.codec, math.prod(encoded.shape))
    sizes = [scales, expected - scales] if encoded.codec in _SCALED else [expected]
    if [len(b) for b in encoded.buffers] == sizes:
        return [memoryview(b) for b in encoded.buffers]
    whole = memoryview(encoded.buffers[0] if len(encoded.buffers) == 1 else bytearray().join(encoded.buffers))
    return [whole[:scales], whole[scales:]] if len(sizes) == 2 else [whole]


def _scaled(values: Tensor, codec: Codec) -> list[Buffer]:
    """[n] -> a fp32 scale per block, and values: number = scale * value."""
    whole = values.numel() // BLOCK * BLOCK
    blocks, rest = values[:whole].view(-1, BLOCK), values[whole:]
    absmax = [_absmax(blocks)] if whole else []
    absmax += [_absmax(rest.view(1, -1))] if rest.numel() else []
    found = torch.cat(absmax) if absmax else values
    scales, inverse = _of_fp16(found) if codec is Codec.FP16 else _of_8_bits(found, 127 if codec is Codec.INT8 else 1)
    quantised = _QUANTISED[codec]
    packed = torch.empty(values.numel(), dtype=_SCALED[codec], device=values.device)
    scratch = torch.empty(min(_ROWS, len(blocks)), BLOCK, device=values.device)
    into = packed[:whole].view(-1, BLOCK)
    for i in range(0, len(blocks), _ROWS):
        rows = blocks[i : i + _ROWS]
        scaled = torch.mul(rows, inverse[i : i + len(rows), None], out=scratch[: len(rows)])
        into[i : i + _ROWS] = quantised(scaled)
    if rest.numel():
        packed[whole:] = quantised(rest * inverse[-1])
    return [_bytes(scales), _bytes(packed)]


def _of_8_bits(absmax: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Scales and inverses: scale = absmax / largest, and NaN for a block that is not finite."""
    scales = absmax / largest
    scales = torch.where(torch.isfinite(scales), scales, torch.nan)
    scales = torch.where(scales > _TINY, scales, 0 * scales)  # 0, or NaN
    return scales, torch.where(scales > 0, 1 / scales, 0.0)


def _of_fp16(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and inverses: powers of two, so that no number is rounded twice. Scales follow from the largest number
    after rounding to fp16, so decoded numbers encode to the same bits. In a block that is not finite, only single
    numbers are not."""
    mantissa, exponent = torch.frexp(absmax)
    exponent = exponent - _TOP + (mantissa.half() == 1).to(exponent.dtype)
    exponent = torch.where(torch.isfinite(absmax), exponent, _MOST).clamp(_LEAST, _MOST)
    return _power_of_two(exponent), _power_of_two(-exponent)


@functools.cache
def _numbers(device: torch.device) -> Tensor:
    """fp32 [256]: the numbers of ``DYNAMIC8`` in order, and NaN for the byte that no sender writes. The largest are -1 and 1,
    so that decoded numbers encode to the same bits."""
    parts = ((i, (k + (1 if i == 6 else 0.5)) / 2**i) for i in range(7) for k in range(2**i))
    each = [10.0 ** (i - 6) * (0.1 + 0.9 * part) for i, part in parts]
    return torch.tensor([*sorted([*each, 0.0, *(-x for x in each)]), math.nan], device=device)


@functools.cache
def _nearest(device: torch.device) -> Tensor:
    """uint8 [2**16]: for each fp16 number, by its bits, the place of the nearest of ``_numbers``. Rounding to fp16 first
    costs a tenth of a spacing at most."""
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers = _numbers(torch.device("cpu"))[:-1]
    return torch.bucketize(halves, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8).to(device)


def _places(scaled: Tensor) -> Tensor:
    bits = scaled.half().view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return _nearest(scaled.device).index_select(0, bits.flatten()).view(scaled.shape)


_QUANTISED: dict[Codec, Callable[[Tensor], Tensor]] = {
    Codec.INT8: Tensor.round_,
    Codec.FP16: lambda scaled: scaled,
    Codec.DYNAMIC8: _places,
}
"""From numbers divided by their block's scale to values on the wire."""


def _power_of_two(exponent: Tensor) -> Tensor:
    """[n] int32 -> fp32, exactly."""
    return ((exponent + _BIAS) << 23).to(torch.int32).view(torch.float32)


def _absmax(blocks: Tensor) -> Tensor:
    """[blocks, n] -> [blocks]; NaN for a block that has one."""
    low, high = torch.aminmax(blocks, dim=1)
    return torch.maximum(high, -low)


def _unscaled(scale_bytes: memoryview, value_bytes: memoryview, dtype: torch.dtype) -> Tensor:
    scales, values = _tensor(scale_bytes, torch.float32), _tensor(value_bytes, dtype)
    values = _numbers(values.device).index_select(0, values.int()) if dtype == torch.uint8 else values.float()
    whole = values.numel() // BLOCK * BLOCK
    values[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
    if whole < values.numel():
        values[whole:] *= scales[-1]
    return values


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().data


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    """A tensor on the memory of ``data``, or on a copy if that is not writable, as torch demands."""
    if len(data) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
