"""A stage's flat gradient is divided for the all-reduce: one contiguous shard for each owner, in chunks that stream."""

from __future__ import annotations

from itertools import pairwise

BLOCK = 4096
"""Elements of a quantisation block. Shards and chunks start on one, so that every sender quantises the same blocks."""
CHUNK = 128 * BLOCK
"""Elements in a chunk: 2 MiB of fp32. Small enough to overlap sending, summing and returning, large enough to
stream."""
LONE_CHUNK, LONE_CHUNKS = 4096 * BLOCK, 64
"""Elements in a chunk of a peer that streams to nobody, at most, and chunks of a small model at least."""


def lone_chunk(n_params: int) -> int:
    """Returns the elements in a chunk where one peer makes the mean alone: enough for all cores, and little beside a
    model that has no room in memory."""
    return max(CHUNK, min(LONE_CHUNK, n_params // LONE_CHUNKS // BLOCK * BLOCK))


def shard_ranges(n_params: int, members: int) -> list[tuple[int, int]]:
    """Returns ``members`` half-open ranges that cover 0..n_params, equal to within a block. Some are empty for tiny
    stages."""
    blocks = -(-n_params // BLOCK)
    bounds = [min(n_params, BLOCK * (blocks * k // members)) for k in range(members + 1)]
    return list(pairwise(bounds))


def chunk_ranges(begin: int, end: int, chunk: int = CHUNK) -> list[tuple[int, int]]:
    """Returns the chunks of one shard, in sending order. ``chunk``: elements in each, whole blocks."""
    return [(a, min(a + chunk, end)) for a in range(begin, end, chunk)]
