"""An event loop whose time is virtual: when nothing is ready, it jumps to the next timer. Nothing in it waits for the wall clock; clocks
of virtual machines may run faster or slower than it."""

from __future__ import annotations

import asyncio
import gc
import selectors
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack

from muletrain.clock import LoopClock
from muletrain.errors import MuletrainError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from concurrent.futures import Executor

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
GARBAGE = 200_000
"""Objects between two looks for what holds on to itself."""


class Hang(MuletrainError):
    """Nothing can happen any more, or nothing came to an end within the time allowed."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is the sum of the jumps [s]. There are no threads: a job for an executor is done at once, whichever it is, and whoever
    waits for it goes on in the next pass, as if a thread had done it meanwhile."""

    def __init__(self, limit_s: float) -> None:
        """Raises Hang out of ``run_until_complete`` after ``limit_s`` seconds of virtual time."""
        self._virtual_s = 0.0
        self._limit_s = limit_s
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """What ``func`` returns or raises, in the next pass."""
        done: asyncio.Future[T] = self.create_future()
        try:
            self.call_soon(_unless_done, done, done.set_result, func(*args))
        except Exception as e:
            self.call_soon(_unless_done, done, done.set_exception, e)
        return done

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise Hang("nothing is ready, and no timer is set: everyone waits for everyone")
        self._virtual_s += max(0.0, seconds)
        if self._virtual_s > self._limit_s:
            raise Hang(f"not finished after {self._limit_s:.0f} s of virtual time")


def _unless_done(future: asyncio.Future[Any], end: Callable[[Any], None], value: Any) -> None:
    """Whoever waited may have been cancelled."""
    if not future.done():
        end(value)


class _JumpingSelector(selectors.DefaultSelector):
    """Only the loop's own wake-up pipe is ever registered, and without threads nobody writes into it: instead of waiting, time passes."""

    def __init__(self, jump: Any) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> Any:
        if timeout != 0:
            self._jump(timeout)
        return []


class SkewedClock(LoopClock):
    """A machine's own: it says ``offset_s`` + ``rate`` times the loop's time."""

    def __init__(self, rate: float, offset_s: float) -> None:
        self._rate, self._offset_s = rate, offset_s

    def now(self) -> float:
        return self._offset_s + self._rate * super().now()

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / self._rate)

    async def deadline(self, awaitable: Awaitable[T], seconds: float, what: str) -> T:
        return await super().deadline(awaitable, seconds / self._rate, what)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A large fleet is millions of objects that stay: the garbage collector does not look at them over and over."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GARBAGE, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run_virtually(work: Coroutine[Any, Any, T], limit_s: float, problems: list[str]) -> T:
    """``work`` to its end on a loop of its own. What goes wrong in tasks that nobody awaits is added to ``problems``. Raises Hang."""
    loop = VirtualLoop(limit_s)
    loop.set_exception_handler(lambda _, context: problems.append(_described(context)))
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop._limit_s = float("inf")
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        loop.close()


def _described(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']}: {type(error).__name__}: {error}" if error is not None else str(context["message"])
