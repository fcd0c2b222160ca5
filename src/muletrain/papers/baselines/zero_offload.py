"""ZeRO-Offload under data parallelism: every GPU computes the whole model, swapping states with the host's memory, and
all members average all gradients (Ren et al. 2021)."""

from __future__ import annotations


def samples_per_s(layer_s: float, layers: int) -> float:
    """Samples/s of one GPU that computes ``layers`` one after another without network."""
    return 1 / (layer_s * layers)


def all_reduce_s(layer_bytes: float, layers: int, bytes_per_s: float) -> float:
    """All gradients out and back. However many members: SWARM's table 2 shows no trace of a ring's (members - 1) /
    members."""
    return 2 * layer_bytes * layers / bytes_per_s
