"""An event loop with virtual time: if no call is ready, the loop jumps to the next timer. The loop never waits for the
wall clock; clocks of virtual machines may run faster or slower."""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import math
import time
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack, cast

from muletrain.clock import LoopClock
from muletrain.errors import DeadlineExceeded, MuletrainError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
    from concurrent.futures import Executor
    from contextvars import Context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
RESOLUTION_S = 1e-9
"""Timers closer together than this [s] are due at the same time."""
FEW_TIMERS = 100
"""Number of timers above which cancelled timers are removed early."""
LOOK_UP_S = 0.1
"""Real seconds between two calls of ``VirtualLoop.look_up``."""
MACHINE: ContextVar[str] = ContextVar("machine", default="")
"""Name of the virtual machine to which a task or a timer belongs; inherited from its creator."""
GARBAGE = 200_000
"""New objects between two collections of garbage."""


class Hang(MuletrainError):
    """Nothing can happen any more, or the time limit is over."""


class _Call:
    """A call: asyncio's ``Handle`` without debugging, because one message takes some twenty calls."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        self.callback = None

    def cancelled(self) -> bool:
        return self.callback is None


class _Timer(float):
    """A timer, compared by its time."""

    __slots__ = ("args", "callback", "context", "loop")
    args: tuple[Any, ...]
    callback: Callable[..., object] | None
    context: Context
    loop: VirtualLoop | None
    """None: the timer has left the queue."""

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback, self.args = None, ()
            if self.loop is not None:
                self.loop.cancelled += 1

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return float(self)


class _Task(asyncio.Task[T]):
    """A task hashed by its number in the loop, so that sets of tasks (a TaskGroup's) keep their order: a seed replays
    the same way after any earlier play."""

    def __init__(self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose ``time()`` is the sum of its jumps [s]. A job for an executor runs at once, and its caller continues
    in the next pass, as after a thread. Queues and passes are asyncio's, in the same order, without selectors and
    threads."""

    def __init__(self, limit_s: float, look_up: Callable[[], None] | None = None) -> None:
        """Raises Hang from ``run_until_complete`` after ``limit_s`` virtual seconds. ``look_up`` is called between
        passes, every ``LOOK_UP_S`` of real time."""
        self._look_up, self._looks_up_s = look_up, time.monotonic()
        self._virtual_s = 0.0
        self._limit_s = limit_s
        self.cancelled = 0
        """Cancelled timers in the queue."""
        self.timers: list[_Timer] = []
        """A heap by time, written only by this loop."""
        self._calls: deque[_Call | _Timer] = deque()
        self._numbers = itertools.count()
        """Numbers of tasks."""
        self._frozen: dict[str, list[_Call | _Timer]] = {}
        """Calls that have become due since a machine was frozen, by machine."""
        self._suspended_at_s: dict[str, float] = {}
        """Loop time since which a suspended machine's clock stands still, by machine."""
        self._stood_still_s: dict[str, float] = {}
        """Total time of earlier suspensions, by machine."""
        super().__init__()

    def time(self) -> float:
        return self._virtual_s

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        call = _Call(callback, args, context)
        self._calls.append(call)
        return cast("asyncio.Handle", call)

    call_soon_threadsafe = call_soon  # there is one thread

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        when = self._virtual_s + delay
        if (
            delay > 0.0 and when == self._virtual_s
        ):  # a real clock advances: a caller waiting for the rest of its time would wait for ever
            when = math.nextafter(when, math.inf)
        return self.call_at(when, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when)
        timer.callback, timer.args, timer.loop = callback, args, self
        timer.context = copy_context() if context is None else context
        heapq.heappush(self.timers, timer)
        return cast("asyncio.TimerHandle", timer)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return _Task(coro, next(self._numbers), loop=self, name=name, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run ``func`` now; the result or error comes in the next pass."""
        done: asyncio.Future[T] = self.create_future()
        try:
            self.call_soon(_unless_done, done, done.set_result, func(*args))
        except Exception as e:
            self.call_soon(_unless_done, done, done.set_exception, e)
        return done

    def _run_once(self) -> None:
        """Run one pass: due timers, and calls made before the pass began."""
        if self._look_up is not None and (now := time.monotonic()) >= self._looks_up_s:
            self._looks_up_s = now + LOOK_UP_S
            self._look_up()
        self._forget_the_cancelled()
        timers, calls = self.timers, self._calls
        if not calls:
            self._jump()
        end_s = self._virtual_s + RESOLUTION_S
        while timers and timers[0] < end_s:
            timer = heapq.heappop(timers)
            timer.loop = None
            calls.append(timer)
        for _ in range(len(calls)):
            call = calls.popleft()
            if call.callback is None:
                continue
            if self._frozen and (machine := call.context.get(MACHINE, "")) in self._frozen:
                self._frozen[machine].append(call)
                continue
            try:
                call.context.run(call.callback, *call.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as e:  # as asyncio does
                self.call_exception_handler({"message": f"exception in {call.callback}", "exception": e})

    def freeze(self, machine: str, *, suspended: bool = False) -> None:
        """Stop ``machine`` as SIGSTOP does: its calls and timers wait. ``suspended``: the machine's own clock
        (``MachineClock``) stands still meanwhile."""
        self._frozen.setdefault(machine, [])
        if suspended:
            self._suspended_at_s.setdefault(machine, self._virtual_s)

    def thaw(self, machine: str) -> None:
        """Continue ``machine`` with all calls that were due meanwhile."""
        self._calls.extend(self._frozen.pop(machine, ()))
        self._stood_still_s[machine] = self.stood_still_s(machine)
        self._suspended_at_s.pop(machine, None)

    def stood_still_s(self, machine: str) -> float:
        """Seconds for which the clock of ``machine`` has stood still so far."""
        now_s = self._virtual_s
        return self._stood_still_s.get(machine, 0.0) + now_s - self._suspended_at_s.get(machine, now_s)

    def _forget_the_cancelled(self) -> None:
        timers = self.timers
        if len(timers) > FEW_TIMERS and self.cancelled > len(timers) / 2:
            timers[:] = [timer for timer in timers if timer.callback is not None]
            heapq.heapify(timers)
            self.cancelled = 0
        while timers and timers[0].callback is None:
            heapq.heappop(timers)
            self.cancelled -= 1

    def _jump(self) -> None:
        if not self.timers or self.timers[0] == math.inf:
            raise Hang("nothing is ready, and no timer is set: everyone waits for everyone")
        self._virtual_s += max(0.0, self.timers[0] - self._virtual_s)
        if self._virtual_s > self._limit_s:
            raise Hang(f"not finished after {self._limit_s:.0f} s of virtual time")


def _unless_done(future: asyncio.Future[Any], end: Callable[[Any], None], value: Any) -> None:
    """The caller may have been cancelled meanwhile."""
    if not future.done():
        end(value)


def virtual_loop() -> VirtualLoop:
    """The running loop."""
    return cast("VirtualLoop", asyncio.get_running_loop())


def context_of(machine: str) -> Context:
    """A context for the tasks of ``machine``."""
    context = copy_context()
    context.run(MACHINE.set, machine)
    return context


class MachineClock(LoopClock):
    """A machine's own clock: ``offset_s`` + ``rate`` times the loop's time, without times of suspension."""

    def __init__(self, machine: str, rate: float, offset_s: float) -> None:
        self._machine, self._rate, self._offset_s = machine, rate, offset_s

    def now(self) -> float:
        return self._offset_s + self._rate * (super().now() - virtual_loop().stood_still_s(self._machine))

    def stood_still_s(self) -> float:
        return virtual_loop().stood_still_s(self._machine)

    async def sleep(self, seconds: float) -> None:
        until = self.now() + seconds
        await super().sleep(seconds / self._rate)
        while self._left_s(until) > RESOLUTION_S:  # the machine was suspended meanwhile
            await super().sleep(self._left_s(until))

    def _left_s(self, until: float) -> float:
        return (until - self.now()) / self._rate

    async def deadline(self, awaitable: Awaitable[T], seconds: float, what: str) -> T:
        loop, until = virtual_loop(), self.now() + seconds
        timers = list[asyncio.TimerHandle]()

        def due() -> None:
            if (left_s := self._left_s(until)) > RESOLUTION_S:  # the machine was suspended meanwhile
                timers.append(loop.call_later(left_s, due))
            else:
                limit.reschedule(loop.time())

        timers.append(loop.call_later(seconds / self._rate, due))
        try:
            async with asyncio.timeout(None) as limit:
                return await awaitable
        except TimeoutError as e:
            raise DeadlineExceeded(f"no answer within {seconds:.2f} s", what) from e
        finally:
            timers[-1].cancel()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let the garbage collector skip the millions of lasting objects of a large fleet."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GARBAGE, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run_virtually(
    work: Coroutine[Any, Any, T], limit_s: float, problems: list[str], look_up: Callable[[], None] | None = None
) -> T:
    """Run ``work`` to its end on a new loop. Errors of tasks without an awaiter go to ``problems``. ``look_up``: see
    ``VirtualLoop``. Raises Hang."""
    loop = VirtualLoop(limit_s, look_up)
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
