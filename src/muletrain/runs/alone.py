"""A run of one peer that nobody can join: the peer works in this process, in a thread with a separate event loop, and
no daemon is started. Work, reports and files are the same as for a peer's process (``worker.work``)."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from muletrain.runs.fleet import LocalFleet, environment
from muletrain.runs.worker_files import EXIT_ERROR

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from muletrain.runs.spec import WorkerSpec
    from muletrain.runs.worker import Worker

KILL_S = 5.0
"""Longest wait for the peer's end after ``kill`` [s]."""


class Alone(LocalFleet):
    """A fleet of one peer, which is a thread of this process."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(folder, threads)
        os.environ.update(environment(threads))
        self._loop = asyncio.new_event_loop()
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._thread: threading.Thread | None = None
        self._name, self._code, self._over = "", EXIT_ERROR, False

    def spawn(self, names: list[str]) -> None:
        """There is no process to start."""
        (self._name,) = names

    def begin(self, spec: WorkerSpec) -> None:
        self._thread = threading.Thread(target=self._run, args=(spec,), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, spec: WorkerSpec) -> None:
        import torch

        from muletrain.runs.worker import work

        torch.set_num_threads(self._threads)  # torch read the environment when the configuration was checked
        with open(self.folder / f"{self._name}.log", "a", encoding="utf-8") as log:
            try:
                with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                    self._code = runner.run(work(spec, self._obey))
            except asyncio.CancelledError:
                pass  # killed
            except BaseException:
                traceback.print_exc(file=log)
        self._over = True

    async def _obey(self, worker: Worker) -> None:
        while True:
            worker.obey(await self._lines.get())

    def alive(self) -> list[str]:
        return [] if self._thread is None or self._over else [self._name]

    def exit_codes(self) -> dict[str, int]:
        return {self._name: self._code} if self._over else {}

    def tell(self, name: str, line: str) -> None:
        self._in_loop(lambda: self._lines.put_nowait(line))

    def kill(self) -> None:
        """End the peer now. A running device operation ends by itself."""
        self._in_loop(lambda: [task.cancel() for task in asyncio.all_tasks()])
        if self._thread is not None:
            self._thread.join(KILL_S)
            self._over = True

    def _in_loop(self, act: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the peer has ended
            self._loop.call_soon_threadsafe(act)
