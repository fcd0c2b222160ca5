"""Codecs and frames: what goes in comes out, and nothing that arrives does harm."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muletrain.config.schema import Codec
from muletrain.errors import ProtocolError
from muletrain.wire.codec import BLOCK, Encoded, decode, decode_raw, encode, encode_ids, encode_raw, encoded_size
from muletrain.wire.frame import MAX_HEADER, MAX_TENSORS, PREFIX, Frame, pack, read_frame, reread

TOLERANCE = {Codec.FP32: 0.0, Codec.FP16: 2.0**-11, Codec.BF16: 2.0**-8}
STEPS = {Codec.INT8: 1 / 127, Codec.DYNAMIC8: 0.0155}
"""Largest distance of two neighbouring numbers, of the largest number in a block."""
SHAPES = [(), (0,), (1,), (3, 0, 2), (BLOCK,), (BLOCK - 1,), (BLOCK + 1,), (3, BLOCK), (7, 5, 11), (130, BLOCK + 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", list(Codec))
def test_a_tensor_survives_each_codec(codec: Codec, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    encoded = encode(values, codec)
    assert encoded.nbytes == encoded_size(codec, shape) == sum(len(b) for b in encoded.buffers)
    decoded = decode(encoded)
    assert decoded.shape == values.shape
    assert decoded.dtype == torch.float32
    if codec in STEPS:
        bounds = [
            block.abs().max() * STEPS[codec] / 2 * 1.01 for block in values.reshape(-1).split(BLOCK) if len(block)
        ]
        errors = [e.abs().max() for e in (decoded - values).reshape(-1).split(BLOCK) if len(e)]
        assert all(e <= b for e, b in zip(errors, bounds, strict=True))
    else:
        assert torch.allclose(decoded, values, rtol=TOLERANCE[codec], atol=1e-7 * (codec is not Codec.FP32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", list(Codec))
def test_other_float_types_and_strides_are_taken(codec: Codec, dtype: torch.dtype) -> None:
    values = torch.randn(40, 30).to(dtype).t()
    decoded = decode(encode(values, codec))
    assert torch.allclose(decoded, values.float(), atol=0.04)


def test_int8_is_as_exact_on_gaussian_data_as_it_was_measured() -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert (decode(encode(values, Codec.INT8)) - values).norm() / values.norm() < 0.009


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, BLOCK + 5])
@pytest.mark.parametrize("codec", list(Codec))
def test_what_is_not_finite_arrives_not_finite(codec: Codec, bad: float, position: int) -> None:
    values = torch.ones(BLOCK + 10)
    values[position] = bad
    decoded = decode(encode(values, codec))
    assert not torch.isfinite(decoded[position])
    other = decoded[:BLOCK] if position >= BLOCK else decoded[BLOCK:]
    assert torch.allclose(other, torch.ones_like(other))  # other blocks are not touched


@pytest.mark.parametrize("magnitude", [10.0**k for k in range(-33, 38, 5)])
@pytest.mark.parametrize(("codec", "off"), [(Codec.FP16, 2.0**-11), (Codec.INT8, 0.01), (Codec.DYNAMIC8, 0.012)])
def test_a_scaled_codec_is_as_exact_at_any_magnitude(codec: Codec, off: float, magnitude: float) -> None:
    """A gradient of a loss of 1e-8 fell below fp16, and one of 1e6 was not finite in it."""
    values = torch.rand(3 * BLOCK + 5, generator=torch.Generator().manual_seed(2)).sub(0.5) * magnitude
    decoded = decode(encode(values, codec))
    assert float(torch.linalg.vector_norm(decoded / magnitude - values / magnitude)) <= off * float(
        torch.linalg.vector_norm(values / magnitude)
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), low=st.integers(-140, 120), spread=st.integers(0, 60), size=st.integers(1, BLOCK + 9)
)
@pytest.mark.parametrize("codec", [Codec.FP16, Codec.INT8, Codec.DYNAMIC8])
def test_what_was_decoded_encodes_to_the_same_bits(codec: Codec, seed: int, low: int, spread: int, size: int) -> None:
    """Holders of a mean gradient have decoded values, and prove these by encoding them again."""
    draw = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, min(128, low + spread + 1), (size,), generator=draw)
    values = torch.ldexp(torch.rand(size, generator=draw).sub(0.5).mul(2), exponents).float()
    first = encode(values, codec)
    again = encode(decode(first), codec)
    assert [bytes(b) for b in again.buffers] == [bytes(b) for b in first.buffers]


def test_in_fp16_single_numbers_are_not_finite() -> None:
    values = torch.tensor([3e38, torch.inf, 1e30, torch.nan])
    assert torch.isfinite(decode(encode(values, Codec.FP16))).tolist() == [True, False, True, False]


def test_dynamic8_keeps_small_numbers_beside_a_large_one() -> None:
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    values[7] = 1000.0
    small = torch.arange(BLOCK) != 7
    off = {c: (decode(encode(values, c)) - values)[small].norm() / values[small].norm() for c in STEPS}
    assert off[Codec.INT8] > 0.9
    assert off[Codec.DYNAMIC8] < 0.12
    assert float(decode(encode(-values, Codec.DYNAMIC8))[7]) == -1000.0


def test_each_byte_of_dynamic8_is_a_number_or_not_finite() -> None:
    encoded = encode(torch.ones(256), Codec.DYNAMIC8)
    decoded = decode(Encoded(encoded.codec, encoded.shape, [encoded.buffers[0], bytes(range(256))]))
    assert torch.isfinite(decoded[:255]).all()
    assert len(set(decoded[:255].tolist())) == 255
    assert decoded[255].isnan()


@pytest.mark.parametrize("codec", STEPS)
@pytest.mark.parametrize("size", [BLOCK, 5])
def test_8_bits_of_zeros_and_of_the_tiniest_numbers_are_zero(size: int, codec: Codec) -> None:
    for value in (0.0, 1e-45, 1e-39, -1e-36):
        decoded = decode(encode(torch.full((size,), value), codec))
        assert torch.allclose(decoded, torch.full((size,), value), atol=1.3e-35)


def test_ids_take_the_fewest_bytes() -> None:
    small, large = torch.tensor([[0, 65535]]), torch.tensor([-100, 65536, 2**31 - 1])
    assert encode_ids(small).nbytes == 4
    assert encode_ids(large).nbytes == 12
    for ids in (small, large, torch.empty(0, dtype=torch.int64)):
        assert torch.equal(decode(encode_ids(ids)), ids.to(torch.int64))
    with pytest.raises(ValueError, match="2147483648"):
        encode_ids(torch.tensor([1 << 31]))


@pytest.mark.parametrize("codec", list(Codec))
def test_both_directions_return_memory_of_their_own(codec: Codec) -> None:
    values = torch.ones(BLOCK)
    encoded = encode(values, codec)
    values.zero_()
    decoded = decode(encoded)
    assert decoded[0] == 1
    decoded.zero_()
    assert decode(encoded)[0] == 1


@pytest.mark.parametrize(
    "encoded",
    [
        Encoded("fp32", (3,), [b"\0" * 11]),
        Encoded("int8", (BLOCK + 1,), [b"\0" * BLOCK]),
        Encoded("pickle", (1,), [b"\0"]),
        Encoded("fp32", (-1,), [b""]),
        Encoded("fp32", (1,) * 9, [b"\0" * 4]),
        Encoded("fp32", (1 << 20, 1 << 20), [b""]),
        encode_raw(b"abc"),
    ],
)
def test_a_tensor_that_lies_is_refused(encoded: Encoded) -> None:
    with pytest.raises(ProtocolError):
        decode(encoded)


def test_raw_bytes() -> None:
    assert bytes(decode_raw(encode_raw(b"abc"))) == b"abc"
    with pytest.raises(ProtocolError):
        decode_raw(encode(torch.ones(1), Codec.FP32))


# Frames ---------------------------------------------------------------------------------------------------------------

FRAME = Frame(
    "forward",
    {"step": 3, "lineage": b"x" * 32, "accumulate": [0, 1], "loss": 0.5, "none": None, "in": {"a": True}},
    [encode(torch.arange(30.0).view(5, 6), c) for c in Codec] + [encode_ids(torch.arange(9)), encode_raw(b"abc")],
)
BYTES = b"".join(pack(FRAME))


def read(data: bytes, **limits: int) -> Frame:
    async def fed() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await asyncio.wait_for(read_frame(reader, **limits), 5)

    return asyncio.run(fed())


def same(a: Frame, b: Frame) -> bool:
    def flat(f: Frame) -> list[object]:
        return [f.kind, msgpack.packb(f.header), [(t.codec, tuple(t.shape), b"".join(t.buffers)) for t in f.tensors]]

    return flat(a) == flat(b)


def test_a_frame_comes_out_as_it_went_in() -> None:
    assert same(read(BYTES), FRAME)
    assert same(reread(FRAME), FRAME)
    for sent, got in zip(FRAME.tensors[:-1], read(BYTES).tensors[:-1], strict=True):
        assert torch.equal(decode(sent), decode(got))


def test_tensors_are_not_copied_into_a_frame() -> None:
    raw = bytearray(100)
    assert any(b is raw for b in pack(Frame("x", {}, [encode_raw(raw)])))


def framed(header: object, payload: bytes = b"", claimed: int | None = None) -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    size = len(payload) if claimed is None else claimed
    return PREFIX.pack(b"MT", 1, 0, len(packed), size) + packed + payload


def nested(depth: int) -> object:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFIX.pack(b"MT", 2, 0, 4, 0) + b"\0" * 4,
        PREFIX.pack(b"MT", 1, 7, 4, 0) + b"\0" * 4,
        PREFIX.pack(b"MT", 1, 0, MAX_HEADER + 1, 0),
        PREFIX.pack(b"MT", 1, 0, 4, 1 << 60),
        framed(b"\xc1"),
        framed(["kind", {}]),
        framed([1, {}, []]),
        framed(["k" * 65, {}, []]),
        framed(["kind", [], []]),
        framed(["kind", {b"a": 1}, []]),
        framed(["kind", {1: 1}, []]),
        framed(["kind", {"a": {2: 1}}, []]),
        framed(["kind", {}, {}]),
        framed(["kind", {}, ["ab"]]),
        framed(["kind", {}, [["raw", "1"]]], b"x"),
        framed(["kind", {}, [["raw", [1.0]]]], b"x"),
        framed(["kind", {}, [["raw", [True]]]], b"x"),
        framed(["kind", {}, [["raw", [2]]]], b"x"),
        framed(["kind", {}, [["raw", [1 << 63]]]], b"x"),
        framed(["kind", {}, [["raw", [0]]] * (MAX_TENSORS + 1)]),
        framed(["kind", {"a": msgpack.ExtType(5, b"")}, []]),
        framed(["kind", {"a": msgpack.ExtType(5, b"xy")}, []]),
        framed(["kind", {"a": msgpack.Timestamp(5)}, []]),
        framed(["kind", {"a": nested(9)}, []]),
        framed(["kind", {"a": nested(500)}, []]),
        framed(msgpack.packb(["kind", {}, []]) + b"\0"),
        framed(b"\x93\xa1k\x80\xdd\xff\xff\xff\xff"),
        framed(b"\x93\xa1\xff\x80\x90"),
    ],
    ids=lambda d: d[:40].hex(),
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(data)


def test_limits_are_the_receivers() -> None:
    with pytest.raises(ProtocolError):
        read(BYTES, max_payload=10)


def test_a_frame_that_no_receiver_accepts_is_not_sent() -> None:
    with pytest.raises(ProtocolError):
        pack(Frame("x", {"a": b"x" * (MAX_HEADER + 1)}))
    with pytest.raises(ProtocolError):
        pack(Frame("x", {}, [encode_raw(b"x")] * (MAX_TENSORS + 1)))


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 40, len(BYTES) - 1])
def test_a_stream_that_ends_early_says_so(cut: int) -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read(BYTES[:cut])


def test_memory_follows_what_arrives_not_what_is_claimed() -> None:
    data = framed(["kind", {}, [["raw", [1 << 29]]]], b"x" * 1000, claimed=1 << 29)
    tracemalloc.start()
    with pytest.raises(asyncio.IncompleteReadError):
        read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@settings(max_examples=400, deadline=2000)
@given(
    st.lists(
        st.tuples(st.integers(0, len(BYTES) - 1), st.sampled_from(["set", "insert", "delete"]), st.binary(max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_mutated_frames_are_refused_or_whole(changes: list[tuple[int, str, bytes]]) -> None:
    data = bytearray(BYTES)
    for position, how, what in changes:
        end = position if how == "insert" else position + max(1, len(what))
        data[position:end] = b"" if how == "delete" else what
    try:
        frame = read(bytes(data))
    except (ProtocolError, asyncio.IncompleteReadError):
        return
    for tensor in frame.tensors:
        assert tensor.nbytes == encoded_size(tensor.codec, tensor.shape)
        if tensor.codec != "raw":
            decode(tensor)
    assert same(read(b"".join(pack(frame))), frame)


@settings(max_examples=200, deadline=2000)
@given(st.binary(max_size=200))
def test_garbage_headers_are_refused(header: bytes) -> None:
    with pytest.raises((ProtocolError, asyncio.IncompleteReadError)):
        read(struct.pack(">2sBBIQ", b"MT", 1, 0, len(header), 5) + header)


def test_numpy_and_torch_agree_on_the_wire() -> None:
    """Little endian, row major: what another implementation would have to know."""
    assert bytes(encode(torch.tensor([[1.0, 2.0]]), Codec.FP32).buffers[0]) == np.array([1, 2], "<f4").tobytes()
