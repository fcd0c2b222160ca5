"""A peer runs its background work in ``Tasks``."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

R = TypeVar("R")


class Tasks:
    """The tasks of one peer at one stage, which end when the peer leaves the stage."""

    def __init__(self, background: Executor | None = None) -> None:
        """``background``: runs work that may take seconds (hashing, the disk), so that neither the event loop nor
        ``Compute.offload`` is blocked; default: a thread."""
        self._background = background or ThreadPoolExecutor(1, thread_name_prefix="background")
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """In the order of their start: the order of a set would depend on addresses."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when a task failed unexpectedly: then the peer ends with that error."""
        self.closed = False
        """The peer has left its stage; calls may still come."""

    def spawn(self, work: Coroutine[Any, Any, R], name: str) -> asyncio.Task[R]:
        """Run ``work`` until its end, or until the peer leaves its stage."""
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._finished)
        if self.closed:
            task.cancel()
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def aside(self, fn: Callable[..., R], *args: Any) -> R:
        """Run ``fn`` in the background, after all earlier calls."""
        return await asyncio.get_running_loop().run_in_executor(self._background, fn, *args)

    async def close(self) -> None:
        """Cancel the running tasks."""
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._background.shutdown(wait=False, cancel_futures=True)
        if not self.failure.done():
            self.failure.cancel()
