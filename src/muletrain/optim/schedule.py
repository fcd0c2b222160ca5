"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muletrain.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate [1] of ``step`` (0 .. total_steps - 1).

    Linear warm-up (over a tenth of the run unless told otherwise), (step + 1) / warmup of the peak, so that no step is
    lost. Then the rate falls to ``final_lr`` times the peak at the last step.
    """
    warmup = total_steps // 10 if config.warmup is None else config.warmup
    if step < warmup:
        return config.lr * (step + 1) / warmup
    last = total_steps - 1
    progress = min(1.0, (step - warmup) / max(1, last - warmup))
    return config.lr * (config.final_lr + (1 - config.final_lr) * _remaining(config.schedule, progress))


def _remaining(schedule: str, progress: float) -> float:
    """Share of the way from ``final_lr`` to the peak; 1 at progress 0."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if schedule == "linear" else 1.0
