"""The roles of peers in a checkpoint: its coordinator, the writer of each part, and the keepers of copies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from muletrain.policy.checkpoints import keepers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.network.base import PeerId
    from muletrain.runtime.checkpoint.store import CheckpointStore, Key, PartFacts
    from muletrain.runtime.members.roster import Roster


@dataclass(frozen=True)
class Book:
    """This peer's place for checkpoints, and the manifest fields and files that make them self-contained. It outlives
    moves and restarts of the peer."""

    place: CheckpointStore
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    parts: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """Parts in the place, also of incomplete checkpoints. Only the event loop's thread uses it."""
    complete: dict[Key, dict[int, PartFacts]] = field(default_factory=dict)
    """The complete checkpoints when the place was last read."""


class Roles:
    """Roles follow from the roster at every moment, so another peer takes over when one goes. Owns nothing."""

    def __init__(self, roster: Roster, book: Book) -> None:
        self._roster, self._book = roster, book

    @property
    def coordinator(self) -> PeerId | None:
        """The peer that gathers the parts and publishes the checkpoint."""
        coordinator = self._roster.coordinator()
        return None if coordinator is None else coordinator.id

    def coordinates(self) -> bool:
        """Is this peer the coordinator?"""
        return self.coordinator == self._roster.own.id

    @property
    def target(self) -> str:
        """The name of the place that checkpoints go to."""
        coordinator = self._roster.coordinator()
        return "" if coordinator is None else coordinator.place

    def shares_target(self) -> bool:
        """Does this peer share the place that checkpoints go to?"""
        return self._book.place.name == self.target

    def writer(self, stage: int) -> PeerId | None:
        """The live peer that writes the stage's part: the first that shares the place, else the first."""
        roster, place = self._roster, self.target
        return min(roster.stage(stage), key=lambda p: (roster.member(p).place != place, p), default=None)

    def is_writer(self) -> bool:
        """Does this peer write its stage's part?"""
        return self.writer(self._roster.own.stage) == self._roster.own.id

    def keepers(self, stage: int, there: PeerId) -> tuple[PeerId, ...]:
        """The peers that also keep ``stage``'s parts: live ones, or ``there``, which counts as live."""
        members = [m for m in self._roster.members() if self._roster.is_alive(m.id) or m.id == there]
        places = {m.id: (m.stage, m.place) for m in members if m.place}
        return keepers(places, stage, self.target)
