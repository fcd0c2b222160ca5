"""Real daemons on loopback: calls, frames, the directory, and strangers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from muletrain.config.schema import Codec
from muletrain.errors import (
    AdmissionError,
    DeadlineExceeded,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
    Refused,
)
from muletrain.network.base import Channel, Network
from muletrain.network.daemon import check_socket_folder
from muletrain.network.gate import NO_SECRET, OTHER_SECRET
from muletrain.network.identity import Key
from muletrain.network.libp2p import CALL
from muletrain.network.streams import FRAMES
from muletrain.wire.codec import decode, encode, encode_raw
from muletrain.wire.frame import Frame, pack, size
from tests.daemons import number, world
from tests.polling import poll

pytestmark = pytest.mark.alone

# Real daemons: calls, frames, directory -----------------------------------------------------------------------------------


def test_calls() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)

            async def say(sender: str, payload: bytes) -> bytes:
                if payload == b"no":
                    raise AdmissionError("use another ticket")
                if payload == b"bug":
                    raise KeyError("oops")
                if payload == b"wrong":
                    raise ProtocolError("that was wrong")
                return sender.encode()

            a.serve("say", say)
            big = os.urandom(1 << 20)
            assert await b.call(a.peer_id, "echo", big, timeout_s=10) == big
            assert await a.call(b.peer_id, "echo", b"", timeout_s=10) == b""
            assert await b.call(a.peer_id, "say", b"", timeout_s=10) == b.peer_id.encode()
            assert await a.call(a.peer_id, "say", b"", timeout_s=10) == a.peer_id.encode()
            with pytest.raises(Refused, match="use another ticket"):
                await b.call(a.peer_id, "say", b"no", timeout_s=10)
            with pytest.raises(Refused):
                await b.call(a.peer_id, "other", b"", timeout_s=10)
            with pytest.raises(ProtocolError):
                await b.call(a.peer_id, "echo", big + b"1", timeout_s=10)
            assert not w.refusals[a.peer_id]
            with pytest.raises(Refused, match="that was wrong"):
                await b.call(a.peer_id, "say", b"wrong", timeout_s=10)
            assert w.refusals[a.peer_id] == [(b.peer_id, "say: that was wrong")]
            loud: list[dict[str, Any]] = []
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: loud.append(context))
            with pytest.raises(Refused, match="KeyError"):
                await b.call(a.peer_id, "say", b"bug", timeout_s=10)
            assert isinstance(loud[0]["exception"], KeyError)

    asyncio.run(scenario())


def test_a_slow_answer_misses_its_deadline_and_later_calls_go_on() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)

            async def slow(sender: str, payload: bytes) -> bytes:
                await asyncio.sleep(float(payload))
                return payload

            a.serve("slow", slow)
            begin = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await b.call(a.peer_id, "slow", b"30", timeout_s=0.2)
            assert time.monotonic() - begin < 1
            for _ in range(40):  # answers that cross their own cancellation
                with contextlib.suppress(DeadlineExceeded):
                    await b.call(a.peer_id, "slow", b"0.005", timeout_s=random.uniform(0.004, 0.009))
            assert await b.call(a.peer_id, "slow", b"0", timeout_s=5) == b"0"
            assert await b.call(a.peer_id, "slow", b"0", timeout_s=5) == b"0"
            await poll(lambda: not a.p2p._client.control._handler_tasks)  # what was given up is not kept

    asyncio.run(scenario())


def test_an_answer_in_the_very_turn_of_its_cancellation_ends_nothing() -> None:
    """hivemind's own call ends the task that reads all answers then: every later call of the process would hang."""
    from hivemind.p2p import PeerID
    from hivemind.proto import p2pd_pb2

    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            control = b.p2p._client.control
            asleep = asyncio.Event()

            async def sleep(sender: str, payload: bytes) -> bytes:
                asleep.set()
                await asyncio.Event().wait()
                return b""

            a.serve("sleep", sleep)
            call = asyncio.create_task(b.p2p.exchange(PeerID.from_base58(a.peer_id), CALL, b"\5sleep"))
            await asyncio.wait_for(asleep.wait(), 5)
            call.cancel()
            (pending,) = [f for f in control._pending_calls.values() if f.cancelled()]  # beside the directory's own
            pending.set_result(p2pd_pb2.CallUnaryResponse(response=b"late").SerializeToString())  # as the reader does
            pending.set_exception(ConnectionError())
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await b.call(a.peer_id, "echo", b"on", timeout_s=5) == b"on"

    asyncio.run(scenario())


