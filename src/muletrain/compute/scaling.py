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

    def __init__(self, *, fp16: bool, versions: int = 1) -> None:
        """``versions``: of the weights, in use at once (``StageWeights``); the scale goes with them."""
        self._on = fp16
        self._values = [FIRST if fp16 else 1.0] * versions
        self._good = 0
        self._next = 0

    def of(self, step: int) -> float:
        """What ``step`` computes with."""
        return self._values[step % len(self._values)]

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: 'loss_scale', its newest value, the good steps since it changed, and the older value if one
        is in use; nothing where it is off."""
        *older, newest = (self.of(self._next + k) for k in range(len(self._values)))
        return {"loss_scale": torch.tensor([newest, self._good, *older], dtype=torch.float64)} if self._on else {}

    def load_state(self, state: dict[str, Tensor], step: int) -> None:
        """The inverse; without 'loss_scale' (the state of a run in another precision) it begins anew."""
        if self._on and "loss_scale" in state:
            newest, good, *older = state["loss_scale"].tolist()
            self._good, self._next = int(good), step
            for k, value in enumerate([*older, newest]):
                self._values[(step + k) % len(self._values)] = value

    def update(self, step: int, *, skipped: bool) -> None:
        """After ``step``: halve after a skipped one, double after ``GOOD_STEPS`` good ones in a row."""
        if not self._on:
            return
        self._good = 0 if skipped else self._good + 1
        value = self.of(step + len(self._values) - 1)  # the newest
        if skipped:
            value = max(1.0, value / 2)
        elif self._good % GOOD_STEPS == 0:
            value = min(LARGEST, value * 2)
        self._values[step % len(self._values)], self._next = value, step + 1
