"""Accounts of a simulated run: work, idle time by cause, bytes by region, recoveries, and curves to draw."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from muletrain.sim.steps.endings import ending_bytes
from muletrain.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.sim.fleet.rates import Counts, Rate, Rates

POINTS = 400
"""Points of each curve."""
SAMPLES = 50
"""Samples of the traffic pattern per play; all traffic since the last sample follows the sampled pattern."""
RECOVERED = 0.95
"""A fleet has recovered at this fraction of its share of the optimum before the departure."""
GoesOn = Callable[[float, float], bool]
"""Called now and then with the virtual time played [s] and the steps done; False ends the play."""
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
    """One point of a curve: means since the previous point. ``peers``: by stage, at the point's time; ``events``:
    counts by name."""

    time_s: float
    throughput: float
    optimum: float
    peers: tuple[int, ...]
    events: dict[str, int]


@dataclass(frozen=True)
class GaveUp:
    """A peer that failed, and was not killed, not expelled and not leaving in order."""

    time_s: float
    peer: str
    why: str


@dataclass(frozen=True)
class Outcome:
    """The result of a play. Throughput in microbatches/s; ``idle``: shares of what all present machines could have
    done, by cause, which sum to 1 with ``share_of_optimum``; ``bytes``: by (from, to) region and class."""

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
    """Seconds from a departure until the fleet uses its machines about as well as before (``RECOVERED``)."""
    not_recovered: bool
    curve: tuple[Point, ...]
    partial: bool = False
    """The play ended early; ``hours`` is the played time."""
    gave_up: tuple[GaveUp, ...] = ()
    """Failed peers in order of time (fidelity 'protocol')."""

    @property
    def failure(self) -> str | None:
        """A sentence about the peers that failed; None: none did."""
        if not self.gave_up:
            return None
        first, others = self.gave_up[0], len(self.gave_up) - 1
        beside = f", and {others} more later" if others else ""
        return f"{first.peer} gave up after {format_duration(first.time_s)}{beside}: {first.why}"

    @property
    def recovery_s(self) -> tuple[float, float]:
        """Median and longest recovery [s]; nan if there was none."""
        found = self.recoveries_s
        return (median(found), max(found)) if found else (math.nan, math.nan)


class Accounts:
    """Adds up stretches of time and changes of membership."""

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
        """Microbatches done and possible since the last point of the curve."""
        self._unsampled = 0.0
        self._sampled = 0
        self._partial = False
        self._counts, self._optimum = counts, self._whole(present)
        self._share = math.nan

    def _whole(self, present: Sequence[int]) -> float:
        return sum(n * v for n, v in zip(present, self._rates.whole_per_s, strict=True))

    def change(self, counts: Sequence[Counts], present: Sequence[int], rate: Rate) -> None:
        """The serving peers (``counts``) or the present machines change now. Recovery is measured only after a first
        departure, because moves between stages take time, too."""
        before = self._share
        self._counts, self._optimum = counts, self._whole(present)
        self._share = self._rates.flowing / self._optimum if self._optimum and rate.throughput else 0.0
        if self._outage is None and self._events["left"] and self._share < RECOVERED * before:
            self._outage = self._now, before
        elif self._outage is not None and self._share >= RECOVERED * self._outage[1]:
            self._recoveries_s.append(self._now - self._outage[0])
            self._outage = None

    def stalled(self, seconds: float) -> None:
        """The run only repeats lost work for ``seconds``."""
        if seconds > 0 and self._outage is None:
            self._recoveries_s.append(seconds)

    def happened(self, what: str) -> None:
        self._events[what] += 1
        self._since[what] += 1

    def pass_time(self, seconds: float, rate: Rate, *, again: bool) -> None:
        """Time passes at ``rate``; ``again``: only lost work is repeated."""
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
        """Add a point to the curve. ``end_s``: when a play ended early."""
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
        """Count the traffic since the last sample, by region."""
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
        for way, nbytes in ending_bytes(cost, counts):
            self._sent(*way, "averaging", nbytes * microbatches / cost.microbatches)

    def fetched(self, kind: int, donors: Sequence[int], nbytes: float) -> None:
        """A machine copied a stage's state from all peers of the stage."""
        for donor, n in enumerate(donors):
            if n:
                self._sent(donor, kind, "state", nbytes * n / sum(donors))

    def _sent(self, a: int, b: int, what: str, nbytes: float) -> None:
        self._bytes[self._kinds[a].region, self._kinds[b].region][what] += nbytes

    def close(self, *, partial: bool = False) -> None:
        """End the play; ``partial``: before the horizon."""
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
