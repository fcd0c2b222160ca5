"""The clock that protocol code waits on."""

from __future__ import annotations

import asyncio

import pytest

from muletrain.clock import LoopClock
from muletrain.errors import DeadlineExceeded


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
