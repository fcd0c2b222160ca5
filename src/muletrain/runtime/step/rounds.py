"""Rounds of averaging: what is reduced by whom, in which chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.policy.shards import CHUNK, chunk_ranges, shard_ranges

if TYPE_CHECKING:
    from muletrain.network.base import PeerId


class RoundFailed(MuletrainError):
    """This attempt did not complete; accumulators are untouched, so another can follow."""


@dataclass(frozen=True)
class Round:
    """One attempt at reducing a stage's gradient. ``contributors`` have something in their accumulators."""

    id: bytes
    lineage: bytes
    step: int
    stage: int
    members: tuple[PeerId, ...]
    contributors: tuple[PeerId, ...]
    microbatches: int
    n_params: int
    stop: bool
    leaves: tuple[PeerId, ...] = ()
    expelled: tuple[PeerId, ...] = ()
    finite: bool = True
    """All accumulators were, when they were sealed."""
    chunk: int = CHUNK
    """Elements."""

    def others(self, member: PeerId) -> tuple[PeerId, ...]:
        """In the order in which ``member`` sends to them: everyone starts with another receiver."""
        k = self.members.index(member)
        return (*self.members[k + 1 :], *self.members[:k])

    def chunks(self, owner: PeerId) -> list[tuple[int, tuple[int, int]]]:
        """(chunk number, element range) of the shard that ``owner`` reduces; numbers are unique within the round."""
        shards = [chunk_ranges(a, b, self.chunk) for a, b in shard_ranges(self.n_params, len(self.members))]
        k = self.members.index(owner)
        first = sum(len(s) for s in shards[:k])
        return list(enumerate(shards[k], start=first))
