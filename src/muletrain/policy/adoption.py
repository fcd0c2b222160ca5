"""Where a run steps back to when a stage has lost all its peers, and who adopts that stage (DESIGN "Checkpoints").

Pure functions of what the peers that can be reached say of themselves: whoever asks the same peers comes to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Base = tuple[int, bytes]
"""A checkpoint: steps done, lineage."""


@dataclass(frozen=True)
class Standing:
    """One peer's. ``targets``: other stages that its memory has room for; ``parts``: (checkpoint, stage) to the digest of each part
    that it can read."""

    stage: int
    targets: frozenset[int]
    parts: Mapping[tuple[Base, int], bytes]


def newest_complete(
    standings: Mapping[str, Standing], stages: int, limit: int
) -> tuple[Base, tuple[bytes, ...]] | None:
    """The newest checkpoint of at most ``limit`` steps of which somebody has each stage's part, with their digests; of two of as many
    steps, the one with the higher lineage. Parts of other digests than the first peer's (by id) are others."""
    found: dict[Base, dict[int, bytes]] = {}
    for _, standing in sorted(standings.items()):
        for (base, stage), digest in standing.parts.items():
            if base[0] <= limit:
                found.setdefault(base, {}).setdefault(stage, digest)
    whole = [base for base, parts in found.items() if parts.keys() == set(range(stages))]
    if not whole:
        return None
    return max(whole), tuple(digest for _, digest in sorted(found[max(whole)].items()))


def adopters(standings: Mapping[str, Standing], work: Sequence[float]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Who moves where, so that each stage has a peer, and the stages for which there is nobody. ``work``: each stage's cost.

    Stages that much depends on come first. A peer comes from the stage that has most left of what it needs (peers per work), never the
    last one of it; of its peers the best is one that has a part of the lost stage already, then the first by id.
    """
    stages = len(work)
    serving = {s: sorted(p for p, standing in standings.items() if standing.stage == s) for s in range(stages)}
    lost = sorted((s for s in range(stages) if not serving[s]), key=lambda s: (-work[s], s))
    moves: dict[str, int] = {}
    missing = []
    for stage in lost:
        able = [
            (len(peers) / max(work[source], 1e-12), _has_part(standings[p], stage), p)
            for source, peers in serving.items()
            if len(peers) > 1
            for p in peers
            if stage in standings[p].targets
        ]
        if not able:
            missing.append(stage)
            continue
        peer = min(able, key=lambda a: (-a[0], not a[1], a[2]))[2]
        serving[standings[peer].stage].remove(peer)
        moves[peer] = stage
    return moves, tuple(sorted(missing))


def _has_part(standing: Standing, stage: int) -> bool:
    return any(s == stage for _, s in standing.parts)
