"""This rule decides which checkpoint a run rolls back to when a stage has lost all its peers.

It is a pure function of what the reachable peers report, so peers that ask the same ones get the same result.
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
    """Returns the newest checkpoint of at most ``limit`` steps of which each stage's part can be read, with the digests
    of its parts; of two with as many steps, the one with the higher lineage. ``readable``: by peer, (checkpoint, stage)
    to the digest of each part that it can read. A part whose digest differs from that of the first peer (by id) does
    not count."""
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
    """Returns two of ``peers`` (id: stage, place) with two different places, neither of which is the ``target``; none if
    all share the target. Whichever stage loses all its peers, a copy is elsewhere: they are of stages other than ``stage``
    and the target's. If there are none such, one is of ``stage`` itself, for the target may be lost with its own stage. A
    stage keeps the same ones as long as they live (rendezvous hashing), so no copy is fetched in vain."""
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
