"""Virtual links: what shares them, what waits in their queues, and what the production pacer makes of them."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from muletrain.errors import DeadlineExceeded, PeerUnreachable
from muletrain.network.base import Channel, Frame
from muletrain.network.conditions import Conditions
from muletrain.network.memory import MemoryHub
from muletrain.network.pacing import TARGET_S
from muletrain.network.roads import Road
from tests.virtual import virtually

if TYPE_CHECKING:
    pass

MBPS = 1e6 / 8
WIDE = Road()
CONTROL, PIPE, AVERAGE, BULK = Channel


class Links(Conditions):
    """One delay, paths with the bandwidth that their sender has, and frames that weigh what their headers say."""

    def __init__(self, delay_s: float, paths: dict[str, float]) -> None:
        self._delay_s, self._paths = delay_s, paths

    def delay_s(self, sender: str, receiver: str) -> float:
        return self._delay_s

    def path_bytes_per_s(self, sender: str, receiver: str) -> float:
        return self._paths.get(sender, math.inf)

    def weight(self, sender: str, frame: Frame) -> int:
        return int(frame.header["n"])


class World:
    """Peers on ``roads``. Frames count for the bytes that their headers say. ``got``: (when, sender, receiver, channel,
    bytes, number)."""

    def __init__(
        self,
        roads: dict[str, Road],
        delay_s: float = 0.001,
        paths: dict[str, float] | None = None,
        *,
        relays: bool = False,
    ) -> None:
        self.hub = MemoryHub(Links(delay_s, paths or {}), relays=relays, hands_over=True)
        self.got: list[tuple[float, str, str, str, int, int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        for peer, road in roads.items():
            self.hub.roads.lay(peer, road)
            self.hub.join(peer).receive(partial(self._receive, peer))
            self.hub.peers[peer].serve("echo", _echo)

    async def _receive(self, receiver: str, sender: str, frame: Frame) -> None:
        self.got.append((now(), sender, receiver, frame.kind, frame.header["n"], frame.header["k"]))

    async def send(
        self, a: str, b: str, n: float, channel: Channel = AVERAGE, k: int = 0, timeout_s: float = 60.0
    ) -> None:
        frame = Frame(channel.value, {"n": int(n), "k": k})
        await self.hub.peers[a].send(b, frame, channel=channel, timeout_s=timeout_s)

    async def call(self, a: str, b: str, nbytes: int = 100, timeout_s: float = 60.0) -> float:
        """The time it takes."""
        begin_s = now()
        await self.hub.peers[a].call(b, "echo", bytes(nbytes), timeout_s=timeout_s)
        return now() - begin_s

    def flood(self, a: str, b: str, channel: Channel, after_s: float = 0.0) -> None:
        async def forever() -> None:
            await asyncio.sleep(after_s)
            while True:
                await self.send(a, b, 500e3, channel)

        self._tasks.append(asyncio.create_task(forever()))

    async def queued(self, peer: str, seconds: float) -> list[float]:
        """In front of the narrower direction of the peer's link, looked at every 5 ms."""
        end_s, found = now() + seconds, list[float]()
        while now() < end_s:
            found.append(max(self.hub.roads.queued_s(peer)))
            await asyncio.sleep(0.005)
        return found

    def rates(self, by: int, begin_s: float, end_s: float) -> dict[Any, float]:
        """Bytes/s that arrived, by the entry of ``got``."""
        found = defaultdict[Any, float](float)
        for entry in self.got:
            if begin_s <= entry[0] < end_s:
                found[entry[by]] += entry[4] / (end_s - begin_s)
        return found


async def _echo(sender: str, payload: bytes) -> bytes:
    return payload[:100]


def now() -> float:
    return asyncio.get_running_loop().time()


