"""The pool decides which worker computes which sequences of a microbatch (HYBRID sec. 3.2.1).

A server puts in *jobs*: one pass of one microbatch. Workers take *parts* of them: runs of sequences, as many as
correspond to the worker's share of all workers' measured speed. What a worker does not bring back in time may be taken
by others, too, and the first result counts. The pool is a state machine without clock, network and tensors.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from muletrain.policy.deadline import Usual

if TYPE_CHECKING:
    from collections.abc import Iterable

OWN = ""
"""The worker that is the server's own device."""
LATE, FLOOR_S, UNMEASURED_S = 4.0, 1.0, 60.0
"""A part is late after this multiple of the time that its worker usually takes, at least and before any measurement
[s]."""
RECENT = 9
"""Measurements of a worker that are remembered."""


class Pass(StrEnum):
    """What is to be computed of a part."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    """Forward and backward of the last stage."""
    AGAIN = "again"
    """Forward and backward for the parameter gradient alone: it was lost with the worker that had it."""

    @property
    def cost(self) -> int:
        """Compute per sequence, in forward passes."""
        return {Pass.FORWARD: 1, Pass.BACKWARD: 2}.get(self, 3)


class Part(NamedTuple):
    """Sequences ``first`` to ``first + rows - 1`` of a microbatch, in one pass."""

    what: Pass
    step: int
    index: int  # type: ignore[assignment]  # the field's name is the papers'; tuple.index is never used
    first: int
    rows: int

    @property
    def cost(self) -> int:
        return self.what.cost * self.rows


@dataclass
class _Job:
    """Sequences from ``next`` to ``end`` of a pass that nobody has taken yet."""

    what: Pass
    step: int
    index: int
    next: int
    end: int
    rows: int
    """Sequences of the whole microbatch."""


@dataclass
class _Out:
    """A part that workers compute. ``since``: when each took it; ``due``: until when it should be back."""

    since: dict[str, float] = field(default_factory=dict)
    due: dict[str, float] = field(default_factory=dict)


class _Worker:
    def __init__(self, speed: float, room: int) -> None:
        self.hint, self.room = speed, room
        """Forward passes of a sequence per second, by its own word; parts that it takes at once."""
        self.out: dict[Part, None] = {}
        self.mine: deque[Part] = deque()
        """Parts that it should compute, because it has their forward."""
        self.late = False
        self._unit_s = Usual(unmeasured_s=math.inf, floor_s=0.0, times=1.0)
        self._free_at = -math.inf
        """When its last part came back."""

    @property
    def speed(self) -> float:
        """Forward passes of a sequence per second."""
        unit_s = self._unit_s.seconds()
        return 1 / unit_s if 0 < unit_s < 600 else self.hint

    def due_s(self) -> float:
        """Seconds from now until everything that it has should be back, as usual."""
        unit_s = self._unit_s.seconds()
        if unit_s >= 600:
            return UNMEASURED_S
        return max(FLOOR_S, LATE * unit_s * sum(part.cost for part in self.out))

    def measured(self, part: Part, since: float, now: float) -> None:
        """It had ``part`` since then, and brings it back now."""
        self._unit_s.measured(max(1e-6, now - max(since, self._free_at)) / part.cost)
        self._free_at = now


class Pool:
    """The jobs and workers of one server."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._jobs: dict[Pass, deque[_Job]] = {Pass.FORWARD: deque(), Pass.LOSS: deque()}
        self._free: dict[Part, None] = {}
        """Parts that any worker may take, oldest first."""
        self._again: dict[Part, None] = {}
        """Those of them that nobody waits for before the step's end."""
        self._parts: dict[Part, _Out] = {}
        """Parts that were cut and are not done."""

    # Workers ----------------------------------------------------------------------------------------------------------

    def enlist(self, worker: str, speed: float, room: int) -> None:
        """``worker`` asks for parts; ``speed``: forward passes of a sequence per second as far as it knows; ``room``:
        parts that it takes at once. One that was enlisted before has lost all that it had."""
        self.lost(worker)
        self._workers[worker] = _Worker(speed, room)

    def lost(self, worker: str) -> None:
        """``worker`` is gone, and what it was to compute is for others."""
        if (gone := self._workers.pop(worker, None)) is None:
            return
        for part in gone.out.keys() & self._parts.keys():
            self._parts[part].since.pop(worker, None)
            self._parts[part].due.pop(worker, None)
        for part in (*gone.mine, *gone.out):
            if part in self._parts and not self._parts[part].since:
                self._release(part)

    def workers(self) -> tuple[str, ...]:
        return tuple(self._workers)

    def speed(self) -> float:
        """Of all workers but the server's own: forward passes of a sequence per second."""
        return sum(w.speed for name, w in self._workers.items() if name != OWN and not w.late)

    def _helped(self) -> bool:
        """Is there a worker, beside the server's own device, that is not late?"""
        return any(not w.late for name, w in self._workers.items() if name != OWN)

    def waiting(self) -> bool:
        """Is there a part that nobody computes?"""
        mine = any(w.mine for w in self._workers.values())
        return bool(self._free or self._again or mine) or any(self._jobs.values())

    # Jobs -------------------------------------------------------------------------------------------------------------

    def put(self, what: Pass, step: int, index: int, rows: int) -> None:
        """Put in a pass of a whole microbatch: a forward, or a loss. Workers cut it when they take from it."""
        self._jobs[what].append(_Job(what, step, index, 0, rows, rows))

    def put_part(self, part: Part, prefers: str | None = None) -> None:
        """Put in one part. ``prefers``: the worker that has its forward; others take it only once that one is gone, or
        late."""
        self._parts[part] = _Out()
        worker = self._workers.get(prefers) if prefers is not None else None
        if worker is None or worker.late:
            self._release(part)
        else:
            worker.mine.append(part)

    def _release(self, part: Part) -> None:
        """Let any worker take ``part``."""
        (self._again if part.what is Pass.AGAIN else self._free)[part] = None

    def drop(self, step: int, index: int | None = None) -> list[tuple[str, Part]]:
        """Forget the jobs and parts of a microbatch (but for those to compute again), or all of the step. Returns who
        still computes which."""

        def wanted(found: _Job | Part) -> bool:
            if index is None:
                return found.step != step
            return found.what is Pass.AGAIN or (found.step, found.index) != (step, index)

        for what, jobs in self._jobs.items():
            self._jobs[what] = deque(job for job in jobs if wanted(job))
        withdrawn = []
        for part in [p for p in self._parts if not wanted(p)]:
            withdrawn += [(worker, part) for worker in self._remove(part)]
        return withdrawn

    # Taking and bringing back -----------------------------------------------------------------------------------------

    def take(self, worker: str, now: float) -> Part | None:
        """Returns the part that ``worker`` computes next: one whose forward it has, then one that nobody else has (any
        more), then its share of the microbatch that waits for longest. The server's own device takes only the first
        kind while another worker is there. None: nothing, or it has no room."""
        taker = self._workers.get(worker)
        if taker is None or len(taker.out) >= taker.room or taker.late:
            return None
        part = self._of_its_own(taker)
        if part is None and (worker != OWN or not self._helped()):
            part = self._first_of(self._free, taker) or self._share(worker, taker)
            part = part or self._first_of(self._again, taker)
        if part is not None:
            taker.out[part] = None
            out = self._parts[part]
            out.since[worker], out.due[worker] = now, now + taker.due_s()
        return part

    def _of_its_own(self, taker: _Worker) -> Part | None:
        while taker.mine:
            if (part := taker.mine.popleft()) in self._parts:
                return part
        return None

    def _first_of(self, free: dict[Part, None], taker: _Worker) -> Part | None:
        for part in free:
            if part not in taker.out:
                del free[part]
                return part
        return None

    def _share(self, worker: str, taker: _Worker) -> Part | None:
        for jobs in self._jobs.values():
            if jobs:
                job = jobs[0]
                rows = min(job.end - job.next, max(1, round(job.rows * self._share_of(worker, taker))))
                part = Part(job.what, job.step, job.index, job.next, rows)
                self._parts[part] = _Out()
                job.next += rows
                if job.next == job.end:
                    jobs.popleft()
                return part
        return None

    def _share_of(self, worker: str, taker: _Worker) -> float:
        """Share of ``worker`` in the speed of all workers; of equal ones if no speed is known."""
        speeds = {name: w.speed for name, w in self._workers.items() if not w.late and (name != OWN or name == worker)}
        if not all(speeds.values()):
            return 1 / len(speeds)
        return taker.speed / sum(speeds.values())

    def done(self, worker: str, part: Part, now: float) -> bool:
        """``worker`` brings ``part`` back. Returns False if it does not count: another worker was first, it is no longer
        wanted, or was never given to this one."""
        known = self._workers.get(worker)
        if known is None or part not in known.out:
            return False
        del known.out[part]
        known.late = False
        if (out := self._parts.get(part)) is None:
            return False
        known.measured(part, out.since[worker], now)
        self._remove(part)
        return True

    def failed(self, worker: str, part: Part) -> None:
        """``worker`` cannot compute ``part``."""
        known = self._workers.get(worker)
        if known is None or part not in known.out:
            return
        del known.out[part]
        if part not in self._parts:
            return
        out = self._parts[part]
        out.since.pop(worker, None)
        out.due.pop(worker, None)
        if not out.since:
            self._release(part)

    def others(self, part: Part) -> tuple[str, ...]:
        """Workers that still have ``part``, which is done or no longer wanted."""
        return tuple(name for name, w in self._workers.items() if part in w.out)

    def expire(self, now: float) -> tuple[str, ...]:
        """Let others take parts that are late, and those that their workers should compute next. Returns the workers
        that became late; they get nothing more until they bring something back."""
        late = [
            n for n, w in self._workers.items() if not w.late and any(self._overdue(n, part, now) for part in w.out)
        ]
        for name in late:
            worker = self._workers[name]
            worker.late = True
            for part in (*worker.out, *worker.mine):
                if part in self._parts:
                    self._release(part)
            worker.mine.clear()
        return tuple(late)

    def _overdue(self, worker: str, part: Part, now: float) -> bool:
        out = self._parts.get(part)
        return out is not None and out.due.get(worker, math.inf) <= now

    def next_due(self) -> float:
        """When ``expire`` may have something to do; inf: never."""
        return min((due for out in self._parts.values() for due in out.due.values()), default=math.inf)

    def _remove(self, part: Part) -> Iterable[str]:
        """Forget ``part``. Returns the workers that have it; it takes a place of theirs until they bring it back."""
        self._free.pop(part, None)
        self._again.pop(part, None)
        return [*self._parts.pop(part).since]
