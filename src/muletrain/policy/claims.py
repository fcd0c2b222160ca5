"""Which trainer builds which microbatch: rendezvous hashing, so that losing a trainer moves only its own indices."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def claimant(step: int, index: int, trainers: Iterable[str]) -> str:
    """The live trainer that should build microbatch ``(step, index)``. A hint against double work, not a promise.

    Raises ValueError when there is no trainer.
    """
    return max(trainers, key=lambda t: (hashlib.blake2b(f"{step}/{index}/{t}".encode(), digest_size=8).digest(), t))
