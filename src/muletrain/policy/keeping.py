"""Who keeps a stage's part of a checkpoint where not all peers share the place that it is written to (DESIGN
"Checkpoints")."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

COPIES = 2


def keepers(peers: Mapping[str, tuple[int, str]], stage: int, target: str) -> tuple[str, ...]:
    """Of ``peers`` (id: stage, place), two of other stages on places of their own, not the ``target`` and not one place
    twice; nobody where all share the target. The same ones for a stage as long as they live (rendezvous hashing), so
    that nobody fetches in vain."""
    if all(place == target for _, place in peers.values()):
        return ()
    able = sorted(
        (p for p, (s, place) in peers.items() if s != stage and place != target), key=lambda p: _rank(stage, p)
    )
    chosen: dict[str, str] = {}
    for peer in able:
        chosen.setdefault(peers[peer][1], peer)
    return tuple(list(chosen.values())[:COPIES])


def _rank(stage: int, peer: str) -> bytes:
    return hashlib.sha256(f"{stage}/{peer}".encode()).digest()
