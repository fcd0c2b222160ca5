"""Waiting until something is so, and doing something many times."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def repeat(times: int, work: Callable[[int], Awaitable[Any]]) -> None:
    for n in range(times):
        await work(n)


async def poll(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)
