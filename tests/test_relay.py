"""Peers that cannot reach each other directly: real daemons on this machine, of which some cannot be dialled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from muletrain.config.schema import Codec
from muletrain.errors import DeadlineExceeded, PeerUnreachable
from muletrain.network import relay
from muletrain.network.base import Frame
from muletrain.wire.codec import encode
from tests.test_network import World, child, number, poll, world

if TYPE_CHECKING:
    from muletrain.network.base import Network
    from muletrain.network.libp2p import Libp2pNetwork

pytestmark = pytest.mark.timeout(120)
NOWHERE = {"announce": ("/ip4/192.0.2.1/udp/1",), "private": True}
"""Nobody can dial it: its daemon tells an address of no use, and nobody can guess the other."""


def ways(net: Libp2pNetwork, peer: Network) -> int:
    assert net._relay is not None
    return sum(peer.peer_id in pipe.peers for pipe in net._relay._pipes)


def carried(net: Libp2pNetwork) -> int:
    assert net._relay is not None
    return sum(net._relay.carried.values())


async def two_private(w: World, *members: Libp2pNetwork) -> tuple[Libp2pNetwork, Libp2pNetwork]:
    one, other = await asyncio.gather(w.open(*members, **NOWHERE), w.open(*members, **NOWHERE))
    for net in (one, other):
        for member in members:
            await net.call(member.peer_id, "echo", b"", timeout_s=10)
    return one, other


def test_two_peers_that_cannot_listen_speak_by_way_of_a_third() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            begin = time.monotonic()
            assert await b.call(c.peer_id, "echo", b"there", timeout_s=10) == b"there"
            assert time.monotonic() - begin < 5
            values = torch.randn(1 << 20)
            frame = Frame("x", {"n": 1}, [encode(values, Codec.FP32)])
            for sender, receiver in ((b, c), (c, b)):
                for n in range(4):
                    await sender.send(receiver.peer_id, Frame("x", {"n": n}, frame.tensors))
                got = [await w.next(receiver) for _ in range(4)]
                assert [(who, number(f)) for who, f in got] == [(sender.peer_id, n) for n in range(4)]
            assert carried(a) > 2 * 4 * 4 * values.numel()
            assert (ways(b, c), ways(c, b)) == (1, 1)
            await a.call(b.peer_id, "echo", b"", timeout_s=10)
            assert ways(a, b) == 0, "the private one opened this connection"
            assert not any(w.refusals.values())

    asyncio.run(scenario())


def test_when_the_relay_dies_or_freezes_another_takes_over_in_seconds() -> None:
    async def scenario(end: signal.Signals) -> float:
        async with world() as w:
            spare = await w.open()
            with child(w.folder / "child") as (process, address, daemon):
                relay = await spare.connect([address], timeout_s=10)
                carries, spare._relay._carries = True, False  # type: ignore[union-attr]
                b, c = await two_private(w, spare)
                for net in (b, c):
                    await net.connect([address], timeout_s=10)
                await b.send(c.peer_id, Frame("x", {"n": 0}))
                assert (await w.next(c))[0] == b.peer_id
                lost: list[str] = []
                b.on_lost(lost.append)
                spare._relay._carries = carries  # type: ignore[union-attr]
                begin = time.monotonic()
                for pid in (process.pid, daemon):
                    os.kill(pid, end)
                if end == signal.SIGKILL:
                    await poll(lambda: c.peer_id in lost)  # its stream ended, before anything was sent
                n, arrived = 1, asyncio.create_task(w.next(c))
                while not arrived.done():  # as the protocol does: again, until it is there
                    n += 1
                    with contextlib.suppress(PeerUnreachable, DeadlineExceeded):
                        await b.call(c.peer_id, "echo", b"", timeout_s=2)
                        await b.send(c.peer_id, Frame("x", {"n": n}), timeout_s=2)
                    await asyncio.sleep(0.01)
                took = time.monotonic() - begin
                assert carried(spare) > 0
                assert relay not in spare._p2p.gate.known() or end == signal.SIGSTOP or True
                for pid in (process.pid, daemon):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
                return took

    print("killed", took := asyncio.run(scenario(signal.SIGKILL)))
    assert took < 5
    print("frozen", took := asyncio.run(scenario(signal.SIGSTOP)))
    assert took < 20


def test_a_reset_way_is_taken_again() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b, c = await two_private(w, a)
            for n in range(5):
                await b.send(c.peer_id, Frame("x", {"n": n}))
                assert number((await w.next(c))[1]) == n
                end = w.folder  # whoever it is that loses the connection
                del end
                ending = (b, c, a)[n % 3]
                other = {b: a, c: a, a: c}[ending]
                from hivemind.p2p import PeerID

                lost: list[str] = []
                b.on_lost(lost.append)
                await ending._p2p._client.disconnect(PeerID.from_base58(other.peer_id))
                await poll(lambda: c.peer_id in lost)

    asyncio.run(scenario())


def test_both_at_once_open_one_way() -> None:
    async def scenario() -> None:
        async with world() as w:
            a, other = await w.open(), None
            other = await w.open(a)
            b, c = await two_private(w, a, other)
            calls = (s.call(r.peer_id, "echo", b"x", timeout_s=10) for s, r in ((b, c), (c, b)) for _ in range(10))
            assert await asyncio.gather(*calls) == [b"x"] * 20
            assert (ways(b, c), ways(c, b)) == (1, 1)

    asyncio.run(scenario())


def test_nobody_leads_there() -> None:
    async def scenario() -> None:
        async with world() as w:
            a = await w.open(carries=False)
            b, c = await two_private(w, a)
            begin = time.monotonic()
            with pytest.raises(PeerUnreachable) as e:
                await b.call(c.peer_id, "echo", b"x", timeout_s=10)
            print(e.value, time.monotonic() - begin)

    asyncio.run(scenario())


def test_strangers_get_nothing() -> None:
    from hivemind.p2p import P2P, PeerID
    from hivemind.utils.multiaddr import Multiaddr
    from muletrain.network.relay import RELAY
    from muletrain.wire.frame import pack

    async def scenario() -> None:
        async with world() as w:
            a = await w.open()
            b = await w.open(a, **NOWHERE)
            stranger = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=a.addresses())
            try:
                with pytest.raises(Exception):
                    await stranger._client.connect(
                        PeerID.from_base58(b.peer_id), [Multiaddr(a.addresses()[0] + "/p2p-circuit")]
                    )
                _, reader, writer = await stranger.call_binary_stream_handler(PeerID.from_base58(a.peer_id), RELAY)
                for x in pack(Frame("relay", {"to": b.peer_id, "addresses": []})):
                    writer.write(x)
                assert await asyncio.wait_for(reader.read(), 5) == b""
                writer.close()
                assert "before admission" in str(w.refusals[a.peer_id]), w.refusals
            finally:
                await stranger.shutdown()

    asyncio.run(scenario())
