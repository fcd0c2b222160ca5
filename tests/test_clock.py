"""The clock that protocol code waits on."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from muletrain.clock import ALWAYS, LoopClock
from muletrain.errors import DeadlineExceeded
from muletrain.sim.loop import MachineClock, context_of, run_virtually, virtual_loop


@pytest.mark.parametrize("turns", range(5))
def test_who_is_cancelled_at_the_moment_at_which_its_wait_ends_does_not_go_on(turns: int) -> None:
    """``asyncio.wait_for`` does, before Python 3.12: a peer that was told to end trained on for ever."""

    async def scenario() -> None:
        event = asyncio.Event()
        waiting = asyncio.create_task(LoopClock().deadline(event.wait(), 10.0, "an event"))
        await asyncio.sleep(0.01)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        in_time = waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() == in_time

    asyncio.run(scenario())


def test_a_missed_deadline_names_what_was_waited_for_and_ends_it() -> None:
    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExceeded, match=r"an answer: no answer within 0\.01 s"):
            await LoopClock().deadline(never, 0.01, "an answer")
        assert never.cancelled()

    asyncio.run(scenario())


@pytest.mark.skipif(
    sys.platform not in ("linux", "darwin"), reason="only there a clock counts on in a suspended machine"
)
def test_a_system_that_knows_for_how_long_it_was_suspended_says_so() -> None:
    assert ALWAYS is not None
    before, since = LoopClock().stood_still_s(), time.monotonic()
    time.sleep(0.3)
    assert time.monotonic() - since > 0.25
    assert LoopClock().stood_still_s() == pytest.approx(before, abs=0.05), "nobody has suspended it"


def test_the_clock_of_a_suspended_machine_stands_still() -> None:
    """And what waits there waits for as long as it would have."""

    async def scenario() -> None:
        loop, clock, ends = virtual_loop(), MachineClock("laptop", 2.0, 500.0), list[float]()

        async def sleeps() -> None:
            await clock.sleep(20.0)
            ends.append(loop.time())

        async def waits() -> None:
            with pytest.raises(DeadlineExceeded, match=r"an answer: no answer within 40\.00 s"):
                await clock.deadline(loop.create_future(), 40.0, "an answer")
            ends.append(loop.time())

        waiting = [asyncio.create_task(work(), context=context_of("laptop")) for work in (sleeps, waits)]
        await asyncio.sleep(5.0)
        loop.freeze("laptop", suspended=True)
        await asyncio.sleep(100.0)
        assert clock.now() == pytest.approx(510.0)
        loop.thaw("laptop")
        await asyncio.sleep(1.0)
        loop.freeze("laptop")  # stopped, not suspended
        await asyncio.sleep(1.0)
        loop.thaw("laptop")
        await asyncio.gather(*waiting)
        assert ends == pytest.approx([110.0, 120.0])
        assert (clock.now(), clock.stood_still_s()) == pytest.approx((540.0, 100.0))

    run_virtually(scenario(), 1000.0, [])
