"""Networks in memory: frozen and dead peers, refused frames."""

from __future__ import annotations

import asyncio

import pytest

from muletrain.errors import (
    DeadlineExceeded,
    PeerUnreachable,
)
from muletrain.network.base import Channel
from muletrain.network.memory import Conditions, MemoryHub
from muletrain.network.roads import Road
from muletrain.sim.loop import VirtualLoop, context_of
from muletrain.wire.frame import Frame
from tests.daemons import number
from tests.polling import repeat
from tests.virtual import virtually

pytestmark = pytest.mark.alone


def test_in_memory_a_frozen_peer_times_out_and_a_dead_one_is_unreachable() -> None:
    async def scenario() -> None:
        hub = MemoryHub()
        a, b = hub.join("a"), hub.join("b")
        got: list[int] = []

        async def receive(sender: str, frame: Frame) -> None:
            got.append(number(frame))

        async def echo(sender: str, payload: bytes) -> bytes:
            await asyncio.sleep(1)
            return payload

        b.receive(receive)
        b.serve("echo", echo)
        assert await a.connect(b.addresses(), timeout_s=1) == "b"
        assert await a.call("b", "echo", b"x", timeout_s=2) == b"x"
        hub.barriers.freeze("b")
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", b"x", timeout_s=2)
        with pytest.raises(DeadlineExceeded):
            await repeat(100, lambda n: a.send("b", Frame("x", {"n": n}), timeout_s=2))
        hub.barriers.thaw("b")
        await asyncio.sleep(1)
        assert got == list(range(len(got)))
        assert len(got) > 60
        hub.barriers.cut("a", "b")
        with pytest.raises(PeerUnreachable):
            await a.send("b", Frame("x", {"n": 0}))
        hub.barriers.mend("a", "b")
        call = asyncio.create_task(a.call("b", "echo", b"x", timeout_s=9))
        await asyncio.sleep(0.5)
        lost: list[tuple[str, Channel]] = []
        a.on_lost(lambda *stream: lost.append(stream))
        hub.kill("b")
        with pytest.raises(PeerUnreachable):
            await call
        assert lost == [("b", Channel.PIPE)]
        with pytest.raises(PeerUnreachable):
            await a.send("b", Frame("x", {"n": 0}))
        await a.announce("k", b"v", 5)
        assert await a.lookup("k") == {"a": b"v"}
        await asyncio.sleep(6)
        assert await a.lookup("k") == {}
        await a.close()

    virtually(scenario())


class Damage(Conditions):
    """Flips a bit of the ``nth`` frame; every frame takes 0.1 s."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def delay_s(self, sender: str, receiver: str) -> float:
        return 0.1

    def damage(self, sender: str, receiver: str, packed: bytes) -> bytes:
        self._left -= 1
        return packed if self._left else bytes([packed[0] ^ 1]) + packed[1:]


@pytest.mark.parametrize("road", [Road(), Road(1e5, 1e5)])
def test_in_memory_a_refused_frame_ends_its_stream_and_both_ends_hear_of_it(road: Road) -> None:
    """As with real daemons: what follows on the stream is lost, and other streams go on."""

    async def scenario() -> None:
        hub = MemoryHub(Damage(2))
        hub.roads.lay("a", road)
        a, b = hub.join("a"), hub.join("b")
        got: list[int] = []
        lost: list[tuple[str, str, Channel]] = []

        async def receive(sender: str, frame: Frame) -> None:
            got.append(number(frame))

        b.receive(receive)
        a.on_lost(lambda *stream: lost.append(("a", *stream)))
        b.on_lost(lambda *stream: lost.append(("b", *stream)))
        for n in range(4):
            await a.send("b", Frame("x", {"n": n}))
        await a.send("b", Frame("x", {"n": 10}), channel=Channel.BULK)
        await asyncio.sleep(1)
        assert got == [0, 10]
        assert lost == [("b", "a", Channel.PIPE), ("a", "b", Channel.PIPE)]
        await a.send("b", Frame("x", {"n": 4}))
        await asyncio.sleep(1)
        assert got == [0, 10, 4]
        await a.close()

    virtually(scenario())


def test_what_a_machine_sent_and_asked_for_goes_on_when_it_freezes() -> None:
    """Its bytes are in the network, and the question is another machine's work."""

    async def scenario() -> None:
        hub = MemoryHub()
        hub.roads.lay("a", Road(1000.0, 1000.0, 10.0))
        contexts = {name: context_of(name) for name in "ab"}
        a, b = (contexts[name].run(hub.join, name) for name in "ab")
        got: list[tuple[str, float]] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        async def receive(sender: str, frame: Frame) -> None:
            got.append(("frame", loop.time()))

        async def works(sender: str, payload: bytes) -> bytes:
            await asyncio.sleep(5.0)
            got.append(("work", loop.time()))
            return b""

        async def life() -> None:
            call = asyncio.create_task(a.call("b", "works", b"", timeout_s=60.0))
            await a.send("b", Frame("x", {"n": bytes(3000)}))
            await call
            got.append(("answer", loop.time()))

        b.receive(receive)
        b.serve("works", works)
        living = asyncio.create_task(life(), context=contexts["a"])
        await asyncio.sleep(1.0)
        loop.freeze("a")
        hub.barriers.freeze("a")
        await asyncio.sleep(30.0)
        assert [what for what, _ in got] == ["frame", "work"]
        hub.barriers.thaw("a")
        loop.thaw("a")
        await living
        assert got[-1] == ("answer", 31.0)

    virtually(scenario())
