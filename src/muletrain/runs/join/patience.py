"""A newcomer's patience in reaching the run: a member may be frozen, overloaded or cut off for a while."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, TypeVar

from muletrain.errors import DeadlineExceeded, PeerUnreachable
from muletrain.policy.deadline import backoff_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
PATIENCE_S = 60.0
"""Seconds for which a newcomer repeats a request without an answer."""
FIRST_S, LONGEST_S = 0.5, 5.0
"""Pause after the first try, which doubles, and the longest pause [s]."""


async def patiently(attempt: Callable[[], Awaitable[T]], tell: Callable[[str], None] = lambda reason: None) -> T:
    """Repeat ``attempt`` as long as no peer answers, for ``PATIENCE_S``. ``tell`` gets the error of the first try.
    Raises the error of the last try."""
    clock = asyncio.get_running_loop()
    until = clock.time() + PATIENCE_S
    for tries in itertools.count():
        try:
            return await attempt()
        except (PeerUnreachable, DeadlineExceeded) as e:
            if clock.time() >= until:
                raise
            if tries == 0:
                tell(f"{e}; trying again for {PATIENCE_S:.0f} s")
        await asyncio.sleep(backoff_s(tries, FIRST_S, LONGEST_S))
    raise AssertionError("the loop has no end")
