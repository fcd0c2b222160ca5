"""Background tasks that end with the owning object."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from contextvars import Context


class Jobs:
    """The tasks of one object, in starting order."""

    def __init__(self, context: Context | None = None) -> None:
        """``context``: of all tasks; None: of the spawning code."""
        self._context = context
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.over = False
        """The tasks were cancelled."""

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, context=self._context)
        self._keep(task)
        return task

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Add the current task, which asyncio's stream server began. A cancellation ends here: the server would
        complain."""
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.over:
                raise

    def cancel(self) -> None:
        self.over = True
        for task in list(self._tasks):
            task.cancel()

    async def end(self) -> None:
        """Cancel all, and wait for the ends."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