# Links ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [("ab", "ac", "ad"), ("ad", "bd", "cd")], ids=["up", "down"])
def test_flows_share_an_uplink_and_a_downlink(pairs: tuple[str, ...]) -> None:
    async def scenario() -> None:
        w = World({peer: Road(6e6, 6e6) if all(peer in pair for pair in pairs) else WIDE for peer in "abcd"})

        async def flood(a: str, b: str) -> None:
            for _ in range(200):
                await w.send(a, b, 60e3, CONTROL)

        await asyncio.gather(*(flood(*pair) for pair in pairs))
        await asyncio.sleep(6.0)
        rates = w.rates(2 if pairs[0][0] == pairs[1][0] else 1, 1.0, 5.0)
        assert list(rates.values()) == [pytest.approx(2e6, rel=0.02)] * 3

    virtually(scenario())


def test_a_frame_takes_the_time_of_its_slowest_link_and_the_delay_and_directions_do_not_share() -> None:
    async def scenario() -> None:
        w = World({"a": Road(1e6, 4e6), "b": Road(4e6, 2e6)}, 0.5)
        await asyncio.gather(w.send("a", "b", 60e3, CONTROL), w.send("b", "a", 60e3, CONTROL))
        await asyncio.sleep(2.0)
        assert {entry[2]: entry[0] for entry in w.got} == {"b": pytest.approx(0.56), "a": pytest.approx(0.515)}
        w = World({"a": WIDE, "b": WIDE}, 0.5, {"a": 1e6})
        await w.send("a", "b", 60e3, CONTROL)
        assert await w.call("a", "b", 1000) == pytest.approx(1.06 + 1.128e-3), "it waits behind the frame"
        assert w.got[0][0] == pytest.approx(2.56)

    virtually(scenario())


def test_what_is_small_waits_behind_what_is_queued() -> None:
    async def scenario() -> None:
        w = World({"a": Road(1e6, 1e6, 2.0), "b": WIDE, "c": WIDE})
        assert await w.call("a", "b") < 0.01
        for _ in range(15):
            await w.send("a", "b", 100e3, CONTROL)
        waited, free = await w.call("a", "c"), await w.call("b", "c")
        assert waited == pytest.approx(1.5, abs=0.01), "to another receiver, too"
        assert free < 0.01

    virtually(scenario())


