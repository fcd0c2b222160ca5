"""Shaped links on a virtual clock: bandwidth, delay, order, partitions and stalls."""

from __future__ import annotations

import asyncio
import math
import random
from itertools import pairwise

import pytest

from muletrain.clock import LoopClock
from muletrain.config.fleet_file import FleetPeer, Link, Stall
from muletrain.errors import (
    DeadlineExceeded,
    PeerUnreachable,
    Refused,
)
from muletrain.network.base import Channel
from muletrain.network.memory import MemoryHub
from muletrain.network.pacing import TARGET_S
from muletrain.network.shaped import ShapedNetwork, Stalls
from muletrain.wire.codec import encode_raw
from muletrain.wire.frame import Frame, pack, size
from tests.daemons import number
from tests.polling import repeat
from tests.virtual import virtually

pytestmark = pytest.mark.alone


def machine(index: int = 0, up: float = math.inf, down: float = math.inf, stall: Stall | None = None) -> FleetPeer:
    return FleetPeer(index, f"m{index}", "here", None, 1.0, None, None, True, up, down, None, None, stall)


class Shaped:
    """Shaped networks over a hub; arrival times [s] of frames by number."""

    def __init__(self, link: Link, machines: dict[str, FleetPeer]) -> None:
        self.hub, self.clock = MemoryHub(), LoopClock()
        self.arrivals: dict[int, float] = {}
        self.nets = {p: ShapedNetwork(self.hub.join(p), lambda to: link, m) for p, m in machines.items()}
        for net in self.nets.values():
            net.receive(self.on_frame)
        self._begin = self.clock.now()

    def time(self) -> float:
        return self.clock.now() - self._begin

    async def on_frame(self, sender: str, frame: Frame) -> None:
        self.arrivals[number(frame)] = self.time()

    async def finish(self) -> dict[int, float]:
        await asyncio.sleep(1000)
        await asyncio.gather(*(n.close() for n in self.nets.values()))
        return self.arrivals


def megabyte(n: int) -> Frame:
    """A frame of 1 MB."""
    overhead = size(pack(Frame("x", {"n": n}, [encode_raw(bytes(900_000))]))) - 900_000
    return Frame("x", {"n": n}, [encode_raw(bytes(1_000_000 - overhead))])


def test_delay_does_not_take_bandwidth_and_order_holds() -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.1, 1e6), {"a": machine(), "b": machine()})
        for n in range(8):
            assert await s.nets["a"].send("b", megabyte(n)) == 1_000_000
            assert n not in s.arrivals, "taken when the link took it, not when it arrived"
        arrivals = await s.finish()
        assert list(arrivals) == list(range(8))
        assert [b - a for a, b in pairwise(list(arrivals.values())[2:])] == pytest.approx([1.0] * 5, rel=0.05)
        assert arrivals[7] < 8 + 1.5, "1 MB/s, after a start with a small window"

    virtually(scenario())


def test_receivers_share_the_uplink_and_senders_the_downlink() -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.01, 1e6), {"a": machine(up=2e6), "b": machine(), "c": machine(), "d": machine()})
        await asyncio.gather(*(s.nets["a"].send(to, megabyte(n)) for n, to in enumerate("bcd")))
        arrivals = sorted((await s.finish()).values())
        assert arrivals[0] > 1.2, "each gets about a third of 2 MB/s"
        assert arrivals[2] == pytest.approx(1.5, rel=0.12)

    async def scenario_down() -> None:
        s = Shaped(Link(0.01, 1e6), {"a": machine(), "b": machine(), "c": machine(down=1e6)})
        await asyncio.gather(*(s.nets[of].send("c", megabyte(n)) for n, of in enumerate("ab")))
        assert sorted((await s.finish()).values()) == pytest.approx([1.0, 2.0], rel=0.12)

    virtually(scenario())
    virtually(scenario_down())


def test_a_slow_path_leaves_the_uplink_to_others() -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.0, 1e6), {"a": machine(up=1e9), "b": machine(), "c": machine()})
        await asyncio.gather(*(s.nets["a"].send(to, megabyte(n)) for n, to in enumerate("bbbc")))
        arrivals = await s.finish()
        assert [arrivals[n] for n in range(4)] == pytest.approx([1, 2, 3, 1], abs=0.01)

    virtually(scenario())


