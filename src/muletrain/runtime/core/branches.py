"""Branches of the run's history: one begins whenever the run steps back to a checkpoint (DESIGN "Checkpoints").

A lineage begins with its branch: a count of the steps back, then some of the hash of the one that began it. Branches
are ordered, so that whoever meets a later one gives up its own, and frames of abandoned steps are told from those that
count.
"""

from __future__ import annotations

import hashlib

BRANCH = 8
"""Bytes of a lineage."""
COUNT = 2
"""Of these, the count (big endian)."""


def branch_of(lineage: bytes) -> bytes:
    return lineage[:BRANCH]


def hashed(branch: bytes, content: bytes) -> bytes:
    """The lineage that follows from ``content`` on ``branch``."""
    return branch + hashlib.sha256(content).digest()[BRANCH:]


def count_of(lineage: bytes) -> int:
    """Steps back before it."""
    return int.from_bytes(lineage[:COUNT], "big")


def branched(count: int, content: bytes) -> bytes:
    """The first lineage of a branch, the ``count``-th step back."""
    digest = hashlib.sha256(content).digest()
    return count.to_bytes(COUNT, "big") + digest[: BRANCH - COUNT] + digest[BRANCH:]
