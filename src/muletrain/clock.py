"""The ``Clock`` seam: the source of time for protocol code.

Protocol code uses a ``Clock`` instead of ``time.*``, so that the same code runs on a virtual event loop whose time
jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from muletrain.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")
ALWAYS = {"linux": getattr(time, "CLOCK_BOOTTIME", None), "darwin": getattr(time, "CLOCK_MONOTONIC", None)}.get(
    sys.platform
)
"""The system's clock that also counts while the machine is suspended (a laptop with a closed lid); None: there is
none."""


class Clock(Protocol):
    """The source of time for protocol code."""

    def now(self) -> float:
        """Seconds on a monotonic clock with an arbitrary origin. The clock may stand still while the machine is
        suspended."""
        ...

    def stood_still_s(self) -> float:
        """Seconds, since an arbitrary origin, that passed while this clock stood still."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspend for ``seconds`` of this clock's time."""
        ...

    async def deadline(self, awaitable: Awaitable[T], seconds: float, what: str) -> T:
        """Await with a deadline. Raises ``DeadlineExceeded`` naming ``what`` after ``seconds``; cancels the
        awaitable."""
        ...


def loop_time_s() -> float:
    """Time of the running event loop [s]."""
    return asyncio.get_running_loop().time()


class LoopClock:
    """The running asyncio loop's time: wall time on a real loop, virtual time on a virtual loop."""

    def now(self) -> float:
        try:
            return loop_time_s()
        except RuntimeError:  # called from a compute thread
            return time.monotonic()

    def stood_still_s(self) -> float:
        return 0.0 if ALWAYS is None else time.clock_gettime(ALWAYS) - time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def deadline(self, awaitable: Awaitable[T], seconds: float, what: str) -> T:
        try:  # not wait_for: before Python 3.12, wait_for loses a cancellation that comes just as its task is done
            async with asyncio.timeout(seconds):
                return await awaitable
        except TimeoutError as e:
            raise DeadlineExceeded(f"no answer within {seconds:.2f} s", what) from e
