"""Baselines in which every peer computes the whole model, and all average their gradients.

DeDLOC: elastic data parallelism. Every peer computes at its own pace until all together have a batch (Diskin et al.
2021, sec. 3). ZeRO-Offload: every GPU swaps states with the host's memory (Ren et al. 2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def dedloc_batch_s(
    samples: float, samples_per_s: Sequence[float], lost: Sequence[float], model_bytes: float, bytes_per_s: float
) -> float:
    """Time of a batch [s]. ``lost``: the share of each peer's work that goes with it when it leaves before the average;
    averaging does not overlap with the next batch, and sends and takes the whole model."""
    kept = sum(speed * (1 - share) for speed, share in zip(samples_per_s, lost, strict=True))
    return samples / kept + 2 * model_bytes / bytes_per_s


def offloading_samples_per_s(layer_s: float, layers: int) -> float:
    """Samples/s of one GPU that computes ``layers`` one after another without network."""
    return 1 / (layer_s * layers)


def all_reduce_s(layer_bytes: float, layers: int, bytes_per_s: float) -> float:
    """All gradients out and back. However many members: SWARM's table 2 shows no trace of a ring's (members - 1) /
    members."""
    return 2 * layer_bytes * layers / bytes_per_s
