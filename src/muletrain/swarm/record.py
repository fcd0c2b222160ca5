"""The step record: the unit of agreement of the whole run (DESIGN "The step record").

``R_t`` holds, for each stage, the entry of the round that reduced its gradient, and hash(R_{t-1}). A peer applies step t
only with the whole record; the clip scale and the skipping of a non-finite step are pure functions of it, so that every peer
takes the same decision without asking anyone.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgpack

from muletrain.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.swarm.messages import ShardEntry


def round_id(
    lineage: bytes, stage: int, step: int, attempt: int, sealed: dict[str, frozenset[int]], chosen: tuple[str, ...]
) -> bytes:
    """Identity of one attempt at reducing one stage: members that disagree on anything have different rounds, and fail loudly."""
    sets = [(m, sorted(sealed[m])) for m in sorted(sealed)]
    return hashlib.sha256(msgpack.packb(["round", lineage, stage, step, attempt, sets, list(chosen)])).digest()


@dataclass(frozen=True)
class StageEntry:
    """One stage's part of the record: the shards of one complete round, in order."""

    round: bytes
    shards: tuple[ShardEntry, ...]

    @property
    def square_norm(self) -> float:
        return math.fsum(s.square_norm for s in self.shards)

    @property
    def finite(self) -> bool:
        return all(s.finite for s in self.shards)


@dataclass(frozen=True)
class StepRecord:
    """``R_t``. ``stages`` are in pipeline order."""

    step: int
    lineage: bytes
    """hash(R_{t-1})"""
    stages: tuple[StageEntry, ...]

    @property
    def hash(self) -> bytes:
        """The lineage of step t + 1."""
        content = [
            [e.round, [[s.content, s.square_norm, s.finite, s.stop, s.leaves] for s in e.shards]] for e in self.stages
        ]
        return hashlib.sha256(msgpack.packb(["record", self.step, self.lineage, content])).digest()

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of the whole model's mean gradient, as a single process would compute it."""
        return math.sqrt(math.fsum(e.square_norm for e in self.stages))

    @property
    def skip(self) -> bool:
        return not (all(e.finite for e in self.stages) and math.isfinite(self.gradient_norm))

    @property
    def stop(self) -> bool:
        """Some member asked for an orderly end: everyone that applies this record stops after it."""
        return any(s.stop for e in self.stages for s in e.shards)

    def leavers(self, trains: Callable[[str], bool]) -> tuple[str, ...]:
        """Who goes after this step, the same for everyone: of the members of a stage's round at most one, and only if another stays; of
        the trainers (``trains``) at most one. The others that asked stay, and ask again."""
        chosen: list[str] = []
        for entry in self.stages:
            asked = sorted(s.leaves for s in entry.shards if s.leaves is not None)
            free = [p for p in asked if not (trains(p) and any(map(trains, chosen)))]
            chosen += free[:1] if len(entry.shards) > 1 else []
        return tuple(chosen)

    def clip_scale(self, clip: float | None) -> float:
        """min(1, clip / norm), as ``torch.nn.utils.clip_grad_norm_`` computes it."""
        return 1.0 if clip is None else min(1.0, clip / (self.gradient_norm + 1e-6))


@dataclass
class RecordBuilder:
    """Collects shard entries of one step until every stage has a complete round."""

    step: int
    lineage: bytes
    stages: int
    _entries: dict[tuple[int, bytes], dict[int, ShardEntry]] = field(default_factory=dict)

    MAX_ROUNDS = 64  # a stage retries a handful of times; more is an attack on memory

    def add(self, entry: ShardEntry) -> None:
        """Raises ProtocolError for an entry that contradicts the step, itself, or an earlier one."""
        if (entry.step, entry.lineage) != (self.step, self.lineage):
            raise ProtocolError(f"entry of step {entry.step} for the record of step {self.step}, or of another lineage")
        if entry.stage >= self.stages or not entry.shard < entry.shards <= 4096:
            raise ProtocolError(f"entry for shard {entry.shard}/{entry.shards} of stage {entry.stage}/{self.stages}")
        key = (entry.stage, entry.round)
        if key not in self._entries and sum(s == entry.stage for s, _ in self._entries) >= self.MAX_ROUNDS:
            raise ProtocolError(f"stage {entry.stage}: more than {self.MAX_ROUNDS} rounds in one step")
        known = self._entries.setdefault(key, {})
        if any(e.shards != entry.shards for e in known.values()) or known.get(entry.shard, entry) != entry:
            raise ProtocolError(f"stage {entry.stage} shard {entry.shard}: two different entries for one round")
        known[entry.shard] = entry

    def entries(self) -> tuple[ShardEntry, ...]:
        return tuple(e for known in self._entries.values() for e in known.values())

    def record(self) -> StepRecord | None:
        """``R_t`` once every stage has a complete round (the lowest round id, should there be two), else None."""
        complete = []
        for stage in range(self.stages):
            rounds = sorted(r for s, r in self._entries if s == stage and self._is_complete(s, r))
            if not rounds:
                return None
            known = self._entries[stage, rounds[0]]
            complete.append(StageEntry(rounds[0], tuple(known[k] for k in range(len(known)))))
        return StepRecord(self.step, self.lineage, tuple(complete))

    def missing(self) -> list[int]:
        """Stages without a complete round."""
        return [s for s in range(self.stages) if not any(k == s and self._is_complete(k, r) for k, r in self._entries)]

    def _is_complete(self, stage: int, round_: bytes) -> bool:
        known = self._entries[stage, round_]
        return len(known) == next(iter(known.values())).shards
