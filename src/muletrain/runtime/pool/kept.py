"""What a server keeps of each part of a step until its gradient is in the server's own accumulator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.policy.pool import Part, Pass

if TYPE_CHECKING:
    from collections.abc import Collection

    from muletrain.network.base import PeerId
    from muletrain.wire.codec import Encoded

Place = tuple[int, int]
"""Microbatch and first sequence of a part."""


@dataclass
class KeptPart:
    """Everything from which the gradient of a part can be computed again. ``forward_at``: the worker that has its
    forward; ``at``: the one in whose accumulator its gradient is; None: it is in none."""

    rows: int
    inputs: Encoded
    targets: Encoded | None = None
    gradient: Encoded | None = None
    forward_at: PeerId | None = None
    at: PeerId | None = None


class KeptParts:
    """The parts of one step at one server."""

    def __init__(self) -> None:
        self._under_way: dict[int, dict[int, KeptPart]] = {}
        """By microbatch and first sequence: parts as the latest pass through the microbatch cut them."""
        self._accumulated: dict[Place, KeptPart] = {}
        """Parts whose gradients were computed and are not here."""

    def begin(self, index: int) -> None:
        """A microbatch begins to pass through, perhaps not for the first time."""
        self._under_way[index] = {}

    def keep(self, part: Part, inputs: Encoded, targets: Encoded | None) -> None:
        """A part of a microbatch that passes through is given out."""
        self._under_way[part.index][part.first] = KeptPart(part.rows, inputs, targets)

    def find(self, part: Part) -> KeptPart | None:
        """Returns what is kept for computing ``part``."""
        if part.what is Pass.AGAIN:
            return self._accumulated.get((part.index, part.first))
        return self._under_way.get(part.index, {}).get(part.first)

    def cut(self, index: int) -> dict[int, KeptPart]:
        """Returns the parts of a microbatch that passes through, by first sequence."""
        return dict(sorted(self._under_way.get(index, {}).items()))

    def accumulated(self, part: Part, worker: PeerId) -> None:
        """The gradient of ``part`` is in the accumulator of ``worker``."""
        found = self.find(part)
        assert found is not None  # it was given out
        found.at = worker
        self._accumulated[part.index, part.first] = found

    def through(self, index: int) -> None:
        """A microbatch has passed through, or will not: only what is needed for its gradient stays."""
        self._under_way.pop(index, None)

    def holders(self) -> dict[PeerId, set[Place]]:
        """Returns the parts whose gradient is in an accumulator of another worker."""
        found = defaultdict[str, set[Place]](set)
        for place, kept in self._accumulated.items():
            if kept.at is not None:
                found[kept.at].add(place)
        return dict(found)

    def arrived(self, places: Collection[Place]) -> None:
        """The gradients of these parts are here."""
        for place in places:
            del self._accumulated[place]

    def take_back(self, index: int) -> set[PeerId]:
        """A microbatch does not count. Returns the workers that have accumulated parts of it."""
        found = {place: kept.at for place, kept in self._accumulated.items() if place[0] == index}
        for place in found:
            del self._accumulated[place]
        return {worker for worker in found.values() if worker is not None}

    def lost(self, worker: PeerId) -> list[tuple[int, int, int]]:
        """What ``worker`` had is gone. Returns (microbatch, first sequence, sequences) of what is to be computed again."""
        for parts in self._under_way.values():
            for kept in parts.values():
                if kept.forward_at == worker:
                    kept.forward_at = None
        gone = [(place, kept) for place, kept in self._accumulated.items() if kept.at == worker]
        for _, kept in gone:
            kept.at = None
        return [(index, first, kept.rows) for (index, first), kept in gone]

    @property
    def complete(self) -> bool:
        """Are all gradients here?"""
        return not self._accumulated
