"""A stage keeps accumulators with disjoint sealed sets that cover as many microbatches as possible.

Accumulators cannot be split. When a suspected peer turns out to be alive, two replicas may hold the same microbatch,
and one of the two whole sets must be dropped. Every member computes the same answer from the same announced sets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

EXACT_LIMIT = 16
"""Most conflicting members for which the search is exact (2^16 subsets)."""


@dataclass(frozen=True)
class Cover:
    """``chosen`` members' sets are pairwise disjoint; ``gaps`` are the uncovered microbatches."""

    chosen: tuple[str, ...]
    dropped: tuple[str, ...]
    gaps: tuple[int, ...]


def resolve(sealed: Mapping[str, frozenset[int]], microbatches: int) -> Cover:
    """Returns the disjoint sets with the largest union, so that the fewest of the ``microbatches`` are run again. Ties
    go to the lexicographically first members. Raises ValueError for indices outside 0..microbatches-1."""
    universe = frozenset(range(microbatches))
    for member, indices in sealed.items():
        if not indices <= universe:
            raise ValueError(f"{member} sealed indices outside 0..{microbatches - 1}: {sorted(indices - universe)}")
    members = sorted(sealed)
    holders = Counter(i for indices in sealed.values() for i in indices)
    twice = frozenset(i for i, n in holders.items() if n > 1)
    contested = [m for m in members if sealed[m] & twice]
    free = [m for m in members if not sealed[m] & twice]
    best = _exact(contested, sealed) if len(contested) <= EXACT_LIMIT else _greedy(contested, sealed)
    chosen = tuple(sorted([*free, *best]))
    covered = frozenset().union(*(sealed[m] for m in chosen))
    return Cover(chosen, tuple(m for m in members if m not in chosen), tuple(sorted(universe - covered)))


def _exact(members: list[str], sealed: Mapping[str, frozenset[int]]) -> list[str]:
    """Branch on taking or leaving each member; the first largest union found in this order is the answer everywhere.
    Branches that cannot exceed the best so far are cut: almost all, where few sets overlap."""
    left = [*accumulate((len(sealed[m]) for m in reversed(members)), initial=0)][::-1]
    best: tuple[int, list[str]] = (-1, [])

    def search(k: int, taken: frozenset[int], chosen: list[str]) -> None:
        nonlocal best
        if len(taken) + left[k] <= best[0]:
            return
        if k == len(members):
            best = len(taken), chosen
            return
        member = members[k]
        if not sealed[member] & taken:
            search(k + 1, taken | sealed[member], [*chosen, member])
        search(k + 1, taken, chosen)

    search(0, frozenset(), [])
    return best[1]


def _greedy(members: list[str], sealed: Mapping[str, frozenset[int]]) -> list[str]:
    chosen: list[str] = []
    taken: frozenset[int] = frozenset()
    for member in sorted(members, key=lambda m: (-len(sealed[m]), m)):
        if not sealed[member] & taken:
            chosen.append(member)
            taken |= sealed[member]
    return chosen
