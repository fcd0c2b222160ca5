"""What a simulated run did, counted where it happens: work, idle time by cause, bytes by region, recoveries, and curves
to draw."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from muletrain.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.sim.fleet.rates import Counts, Rate, Rates

POINTS = 400
"""Of the curves."""
SAMPLES = 50
"""Looks at who sends to whom: what passed since the one before is taken to have gone the same ways."""
RECOVERED = 0.95
"""Of the share of the optimum before a machine left."""
GoesOn = Callable[[float, float], bool]
"""Asked now and then while a fleet is played, with the virtual time played [s] and the steps done: False ends the play
there."""
CAUSES = (
    "uneven stages",
    "links",
    "few microbatches under way",
    "ends of steps",
    "fetching state",
    "run again",
    "a stage without peers",
    "steps taken back",
)


def always(now_s: float, steps: float) -> bool:
    return True


@dataclass(frozen=True)
class Point:
    """Means since the point before; ``peers``: by stage, at its end; ``events``: what happened, how often."""

    time_s: float
    throughput: float
    optimum: float
    peers: tuple[int, ...]
    events: dict[str, int]


@dataclass(frozen=True)
class GaveUp:
    """A peer that ended with an error of its own: it was not killed, and it neither left in order nor was expelled."""

    time_s: float
    peer: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """Throughput in microbatches/s. ``idle``: by cause, shares of what all machines there could have done; with
    ``share_of_optimum`` they sum to 1. ``bytes``: by (from, to) region and class."""

    hours: float
    steps: float
    throughput: float
    share_of_optimum: float
    idle: dict[str, float]
    bytes: dict[tuple[str, str], dict[str, float]]
    lost_microbatches: float
    repeated_microbatches: float
    events: dict[str, int]
    recoveries_s: tuple[float, ...]
    """Until the fleet makes as much of its machines as before one left, nearly (``RECOVERED``)."""
    not_recovered: bool
    curve: tuple[Point, ...]
    partial: bool = False
    """It was ended before the time asked for: ``hours`` is what was played."""
    gave_up: tuple[GaveUp, ...] = ()
    """In order of time (fidelity 'protocol')."""

    @property
    def failure(self) -> str | None:
        """How many peers gave up, the first of them, and why; None: nobody did."""
        if not self.gave_up:
            return None
        first, others = self.gave_up[0], len(self.gave_up) - 1
        beside = f", and {others} more later" if others else ""
        return f"{first.peer} gave up after {format_duration(first.time_s)}{beside}: {first.why}"

    @property
    def recovery_s(self) -> tuple[float, float]:
        """Median and longest; nan where nothing had to be recovered from."""
        found = self.recoveries_s
        return (median(found), max(found)) if found else (math.nan, math.nan)


class Accounts:
    """Told of every stretch of time and every change."""

    def __init__(self, rates: Rates, horizon_s: float, counts: Sequence[Counts], present: Sequence[int]) -> None:
        self._rates, self._horizon_s = rates, horizon_s
        self._kinds, self._cost = rates.setting.kinds, rates.setting.cost
        self.steps = 0.0
        self.repeated = 0.0
        self._lost = 0.0
        self._now = 0.0
        self._done, self._possible = 0.0, 0.0
        self._idle = dict.fromkeys(CAUSES, 0.0)
        self._events: Counter[str] = Counter()
        self._bytes: defaultdict[tuple[str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._recoveries_s: list[float] = []
        self._outage: tuple[float, float] | None = None
        self._curve: list[Point] = []
        self._since: Counter[str] = Counter()
        self._point = [0.0, 0.0]
        """Done and possible since the last point of the curve."""
        self._unsampled = 0.0
        self._sampled = 0
        self._partial = False
        self._counts, self._optimum = counts, self._whole(present)
        self._share = math.nan

    def _whole(self, present: Sequence[int]) -> float:
        return sum(n * v for n, v in zip(present, self._rates.whole_per_s, strict=True))

    def change(self, counts: Sequence[Counts], present: Sequence[int], rate: Rate) -> None:
        """From now on these serve, and these are there."""
        before = self._share
        self._counts, self._optimum = counts, self._whole(present)
        self._share = self._rates.flowing / self._optimum if self._optimum and rate.throughput else 0.0
        if self._outage is None and self._share < RECOVERED * before:
            self._outage = self._now, before
        elif self._outage is not None and self._share >= RECOVERED * self._outage[1]:
            self._recoveries_s.append(self._now - self._outage[0])
            self._outage = None

    def stalled(self, seconds: float) -> None:
        """For so long the run does what died with a peer again, and nothing else."""
        if seconds > 0 and self._outage is None:
            self._recoveries_s.append(seconds)

    def happened(self, what: str) -> None:
        self._events[what] += 1
        self._since[what] += 1

    def pass_time(self, seconds: float, rate: Rate, *, again: bool) -> None:
        """``again``: all that is done is done for the second time."""
        if math.isnan(self._share):
            self._share = self._rates.flowing / self._optimum if self._optimum and rate.throughput else 0.0
        while seconds > 0:
            end_s = (len(self._curve) + 1) * self._horizon_s / POINTS
            stretch_s = min(seconds, max(0.0, end_s - self._now))
            if stretch_s < seconds and len(self._curve) == POINTS - 1:
                stretch_s = seconds  # rounding
            self._account(stretch_s, rate, again)
            self._now += stretch_s
            seconds -= stretch_s
            if seconds > 0:
                self._mark()

    def _account(self, seconds: float, rate: Rate, again: bool) -> None:
        self._possible += seconds * self._optimum
        self._point[1] += seconds * self._optimum
        idle = self._idle
        idle["fetching state"] += seconds * (self._optimum - rate.even)
        if rate.slowest <= 0:
            idle["a stage without peers"] += seconds * rate.even
            return
        idle["uneven stages"] += seconds * (rate.even - rate.slowest)
        idle["links"] += seconds * (rate.slowest - rate.linked)
        idle["few microbatches under way"] += seconds * (rate.linked - rate.windowed)
        idle["ends of steps"] += seconds * (rate.windowed - rate.throughput)
        done = seconds * rate.throughput
        if again:
            idle["run again"] += done
            return
        self._done += done
        self._point[0] += done
        self._unsampled += done
        self.steps += done / self._cost.microbatches

    def step_back(self, base: float) -> None:
        lost = (self.steps - base) * self._cost.microbatches
        self.steps = base
        self._lost += lost
        self._done -= lost
        self._idle["steps taken back"] += lost
        self.happened("stepped back")

    def _mark(self, end_s: float | None = None) -> None:
        """A point of the curve. ``end_s``: where a play ended early."""
        usual_s, (done, possible) = self._horizon_s / POINTS, self._point
        begin_s = len(self._curve) * usual_s
        time_s, width_s = (begin_s + usual_s, usual_s) if end_s is None else (end_s, end_s - begin_s)
        self._curve.append(
            Point(time_s, done / width_s, possible / width_s, tuple(map(sum, self._counts)), dict(self._since))
        )
        self._point, self._since = [0.0, 0.0], Counter()
        if len(self._curve) * SAMPLES // POINTS > self._sampled:
            self._sampled += 1
            self._sample()

    # Traffic ----------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """What passed since the last time, between regions."""
        microbatches, self._unsampled = self._unsampled, 0.0
        if not microbatches or not all(map(any, self._counts)):
            self._unsampled = microbatches
            return
        cost, counts = self._cost, self._counts
        for stage in range(1, len(counts)):
            shares = self._rates.shares(stage, counts[stage - 1], counts[stage])
            for (a, *_), row in zip(self._rates.places, shares, strict=True):
                for (b, *_), share in zip(self._rates.places, row, strict=True):
                    if share:
                        self._sent(a, b, "activations", microbatches * share * cost.forward_bytes[stage])
                        self._sent(b, a, "gradients", microbatches * share * cost.backward_bytes[stage])
        for stage, here in enumerate(counts):
            each = 2 * cost.stages[stage].averaged_bytes / sum(here) * microbatches / cost.microbatches
            for a, n in enumerate(here):
                for b, m in enumerate(here):
                    if n and m and (a != b or n > 1):
                        self._sent(a, b, "averaging", each * n * (m - (a == b)))

    def fetched(self, kind: int, donors: Sequence[int], nbytes: float) -> None:
        """The state of a stage, from all that serve it."""
        for donor, n in enumerate(donors):
            if n:
                self._sent(donor, kind, "state", nbytes * n / sum(donors))

    def _sent(self, a: int, b: int, what: str, nbytes: float) -> None:
        self._bytes[self._kinds[a].region, self._kinds[b].region][what] += nbytes

    def close(self, *, partial: bool = False) -> None:
        """The end of the play; ``partial``: before the horizon."""
        if self._outage is not None:
            self._outage = self._now, self._outage[1]
        if not partial:
            self._mark()
        elif self._now > len(self._curve) * self._horizon_s / POINTS:
            self._mark(self._now)
        self._sample()
        self._partial = partial

    def outcome(self) -> Outcome:
        possible, played_s = self._possible or 1.0, self._now if self._partial else self._horizon_s
        return Outcome(
            hours=played_s / 3600,
            steps=self.steps,
            throughput=self._done / (played_s or 1.0),
            partial=self._partial,
            share_of_optimum=self._done / possible,
            idle={cause: lost / possible for cause, lost in self._idle.items()},
            bytes={link: dict(sent) for link, sent in sorted(self._bytes.items())},
            lost_microbatches=self._lost,
            repeated_microbatches=self.repeated,
            events=dict(sorted(self._events.items())),
            recoveries_s=tuple(self._recoveries_s),
            not_recovered=self._outage is not None,
            curve=tuple(self._curve),
        )
