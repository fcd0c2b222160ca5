"""The threads of one stage's compute."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from muletrain.clock import LoopClock
from muletrain.compute.jobs import Jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")
R = TypeVar("R")


class InlineExecutor(Executor):
    """Runs a job at submission: for a virtual event loop, where time must not pass while a thread works."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as e:
            future.set_exception(e)
        return future


class Threads:
    """Each thread runs jobs one by one, in the order of submission."""

    def __init__(self, stage: int, *, delayed: bool, inline: bool) -> None:
        """``delayed``: updates have a separate thread, beside the next step or the beginning of the next step.
        ``inline``: every job runs in the caller's thread."""

        def thread(name: str) -> Executor:
            return InlineExecutor() if inline else ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{stage}")

        self.jobs = Jobs(LoopClock().now)
        self.compute = thread("compute")
        self.updates = thread("update") if delayed else self.compute
        self.aside = thread("offload")
        self.copies = thread("copy")
        self.arrivals = thread("arrive")

    def submit(self, thread: Executor, fn: Callable[..., R], *args: object) -> Future[R]:
        """Queue ``fn`` on ``thread``."""
        return thread.submit(self._at, thread, fn, *args)

    async def run(self, thread: Executor, fn: Callable[..., R], *args: object) -> R:
        """Run ``fn`` on ``thread``. A cancelled call that runs already completes."""
        return await asyncio.get_running_loop().run_in_executor(thread, partial(self._at, thread, fn, *args))

    def _at(self, thread: Executor, fn: Callable[..., R], *args: object) -> R:
        name = getattr(fn, "__name__", type(fn).__name__).strip("_")
        with self.jobs.at(name, device=thread is not self.aside):
            return fn(*args)

    def close(self) -> None:
        """Drop the jobs that wait. A job that runs ends by itself."""
        for thread in (self.compute, self.updates, self.aside, self.copies, self.arrivals):
            thread.shutdown(wait=False, cancel_futures=True)


class ThreadedCompute:
    """Common part of resident and swapped ``Compute`` on this machine's threads."""

    threads: Threads

    async def gather(self, step: int) -> None:
        """Everything is here."""

    async def end(self, *, over: bool) -> None:
        """No remote machine is told."""

    async def offload(self, fn: Callable[..., R], *args: object) -> R:
        return await self.threads.run(self.threads.aside, fn, *args)

    async def _compute(self, fn: Callable[..., R], *args: object) -> R:
        return await self.threads.run(self.threads.compute, fn, *args)

    async def _read(self, fn: Callable[[], R]) -> R:
        """``fn`` beside the compute thread, but after every ``apply`` and ``load_state`` called before."""
        await self._compute(passed)
        if self.threads.updates is not self.threads.compute:
            await self.threads.run(self.threads.updates, passed)
        return await self.offload(fn)


@contextlib.contextmanager
def on_cores(share: float) -> Iterator[None]:
    """This thread's operations take that share of the cores which torch uses, at least one."""
    whole = torch.get_num_threads()
    torch.set_num_threads(max(1, int(share * whole)))
    try:
        yield
    finally:
        torch.set_num_threads(whole)


def passed() -> None:
    """A job that is done when all earlier jobs are."""
