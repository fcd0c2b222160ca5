"""Deadlines follow from measured times, after TCP's retransmission timer (RFC 6298): mean plus four deviations, doubled
on retry."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

FLOOR_S = 2.0
"""Shortest deadline [s]: a shorter one takes a busy machine's scheduling for a fault."""
RECENT = 15
"""Measurements that ``Usual`` remembers."""
UNMEASURED_S = 30.0
"""Deadline before the first measurement [s]: long enough for a first step on a cold machine."""
CEILING_S = 600.0
MOST = 4.0
"""One answer counts for so many times the deadline at most."""
IDLE, MOST_RESTS = 3, 16
"""Steps in a row without work, after which a client sits steps out, and the largest number of such steps: at first one
or two, then twice as many each time."""


class Deadline:
    """Says how long to wait for one kind of answer."""

    def __init__(self, unmeasured_s: float = UNMEASURED_S, floor_s: float = FLOOR_S, deviations: float = 4.0) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0
        self._unmeasured_s = unmeasured_s
        self._floor_s = floor_s
        self._deviations = deviations

    @property
    def known(self) -> bool:
        """Was anything measured?"""
        return self._mean_s is not None

    def measured(self, seconds: float) -> None:
        """An answer took ``seconds``. Except for the first answer, at most ``MOST`` times the deadline counts: this
        machine may have slept meanwhile."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
        else:
            seconds = min(seconds, MOST * self.seconds(longest_s=math.inf))
            self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (seconds - self._mean_s) / 8

    def seconds(self, attempt: int = 0, longest_s: float = CEILING_S) -> float:
        """Returns the deadline of try number ``attempt``, from 0; at most ``longest_s``."""
        base = self._unmeasured_s if self._mean_s is None else self._mean_s + self._deviations * self._deviation_s
        return min(longest_s, max(self._floor_s, base) * 2.0 ** min(attempt, 10))


class Usual:
    """Says when a wait becomes unusual: after a multiple of the median of recent measurements. Unlike mean and
    deviation, a median forgets a cold start or a stall as soon as most measurements are of something else."""

    def __init__(
        self, unmeasured_s: float, floor_s: float, times: float, slow_times: float = 0.0, longest_s: float = CEILING_S
    ) -> None:
        """``slow_times``: wait at least this multiple of the second slowest measurement, for where slow answers are as
        usual as fast ones, as on a link that is full now and then. ``longest_s``: no wait is longer."""
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._base_s: float | None = None
        """Computed from ``_recent_s``; None: not yet."""
        self._unmeasured_s, self._floor_s, self._times, self._slow_times = unmeasured_s, floor_s, times, slow_times
        self._longest_s = longest_s

    def measured(self, seconds: float) -> None:
        """An answer took ``seconds``."""
        self._recent_s.append(seconds)
        self._base_s = None

    @property
    def known(self) -> bool:
        """Was anything measured?"""
        return bool(self._recent_s)

    @property
    def median_s(self) -> float:
        """Of the recent answers; there must be one."""
        return statistics.median(self._recent_s)

    @property
    def fastest_s(self) -> float:
        """Of the recent answers; there must be one."""
        return min(self._recent_s)

    def seconds(self, attempt: int = 0) -> float:
        """Returns the wait of try number ``attempt``, from 0; doubles."""
        if self._base_s is None and self._recent_s:
            slow_s = sorted(self._recent_s)[max(0, len(self._recent_s) - 2)]
            self._base_s = max(self._times * statistics.median(self._recent_s), self._slow_times * slow_s)
        base = self._unmeasured_s if self._base_s is None else self._base_s
        return min(self._longest_s, max(self._floor_s, base) * 2.0 ** min(attempt, 10))


class Pulse:
    """Tells whether repeated work goes on: the pause since the last time is not unusually long."""

    def __init__(self, times: float) -> None:
        """``times``: a pause of more than this many usual ones is unusual."""
        self._usual = Usual(unmeasured_s=0.0, floor_s=0.0, times=times)
        self._last_s = -math.inf

    def beat(self, now: float) -> None:
        if self._last_s > -math.inf:
            self._usual.measured(now - self._last_s)
        self._last_s = now

    def goes_on_s(self, now: float, longest_s: float) -> float:
        """Returns for how many more seconds the work counts as going on without another beat; 0 or less: not any more.
        Pauses of more than ``longest_s`` are unusual, too."""
        return self._last_s + min(self._usual.seconds(), longest_s) - now


class RetryBudget:
    """A token bucket: work that is done once pays for work that is done twice, so lateness does not cause more load."""

    def __init__(self, most: float, share: float) -> None:
        """``most``: retries that may follow each other; ``share``: part of a retry earned by each success."""
        self._left = self._most = most
        self._share = share

    def succeeded(self) -> None:
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Take one retry. Returns False if none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Rests:
    """Says which steps a client sits out. If a client always comes too late or finds no work, fetching weights in each
    step is load for nothing; without that client, other clients may come in time."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._idle = self._left = 0

    def takes_part(self, *, worked: bool) -> bool:
        """A step begins. ``worked``: the client got work in the last step with participation."""
        if self._left:
            self._left -= 1
            return not self._left
        self._idle = 0 if worked else self._idle + 1
        if self._idle < IDLE:
            return True
        self._left = self._draw.randint(1, min(MOST_RESTS, 2 ** (self._idle - IDLE + 1)))
        return False


def backoff_s(times: int, first_s: float, longest_s: float) -> float:
    """Returns the pause after ``times`` earlier tries: doubles, up to ``longest_s``."""
    # a float overflows at 2**1024, and some callers try for hours
    return min(longest_s, first_s * 2.0 ** min(times, 30))
