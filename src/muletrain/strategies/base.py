"""What a strategy decides: the one interface between the step protocol (``runtime``) and what tells the four systems
apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from muletrain.policy.assignment import Move, View


@dataclass(frozen=True)
class Order:
    """What the compute slot of a peer does first when forward and backward passes wait."""

    backward_first: bool = True
    most_between: int | None = None
    """Microbatches between their forward and their backward at once, at most; None: any number."""


class StandIn(NamedTuple):
    """A peer that the plan names is not there: who serves its pipeline at that stage instead."""

    stage: int
    pipeline: int
    name: str
    """Of the peer that is missing."""


class Strategy(Protocol):
    """Decides what differs between the systems. All methods are pure: what a running peer measures or counts stays with
    the peer.

    Peers have the names that a plan knows them by, except in ``assign`` and ``shard_owners``, where they have ids."""

    @property
    def fixed(self) -> bool:
        """Whether ``choose`` names one peer for each microbatch, as long as everyone is there."""
        ...

    def assign(self, view: View) -> tuple[Move, ...]:
        """Who should serve another stage than now: newcomers, if ``view`` has any; else, if the run rolls back
        (``View.stopped``), the peers that fill stages without peers; else those that are needed more elsewhere while
        the run goes on."""
        ...

    def choose(self, stage: int, index: int, there: Collection[str]) -> Sequence[str]:
        """Which of the peers of ``stage`` that are ``there`` may get microbatch ``index`` next; empty: all of them.
        Among several the sender chooses by what it measures (``policy.wiring``)."""
        ...

    def lane(self, index: int) -> int:
        """Which of a trainer's windows microbatch ``index`` needs a place in: a full one holds nobody up in the
        others."""
        ...

    def window(self, capacity: int, serving: Sequence[int], trainers: int) -> int:
        """Microbatches of one lane that a trainer has under way. ``capacity``: that a peer holds at once; ``serving``:
        peers, by stage."""
        ...

    def capacity(self, stages: int) -> int:
        """Requests that a peer holds at once."""
        ...

    def order(self, stage: int, name: str) -> Order:
        """Of the compute slot of the peer of that name."""
        ...

    def shard_owners(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Which of the replicas that reduce a stage's gradient together sum up a part of it, in order."""
        ...

    def has_place(self, name: str) -> bool:
        """Whether a peer of that name takes the place of an earlier one of the same name."""
        ...

    def stand_ins(self, serving: Sequence[Collection[str]]) -> Mapping[StandIn, tuple[str, ...]]:
        """Who takes over for planned peers that are missing, where ``serving``, names by stage, are there; nobody in
        particular where all peers of the stage share the work."""
        ...


def capacity(stages: int) -> int:
    """Requests a peer holds at once, twice of what trainers have under way for each. At least 24, to cover a round trip
    of several service times: at 100 ms and 180 ms of service a fleet kept 0.84 of its throughput with 8 and 0.91 with
    16 (benchmarks/slow_links). A pipeline computes all the time with as many microbatches under way for each of a
    stage's peers as there are stages; half as many more keep narrow links busy, too, where what a sender has for one
    receiver often waits for another sender (benchmarks/sim_grid)."""
    return max(24, 9 * stages // 2)
