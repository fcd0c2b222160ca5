"""This rule decides which peers keep a copy of a stage's part of a checkpoint, if not all share the place that it is
written to."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

COPIES = 2
"""Copies of a part beside the one at the target."""


def keepers(peers: Mapping[str, tuple[int, str]], stage: int, target: str) -> tuple[str, ...]:
    """Returns two of ``peers`` (id: stage, place), of other stages and with two different places, neither of which is
    the ``target``; none if all share the target. A stage keeps the same ones as long as they live (rendezvous hashing),
    so no copy is fetched in vain."""
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
