"""Which trainer builds which microbatch: rendezvous hashing, so that losing a trainer moves only its own indices."""

from __future__ import annotations

import hashlib
import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def claimants(step: int, index: int, trainers: Iterable[str], count: int = 1) -> list[str]:
    """The live trainers that should build microbatch ``(step, index)``: one, and ``count`` of them where it was waited for in vain. A
    hint against double work, not a promise."""
    return heapq.nlargest(
        count, trainers, key=lambda t: (hashlib.blake2b(f"{step}/{index}/{t}".encode(), digest_size=8).digest(), t)
    )
