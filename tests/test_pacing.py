"""The pacer and the policies below it: nobody waits for ever, and what others say of themselves harms nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from muletrain.network.base import Channel
from muletrain.network.pacing import QUEUED_MAX_S, Pacer
from muletrain.policy.congestion import BESIDE, FIRST, Window
from tests.virtual import virtually

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

PIPE, BULK = Channel.PIPE, Channel.BULK


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 15))


def test_a_channel_that_comes_while_another_is_being_woken_does_not_lose_the_turn() -> None:
    async def scenario() -> None:
        pacer, given = Pacer(), 0
        with contextlib.suppress(TimeoutError):
            while True:
                given += await asyncio.wait_for(pacer.grant("b", BULK, 1 << 20), 0.05)
        low = asyncio.create_task(pacer.grant("b", BULK, 1 << 20))
        await asyncio.sleep(0.01)
        high = asyncio.create_task(pacer.grant("b", PIPE, 1 << 20))
        pacer.forget("b", BULK, given)  # wakes the waiting flow, but the other flow runs first
        assert await asyncio.wait_for(high, 1.0) > 0
        assert await asyncio.wait_for(low, 1.0) > 0

    run(scenario())


async def larger_than_the_window(pacer: Pacer) -> int:
    """Bytes of a piece that virtual worlds hand over at once; it is under way to "b"."""
    for sent_s, queue_s in ((0.1, 0.0), (0.3, 0.2)):  # a queue ends the start
        nbytes = await pacer.grant("b", BULK, 1 << 10)
        now_s = asyncio.get_running_loop().time()
        pacer.acknowledged("b", BULK, nbytes, now_s - sent_s, now_s - sent_s + 0.05 + queue_s)
        await asyncio.sleep(0.02)
    return await pacer.grant("b", BULK, 1 << 20, coarse=1 << 20)


def test_a_pause_is_over_although_the_loop_calls_a_little_early() -> None:
    """asyncio's timers may come before their time by less than the clock's resolution; nobody would call again (fleet
    120 of the grid)."""

    async def scenario() -> None:
        pacer, loop = Pacer(), asyncio.get_running_loop()
        size = await larger_than_the_window(pacer)
        right = loop.call_at
        loop.call_at = lambda when, *work, **how: right(when - 1e-9, *work, **how)  # type: ignore[method-assign]
        pacer.acknowledged("b", BULK, size, loop.time() - 0.2, loop.time())
        assert await asyncio.wait_for(pacer.grant("b", BULK, 1 << 20), 5.0)

    virtually(scenario(), 10.0)


def test_room_in_the_uplink_is_never_lost() -> None:
    """A flow that had gone on by itself was let go for another time, and one that waits was not."""

    async def fill(pacer: Pacer, peer: str, nbytes: int) -> None:
        while nbytes:
            nbytes -= await pacer.grant(peer, PIPE, nbytes)

    async def scenario() -> None:
        pacer = Pacer()
        for peer, nbytes in (("b", FIRST), ("c", FIRST // 2), ("d", FIRST // 2)):
            await fill(pacer, peer, nbytes)
        for n in range(round(BESIDE) - 2):  # to the bound of all
            await fill(pacer, f"beside {n}", FIRST)
        waiting = [asyncio.create_task(fill(pacer, peer, FIRST // 4)) for peer in ("e", "f", "d")]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        for done in (1, 2, 3):
            pacer.forget("d" if done == 1 else "b", PIPE, FIRST // 4)
            await asyncio.sleep(0.01)
            assert sum(task.done() for task in waiting) == done

    run(scenario())


def test_bytes_of_a_lower_channel_keep_no_higher_one_from_the_uplink() -> None:
    """Weights on their way to ten clients behind slow links held the servers' averaging up."""

    async def scenario() -> None:
        pacer = Pacer()
        for n in range(round(BESIDE)):
            left = FIRST
            while left:
                left -= await pacer.grant(f"client {n}", BULK, left)
        low = asyncio.create_task(pacer.grant("c", BULK, FIRST))
        await asyncio.sleep(0.01)
        assert not low.done()
        assert await asyncio.wait_for(pacer.grant("b", Channel.AVERAGE, FIRST), 1.0)
        low.cancel()

    run(scenario())


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 1e308])
def test_a_clock_that_jumps_is_no_queue(jump_s: float) -> None:
    """Of a machine that slept, or of one that lies."""
    window, round_trip_s, ahead_s = Window(), 0.1, 0.0
    for k in range(400):
        sent_s = k * 0.02
        ahead_s = jump_s if k >= 200 else 0.0
        received_s, now_s = sent_s + 0.05 + ahead_s, sent_s + round_trip_s
        window.acknowledged(1 << 14, sent_s, received_s, now_s, target_s=0.025, filled=True)
        assert window.queue_s <= round_trip_s
        if k == 199:
            before = window.size
    assert window.size >= before


