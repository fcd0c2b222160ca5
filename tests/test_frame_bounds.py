"""Frames beyond their bounds are refused before they are read, and what is held for one sender is bounded."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgpack
import pytest
import torch

from muletrain.config.schema import Codec
from muletrain.errors import Malformed, ProtocolError
from muletrain.network.memory import MemoryHub
from muletrain.network.relay import MAX_REQUEST
from muletrain.policy.recent import MOST, Debts, Recent
from muletrain.runs.measure.probing import MOST as MOST_ECHOED
from muletrain.runs.measure.probing import PIECES, Echo, Prober
from muletrain.runtime.averaging.averager import KEPT_BYTES
from muletrain.runtime.averaging.messages import Shard
from muletrain.runtime.microbatch.messages import Forward
from muletrain.wire.codec import encode, encode_raw, encoded_size
from muletrain.wire.frame import MAX_HEADER, MAX_PAYLOAD, PREFIX, read_frame

from .targets import KINDS, Target, delivery, ended, frames, ready, resident_bytes, run

if TYPE_CHECKING:
    from muletrain.wire.frame import Frame


pytestmark = pytest.mark.timeout(300)

# Frames: refused before they are read --------------------------------------------------------------------------------------


class Stream:
    """A frame whose tensors never come; ``read``: bytes that were asked for."""

    def __init__(self, data: bytes) -> None:
        self._data, self.read = data, 0

    async def readexactly(self, n: int) -> bytes:
        part = self._data[self.read : self.read + n]
        self.read += n
        if len(part) < n:
            raise asyncio.IncompleteReadError(part, n)
        return part


def claimed(frame: Frame, tensors: list[tuple[str, tuple[int, ...]]]) -> bytes:
    """``frame`` as if it had other tensors; none of their bytes."""
    header: bytes = msgpack.packb([frame.kind, frame.header, [[codec, list(shape)] for codec, shape in tensors]])
    return PREFIX.pack(b"MT", 1, 0, len(header), sum(encoded_size(*t) for t in tensors)) + header


HUGE: list[tuple[str, tuple[int, ...]]] = [("fp32", (1 << 28,)), ("int8", (1 << 15, 1 << 15)), ("raw", (MAX_PAYLOAD,))]


@pytest.mark.parametrize("stage", [0, 1])
def test_tensors_that_no_correct_peer_sends_are_refused_before_they_are_read(stage: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        target = Target(stage, tmp_path)
        await ready(target)
        offended: list[str] = []
        delivery(target.net).offended = offended.append
        door = delivery(target.net).door("last" if stage else "second")
        for frame, tensor in itertools.product(frames(stage, 3), HUGE):
            for tensors in ([tensor], [tensor] * max(1, len(frame.tensors))):
                stream = Stream(
                    data := claimed(frame, tensors) if sum(encoded_size(*t) for t in tensors) <= MAX_PAYLOAD else b""
                )
                if data:
                    with pytest.raises(ProtocolError):
                        await read_frame(stream, door=door)
                    assert stream.read == len(data), f"{frame.kind} {tensors}: no byte of a tensor"
        for frame in frames(stage, 3):
            held = [(t.codec, t.shape) for t in frame.tensors]
            stream = Stream(data := claimed(frame, held))
            mine = frame.kind != "backward" or stage == 0
            if held and mine:
                with pytest.raises(asyncio.IncompleteReadError):
                    await read_frame(stream, door=door)
                assert stream.read > len(data), f"{frame.kind}: what is expected is read"
        await ended(target)

    run(scenario)


def test_a_forward_whose_tensors_came_while_its_peer_moved_is_refused(tmp_path: Path) -> None:
    """Its header passed the door of the stage before; activations between stages have one shape, and were accumulated."""

    async def scenario() -> None:
        target = Target(1, tmp_path, answers=False)
        await ready(target)
        frame = frames(1, 3)[0]
        late = Forward.parse(frame).model_copy(update={"stage": 2, "accumulate": (2,)})
        with pytest.raises(ProtocolError, match="at a peer of stage 1"):
            await target.peer._incoming._on_frame("last", late.frame(frame.tensors))
        await ended(target)

    run(scenario)


@pytest.mark.parametrize("kind", ["nonsense", "k" * 64, "sync", *KINDS])
def test_a_header_larger_than_its_kind_needs_is_not_read(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        target = Target(1, tmp_path)
        await ready(target)
        start: bytes = b"\x93" + msgpack.packb(kind)
        stream = Stream(PREFIX.pack(b"MT", 1, 0, MAX_HEADER, 0) + start + bytes(MAX_HEADER - len(start)))
        if kind != "statements":  # those about 4096 members or stages may be as large as any
            with pytest.raises(Malformed, match=r"unknown kind|are accepted"):
                await read_frame(stream, door=delivery(target.net).door("last"))
            assert stream.read < 400
        await ended(target)

    run(scenario)


def test_who_sends_them_is_counted_as_an_offender_and_memory_is_as_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        target, offended = Target(1, tmp_path), list[str]()
        await ready(target)
        delivery(target.net).offended = offended.append
        before = resident_bytes()
        large = encode(torch.zeros(16 << 20), Codec.FP32)
        wrong = [f for f in frames(1, 5) if f.kind in ("forward", "shard", "reduced")]
        for frame in wrong:
            frame.tensors = [large, *frame.tensors[1:]]
            await target.send("last", frame)
            await target.handled()  # what is sent before that is lost with the stream
        assert offended == ["last"] * len(wrong)
        assert len(target.refused()) == len(wrong)
        del large, wrong, frame
        assert resident_bytes() - before < 32 << 20
        await ended(target)

    run(scenario)


def test_a_probe_larger_than_any_is_refused_before_it_is_read() -> None:
    async def scenario() -> None:
        net = MemoryHub().join("a")
        prober = Prober(net, net, "a", cast("Any", None), lambda names: None, cast("Any", None))
        prober.open()
        data = claimed(Echo(number=1).frame([encode_raw(b"")]), [("raw", (MOST_ECHOED // PIECES + 1,))])
        stream = Stream(data)
        with pytest.raises(Malformed, match="too large"):
            await read_frame(stream, door=delivery(net).door("b"))
        assert stream.read == len(data)

    run(scenario)


def test_a_request_for_a_relay_has_a_bound() -> None:
    async def scenario() -> None:
        stream = Stream(PREFIX.pack(b"MT", 1, 0, MAX_REQUEST + 1, 0) + bytes(MAX_REQUEST + 1))
        with pytest.raises(Malformed, match="are accepted"):
            await read_frame(stream, 0, max_header=MAX_REQUEST)
        assert stream.read == PREFIX.size

    run(scenario)


# What is held for one sender ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [1, 1000])
def test_chunks_of_one_member_take_no_room_from_the_others_and_are_bounded(tmp_path: Path, values: int) -> None:
    """However small they are: each costs more than its values."""

    async def scenario() -> None:
        target = Target(1, tmp_path)
        await ready(target)
        averager = target.peer.runner.state.averager
        inbox, taken = averager._inbox, 0
        chunk = encode(torch.zeros(values), Codec.FP32)
        for number in range(10 * inbox.most_chunks):
            try:
                averager.on_chunk("last", Shard(round=number.to_bytes(32, "big"), step=0, chunk=0), chunk)
                taken += 1
            except ProtocolError:
                pass
        assert taken == inbox.most_chunks
        held = len(inbox.arrived["last"]) * (KEPT_BYTES + chunk.nbytes)
        assert 0 < held == inbox.nbytes["last"] <= inbox.most_bytes
        assert inbox.most_bytes < 3 * (8 * target.compute.n_params + 10_000)
        target.peer.roster.moved("first", 1)
        averager.on_chunk("first", Shard(round=bytes(32), step=0, chunk=1), encode(torch.zeros(9), Codec.FP32))
        await ended(target)

    run(scenario)


def test_tables_by_peer_do_not_grow_with_those_that_are_gone() -> None:
    known: Recent[int] = Recent()
    for k in range(2 * MOST):
        known[str(k)] = k
        known["0"] = 0
    assert len(known) == MOST
    assert {"0", str(2 * MOST - 1)} <= known.keys()
    debts = Debts(per_s=2.0)
    assert debts.add("a", 10.0, now=0.0) == 10.0
    assert debts.owed("a", now=3.0) == 4.0
    assert debts.owed("a", now=9.0) == 0.0
