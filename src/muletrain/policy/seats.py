"""Planned membership, strategy ``pipeline`` (DT-FM sec. 3): which pipeline a microbatch belongs to, who serves it at each stage, and who
stands in where a device is lost.

A seat is one stage of one pipeline, and has the name of one peer, which may have several seats of its stage: so stages can have unequal
numbers of peers. Which pipeline a microbatch of a step belongs to follows from its index
alone, so that all peers agree without a word. Members of a stage whose names have no seat there are spares: they average along, and get
microbatches once a seat of their stage is empty. Where there is no spare, all peers of the stage share what the empty seat would get, as
under strategy ``swarm``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from muletrain.config.schema import RunConfig

Schedule = Literal["gpipe", "1f1b"]


def in_flight(schedule: Schedule, stages: int, stage: int, microbatches: int) -> int:
    """Microbatches whose backward a stage owes at most at once."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


@dataclass(frozen=True)
class Seats:
    """``names[stage][pipeline]``; ``microbatches`` of a step, by pipeline."""

    names: tuple[tuple[str, ...], ...]
    microbatches: tuple[int, ...]
    schedule: Schedule

    @property
    def pipelines(self) -> int:
        return len(self.microbatches)

    def pipeline(self, index: int) -> int:
        """Of the microbatch of that index."""
        return self._turns[index]

    @cached_property
    def _turns(self) -> tuple[int, ...]:
        """Evenly in turn, so that all pipelines fill at the same time and a slow one gets its few over the whole step."""
        turns = [((k + 0.5) / n, p) for p, n in enumerate(self.microbatches) for k in range(n)]
        return tuple(p for _, p in sorted(turns))

    def stage_of(self, name: str) -> int | None:
        """Where a peer of that name has its seat."""
        return self._stages.get(name)

    @cached_property
    def _stages(self) -> dict[str, int]:
        return {name: stage for stage, row in enumerate(self.names) for name in row}

    def most_in_flight(self, stage: int, name: str = "") -> int:
        """Microbatches that are between their forward and their backward at ``stage``, at most: at the peer of that name, of all pipelines
        in which it has the seat; of any other name where there are most, for a spare may have to stand in there."""
        owed = Counter[str]()
        for holder, n in zip(self.names[stage], self.microbatches, strict=True):
            owed[holder] += in_flight(self.schedule, len(self.names), stage, n)
        return owed[name] or max(owed.values())

    @cached_property
    def most_seats(self) -> int:
        """Of one peer."""
        return max(max(Counter(row).values()) for row in self.names)

    def window(self, capacity: int, trainers: int) -> int:
        """Microbatches of one pipeline that a trainer has under way: what a peer admits (``capacity``) for one of its seats, shared among
        the trainers; of GPipe all, for a step's forward passes come first."""
        each = max(2, capacity // self.most_seats)
        return each if self.schedule == "gpipe" else max(2, each // trainers)

    def first_choice(self, stage: int, index: int, there: Collection[str]) -> list[str]:
        """Who of those ``there`` is to get the microbatch: the seat's, else the spares; empty: anyone of the stage."""
        seat = self.names[stage][self.pipeline(index)]
        return [seat] if seat in there else self.spares(stage, there)

    def spares(self, stage: int, there: Collection[str]) -> list[str]:
        return sorted(set(there) - set(self.names[stage]))

    def empty(self, serving: Sequence[Collection[str]]) -> list[tuple[int, int]]:
        """(stage, pipeline) of the seats whose peers are not among those that are ``serving`` their stage."""
        return [
            (s, p) for s, row in enumerate(self.names) for p, name in enumerate(row) if name not in serving[s]
        ]  # fmt: skip

    def moves(self, serving: Sequence[Collection[str]], able: Callable[[str, int], bool]) -> Mapping[str, int]:
        """Spares that are to serve another stage: one to each that has lost a peer and has no spare, of those whose own stage has more
        than it has lost peers and that are ``able`` to; in the order of stages and names."""
        lost = [len(set(row) - set(there)) for row, there in zip(self.names, serving, strict=True)]
        spares = [self.spares(s, there) for s, there in enumerate(serving)]
        free = [name for own, n in zip(spares, lost, strict=True) for name in own[n:]]
        found: dict[str, int] = {}
        for stage in (s for s, own in enumerate(spares) if lost[s] and not own):
            if (name := next((n for n in free if n not in found and able(n, stage)), None)) is not None:
                found[name] = stage
        return found


def planned_seats(config: RunConfig) -> Seats | None:
    """Those of a run's configuration; None: strategy ``swarm``."""
    p = config.pipeline
    if not p.seats:
        return None
    each, more = divmod(config.microbatches, len(p.seats[0]))
    evenly = tuple(each + (k < more) for k in range(len(p.seats[0])))
    return Seats(p.seats, p.microbatches or evenly, p.schedule)