def test_who_acknowledges_late_does_not_stretch_the_deadlines_of_questions_for_long() -> None:
    """A peer that froze for an hour, or one that lies, says that its link queued for an hour."""

    async def scenario() -> None:
        pacer, loop = Pacer(), asyncio.get_running_loop()
        for ago_s in (0.0, 3600.0):
            nbytes = await pacer.grant("b", BULK, 1 << 10)
            pacer.acknowledged("b", BULK, nbytes, loop.time() - ago_s, loop.time())
        assert 1.0 < pacer.queued_s("b") <= QUEUED_MAX_S

    run(scenario())


def test_the_queue_in_our_uplink_delays_answers_of_everybody() -> None:
    """Also of a peer that we send nothing: it was suspected as soon as averaging filled the link. One of three that
    acknowledges late, or lies, excuses only itself."""

    async def scenario() -> None:
        pacer, loop = Pacer(), asyncio.get_running_loop()
        for late_s in (0.0, 0.3):
            for peer in "bcd":
                nbytes = await pacer.grant(peer, BULK, 1 << 10)
                now_s = loop.time()
                pacer.acknowledged(
                    peer, BULK, nbytes, now_s - 0.01 - (4.0 if peer == "d" and late_s else late_s), now_s
                )
        assert 0.25 < pacer.queued_s("e") < 0.35
        assert 0.25 < pacer.queued_s("b") < 0.35
        assert pacer.queued_s("d") > 3.5

    run(scenario())


def test_after_a_piece_that_is_larger_than_the_window_comes_a_pause() -> None:
    """Virtual worlds hand over more at once: as much goes in all."""

    async def scenario() -> None:
        pacer, loop = Pacer(), asyncio.get_running_loop()
        nbytes = await larger_than_the_window(pacer)
        size = pacer.window("b").size
        assert size < nbytes <= 2 * size
        begin_s = loop.time()
        pacer.acknowledged("b", BULK, nbytes, begin_s - 0.2, begin_s)
        await pacer.grant("b", BULK, 1 << 20, coarse=1 << 20)
        assert loop.time() - begin_s == pytest.approx(0.2 * (nbytes / size - 1), abs=0.05)

    run(scenario())


def test_a_window_that_shrank_while_its_last_piece_was_under_way_brings_no_pause() -> None:
    """A receiver that froze for a minute: real links would have waited for half an hour."""

    async def scenario() -> None:
        pacer, loop = Pacer(), asyncio.get_running_loop()
        nbytes = await pacer.grant("b", BULK, 1 << 10)
        pacer.acknowledged("b", BULK, nbytes, loop.time() - 0.1, loop.time() - 0.05)
        await asyncio.sleep(0.02)
        window = pacer.window("b")
        window.size = 1 << 21
        nbytes = await pacer.grant("b", BULK, 1 << 20)
        window.size = 1 << 14
        pacer.acknowledged("b", BULK, nbytes, loop.time() - 60.0, loop.time())
        assert window.size < nbytes
        await asyncio.wait_for(pacer.grant("b", BULK, 1 << 20), 0.5)

    run(scenario())
