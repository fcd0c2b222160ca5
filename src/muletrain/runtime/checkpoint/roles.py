"""Who coordinates a checkpoint, who writes a stage's part, and who keeps a copy of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muletrain.policy.keeping import keepers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.store import CheckpointStore, Key, PartFacts
    from muletrain.runtime.members.roster import Roster


@dataclass(frozen=True)
class Book:
    """Where this peer writes checkpoints and what makes them self-contained: the manifest's own fields, and other
    files. It stays the same when the peer moves or begins anew."""

    place: CheckpointStore
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    parts: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """In the place, of checkpoints that need not be complete. Only the event loop touches it."""
    complete: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """What was in the place when it could be read last."""


class Roles:
    """Follow from the roster at every moment, so that the next peer takes over where the last one stopped. Owns
    nothing."""

    def __init__(self, roster: Roster, book: Book) -> None:
        self._roster, self._book = roster, book

    @property
    def coordinator(self) -> PeerId | None:
        coordinator = self._roster.coordinator()
        return None if coordinator is None else coordinator.id

    def coordinates(self) -> bool:
        """Does this peer?"""
        return self.coordinator == self._roster.own.id

    @property
    def target(self) -> str:
        """The name of the place that checkpoints go to."""
        coordinator = self._roster.coordinator()
        return "" if coordinator is None else coordinator.place

    def shares_target(self) -> bool:
        """Does this peer?"""
        return self._book.place.name == self.target

    def writer(self, stage: int) -> PeerId | None:
        """Of the stage's live peers one that shares the place is the best, then the first."""
        roster, place = self._roster, self.target
        return min(roster.stage(stage), key=lambda p: (roster.member(p).place != place, p), default=None)

    def is_writer(self) -> bool:
        """Is this peer, of its stage?"""
        return self.writer(self._roster.own.stage) == self._roster.own.id

    def keepers(self, stage: int, there: PeerId) -> tuple[PeerId, ...]:
        """Of the live peers, and of ``there``, those that keep ``stage``'s parts beside the place."""
        members = [m for m in self._roster.members() if self._roster.is_alive(m.id) or m.id == there]
        places = {m.id: (m.stage, m.place) for m in members if m.place}
        return keepers(places, stage, self.target)
