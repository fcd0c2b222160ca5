"""Strategy ``pipeline`` (DT-FM sec. 3) plans each peer's stage and pipeline. The plan gives each microbatch's pipeline,
and the pipeline's peer at each stage; spares take over for lost devices.

A seat is one stage of one pipeline, and carries the name of one peer. A peer may have several seats of its stage, so
stages can have unequal numbers of peers. The pipeline of a microbatch follows from its index alone, so all peers agree
without messages. Members of a stage without a seat there are spares: a spare averages with its stage, and gets
microbatches once a seat of the stage is empty. Without a spare, all peers of the stage share the empty seat's
microbatches, as under strategy ``swarm``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from muletrain.policy.assignment import NOWHERE, Move, filled, placed
from muletrain.strategies.base import Order, StandIn, capacity

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from muletrain.config.schema import RunConfig
    from muletrain.policy.assignment import View

Schedule = Literal["gpipe", "1f1b"]
LOST = "lost a peer and has no spare, so this one moves there"


def in_flight(schedule: Schedule, stages: int, stage: int, microbatches: int) -> int:
    """Returns the largest number of microbatches whose backward a stage owes at once."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


@dataclass(frozen=True)
class Pipeline:
    """Serves planned pipelines: ``names[stage][pipeline]``; ``microbatches`` of a step, by pipeline."""

    names: tuple[tuple[str, ...], ...]
    microbatches: tuple[int, ...]
    schedule: Schedule
    fixed = True
    pooled = False

    @classmethod
    def of(cls, config: RunConfig) -> Pipeline | None:
        """Returns the pipeline that a run's configuration plans, if any."""
        p = config.pipeline
        if not p.seats:
            return None
        each, more = divmod(config.microbatches, len(p.seats[0]))
        evenly = tuple(each + (k < more) for k in range(len(p.seats[0])))
        return cls(p.seats, p.microbatches or evenly, p.schedule)

    def assign(self, view: View) -> tuple[Move, ...]:
        """Newcomers get their seats, with or without room. Other newcomers are placed, and lost stages filled, as in
        every strategy. During the run only spares move, to stages that lost a peer."""
        if view.newcomers:
            seated = {p: s for p in view.newcomers if (s := self._stages.get(view.loads[p].name)) is not None}
            loads = {p: replace(own, stage=seated.get(p, own.stage)) for p, own in view.loads.items()}
            return (*(Move(p, NOWHERE, s) for p, s in seated.items()), *placed(replace(view, loads=loads)))
        return filled(view) if view.stopped else self._spares_move(view)

    def _spares_move(self, view: View) -> tuple[Move, ...]:
        """Move one spare to each stage that has lost a peer and has no spare. Spares come from stages with more spares
        than lost peers, and must have room; in the order of stages and names."""
        ids = {load.name: peer for peer, load in view.loads.items()}
        serving = [{n for n, p in ids.items() if view.loads[p].stage == s} for s in range(len(self.names))]
        lost = [len(set(row) - there) for row, there in zip(self.names, serving, strict=True)]
        spares = [self._spares(s, there) for s, there in enumerate(serving)]
        free = [ids[name] for own, n in zip(spares, lost, strict=True) for name in own[n:]]
        moves: list[Move] = []
        for stage in (s for s, own in enumerate(spares) if lost[s] and not own):
            able = (p for p in free if view.loads[p].may_move_to(stage))
            if (peer := next(able, None)) is not None:
                free.remove(peer)
                moves.append(Move(peer, view.loads[peer].stage, stage, why=LOST))
        return tuple(moves)

    def choose(self, stage: int, index: int, there: Collection[str]) -> Sequence[str]:
        """Returns the seat's peer, else the spares, else all."""
        seat = self.names[stage][self.lane(index)]
        return [seat] if seat in there else self._spares(stage, there)

    def lane(self, index: int) -> int:
        """Returns the pipeline of microbatch ``index``."""
        return self._turns[index]

    def window(self, capacity: int, serving: Sequence[int], trainers: int) -> int:
        """Returns the requests that a peer admits for one of its seats, shared among the trainers; unshared with GPipe,
        since a step's forward passes come first."""
        each = max(2, capacity // self._most_seats)
        return each if self.schedule == "gpipe" else max(2, each // trainers)

    def capacity(self, stages: int) -> int:
        """Each of a peer's seats counts; with GPipe a seat holds a whole step."""
        whole = max(self.microbatches) if self.schedule == "gpipe" else 0
        return max(capacity(stages), whole) * self._most_seats

    def order(self, stage: int, name: str) -> Order:
        """1F1B bounds the microbatches between forward and backward, except at the last stage, which runs both at
        once."""
        if self.schedule == "gpipe":
            return Order(backward_first=False)
        return Order(most_between=None if stage == len(self.names) - 1 else self.most_in_flight(stage, name))

    def most_in_flight(self, stage: int, name: str = "") -> int:
        """Returns the largest number of microbatches between forward and backward at ``stage``. The number sums over
        the seats of peer ``name``; a peer without a seat gets the maximum over the seats' peers, since a spare may
        stand in there."""
        owed = Counter[str]()
        for holder, n in zip(self.names[stage], self.microbatches, strict=True):
            owed[holder] += in_flight(self.schedule, len(self.names), stage, n)
        return owed[name] or max(owed.values())

    def shard_owners(self, members: tuple[str, ...]) -> tuple[str, ...]:
        return members

    def has_place(self, name: str) -> bool:
        return name in self._stages

    def stand_ins(self, serving: Sequence[Collection[str]]) -> Mapping[StandIn, tuple[str, ...]]:
        """Returns the spares of each empty seat's stage. Stages without peers are left out."""
        return {
            StandIn(s, p, name): tuple(self._spares(s, serving[s]))
            for s, row in enumerate(self.names)
            for p, name in enumerate(row)
            if serving[s] and name not in serving[s]
        }

    def _spares(self, stage: int, there: Collection[str]) -> list[str]:
        return sorted(set(there) - set(self.names[stage]))

    @cached_property
    def _turns(self) -> tuple[int, ...]:
        """Pipelines in turn, evenly, so that all fill at the same time, and a slow pipeline gets its few microbatches
        over the whole step."""
        turns = [((k + 0.5) / n, p) for p, n in enumerate(self.microbatches) for k in range(n)]
        return tuple(p for _, p in sorted(turns))

    @cached_property
    def _stages(self) -> dict[str, int]:
        return {name: stage for stage, row in enumerate(self.names) for name in row}

    @cached_property
    def _most_seats(self) -> int:
        """Most seats of a peer."""
        return max(max(Counter(row).values()) for row in self.names)
