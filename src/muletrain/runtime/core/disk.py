"""Runs calls to a disk in a separate thread, so that a hanging call delays nothing else, not even the end of the
process.

The interpreter joins the threads of a ``ThreadPoolExecutor`` at exit, so a hanging call there would keep the process
alive.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from muletrain.errors import CapacityError
from muletrain.runtime.core.times import LOOK_S, PATIENCE_S
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

SPARE_BYTES = 1 << 30
"""Free bytes of a disk that requests of other machines may not use up."""


class DaemonThreads(Executor):
    """An executor that runs jobs one after the other, each in a daemon thread."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()

        def work() -> None:
            with self._turn:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(fn(*args, **kwargs))
                    except BaseException as e:
                        future.set_exception(e)

        threading.Thread(target=work, name="disk", daemon=True).start()
        return future


class Disk:
    """Makes the calls to one place in order, one at a time."""

    def __init__(self, executor: Executor | None = None) -> None:
        """``executor``: runs the calls, in the virtual world each at once."""
        self._executor = DaemonThreads() if executor is None else executor
        self._turn = asyncio.Lock()
        self._moved = 0
        self._stood = -1
        """Value of ``_moved`` when a call was given up."""

    @property
    def hangs(self) -> bool:
        """Was a call given up, without progress since?"""
        return self._stood == self._moved

    def moved(self) -> None:
        """Note progress of the present call. The call itself notes its progress, from its thread."""
        self._moved += 1

    async def call(self, fn: Callable[..., R], *args: Any) -> R:
        """Returns ``fn(*args)``. Raises errors of ``fn``, and TimeoutError (an OSError) when ``fn``, or an earlier
        call, makes no progress for ``PATIENCE_S``, counted in checks, so
        that a pause of the whole process counts little. Then ``fn`` may still run, or never."""
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
        """Ends within ``PATIENCE_S`` without progress."""
        still_s, moved = 0.0, self._moved
        while not job.done():
            await asyncio.wait({job}, timeout=LOOK_S)
            still_s = still_s + LOOK_S if moved == self._moved else 0.0
            moved = self._moved
            if still_s >= PATIENCE_S and not job.done():
                self._stood = moved
                raise self._given_up()

    def _run(self, fn: Callable[..., R], *args: Any) -> R:
        self.moved()
        try:
            return fn(*args)
        finally:
            self.moved()

    def _given_up(self) -> TimeoutError:
        return TimeoutError(
            errno.ETIMEDOUT, f"the disk or store has made no progress for {PATIENCE_S:.0f} s; it may hang"
        )


def check_room(folder: str, size: int, otherwise: str) -> None:
    """Raises CapacityError if ``size`` more bytes would fill the disk of the existing ``folder``."""
    free = shutil.disk_usage(folder).free
    if size + SPARE_BYTES > free:
        raise CapacityError(
            f"{folder}: {format_memory(size)} are needed, besides {format_memory(SPARE_BYTES)} that stay free, "
            f"but only {format_memory(free)} are free; free some space, or {otherwise}"
        )
