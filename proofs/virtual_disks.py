"""Disks of a virtual world: calls take time, and a disk may be slow, hang, or be full."""

from __future__ import annotations

import asyncio
import errno
import random
from collections import deque
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from muletrain.compute.threads import InlineExecutor
from muletrain.network.jobs import Jobs
from muletrain.runtime.checkpoint.store import Folder
from muletrain.runtime.core.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from proofs.scenario import Scenario

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

    def _write(self, path: str, buffers: Iterable[memoryview]) -> None:
        """Write; on a full disk only half."""
        if self._state.full:
            head, target = next(iter(buffers)), self._folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_name(f".{target.name}.0").write_bytes(head[: len(head) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(path, buffers)


class Disks:
    """The disks of a world's machines: one for all, as in a fleet on one machine, or each its own."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario, self._folder = scenario, folder
        self._states: dict[str, DiskState] = {}
        self._jobs = Jobs()
        """Those of disks that hang do so for ever."""

    def folder(self, name: str) -> Path:
        """Folder of ``name``'s checkpoints."""
        return self._folder / self._at(name)

    def _at(self, name: str) -> str:
        return name if self._scenario.apart else "run"

    def of(self, name: str) -> DiskState:
        """Disk that ``name`` writes to."""
        at, seed = self._at(name), self._scenario.seed
        if at not in self._states:
            self._states[at] = DiskState(random.Random(f"disk/{seed}/{at}"), self._scenario.disk_s)
        return self._states[at]

    def place(self, name: str) -> Folder:
        """Where ``name`` keeps checkpoints. What members call it is in the first lineage, so it must not come from the
        folder that this world happens to have."""
        at, keep = self._at(name), self._scenario.keep
        if self._scenario.disk_s:
            return VirtualFolder(
                self.folder(name), keep, at, self.of(name), VirtualThread(self.of(name), self._jobs.spawn)
            )
        place = Folder(self.folder(name), keep, name=at)
        place.disk = Disk(InlineExecutor())
        return place

    def stop(self) -> None:
        """Cancel the calls that hang."""
        self._jobs.cancel()
