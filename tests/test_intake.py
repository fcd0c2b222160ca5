"""Streams read straight into the memory of their frames: whole, in order, and no faster than they are taken."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.config.schema import Codec
from muletrain.network.streams import AHEAD, Intake
from muletrain.wire.codec import decode, encode
from muletrain.wire.frame import Frame, pack, read_frame

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.timeout(120)


def on_a_stream(talk: Callable[[Intake, socket.socket], Awaitable[None]], early: bytes = b"") -> None:
    """``talk`` with an Intake and the socket that it reads from; ``early`` is in the StreamReader before it is taken
    over."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        if early:
            theirs.send(b"first" + early)
            assert await reader.readexactly(5) == b"first"
        intake = Intake.take_over(reader, writer)
        try:
            async with asyncio.timeout(20):
                await talk(intake, theirs)
        finally:
            theirs.close()
            writer.close()

    asyncio.run(run())


def frames() -> list[Frame]:
    values = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (0, 1, 5_000, 700_001)]
    return [Frame("test", {"n": k}, [encode(v, Codec.FP32), encode(v, Codec.INT8)]) for k, v in enumerate(values)]


@pytest.mark.parametrize("piece", [1 << 12, AHEAD - 1, AHEAD, 1 << 20])
def test_frames_arrive_whole_and_in_order_however_they_are_cut(piece: int) -> None:
    async def talk(intake: Intake, sender: socket.socket) -> None:
        data = b"".join(bytes(b) for f in frames() for b in pack(f))

        async def send() -> None:
            for i in range(0, len(data), piece):
                await asyncio.get_running_loop().sock_sendall(sender, data[i : i + piece])

        sending = asyncio.create_task(send())
        for sent in frames():
            got = await read_frame(intake)
            assert (got.kind, got.header) == (sent.kind, sent.header)
            for a, b in zip(got.tensors, sent.tensors, strict=True):
                assert torch.equal(decode(a), decode(b))
        await sending

    on_a_stream(talk)


def test_what_was_read_before_the_change_is_not_lost() -> None:
    whole = b"".join(bytes(b) for b in pack(frames()[2]))

    async def talk(intake: Intake, sender: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sender, whole[100:])
        assert torch.equal(decode((await read_frame(intake)).tensors[0]), decode(frames()[2].tensors[0]))

    on_a_stream(talk, early=whole[:100])


def test_the_end_in_the_middle_of_a_frame_is_an_end() -> None:
    async def talk(intake: Intake, sender: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sender, b"MT")
        asyncio.get_running_loop().call_later(0.1, sender.close)
        with pytest.raises(asyncio.IncompleteReadError):
            await read_frame(intake)
        with pytest.raises(asyncio.IncompleteReadError):
            await intake.readexactly(1)

    on_a_stream(talk)


def test_nobody_reads_so_nothing_more_is_taken() -> None:
    async def talk(intake: Intake, sender: socket.socket) -> None:
        sent = 0
        while True:  # until the kernel's buffers are full, too
            try:
                sent += sender.send(bytes(1 << 16))
            except BlockingIOError:
                await asyncio.sleep(0.2)
                try:
                    sent += sender.send(bytes(1 << 16))
                except BlockingIOError:
                    break
        assert sent < 64 * AHEAD
        assert len(await intake.readexactly(sent)) == sent, "and all of it comes when somebody reads"

    on_a_stream(talk)
