"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

from __future__ import annotations

FIRST, LARGEST = 2.0**16, 2.0**24
GOOD_STEPS = 2000
"""Steps without a skip before the scale is doubled."""


class LossScale:
    """Factor of the gradients inside the backward pass. A pure function of the sequence of updates, so that replicas
    agree.

    Off (always 1) unless ``fp16``.
    """

    def __init__(self, *, fp16: bool) -> None:
        self._on = fp16
        self.value = FIRST if fp16 else 1.0
        self._good = 0

    def update(self, *, skipped: bool) -> None:
        """After each step of the run: halve after a skipped one, double after ``GOOD_STEPS`` good ones in a row."""
        if not self._on:
            return
        self._good = 0 if skipped else self._good + 1
        if skipped:
            self.value = max(1.0, self.value / 2)
        elif self._good % GOOD_STEPS == 0:
            self.value = min(LARGEST, self.value * 2)
