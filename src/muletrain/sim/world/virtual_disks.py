"""Disks of a virtual world: calls take time, and a disk may be slow, hang, or be full."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from muletrain.runtime.checkpoint.store import Folder
from muletrain.runtime.core.disk import Disk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

P = ParamSpec("P")
R = TypeVar("R")
SLOWER = 1000.0
"""Factor of the time of a call to a slow disk."""
LONGEST_S = 40.0
"""Longest call [s]: a longer one would count as hanging."""


class DiskState:
    """The state of one disk. ``mean_s``: mean time of a call."""

    def __init__(self, rng: random.Random, mean_s: float) -> None:
        self._rng, self._mean_s = rng, mean_s
        self.slow = self.full = False
        self._works = asyncio.Event()
        self._works.set()

    def hang(self) -> None:
        self._works.clear()

    def recover(self) -> None:
        self._works.set()

    async def call(self) -> None:
        """The time of a call [s]."""
        await self._works.wait()
        took_s = self._rng.expovariate(1 / self._mean_s) * (SLOWER if self.slow else 1.0)
        await asyncio.sleep(min(took_s, LONGEST_S))
        await self._works.wait()


class VirtualThread(Executor):
    """Runs one thread's jobs in virtual time."""

    def __init__(self, state: DiskState, spawn: Callable[[Any], object]) -> None:
        self._state, self._spawn = state, spawn
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._works = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        self._jobs.append((future, lambda: fn(*args, **kwargs)))
        if not self._works:
            self._works = True
            self._spawn(self._work())
        return future

    async def _work(self) -> None:
        while self._jobs:
            future, job = self._jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            await self._state.call()
            try:
                future.set_result(job())
            except Exception as e:
                future.set_exception(e)
        self._works = False


class VirtualFolder(Folder):
    """A folder on a virtual disk."""

    def __init__(self, root: Path, keep: int, name: str, state: DiskState, thread: Executor) -> None:
        super().__init__(root, keep, name)
        self._state = state
        self.disk = Disk(thread)

    def _write(self, path: str, buffers: Sequence[memoryview]) -> None:
        """Write; on a full disk only half."""
        if self._state.full:
            target = self._root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_name(f".{target.name}.0").write_bytes(bytes(buffers[0])[: len(buffers[0]) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(path, buffers)
