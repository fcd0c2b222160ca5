"""This rule decides which checkpoint a run rolls back to when a stage has lost all its peers.

It is a pure function of what the reachable peers report, so peers that ask the same ones get the same result.
"""

from __future__ import annotations

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
