"""DeDLOC: elastic data parallelism. Every peer computes the whole model at its own pace until all together have a
batch, then all average it (Diskin et al. 2021, sec. 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def batch_s(
    samples: float, samples_per_s: Sequence[float], lost: Sequence[float], model_bytes: float, bytes_per_s: float
) -> float:
    """Time of a batch [s]. ``lost``: the share of each peer's work that goes with it when it leaves before the average;
    averaging does not overlap with the next batch, and sends and takes the whole model."""
    kept = sum(speed * (1 - share) for speed, share in zip(samples_per_s, lost, strict=True))
    return samples / kept + 2 * model_bytes / bytes_per_s
