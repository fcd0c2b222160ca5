"""What the production pacer makes of virtual links: full, with short queues, and each class of traffic in its turn."""

from __future__ import annotations

import asyncio

import pytest

from muletrain.network.base import Channel
from muletrain.network.pacing import TARGET_S
from muletrain.network.roads import Road
from tests.linked import AVERAGE, BULK, MBPS, PIPE, WIDE, World, now
from tests.virtual import virtually


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