@pytest.mark.parametrize("queue_s", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("end", ["up", "down"])
def test_a_flood_without_pacing_fills_the_queue_to_its_depth_and_no_more(queue_s: float, end: str) -> None:
    """Calls of a megabyte. The others take turns with it."""

    async def scenario() -> None:
        narrow = Road(1e6, 1e6, queue_s)
        w = World({"a": narrow, "b": WIDE, "c": WIDE} if end == "up" else {"a": WIDE, "b": narrow, "c": WIDE})
        calls = [asyncio.create_task(w.call("a", "b", 1 << 20)) for _ in range(8)]
        await asyncio.sleep(0.1)
        queue = await w.queued("a" if end == "up" else "b", 4.0)
        small = await w.call(*("ac" if end == "up" else "cb"))  # type: ignore[arg-type]
        assert max(queue) <= max(queue_s, 0.066) + 1e-6
        assert min(queue[20:]) >= queue_s - 0.15
        assert small < queue_s + 0.25
        await asyncio.gather(*calls)
        assert now() == pytest.approx(8 * (1 << 20) / 1e6, rel=0.02), "nothing is sent twice"

    virtually(scenario())


def test_order_holds_in_a_channel_and_small_frames_overtake_large_ones() -> None:
    async def scenario() -> None:
        w = World({"a": Road(MBPS, MBPS, 0.1), "b": Road(2 * MBPS, 3 * MBPS, 0.0)}, 0.02)
        sends = [w.send("a", "b", 10 ** (1 + k % 5), c, k) for k in range(40) for c in Channel]
        await asyncio.gather(*sends)
        await asyncio.sleep(2.0)
        assert len(w.got) == 160
        for channel in Channel:
            assert [entry[5] for entry in w.got if entry[3] == channel] == list(range(40))
        assert max(entry[0] for entry in w.got if entry[3] == CONTROL) < max(entry[0] for entry in w.got) / 2

    virtually(scenario())


# Pacing ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mbps", "delay_s"), [(20, 0.002), (20, 0.08), (1000, 0.002), (2, 0.02)])
def test_one_flow_fills_the_link_and_keeps_the_queue_near_its_target(mbps: float, delay_s: float) -> None:
    async def scenario() -> None:
        link = Road(mbps * MBPS, mbps * MBPS, 2.0)
        w = World({"a": link, "b": link}, delay_s)
        w.flood("a", "b", AVERAGE)
        await asyncio.sleep(5.0)
        queue = await w.queued("a", 60.0)
        assert w.rates(2, 5.0, 65.0)["b"] >= 0.95 * mbps * MBPS
        assert sum(queue) / len(queue) < TARGET_S[AVERAGE][0] + 0.02
        assert sorted(queue)[int(0.95 * len(queue))] < 2 * TARGET_S[AVERAGE][0]

    virtually(scenario())


@pytest.mark.parametrize("up_mbps", [20, 100])
def test_eight_senders_into_one_receiver_keep_its_queue_short_and_none_starves(up_mbps: float) -> None:
    async def scenario() -> None:
        senders = [f"s{k}" for k in range(8)]
        w = World(
            {
                "r": Road(100 * MBPS, 100 * MBPS, 2.0),
                **dict.fromkeys(senders, Road(up_mbps * MBPS, up_mbps * MBPS, 2.0)),
            }
        )
        for sender in senders:
            w.flood(sender, "r", AVERAGE)
        await asyncio.sleep(5.0)
        queue, calls = await w.queued("r", 30.0), [await w.call(s, "r") for s in senders]
        rates = w.rates(1, 5.0, 35.0)
        assert sum(rates.values()) > 0.95 * 100 * MBPS
        assert min(rates[s] for s in senders) > 0.01 * 100 * MBPS
        assert sorted(queue)[int(0.95 * len(queue))] < 2 * TARGET_S[AVERAGE][0]
        assert max(calls) < 0.3

    virtually(scenario())


@pytest.mark.parametrize("delay_s", [0.001, 0.04])
@pytest.mark.parametrize("high_first", [True, False])
@pytest.mark.parametrize(("high", "low"), [(PIPE, AVERAGE), (PIPE, BULK), (AVERAGE, BULK)])
def test_a_higher_class_gets_most_of_an_uplink_whoever_came_first(
    high: Channel, low: Channel, high_first: bool, delay_s: float
) -> None:
    async def scenario() -> None:
        w = World({"a": Road(50 * MBPS, 50 * MBPS, 2.0), "b": WIDE, "c": WIDE}, delay_s)
        w.flood("a", "b", high, after_s=0.0 if high_first else 4.0)
        w.flood("a", "c", low, after_s=4.0 if high_first else 0.0)
        begin_s = 6.0 + 400.0 * delay_s  # a new flow's window grows with round trips
        await asyncio.sleep(begin_s)
        queue = await w.queued("a", 14.0)
        rates = w.rates(3, begin_s, begin_s + 14.0)
        assert rates[high] > 0.85 * 50 * MBPS
        assert rates[low] > 0.003 * 50 * MBPS, "nothing is starved"
        assert sum(queue) / len(queue) < TARGET_S[high][0] + 0.02

    virtually(scenario())


def test_a_higher_class_gets_a_downlink_that_others_had_filled() -> None:
    """Their queue looks like none to who comes, until they have paused."""

    async def scenario() -> None:
        w = World({"a": WIDE, "b": WIDE, "c": WIDE, "d": Road(50 * MBPS, 50 * MBPS, 2.0)}, 0.005)
        for k, (sender, channel) in enumerate(zip("abc", (AVERAGE, PIPE, BULK), strict=True)):
            w.flood(sender, "d", channel, after_s=3.0 * k)
        await asyncio.sleep(60.0)
        rates = w.rates(3, 30.0, 60.0)
        assert rates[PIPE] > 0.85 * 50 * MBPS
        assert min(rates[AVERAGE], rates[BULK]) > 0.003 * 50 * MBPS

    virtually(scenario())


def test_flows_that_begin_at_the_same_time_do_not_fill_the_uplink() -> None:
    """The first microbatches of a step, to twenty peers. Each flow's window is for the whole uplink, which it had to
    itself: probes of the sender waited for a second."""

    async def scenario() -> None:
        rate, receivers = 73 * MBPS, [f"r{k}" for k in range(20)]
        w = World({"a": Road(rate, rate), "probe": WIDE} | dict.fromkeys(receivers, WIDE))
        for receiver in receivers:
            await w.send("a", receiver, 2e6, PIPE)
        begin_s = now()
        sending = [asyncio.create_task(w.send("a", receiver, 2e6, PIPE)) for receiver in receivers]
        longest_s = 0.0
        while len(w.got) < 40:
            longest_s = max(longest_s, await w.call("probe", "a"))
            await asyncio.sleep(0.02)
        await asyncio.gather(*sending)
        assert longest_s < 0.25
        assert now() - begin_s < 1.1 * 20 * 2e6 / rate

    virtually(scenario())


def test_what_many_slow_receivers_take_together_goes_out() -> None:
    """The bound of all flows grows with what they deliver."""

    async def scenario() -> None:
        receivers = [f"r{k}" for k in range(20)]
        w = World({"a": Road(1000 * MBPS, 1000 * MBPS)} | dict.fromkeys(receivers, Road(20 * MBPS, 20 * MBPS)), 0.04)
        for receiver in receivers:
            w.flood("a", receiver, PIPE)
        await asyncio.sleep(6.0)
        assert sum(w.rates(2, 2.0, 6.0).values()) > 0.85 * 20 * 20 * MBPS

    virtually(scenario())


def test_what_yields_gets_the_pauses_of_what_goes_first() -> None:
    """State beside a step that uses half of the uplink, in bursts: a piece that stands for several small ones is not
    taken for a queue."""

    async def scenario() -> None:
        rate = 240 * MBPS
        w = World({"a": Road(rate, rate), "b": WIDE, "c": WIDE}, 0.01)

        async def bursts() -> None:
            while True:
                await w.send("a", "b", 0.6 * rate, AVERAGE)
                await asyncio.sleep(0.6)

        step = asyncio.create_task(bursts())
        w.flood("a", "c", BULK, after_s=1.0)
        await asyncio.sleep(40.0)
        step.cancel()
        rates = w.rates(3, 5.0, 40.0)
        assert rates[AVERAGE] > 0.4 * rate
        assert rates[BULK] > 0.15 * rate

    virtually(scenario())


# Faults ---------------------------------------------------------------------------------------------------------------------


def test_a_frozen_receiver_acknowledges_nothing_and_holds_up_nobody_else() -> None:
    async def scenario() -> None:
        link = Road(50 * MBPS, 50 * MBPS)
        w = World(dict.fromkeys("abcd", link))
        for receiver in "bcd":
            w.flood("a", receiver, AVERAGE)
        await asyncio.sleep(5.0)
        w.hub.barriers.freeze("b")
        await asyncio.sleep(5.0)
        rates = w.rates(2, 6.5, 10.0)
        assert rates["b"] == 0
        assert rates["c"] + rates["d"] > 0.85 * 50 * MBPS
        assert w.hub.peers["a"].heard_s("b") < 5.1
        assert w.hub.peers["a"].heard_s("c") > 9.9
        with pytest.raises(DeadlineExceeded):
            await w.send("a", "b", 1e6, PIPE, timeout_s=2.0)
        assert now() == pytest.approx(12.0, abs=0.1)
        w.hub.barriers.thaw("b")
        await asyncio.sleep(5.0)
        assert w.rates(2, 12.5, 17.0)["b"] > 0
        assert w.hub.peers["a"].heard_s("b") > 16.9

    virtually(scenario())


@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_a_sender_learns_at_once_that_its_receiver_is_gone_and_sends_to_others(fault: str) -> None:
    async def scenario() -> None:
        link = Road(10 * MBPS, 10 * MBPS)
        w = World(dict.fromkeys("abc", link))
        sends = [asyncio.create_task(w.send("a", "b", 20e6, channel)) for channel in (PIPE, AVERAGE, BULK)]
        await asyncio.sleep(3.0)
        if fault == "kill":
            w.hub.kill("b")
        else:
            w.hub.barriers.cut("a", "b")
        for send in sends:
            with pytest.raises(PeerUnreachable):
                await send
        assert now() < 3.001
        await w.send("a", "c", 1e6)
        await asyncio.sleep(1.0)
        assert w.got[-1][2] == "c"
        assert w.got[-1][0] == pytest.approx(3.8, abs=0.2)
        if fault == "cut":
            w.hub.barriers.mend("a", "b")
            await w.send("a", "b", 1e6)
            await asyncio.sleep(1.0)
            assert [entry[4] for entry in w.got if entry[2] == "b"] == [1e6], "what was on its way is lost"

    virtually(scenario())


def test_a_hold_up_passes_and_what_waited_arrives() -> None:
    async def scenario() -> None:
        w = World(dict.fromkeys("ab", Road(10 * MBPS, 10 * MBPS)))
        sending = asyncio.create_task(w.send("a", "b", 5e6))
        await asyncio.sleep(1.0)
        w.hub.barriers.hold_up("a", "b")
        await asyncio.sleep(10.0)
        assert not sending.done()
        assert w.hub.peers["b"].heard_s("a") < 1.1
        w.hub.barriers.let_pass("a", "b")
        await sending
        await asyncio.sleep(1.0)
        assert [entry[4] for entry in w.got] == [5e6]
        assert now() == pytest.approx(15.0, abs=0.5)

    virtually(scenario())


def test_a_relays_links_carry_what_it_relays() -> None:
    async def scenario() -> None:
        w = World({"a": WIDE, "b": WIDE, "r": Road(8 * MBPS, 16 * MBPS)}, relays=True)
        w.hub.barriers.cut("a", "b")
        await w.send("a", "b", 4e6)
        await asyncio.sleep(1.0)
        assert w.got[0][0] == pytest.approx(4.0, rel=0.05)
        assert w.hub.peers["r"].carried() == {"b": 4_000_000}
        sending = asyncio.create_task(w.send("a", "b", 4e6))
        await asyncio.sleep(1.0)
        w.hub.kill("r")
        with pytest.raises(PeerUnreachable):
            await sending

    virtually(scenario())


def test_who_gives_up_a_frame_does_not_break_the_stream() -> None:
    async def scenario() -> None:
        w = World(dict.fromkeys("ab", Road(8 * MBPS, 8 * MBPS)))
        begun, waiting = (asyncio.create_task(w.send("a", "b", 3e6, k=k)) for k in range(2))
        await asyncio.sleep(1.0)
        begun.cancel()
        waiting.cancel()
        await w.send("a", "b", 1e6, k=2)
        await asyncio.sleep(1.0)
        assert [entry[5] for entry in w.got] == [0, 2], "one that was begun arrives, one that was not does not"

    virtually(scenario())


def test_the_same_world_plays_out_alike() -> None:
    async def scenario(found: list[Any]) -> None:
        w = World({"a": Road(3e6, 5e6), "b": Road(2e6, 2e6), "c": Road(1e6, 4e6)}, 0.01)
        for a, b in ("ab", "ac", "bc", "cb"):
            for channel in (PIPE, AVERAGE, BULK):
                w.flood(a, b, channel)
        await asyncio.sleep(20.0)
        found += w.got

    runs: list[list[Any]] = [[], []]
    for found in runs:
        virtually(scenario(found))
    assert runs[0] == runs[1]
    assert len(runs[0]) > 50
