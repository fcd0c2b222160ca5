"""A peer that others send to and ask, more than a correct peer would."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .test_hostile import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from muletrain.network.delivery import Delivery
    from muletrain.network.memory import MemoryNetwork


def run(scenario: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = 120.0) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout_s))


async def ended(target: Target) -> None:
    target.running.cancel()
    await asyncio.gather(target.running, return_exceptions=True)


def delivery(net: MemoryNetwork) -> Delivery:
    """What stands between a peer's network and its handlers."""
    return net.delivery


async def ready(target: Target) -> None:
    """Until the peer takes frames."""
    await delivery(target.net).receiver("seal")
