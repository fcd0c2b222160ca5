"""A fold over the steps of a run: how far it is, how fast, and at what loss."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muletrain.events import StepDone

SMOOTHING = 0.9
"""Weight of the past in the shown loss: about the last ten steps."""
WINDOW = 20
"""Steps over which speed is measured."""


class Pace:
    """What the steps folded so far tell. Two peers may both report a step."""

    def __init__(self) -> None:
        self.step = 0
        """Steps done; fewer than before after a rollback."""
        self.end_s = -math.inf
        """Wall time at which the last step ended."""
        self._begin_s = math.inf
        self._tokens: dict[int, int] = {}
        """Of each step."""
        self._loss = self._weight = 0.0
        self._recent: deque[StepDone] = deque(maxlen=WINDOW)
        self._seen: set[tuple[int, str]] = set()

    def fold(self, event: StepDone) -> bool:
        """Take in a step. Returns False if it was reported before."""
        if (event.step, event.lineage) in self._seen:
            return False
        self._seen.add((event.step, event.lineage))
        self.step = event.step
        self._tokens[event.step] = event.tokens
        self._begin_s, self.end_s = min(self._begin_s, event.t - event.duration_s), max(self.end_s, event.t)
        self._recent.append(event)
        if math.isfinite(event.loss):
            self._loss = SMOOTHING * self._loss + (1 - SMOOTHING) * event.loss
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        return True

    @property
    def loss(self) -> float:
        """Smoothed training loss [nats/token]; NaN before the first step."""
        return self._loss / self._weight if self._weight else math.nan

    @property
    def tokens(self) -> int:
        """Tokens of all steps up to the current one. A step that was done twice counts once."""
        return sum(tokens for step, tokens in self._tokens.items() if step <= self.step)

    @property
    def seconds(self) -> float:
        """Time from the start of the first step to the end of the last, including waits [s]."""
        return max(0.0, self.end_s - self._begin_s) if self._tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Speed of the whole fleet over the last steps; NaN before the first step."""
        seconds = sum(e.duration_s for e in self._recent)
        return sum(e.tokens for e in self._recent) / seconds if seconds else math.nan

    def seconds_left(self, steps: int) -> float:
        """Time to the end of a run of ``steps`` at the speed of the last ones; NaN before the first step."""
        if not self._recent:
            return math.nan
        return max(0, steps - self.step) * sum(e.duration_s for e in self._recent) / len(self._recent)