def test_full_duplex_and_calls() -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.05, 1e6), {"a": machine(), "b": machine()})

        async def answer(sender: str, payload: bytes) -> bytes:
            if not payload:
                raise Refused("no")
            return bytes(1_000_000 - 128)

        s.nets["b"].serve("ask", answer)
        await asyncio.gather(s.nets["a"].send("b", megabyte(0)), s.nets["b"].send("a", megabyte(1)))
        assert s.time() == pytest.approx(1.0, rel=0.15)
        await asyncio.sleep(10.0 - s.time())
        await s.nets["a"].call("b", "ask", bytes(1_000_000 - 128), timeout_s=9)
        assert s.time() == pytest.approx(10 + 1.05 + 1.05)
        with pytest.raises(Refused):
            await s.nets["a"].call("b", "ask", b"", timeout_s=9)
        assert s.time() == pytest.approx(12.1 + 0.1, abs=0.01)
        with pytest.raises(DeadlineExceeded):
            await s.nets["a"].call("b", "ask", b"x", timeout_s=1)
        assert s.time() == pytest.approx(13.2, abs=0.01)
        assert sorted(await s.finish()) == [0, 1]

    virtually(scenario())


def test_who_takes_nothing_is_not_sent_to_for_longer_than_the_deadline() -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.05, 1e6), {"a": machine(), "b": machine(), "c": machine()})
        began = s.time()
        assert await s.nets["a"].send("c", megabyte(0), timeout_s=0.5), "a long frame takes its time"
        assert s.time() - began > 0.9
        held_up = asyncio.Event()

        async def receive(sender: str, frame: Frame) -> None:
            await held_up.wait()
            await s.on_frame(sender, frame)

        s.nets["b"].receive(receive)
        sent, last = 0, s.time()

        async def send(_: int) -> None:
            nonlocal sent, last
            sent, last = sent + 1, s.time()
            await s.nets["a"].send("b", Frame("x", {"n": sent}, [encode_raw(bytes(20_000))]), timeout_s=3.0)

        with pytest.raises(DeadlineExceeded):
            await repeat(1000, send)
        assert 64 < sent < 200, "what the receiver queues, and a window"
        assert s.time() - last == pytest.approx(3.0, abs=0.5)
        assert await s.nets["a"].send("c", megabyte(1000), timeout_s=3.0), "others are sent to"
        held_up.set()
        await asyncio.sleep(1)
        assert await s.nets["a"].send("b", megabyte(2000), timeout_s=3.0)
        arrivals = await s.finish()
        assert {0, 1000} <= arrivals.keys()
        assert [n for n in arrivals if n not in (0, 1000)] == [*range(1, len(arrivals) - 2), 2000], (
            "in order, all of them"
        )

    virtually(scenario())


def test_a_receiver_that_is_gone_is_noticed_by_the_next_sender() -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.05, 1e6), {"a": machine(), "b": machine()})
        for times in range(5):  # what was lost takes no room on the link, however often
            sending = asyncio.create_task(s.nets["a"].send("b", megabyte(0)))
            await asyncio.sleep(0.5)
            s.hub.kill("b")
            await sending  # all of it was on its way
            await asyncio.sleep(1)
            with pytest.raises(PeerUnreachable):
                await s.nets["a"].send("b", megabyte(1))
            assert times or s.nets["a"].heard_s("b") == -math.inf
            s.nets["b"] = ShapedNetwork(s.hub.join("b"), lambda to: Link(0.05, 1e6), machine())
            s.nets["b"].receive(s.on_frame)
        began = s.time()
        for n in range(2, 9):
            await s.nets["a"].send("b", megabyte(n))
        arrivals = await s.finish()
        assert list(arrivals) == list(range(2, 9))
        assert arrivals[8] - began < 7 * 1.1

    virtually(scenario())


