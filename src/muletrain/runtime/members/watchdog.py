"""Notices that an operation of this peer's own device hangs while the event loop still answers: only the peer itself
knows its device's operation, and since when.

A slow link or a long queue is no hang. A hang shows in the running time of one operation, as a multiple of its usual
time (``compute.jobs``). There are three limits, from measured times:

- *late*, after about four usual times (at least 2 s; 300 s before the operation has ended once): answers to probes
  report this. Other peers suspect this peer, which changes routing alone: they compute copies of the owed microbatches,
  within their budgets, and send no new work.
- *out*, after four times as long (at least 8 s; the first time, as soon as late): no peer should count on this peer.
  The peer refuses probes and sends nothing, like a frozen peer, so its accumulated microbatches are run again. When the
  operation ends after all, the peer comes back as a frozen peer does. The last peer of a stage is never out: no other
  peer could do its work.
- *hung*, after thirty times as long as late, 5 to 60 minutes: the peer ends with an error.

Only time in which this process ran counts: between two checks at most twice the usual pause, however long the process
was stopped or suspended. Absences so long that other peers must have noticed are counted, too (``Meter.absences``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.events import DeviceBack, DeviceLate
from muletrain.runtime.core.meter import DeviceHung
from muletrain.runtime.core.times import ENDLESS, LOOK_S, PATIENCE_S

if TYPE_CHECKING:
    from muletrain.compute.jobs import Job
    from muletrain.runtime.members.context import Context

OUT, HUNG = 4.0, 30.0
"""Multiples of the late time after which an operation is out, and after which an operation is hung."""


class Watchdog:
    """Watches the compute of one peer."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._ages_s: dict[Job, float] = {}

    async def run(self) -> None:
        """Raises DeviceHung. Ends when cancelled."""
        clock = self._ctx.clock
        while True:
            before, stood_still_s = clock.now(), clock.stood_still_s()
            await clock.sleep(LOOK_S)
            passed_s = clock.now() - before
            away_s = passed_s - LOOK_S + clock.stood_still_s() - stood_still_s
            self._ctx.meter.absences += away_s >= self._ctx.detector.deadline.seconds()
            self.look(min(passed_s, 2 * LOOK_S))

    def look(self, seconds: float) -> None:
        """Judge the operations in progress. ``seconds``: running time of this process since the last check. Raises
        DeviceHung."""
        ctx, jobs = self._ctx, self._ctx.compute.jobs
        before = self._ages_s
        self._ages_s = {job: before[job] + seconds if job in before else 0.0 for job in jobs.running()}
        late: tuple[Job, ...] = ()
        for job, age_s in self._ages_s.items():
            if age_s >= hung_s(jobs.late_s(job.what)):
                raise DeviceHung(_what_hangs(job, age_s))
            # beside the device's own, states are written and hashed, which may take any time
            if job.device and age_s >= jobs.late_s(job.what):
                late += (job,)
        ctx.meter.late = _what_hangs(late[0], self._ages_s[late[0]]) if late else ""
        out = [j for j in late if self._ages_s[j] >= (OUT if jobs.known(j.what) else 1.0) * jobs.late_s(j.what)]
        last = ctx.roster.stage(ctx.roster.own.stage) == (ctx.net.peer_id,)
        if out and ctx.meter.works.is_set() and not last:
            ctx.meter.works.clear()
            ctx.emit(DeviceLate(job=_at(out[0], self._ages_s[out[0]])))
        elif not out and not ctx.meter.works.is_set():
            ctx.meter.works.set()
            ctx.meter.absences += 1
            ctx.emit(DeviceBack())


def hung_s(late_s: float) -> float:
    """Returns the seconds after which the peer ends. ``late_s``: see ``Jobs.late_s``."""
    return min(ENDLESS * PATIENCE_S, max(PATIENCE_S, HUNG * late_s))


def _at(job: Job, age_s: float) -> str:
    return f"the {'device' if job.device else 'thread beside the device'} has been at {job.what!r} for {age_s:.0f} s"


def _what_hangs(job: Job, age_s: float) -> str:
    return (
        f"{_at(job, age_s)}, so this peer ends. Look for the device's errors in the system log (dmesg), update or reload its driver, or "
        f"restart the machine; then join again"
    )