def test_large_frames_both_ways_in_order_on_every_channel() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            values = torch.randn(1 << 20)
            tensor = encode(values, Codec.FP32)

            async def pour(sender: Network, receiver: Network, channel: Channel) -> None:
                for n in range(6):
                    frame = Frame("x", {"n": n, "channel": channel.value}, [tensor] if n % 2 else [])
                    assert await sender.send(receiver.peer_id, frame, channel=channel) == size(pack(frame))

            pairs = [(a, b), (b, a), (a, a)]
            await asyncio.gather(*(pour(s, r, c) for s, r in pairs[:2] for c in Channel))
            for sender, receiver in pairs[:2]:
                frames = [await w.next(receiver) for _ in range(6 * len(Channel))]
                assert {who for who, _ in frames} == {sender.peer_id}
                for channel in Channel:
                    chosen = [f for _, f in frames if f.header["channel"] == channel]
                    assert [number(f) for f in chosen] == list(range(6))
                assert all(torch.equal(decode(f.tensors[0]), values) for _, f in frames if f.tensors)
            assert a.counters.sent[b.peer_id, "x"] > 3 * len(Channel) * tensor.nbytes
            assert b.counters.received[a.peer_id, "x"] == 3 * len(Channel) * tensor.nbytes

    asyncio.run(scenario())


def test_frames_to_ourselves_are_ordered_and_need_no_wire() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            for n in range(20):
                assert await a.send(a.peer_id, Frame("x", {"n": n, "t": (1, 2)}, [encode_raw(b"abc")])) == 0
            await a.send(a.peer_id, Frame("wrong", {}))
            await a.send(a.peer_id, Frame("x", {"n": 20}))
            frames = [(await w.next(a))[1] for _ in range(21)]
            assert [number(f) for f in frames] == list(range(21))
            assert frames[0].header["t"] == [1, 2]  # as from the wire
            assert w.refusals[a.peer_id] == [(a.peer_id, "wrong: that was wrong")]

    asyncio.run(scenario())


def test_a_frame_that_waits_its_turn_too_long_leaves_the_one_before_it_whole() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            go = asyncio.Event()
            got: list[int] = []

            async def hold(sender: str, frame: Frame) -> None:
                await go.wait()
                got.append(number(frame))

            a.receive(hold)
            big = [encode_raw(bytes(64 << 20))]
            first = asyncio.create_task(b.send(a.peer_id, Frame("x", {"n": 0}, [])))
            await first
            held_up = asyncio.create_task(b.send(a.peer_id, Frame("x", {"n": 1}, big), timeout_s=30))
            await asyncio.sleep(0.3)
            with pytest.raises(DeadlineExceeded):
                await b.send(a.peer_id, Frame("x", {"n": 2}), timeout_s=0.2)
            assert not held_up.done()  # back-pressure reached the sender
            go.set()
            await held_up
            await b.send(a.peer_id, Frame("x", {"n": 3}))
            await poll(lambda: got == [0, 1, 3])

    asyncio.run(scenario())


def test_three_peers_share_a_directory_and_reach_each_other_through_it() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await asyncio.gather(w.open(a), w.open(a))  # b and c know only a
            for net in (a, b, c):
                await net.announce("stage.0", net.peer_id[-4:].encode(), 60)
            await b.announce("short", b"x", 0.5)
            for net in (a, b, c):
                assert await net.lookup("stage.0") == {n.peer_id: n.peer_id[-4:].encode() for n in (a, b, c)}
            assert await b.call(c.peer_id, "echo", b"hi", timeout_s=10) == b"hi"
            await c.send(b.peer_id, Frame("x", {"n": 1}))
            assert (await w.next(b))[0] == c.peer_id
            assert await c.lookup("nothing") == {}
            for subkey, value in [("not a peer id", b"x"), (7, b"x"), (c.peer_id, "text")]:
                await a.directory.node.store("odd", value, time.time() + 60, subkey=subkey)
            await b.announce("odd", b"fine", 60)
            assert await a.lookup("odd") == {b.peer_id: b"fine"}
            with pytest.raises(ProtocolError):
                await a.announce("big", bytes(1 << 20), 60)
            await asyncio.sleep(0.5)
            assert await c.lookup("short") == {}

    asyncio.run(scenario())


