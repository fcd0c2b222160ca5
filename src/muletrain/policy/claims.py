"""Rendezvous hashing decides which trainer builds which microbatch, so that losing a trainer moves only its own
microbatches."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def claimant(step: int, index: int, trainers: Iterable[str], turn: int = 0) -> str:
    """Returns the live trainer that should build microbatch ``(step, index)``; with each ``turn`` the next one, since
    those before did not. A hint against double work, not a promise. Raises ValueError if there is no trainer."""

    def rank(trainer: str) -> tuple[bytes, str]:
        return hashlib.blake2b(f"{step}/{index}/{trainer}".encode(), digest_size=8).digest(), trainer

    first = max(trainers := [*trainers], key=rank)
    return first if turn == 0 else sorted(trainers, key=rank, reverse=True)[turn % len(trainers)]
