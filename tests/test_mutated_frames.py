"""Frames drawn at random do no harm to the decoder."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter

import pytest
from pydantic import ValidationError

from muletrain.errors import ProtocolError
from muletrain.network.streams import Intake
from muletrain.runtime.core.branches import BRANCH
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.members.row import ShardFacts
from muletrain.runtime.recovery.messages import StandsAt
from muletrain.wire.codec import RAW, decode, encoded_size
from muletrain.wire.frame import Frame, pack, read_frame, unpack

from .mutations import mutated
from .targets import KINDS, frames

pytestmark = pytest.mark.timeout(1000)

AMOUNTS = [300, pytest.param(10_000, marks=pytest.mark.slow)]


def test_what_would_end_a_peer_later_is_refused_when_it_comes() -> None:
    """A square norm whose sums are not finite; a part of a checkpoint that no lineage names."""
    fact = {"content": bytes(32), "finite": True}
    assert ShardFacts.model_validate(fact | {"square_norm": 1e89}).square_norm == 1e89, (
        "as much as fp32 gradients can have"
    )
    with pytest.raises(ValidationError):
        ShardFacts.model_validate(fact | {"square_norm": 1.7e308})
    at = {"branch": bytes(BRANCH), "step": 1, "stage": 0, "state": State.TRAINING, "targets": ()}
    StandsAt.model_validate(at | {"parts": [(1, bytes(32), 0, bytes(32))]})
    with pytest.raises(ValidationError):
        StandsAt.model_validate(at | {"parts": [(1, b"", 0, bytes(32))]})


def test_a_frame_of_every_kind_is_drawn_from() -> None:
    assert {f.kind for f in frames(0, 0)} == KINDS.keys()


def take(frame: Frame) -> None:
    """As a peer takes it. Raises ProtocolError."""
    if frame.kind not in KINDS:
        raise ProtocolError("unknown kind")
    KINDS[frame.kind].parse(frame)
    for tensor in frame.tensors:
        assert tensor.nbytes == encoded_size(tensor.codec, tensor.shape)
        if tensor.codec != RAW:
            assert decode(tensor).shape == tensor.shape


@pytest.mark.parametrize("amount", AMOUNTS)
def test_the_decoder_refuses_or_takes_whole(amount: int) -> None:
    async def scenario() -> None:
        rng, ended = random.Random(amount), Counter[str]()
        for n in range(amount):
            frame = rng.choice(frames(rng.randint(0, 1), n % 63))
            said = ""
            try:
                take(await asyncio.wait_for(unpack(mutated(rng, b"".join(pack(frame)))), 5))
            except ProtocolError as e:
                said = str(e)
            ended["refused" if said else "taken"] += 1
            assert len(said) < 1000, "what is said of it has a bound, too"
        assert min(ended.values()) > amount / 20

    asyncio.run(scenario())


@pytest.mark.parametrize("amount", [30, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_stream_of_mutated_frames_ends_and_never_hangs(amount: int) -> None:
    """Each on a stream of its own, behind a valid one, in pieces: what comes after the damage may be read as
    anything."""

    async def to_the_end(intake: Intake) -> None:
        while True:
            await read_frame(intake)

    async def stream(rng: random.Random) -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        intake = Intake.take_over(reader, writer)
        _, other = await asyncio.open_connection(sock=theirs)
        valid, *rest = [b"".join(pack(f)) for f in rng.sample(frames(1, rng.randint(0, 62)), 3)]
        data = valid + b"".join(mutated(rng, r) for r in rest)
        try:
            for begin in range(0, len(data), 7000):
                other.write(data[begin : begin + 7000])
            other.write_eof()
            take(await asyncio.wait_for(read_frame(intake), 5))
            with pytest.raises((ProtocolError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(to_the_end(intake), 5)
        finally:
            other.close()
            writer.close()

    async def scenario() -> None:
        rng = random.Random(amount)
        for _ in range(amount):
            await stream(rng)

    asyncio.run(scenario())