# Real daemons: strangers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "callers", "callees"),
    [
        ({"secret": b"t" * 32}, OTHER_SECRET, NO_SECRET),
        ({"run_id": "other"}, "belongs to run run, the ticket to run other", "ticket to run other"),
        ({"protocol": "2"}, "this run speaks 1, the newcomer 2", "this run speaks 1, the newcomer 2"),
    ],
)
def test_who_does_not_belong_here_is_told_why(changes: dict[str, Any], callers: str, callees: str) -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            with pytest.raises(AdmissionError, match=callers):
                await w.open(a, **changes)
            (report,) = w.refusals[a.peer_id]
            assert callees in report[1]

    asyncio.run(scenario())


def test_garbage_is_reported_and_everything_else_goes_on() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a)
            port = int(a.addresses()[0].split("/tcp/")[1].split("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(os.urandom(4096))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
            from hivemind.p2p import PeerID

            _, reader, writer = await b.p2p.call_binary_stream_handler(PeerID.from_base58(a.peer_id), FRAMES)
            writer.write(b"not a frame at all, this")
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
            assert w.refusals[a.peer_id] == [(b.peer_id, "not a frame of this protocol (it begins with b'not ')")]
            await b.send(a.peer_id, Frame("x", {"n": 1}))
            lost: list[tuple[str, str, Channel]] = []
            a.on_lost(lambda *stream: lost.append(("a", *stream)))
            b.on_lost(lambda *stream: lost.append(("b", *stream)))
            await b.send(a.peer_id, Frame("x", {"n": 0}), channel=Channel.BULK)
            assert sorted([number((await w.next(a))[1]) for _ in range(2)]) == [0, 1]
            await b.send(a.peer_id, Frame("wrong", {}))  # ends this stream; the next frame opens another
            await poll(lambda: len(w.refusals[a.peer_id]) == 2)
            await poll(lambda: sorted(lost) == [("a", b.peer_id, Channel.PIPE), ("b", a.peer_id, Channel.PIPE)])
            await b.send(a.peer_id, Frame("x", {"n": 2}))
            assert number((await w.next(a))[1]) == 2
            assert await b.call(a.peer_id, "echo", b"on", timeout_s=5) == b"on"

    asyncio.run(scenario())


def test_a_folder_too_long_for_sockets_is_told_what_to_do() -> None:
    """macOS takes 103 bytes, and its temporary folders are long: ours must fit into them, our two levels included."""
    macos = Path("/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T/mule-abcdefgh/mule-abcdefgh")
    check_socket_folder(macos, "darwin")
    check_socket_folder(macos / "xyz", "linux")
    with pytest.raises(NetworkError, match=r"4 bytes too long .* TMPDIR=/tmp"):
        check_socket_folder(macos / "xyz", "darwin")
    with pytest.raises(NetworkError):
        check_socket_folder(Path("/tmp") / ("\N{GREEK SMALL LETTER MU}" * 40), "linux")  # bytes, not letters


def test_addresses_that_lead_nowhere() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            with pytest.raises(PeerUnreachable):
                await a.connect(["/ip4/127.0.0.1/tcp/1"], timeout_s=5)
            closed = f"/ip4/127.0.0.1/tcp/1/p2p/{Key.new().peer_id}"
            with pytest.raises(PeerUnreachable, match=f"^dialling {closed}: connection refused$"):
                await a.connect([closed], timeout_s=5)
            absent = Key.new().peer_id
            gone = a.addresses()[0].replace(a.peer_id, absent)
            with pytest.raises(PeerUnreachable, match=r": no route to it is known$"):
                await a.connect([gone], timeout_s=5)
            with pytest.raises(
                PeerUnreachable,
                match=f"^echo to {absent[-6:]}: no route to it is known; no member leads there, either, so it is probably gone",
            ):
                await a.call(absent, "echo", b"", timeout_s=5)
            port = int(a.addresses()[0].split("/tcp/")[1].split("/")[0])
            in_use = f"network.port: cannot listen on 127.0.0.1:{port}: Address already in use; choose another"
            with pytest.raises(NetworkError, match=in_use):
                await w.open(folder="same-port", port=port)
            for listen, why in (("1.2.3.4", "give an address of this machine"), ("localhost", "is no address; write")):
                with pytest.raises(NetworkError, match=f"network.listen: .*{listen}.*{why}"):
                    await w.open(folder=f"on-{listen}", listen=listen)
            with pytest.raises(NetworkError):
                await w.open(folder="x" * 80)

    asyncio.run(scenario())
