"""The pacer and the policies below it: nobody waits for ever, and what others say of themselves harms nobody else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muletrain.network.base import Channel
from muletrain.network.pacing import Pacer

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

PIPE, BULK = Channel.PIPE, Channel.BULK


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 15))


def test_a_channel_that_comes_while_another_is_being_woken_does_not_lose_the_turn() -> None:
    async def scenario() -> None:
        pacer, given = Pacer(), 0
        while pacer._room(pacer._flow("b"), 1 << 20, 0):
            given += await pacer.grant("b", BULK, 1 << 20)
        low = asyncio.create_task(pacer.grant("b", BULK, 1 << 20))
        await asyncio.sleep(0.01)
        high = asyncio.create_task(pacer.grant("b", PIPE, 1 << 20))
        pacer.forget("b", given)  # wakes the one that waits, but the other runs first
        assert await asyncio.wait_for(high, 1.0) > 0
        assert await asyncio.wait_for(low, 1.0) > 0

    run(scenario())
