"""A fold over the steps of a run: progress, speed and loss. Repeated steps count once: after a step back or a resume,
the fold continues as if the repeated steps had not been taken before."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from muletrain.events import StepDone

SMOOTHING = 0.9
"""Weight of the past in the shown loss: about the last ten steps."""
WINDOW = 20
"""Steps over which speed is measured."""
KNOWN = 3
"""Steps, the first one aside, from which the time of the next ones is estimated."""
OUTLIER = 3.0
"""A step counts as at most so many medians: one that waited for a lost peer says little about the next ones."""
OVERDUE = 2.0
"""Multiple of the longest recent step, after which the next one is overdue."""


class _Sums(NamedTuple):
    """Over all steps up to one. ``loss`` and ``weight``: decaying with the steps since then."""

    loss: float
    weight: float
    tokens: int


NOTHING = _Sums(0.0, 0.0, 0)


class Pace:
    """Figures of the steps folded so far. Two peers may both report a step."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done; fewer than before after a step back."""
        self.left = 0
        """Steps that were done before the last step back."""
        self.end_s = -math.inf
        """Wall time at which the last step ended."""
        self._begin_s = math.inf
        self._before_s = 0.0
        """Time of earlier processes that trained the run."""
        self._sums = {0: NOTHING}
        """By steps done."""
        self._recent: deque[StepDone] = deque(maxlen=WINDOW)
        self._steady: deque[float] = deque(maxlen=WINDOW)
        """Durations [s] of the last steps but the first, in which processes also load code and reserve memory."""
        self._seen: set[tuple[int, str]] = set()

    def begin(self, step: int) -> None:
        """Processes begin to train the run after ``step``, perhaps in place of earlier ones."""
        self._before_s, self._begin_s, self.end_s = self.seconds, math.inf, -math.inf
        self._recent.clear()
        self._steady.clear()
        self.back_to(step)
        self.left = step

    def back_to(self, step: int) -> None:
        """Go on after ``step``: later steps will be taken again."""
        self.left, self.step = self.step, step
        self._sums = {k: sums for k, sums in self._sums.items() if k <= step}
        self._seen = {(k, lineage) for k, lineage in self._seen if k <= step}

    def fold(self, event: StepDone) -> bool:
        """Take in a step. Returns False if reported before."""
        if (event.step, event.lineage) in self._seen:
            return False
        self._seen.add((event.step, event.lineage))
        nearest = event.step - 1 if event.step - 1 in self._sums or event.step <= self.step else self.step
        before = self._sums.get(nearest, NOTHING)
        loss, weight = before.loss, before.weight
        if math.isfinite(event.loss):
            loss = SMOOTHING * loss + (1 - SMOOTHING) * event.loss
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        self._sums[event.step] = _Sums(loss, weight, before.tokens + event.tokens)
        self.step = event.step
        if self._recent:
            self._steady.append(event.duration_s)
        self._begin_s, self.end_s = min(self._begin_s, event.t - event.duration_s), max(self.end_s, event.t)
        self._recent.append(event)
        return True

    @property
    def _now(self) -> _Sums:
        return self._sums.get(self.step, NOTHING)

    @property
    def loss(self) -> float:
        """Smoothed training loss [nats/token]; NaN before the first step."""
        return self._now.loss / self._now.weight if self._now.weight else math.nan

    @property
    def tokens(self) -> int:
        """Tokens of all steps up to the current one, as far as known."""
        return self._now.tokens

    @property
    def seconds(self) -> float:
        """Time from the start of the first step to the end of the last, including waits, but without the time in which
        no process trained the run [s]."""
        return self._before_s + max(0.0, self.end_s - self._begin_s)

    def tokens_per_s(self, now: float | None = None) -> float:
        """Speed of the whole fleet over the last steps; NaN before the first step. ``now``: wall time [s]; once a step is
        overdue, the time without one counts, too, so the speed of a run that stands still goes to zero."""
        seconds = sum(e.duration_s for e in self._recent) + self._overdue_s(now)
        return sum(e.tokens for e in self._recent) / seconds if seconds else math.nan

    def seconds_left(self, steps: int, now: float | None = None) -> float:
        """Time to the end of a run of ``steps`` at the speed of the last ones; NaN until enough are known, and once a
        step is overdue."""
        if len(self._steady) < KNOWN or self._overdue_s(now):
            return math.nan
        most = OUTLIER * statistics.median(self._steady)
        return max(0, steps - self.step) * statistics.fmean(min(seconds, most) for seconds in self._steady)

    def _overdue_s(self, now: float | None) -> float:
        """Time since the next step should have ended [s]."""
        if now is None or not self._recent:
            return 0.0
        return max(0.0, now - self.end_s - OVERDUE * max(e.duration_s for e in self._recent))
