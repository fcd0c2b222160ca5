"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018), and the count of skipped updates."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, LEAST, LARGEST = 2.0**16, 2.0**-24, 2.0**24
HALVED = 4
"""Skips in a row that each halve the scale. Each further one takes twice the factor of the one before, so ten skips reach
every scale that a loss can need."""
GOOD_STEPS = 2000
"""Steps without a skip before the scale is doubled."""
SKIPPED = "skipped"
"""Name of the count of skips in a state."""


class LossScale:
    """Scales the loss, and so the gradients inside the backward pass. The scale and the count of skips are pure functions
    of the sequence of updates, so all peers agree. Without ``fp16`` the scale is always 1."""

    def __init__(self, *, fp16: bool, versions: int = 1) -> None:
        """``versions``: how many weights are in use at once (``StageArithmetic``); each has a scale."""
        self._on = fp16
        self._values = [FIRST if fp16 else 1.0] * versions
        self._good = 0
        self.skipped = 0
        """Updates skipped in a row, up to the last one."""
        self._next = 0

    def of(self, step: int) -> float:
        """The scale that ``step`` computes with."""
        return self._values[step % len(self._values)]

    def state(self) -> dict[str, Tensor]:
        """The state for checkpoints. 'loss_scale' (fp16 alone): the newest value, the good steps since it changed, and
        the older value if in use. 'skipped' [1]: the updates skipped in a row, if any."""
        *older, newest = (self.of(self._next + k) for k in range(len(self._values)))
        scale = {"loss_scale": torch.tensor([newest, self._good, *older], dtype=torch.float64)} if self._on else {}
        return scale | ({SKIPPED: torch.tensor([self.skipped], dtype=torch.float64)} if self.skipped else {})

    def load_state(self, state: dict[str, Tensor], step: int) -> None:
        """Load a ``state``. Without 'loss_scale' (a run in another precision) the scale keeps the first value."""
        self.skipped = int(state[SKIPPED].sum()) if SKIPPED in state else 0
        if self._on and "loss_scale" in state:
            newest, good, *older = state["loss_scale"].tolist()
            self._good, self._next = int(good), step
            for k, value in enumerate([*older, newest]):
                self._values[(step + k) % len(self._values)] = value

    def update(self, step: int, *, skipped: bool) -> None:
        """After ``step``: lower the scale after a skipped one (``HALVED``), double it after ``GOOD_STEPS`` good ones in a
        row."""
        self.skipped = self.skipped + 1 if skipped else 0
        if not self._on:
            return
        self._good = 0 if skipped else self._good + 1
        value = self.of(step + len(self._values) - 1)  # the newest
        if skipped:
            value = max(LEAST, value / 2 ** max(1, self.skipped - HALVED + 1))
        elif self._good % GOOD_STEPS == 0:
            value = min(LARGEST, value * 2)
        self._values[step % len(self._values)], self._next = value, step + 1
