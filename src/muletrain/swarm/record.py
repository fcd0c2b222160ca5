"""The step record: the unit of agreement of the whole run (DESIGN "The step record").

``R_t`` holds, for each stage, the entry of the round that reduced its gradient, and hash(R_{t-1}). A peer applies step t
only with the whole record; the clip scale and the skipping of a non-finite step are pure functions of it, so that every peer
takes the same decision without asking anyone.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgpack

from muletrain.errors import ProtocolError
from muletrain.swarm.branches import branch_of, hashed
from muletrain.swarm.messages import RoundEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.swarm.messages import ShardFacts

_FACTS = tuple(name for name in RoundEntry.model_fields if name not in ("holder", "without", "shards"))
"""What every holder of a round says alike, beside the shards."""


def round_id(
    lineage: bytes,
    stage: int,
    step: int,
    attempt: int,
    sealed: dict[str, frozenset[int]],
    chosen: tuple[str, ...],
    stop: bool,
    leaves: tuple[str, ...] = (),
    expelled: tuple[str, ...] = (),
) -> bytes:
    """Identity of one attempt at reducing one stage: members that disagree on anything have different rounds, and fail loudly."""
    sets = [(m, sorted(sealed[m])) for m in sorted(sealed)]
    return hashlib.sha256(
        msgpack.packb(["round", lineage, stage, step, attempt, sets, list(chosen), stop, list(leaves), list(expelled)])
    ).digest()


@dataclass(frozen=True)
class StageEntry:
    """One stage's part of the record: its complete round. ``stop``: some member of it asked for an orderly end. ``leaves``: those that
    want to go after this step. ``expelled``: those that nobody counts on any more."""

    round: bytes
    shards: tuple[ShardFacts, ...]
    stop: bool
    leaves: tuple[str, ...] = ()
    expelled: tuple[str, ...] = ()

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
            [
                e.round,
                [[s.content, s.square_norm, s.finite] for s in e.shards],
                e.stop,
                list(e.leaves),
                list(e.expelled),
            ]
            for e in self.stages
        ]
        return hashed(branch_of(self.lineage), msgpack.packb(["record", self.step, self.lineage, content]))

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
        return any(e.stop for e in self.stages)

    def leavers(self, trains: Callable[[str], bool]) -> tuple[str, ...]:
        """Who goes after this step, the same for everyone: of the members of a stage's round at most one, and only if another stays; of
        the trainers (``trains``) at most one. The others that asked stay, and ask again."""
        chosen: list[str] = []
        for entry in self.stages:
            free = [p for p in entry.leaves if not (trains(p) and any(map(trains, chosen)))]
            chosen += free[:1] if len(entry.shards) > 1 else []
        return tuple(chosen)

    def clip_scale(self, clip: float | None) -> float:
        """min(1, clip / norm), as ``torch.nn.utils.clip_grad_norm_`` computes it."""
        return 1.0 if clip is None else min(1.0, clip / (self.gradient_norm + 1e-6))


@dataclass
class _Known:
    """A round of which entries arrived: what all of them say, and what each holder says."""

    facts: RoundEntry
    holders: dict[str, RoundEntry] = field(default_factory=dict)
    _lacking: set[str] = field(init=False)
    """Members that neither hold the gradient, as far as we know, nor are given up by one that does."""

    def __post_init__(self) -> None:
        self._lacking = set(self.facts.members)

    def add(self, entry: RoundEntry) -> bool:
        """False where that is no news."""
        before = self.holders.get(entry.holder)
        if before is not None:
            if set(entry.without) <= set(before.without):
                return False
            entry = entry.model_copy(update={"without": tuple(sorted({*entry.without, *before.without}))})
        self.holders[entry.holder] = entry
        self._lacking -= {entry.holder, *entry.without}
        return True

    @property
    def complete(self) -> bool:
        """Every member holds the gradient, or is given up by one that does: an applied gradient can be had from somebody."""
        return not self._lacking


@dataclass
class RecordBuilder:
    """Collects round entries of one step until every stage has a complete round."""

    step: int
    lineage: bytes
    """What the step's frames carry."""
    stages: int
    previous: bytes
    """hash(R_{t-1})"""
    known: Counter[int] = field(default_factory=Counter)
    """Counts what was learnt, by stage."""
    _rounds: dict[tuple[int, bytes], _Known] = field(default_factory=dict)
    _record: StepRecord | None = None

    MAX_ROUNDS = 64  # a stage retries a handful of times; more is an attack on memory

    def add(self, entry: RoundEntry) -> None:
        """Raises ProtocolError for an entry that contradicts the step, itself, or an earlier one."""
        if (entry.step, entry.lineage) != (self.step, self.lineage):
            raise ProtocolError(f"entry of step {entry.step} for the record of step {self.step}, or of another lineage")
        if entry.without and not set(entry.without) <= {*entry.members} - {entry.holder}:
            raise ProtocolError(f"entry of stage {entry.stage}: its holder gives itself up, or one that is no member")
        key = (entry.stage, entry.round)
        known = self._rounds.get(key)
        if known is None:
            self._check(entry)
            known = self._rounds[key] = _Known(facts_of(entry))
        elif not _alike(entry, known.facts):
            raise ProtocolError(f"stage {entry.stage}: {entry.holder[-6:]} contradicts what others hold of one round")
        complete = known.complete
        if known.add(entry):
            self.known[entry.stage] += 1
            if known.complete and not complete:
                self._record = self._built()

    def _check(self, entry: RoundEntry) -> None:
        """The first of its round; of the others it is enough that they say the same."""
        if entry.stage >= self.stages or len(entry.shards) != len(entry.members):
            raise ProtocolError(f"entry of stage {entry.stage}/{self.stages} with {len(entry.shards)} shards")
        if list(entry.members) != sorted(set(entry.members)):
            raise ProtocolError(f"entry of stage {entry.stage}: members out of order")
        if not set(entry.leaves) <= set(entry.members):
            raise ProtocolError(f"entry of stage {entry.stage}: others than its members leave")
        if set(entry.expelled) & set(entry.members):
            raise ProtocolError(f"entry of stage {entry.stage}: a member is expelled")
        if sum(s == entry.stage for s, _ in self._rounds) >= self.MAX_ROUNDS:
            raise ProtocolError(f"stage {entry.stage}: more than {self.MAX_ROUNDS} rounds in one step")

    def entries(self) -> tuple[RoundEntry, ...]:
        return tuple(e for known in self._rounds.values() for e in known.holders.values())

    def held(self, stage: int) -> list[RoundEntry]:
        """Entries of ``stage``, those of the rounds that most hold first."""
        rounds = [k for (s, _), k in sorted(self._rounds.items(), key=lambda item: item[0]) if s == stage]
        rounds.sort(key=lambda k: -len(k.holders))
        return [e for known in rounds for _, e in sorted(known.holders.items())]

    def holders(self, stage: int, round_: bytes) -> frozenset[str]:
        known = self._rounds.get((stage, round_))
        return frozenset(known.holders) if known is not None else frozenset()

    def record(self) -> StepRecord | None:
        """``R_t`` once every stage has a complete round (the lowest round id, should there be two), else None."""
        return self._record

    def _built(self) -> StepRecord | None:
        lowest: dict[int, bytes] = {}
        for (stage, round_), known in self._rounds.items():
            if known.complete:
                lowest[stage] = min(lowest.get(stage, round_), round_)
        if len(lowest) < self.stages:
            return None
        complete = [self._rounds[stage, lowest[stage]].facts for stage in range(self.stages)]
        entries = (StageEntry(f.round, f.shards, f.stop, f.leaves, f.expelled) for f in complete)
        return StepRecord(self.step, self.previous, tuple(entries))


def facts_of(entry: RoundEntry) -> RoundEntry:
    """What every holder of the round says alike."""
    return entry.model_copy(update={"holder": "", "without": ()})


def _alike(a: RoundEntry, b: RoundEntry) -> bool:
    facts = all(getattr(a, name) == getattr(b, name) for name in _FACTS)
    return facts and [vars(s) for s in a.shards] == [
        vars(s) for s in b.shards
    ]  # ten times as fast as the models' own ==
