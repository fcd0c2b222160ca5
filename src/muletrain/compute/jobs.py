"""What runs on the threads of a ``Compute``: seen from outside, so that an operation that never returns is found out
about."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muletrain.policy.deadline import Usual

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNMEASURED_S = 75.0
"""Before an operation has ended once it is late after this time: first calls load libraries and compile kernels."""
FLOOR_S, TIMES, SLOW_TIMES = 2.0, 4.0, 2.0
"""Else after four times its median, and twice the slowest but one of late, but not before ``FLOOR_S``."""


class Job:
    """An operation that a thread is at."""

    __slots__ = ("begun_s", "device", "what")

    def __init__(self, what: str, begun_s: float, *, device: bool) -> None:
        """``device``: on the thread that computes, not beside it."""
        self.what, self.begun_s, self.device = what, begun_s, device


class Jobs:
    """Those of one ``Compute``. Thread safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now``: seconds on a monotonic clock, in any thread."""
        self._now = now
        self._lock = threading.Lock()
        self._running: dict[Job, None] = {}
        self._usual: defaultdict[str, Usual] = defaultdict(lambda: Usual(UNMEASURED_S, FLOOR_S, TIMES, SLOW_TIMES))

    def running(self) -> tuple[Job, ...]:
        with self._lock:
            return tuple(self._running)

    def late_s(self, what: str) -> float:
        """After how long the operation is late [s]."""
        with self._lock:
            return self._usual[what].seconds()

    def begin(self, what: str, *, device: bool = True) -> Job:
        job = Job(what, self._now(), device=device)
        with self._lock:
            self._running[job] = None
        return job

    def end(self, job: Job) -> None:
        took_s = self._now() - job.begun_s
        with self._lock:
            del self._running[job]
            self._usual[job.what].measured(took_s)

    @contextmanager
    def at(self, what: str, *, device: bool = True) -> Iterator[None]:
        """In the thread, around the operation."""
        job = self.begin(what, device=device)
        try:
            yield
        finally:
            self.end(job)
