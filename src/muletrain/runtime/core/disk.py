"""The disk's thread: calls that take long, or never return, delay nothing else of the process, not even its end.

Threads of ``ThreadPoolExecutor`` are joined when the interpreter exits, so a call that hangs would keep the process.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from collections import deque
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from muletrain.errors import CapacityError
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

LOOK_S = 1.0
"""Seconds between two looks at a call that is under way."""
SPARE_BYTES = 1 << 30
"""Of a disk, which no other machine's word fills."""
STILL_S = 300.0
"""Seconds after which a call that does nothing hangs. Counted in looks, so that time in which the whole process is
stopped counts little."""


class OneThread(Executor):
    """Runs jobs one after the other in a daemon thread, which ends when there is nothing to do."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock, self._works = threading.Lock(), False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        with self._lock:
            self._jobs.append((future, partial(fn, *args, **kwargs)))
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, name="disk", daemon=True).start()
        return future

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """In a function of its own: a state that was written is free when it returns."""
        with self._lock:
            self._works = bool(self._jobs)
            if not self._works:
                return False
            future, call = self._jobs.popleft()
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as e:
                future.set_exception(e)
            else:
                future.set_result(result)
        return True


class Disk:
    """The calls to one place, in the order in which they were made, one at a time."""

    def __init__(self, executor: Executor | None = None) -> None:
        """``executor``: the virtual world's runs a job at once."""
        self._executor = OneThread() if executor is None else executor
        self._turn = asyncio.Lock()
        self._moved = 0
        self._stood = -1
        """``_moved`` when a call was given up."""

    @property
    def hangs(self) -> bool:
        """A call was given up, and has not come on since."""
        return self._stood == self._moved

    def moved(self) -> None:
        """The call that is under way came on: to be said by it, from its thread."""
        self._moved += 1

    async def call(self, fn: Callable[..., R], *args: Any) -> R:
        """What ``fn(*args)`` returns. Raises what it raises, and TimeoutError, an OSError, when it does nothing for
        ``STILL_S``, or one before it hangs: then ``fn`` may still run, or never does."""
        async with self._turn:
            if self.hangs:
                raise self._given_up()
            job = asyncio.wrap_future(self._executor.submit(self._run, fn, *args))
            try:
                await self._watch(job)
                return job.result()
            finally:
                job.cancel()

    async def _watch(self, job: asyncio.Future[Any]) -> None:
        still_s, moved = 0.0, self._moved
        while not job.done():
            await asyncio.wait({job}, timeout=LOOK_S)
            still_s = still_s + LOOK_S if moved == self._moved else 0.0
            moved = self._moved
            if still_s >= STILL_S and not job.done():
                self._stood = moved
                raise self._given_up()

    def _run(self, fn: Callable[..., R], *args: Any) -> R:
        self.moved()
        try:
            return fn(*args)
        finally:
            self.moved()

    def _given_up(self) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, f"the disk or store does nothing for {STILL_S:.0f} s, and may hang")


def check_room(folder: str, size: int, otherwise: str) -> None:
    """Raises CapacityError where ``size`` more bytes would fill the disk of ``folder``, which exists."""
    free = shutil.disk_usage(folder).free
    if size + SPARE_BYTES > free:
        raise CapacityError(
            f"{folder}: {format_memory(size)} are to go there, of {format_memory(free)} that are free, and {format_memory(SPARE_BYTES)} "
            f"stay free; free some space, or {otherwise}"
        )
