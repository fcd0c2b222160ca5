"""This rule decides which checkpoint a run rolls back to when a stage has lost all peers.

The decision is a pure function of the reports of reachable peers, so equal reports give equal results.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Set


Base = tuple[int, bytes]
"""A checkpoint: steps done, lineage."""


def newest_complete(
    readable: Mapping[str, Mapping[tuple[Base, int], bytes]], stages: int, limit: int, missed: Set[bytes] = frozenset()
) -> tuple[Base, tuple[bytes, ...]] | None:
    """Returns the newest checkpoint of at most ``limit`` steps with a readable part for each stage, and the parts'
    digests; of two with equal steps, the one with the higher lineage. ``readable``: by peer, (checkpoint, stage) to the
    digest of each readable part. The digest that most peers say counts, then the first peer's (by id). ``missed``:
    digests of parts that could not be had after all. A checkpoint with such a part comes last, for disks may recover;
    and checkpoints whose parts two peers can read come first then, for one peer may lie."""
    held: defaultdict[tuple[Base, int], Counter[bytes]] = defaultdict(Counter)
    for _, own in sorted(readable.items()):
        for part, digest in own.items():
            held[part][digest] += 1

    def best(part: tuple[Base, int]) -> tuple[bool, int, bytes]:
        """Can it be had, as far as known? How many say so, and what is its digest?"""
        first = max(held[part], key=lambda digest: (digest not in missed, held[part][digest]))
        return first not in missed, min(held[part][first], 1 + bool(missed)), first

    bases = {base for base, _ in held if base[0] <= limit}
    whole = {b: [best((b, s)) for s in range(stages)] for b in bases if all((b, s) in held for s in range(stages))}
    if not whole:
        return None
    base = max(whole, key=lambda b: (all(had for had, *_ in whole[b]), min(count for _, count, _ in whole[b]), b))
    return base, tuple(digest for *_, digest in whole[base])


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