@pytest.mark.parametrize("channel", [Channel.PIPE, Channel.AVERAGE, Channel.BULK])
def test_calls_and_notices_wait_little_behind_long_frames_and_not_in_a_stall(channel: Channel) -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.05, 1e6), {"a": machine(3, up=1e6, stall=Stall(10.0, 2.0)), "b": machine()})

        async def answer(sender: str, payload: bytes) -> bytes:
            return payload

        s.nets["a"].serve("ask", answer)
        frames = [asyncio.create_task(s.nets["a"].send("b", megabyte(n), channel=channel)) for n in range(40)]
        waits, notices = [], dict[int, float]()
        while s.time() < 40:
            begin = s.time()
            notices[1000 + len(waits)] = begin
            await s.nets["a"].send("b", Frame("x", {"n": 1000 + len(waits)}), channel=Channel.CONTROL)
            await s.nets["b"].call("a", "ask", bytes(100), timeout_s=100)
            waits.append(s.time() - begin)
            await asyncio.sleep(0.05)
        await asyncio.gather(*frames)
        arrivals = await s.finish()
        for found, delay_s in ((waits, 0.1), ([arrivals[n] - begin for n, begin in notices.items()], 0.05)):
            stalled = [w for w in found if w > 0.4]
            assert 1 < len(stalled) < 20, "40 s at one in 10 s"
            assert 1.6 < max(stalled) < 2.0 + delay_s + 0.3
            usual = sorted(set(found) - set(stalled))
            assert min(usual) >= delay_s
            assert usual[len(usual) // 2] < delay_s + TARGET_S[channel][0] + 0.03
        assert max(arrivals.values()) < 40 * 1.15 + 5 * 2.0

    virtually(scenario())


def test_frames_of_the_step_go_before_state_and_state_comes_through() -> None:
    """To the same receiver, and to another one by the same uplink."""

    async def scenario() -> None:
        s = Shaped(Link(0.02, 1e6), {"a": machine(up=1e6), "b": machine(), "c": machine()})

        async def state() -> None:
            for n in range(30):
                await s.nets["a"].send("b", megabyte(n), channel=Channel.BULK)

        began = dict[int, float]()

        async def step(to: str, first: int) -> None:
            for n in range(first, first + 60):
                await asyncio.sleep(0.5)
                began[n] = s.time()
                await s.nets["a"].send(to, Frame("x", {"n": n}, [encode_raw(bytes(30_000))]))

        await asyncio.gather(state(), step("b", 1000), step("c", 2000))
        arrivals = await s.finish()
        for first in (1000, 2000):
            late = sorted(arrivals[n] - began[n] for n in range(first + 10, first + 60))
            assert late[len(late) // 2] < 0.02 + 0.03 + 0.12, "it waits for no block"
            assert late[-1] < 0.3
        assert arrivals[29] < 1.15 * (30 + 120 * 0.03)

    virtually(scenario())


def test_a_partition_swallows_frames_and_calls_until_it_ends() -> None:
    async def scenario() -> None:
        s = Shaped(Link(0.1, math.inf), {"a": machine(), "b": machine()})

        async def answer(sender: str, payload: bytes) -> bytes:
            return b"on"

        s.nets["b"].serve("ask", answer)
        s.nets["a"].set_partition(frozenset("b"))
        s.nets["b"].set_partition(frozenset("a"))
        await s.nets["a"].send("b", Frame("x", {"n": 0}))
        long = asyncio.create_task(s.nets["a"].send("b", megabyte(0)))
        with pytest.raises(DeadlineExceeded):
            await s.nets["a"].call("b", "ask", b"", timeout_s=3)
        assert s.time() == pytest.approx(3)
        assert s.nets["a"].heard_s("b") == -math.inf
        waiting = asyncio.create_task(s.nets["a"].call("b", "ask", b"", timeout_s=1000))
        await asyncio.sleep(5)
        for net in s.nets.values():
            net.set_partition(frozenset())
        for lost in waiting, long:  # nothing of the partition outlasts it
            with pytest.raises(PeerUnreachable):
                await lost
        assert s.time() == pytest.approx(8)
        assert await s.nets["a"].call("b", "ask", b"", timeout_s=3) == b"on"
        await s.nets["a"].send("b", megabyte(1))
        assert list(await s.finish()) == [1]

    virtually(scenario())


def test_stalls_hold_everything_up_for_their_time() -> None:
    """What the peer sends, and what it receives."""

    async def scenario(sender: str, receiver: str) -> None:
        s = Shaped(Link(0.01, math.inf), {"a": machine(3, stall=Stall(10.0, 2.0)), "b": machine()})
        began = []
        for n in range(2000):
            began.append(s.time())
            await s.nets[sender].send(receiver, Frame("x", {"n": n}), channel=Channel.CONTROL)
            await asyncio.sleep(0.1)
        arrivals = await s.finish()
        waits = [arrivals[n] - begin - 0.01 for n, begin in enumerate(began)]
        stalled = [w for w in waits if w > 1e-6]
        assert 1.8 < max(stalled) <= 2.0 + 1e-6
        assert 20 < len(stalled) < 600, "200 s at one in 10 s, of 20 frames each, or of some where the sender waits"

    virtually(scenario("a", "b"))
    virtually(scenario("b", "a"))


def test_stalls_are_the_same_in_whatever_order_one_asks() -> None:
    times = [n / 7 for n in range(2000)]
    ordered, shuffled = Stalls(Stall(10.0, 2.0), 3, 0.0), Stalls(Stall(10.0, 2.0), 3, 0.0)
    found = {t: shuffled.after(t) for t in random.Random(0).sample(times, len(times))}
    assert [found[t] for t in times] == [ordered.after(t) for t in times]
    assert 0.1 < sum(t != found[t] for t in times) / len(times) < 0.25
