"""This rule decides which checkpoint a run rolls back to when a stage has lost all peers.

The decision is a pure function of the reports of reachable peers, so equal reports give equal results.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


Base = tuple[int, bytes]
"""A checkpoint: steps done, lineage."""


def newest_complete(
    readable: Mapping[str, Mapping[tuple[Base, int], bytes]], stages: int, limit: int
) -> tuple[Base, tuple[bytes, ...]] | None:
    """Returns the newest checkpoint of at most ``limit`` steps with a readable part for each stage, and the parts'
    digests; of two with equal steps, the one with the higher lineage. ``readable``: by peer, (checkpoint, stage) to the
    digest of each readable part. The first peer's (by id) digest of a part counts, a different one does not."""
    found: dict[Base, dict[int, bytes]] = {}
    for _, own in sorted(readable.items()):
        for (base, stage), digest in own.items():
            if base[0] <= limit:
                found.setdefault(base, {}).setdefault(stage, digest)
    whole = [base for base, parts in found.items() if parts.keys() == set(range(stages))]
    if not whole:
        return None
    return max(whole), tuple(digest for _, digest in sorted(found[max(whole)].items()))


COPIES = 2
"""Copies of a part beside the one at the target."""


def keepers(peers: Mapping[str, tuple[int, str]], stage: int, target: str) -> tuple[str, ...]:
    """Returns two of ``peers`` (id: stage, place) with two different places, neither of which is the ``target``; none
    if all share the target. Whichever stage loses all peers, a copy is elsewhere: the keepers are of stages other than
    ``stage`` and the target's. Without such peers, one keeper is of ``stage``, for the target may be lost with the
    target's stage. Keepers stay the same while alive (rendezvous hashing), so no copy is fetched in vain."""
    if all(place == target for _, place in peers.values()):
        return ()
    homes = {s for s, place in peers.values() if place == target}
    able = sorted((p for p, (_, place) in peers.items() if place != target), key=lambda p: _rank(stage, p))
    others = [p for p in able if peers[p][0] != stage]
    if len(homes) == 1 and stage not in homes:
        apart = [p for p in others if peers[p][0] not in homes]
        first = apart or [p for p in able if peers[p][0] == stage][:1]
        others = [*first, *(p for p in others if p not in first)]
    chosen: dict[str, str] = {}
    for peer in others:
        chosen.setdefault(peers[peer][1], peer)
    return tuple(list(chosen.values())[:COPIES])


def _rank(stage: int, peer: str) -> bytes:
    return hashlib.sha256(f"{stage}/{peer}".encode()).digest()
