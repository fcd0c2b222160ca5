"""A branch of the run's history begins whenever the run rolls back to a checkpoint.

A lineage begins with the label of its branch: the number of rollbacks, then a part of the hash of the last rollback.
Branches are ordered, and frames of abandoned steps are recognised. A peer that meets a later branch gives up its own
unless its side has every stage (``recovery.forks``).
"""

from __future__ import annotations

import hashlib

BRANCH = 8
"""Bytes of a lineage with the label of its branch."""
COUNT = 2
"""Bytes of the label with the number of rollbacks (big endian)."""


def branch_of(lineage: bytes) -> bytes:
    return lineage[:BRANCH]


def hashed(branch: bytes, content: bytes) -> bytes:
    """Returns the lineage that follows from ``content`` on ``branch``."""
    return branch + hashlib.sha256(content).digest()[BRANCH:]


def count_of(lineage: bytes) -> int:
    """Returns the number of rollbacks before ``lineage``."""
    return int.from_bytes(lineage[:COUNT], "big")


def branched(count: int, content: bytes) -> bytes:
    """Returns the first lineage of the branch that rollback number ``count`` begins."""
    digest = hashlib.sha256(content).digest()
    return count.to_bytes(COUNT, "big") + digest[: BRANCH - COUNT] + digest[BRANCH:]
