"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

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

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: 'loss_scale', its value and the good steps since it changed; nothing where it is off."""
        return {"loss_scale": torch.tensor([self.value, self._good], dtype=torch.float64)} if self._on else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse; without 'loss_scale' (the state of a run in another precision) it begins anew."""
        if self._on and "loss_scale" in state:
            self.value, good = state["loss_scale"].tolist()
            self._good = int(good)

    def update(self, *, skipped: bool) -> None:
        """After each step of the run: halve after a skipped one, double after ``GOOD_STEPS`` good ones in a row."""
        if not self._on:
            return
        self._good = 0 if skipped else self._good + 1
        if skipped:
            self.value = max(1.0, self.value / 2)
        elif self._good % GOOD_STEPS == 0:
            self.value = min(LARGEST, self.value * 2)
