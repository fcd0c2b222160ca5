"""Jobs show the running operations of a ``Compute``'s threads, so that an operation that never returns is noticed."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muletrain.policy.deadline import Usual

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNMEASURED_S, LONGEST_S = 300.0, 3600.0
"""Seconds after which an operation is late, before the operation has ended once, and at most. First calls load
libraries and compile kernels, and a slow device may need minutes for each. A wait that includes remote answers notices
sooner that none comes."""
FLOOR_S, TIMES, SLOW_TIMES = 2.0, 4.0, 2.0
"""Later, an operation is late after ``TIMES`` the median and ``SLOW_TIMES`` the second slowest of recent runs, and not
before ``FLOOR_S`` [s]."""
OF_MICROBATCHES = {"forward", "backward", "loss"}
"""Operations on one microbatch, also of paced devices ("paced forward")."""


class Job:
    """An operation that runs on a thread."""

    __slots__ = ("begun_s", "device", "part", "what")

    def __init__(self, what: str, begun_s: float, *, device: bool, part: int | None = None) -> None:
        """``device``: the thread uses the device; ``part``: the sub-model of a swapped stage."""
        self.what, self.begun_s, self.device, self.part = what, begun_s, device, part


class Jobs:
    """Owns the jobs of one ``Compute``. Thread safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        """``now``: seconds on a monotonic clock, in any thread."""
        self._now = now
        self.ended: Callable[[Job, float], None] | None = None
        """Called for each ended operation with the seconds, in the operation's thread; for traces."""
        self._lock = threading.Lock()
        self._running: dict[Job, None] = {}
        self._usual: defaultdict[str, Usual] = defaultdict(
            lambda: Usual(UNMEASURED_S, FLOOR_S, TIMES, SLOW_TIMES, LONGEST_S)
        )
        self._ended: dict[str, bool] = {}
        """Operations that have ended once: do they use the device?"""

    def running(self) -> tuple[Job, ...]:
        """The operations that run now."""
        with self._lock:
            return tuple(self._running)

    def late_s(self, what: str) -> float:
        """Seconds after which the operation is late. An operation that has not ended yet may take as long as the rest,
        at least."""
        with self._lock:
            late_s = self._usual[what].seconds()
        return late_s if self.known(what) else max(late_s, self.longest_s())

    def known(self, what: str) -> bool:
        """Has the operation ended once?"""
        with self._lock:
            return what in self._ended

    def longest_s(self) -> float:
        """Returns after how many seconds the device's longest operation is late. Only operations that have ended count; 0
        if there is none."""
        with self._lock:
            return max((self._usual[what].seconds() for what, device in self._ended.items() if device), default=0.0)

    def microbatch_s(self) -> float:
        """Returns the median time of the longer operation on a microbatch [s]; 0 before one has ended."""
        with self._lock:
            ended = [what for what in self._ended if what.rpartition(" ")[2] in OF_MICROBATCHES]
            return max((self._usual[what].median_s for what in ended), default=0.0)

    def begin(self, what: str, *, device: bool = True, part: int | None = None) -> Job:
        """An operation begins."""
        job = Job(what, self._now(), device=device, part=part)
        with self._lock:
            self._running[job] = None
        return job

    def end(self, job: Job, *, whole: bool = True) -> None:
        """An operation has ended. The time is remembered unless the operation was broken off (not ``whole``)."""
        took_s = self._now() - job.begun_s
        with self._lock:
            del self._running[job]
            if whole:
                self._usual[job.what].measured(took_s)
                self._ended[job.what] = job.device
        if self.ended is not None:
            self.ended(job, took_s)

    @contextmanager
    def at(self, what: str, *, device: bool = True, part: int | None = None) -> Iterator[None]:
        """Wraps an operation, in the same thread."""
        job = self.begin(what, device=device, part=part)
        whole = False
        try:
            yield
            whole = True
        finally:
            self.end(job, whole=whole)
