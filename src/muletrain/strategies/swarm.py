"""Strategy ``swarm`` (SWARM, Ryabinin et al. 2023) lets any peer of a stage serve any microbatch, and moves peers to
the stage with the greatest need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.policy.assignment import filled, placed
from muletrain.policy.rebalance import by_queue, by_throughput
from muletrain.strategies.base import Order, StandIn, capacity

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from muletrain.policy.assignment import Move, View


@dataclass(frozen=True)
class Swarm:
    """The strategy, without settings."""

    fixed = False
    pooled = False

    def assign(self, view: View) -> tuple[Move, ...]:
        if view.newcomers:
            return placed(view)
        if view.stopped:
            return filled(view)
        if view.rule == "off":
            return ()
        return by_queue(view) if view.rule == "paper" else by_throughput(view, view.horizon_s, exchange=False)

    def choose(self, stage: int, index: int, there: Collection[str]) -> Sequence[str]:
        return ()

    def lane(self, index: int) -> int:
        return 0

    def window(self, capacity: int, serving: Sequence[int], trainers: int) -> int:
        """Returns half of the stages' mean capacity, but at most the smallest stage's, shared among the trainers. A
        stage with little work has few peers; half of its capacity would leave many other peers idle."""
        under_way = min(sum(serving) * capacity // (2 * len(serving)), min(serving) * capacity)
        return max(2, under_way // trainers)

    def capacity(self, stages: int) -> int:
        return capacity(stages)

    def order(self, stage: int, name: str) -> Order:
        return Order()

    def shard_owners(self, members: tuple[str, ...]) -> tuple[str, ...]:
        return members

    def has_place(self, name: str) -> bool:
        return False

    def stand_ins(self, serving: Sequence[Collection[str]]) -> Mapping[StandIn, tuple[str, ...]]:
        return {}


SWARM = Swarm()
