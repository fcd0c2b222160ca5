"""The step protocol (``runtime``) asks a strategy through this interface."""

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
    """A peer that the plan names is gone, and others serve its pipeline at that stage."""

    stage: int
    pipeline: int
    name: str
    """Name of the peer that is gone."""


class Strategy(Protocol):
    """Decides what differs between the systems. All methods are pure: what a running peer measures or counts stays with
    the peer.

    Peers have the names by which a plan knows them; in ``assign`` and ``shard_owners`` they have ids.
    """

    @property
    def fixed(self) -> bool:
        """Does ``choose`` name one peer for each microbatch while all peers are there?"""
        ...

    @property
    def pooled(self) -> bool:
        """Do clients compute for the peers of a stage (``runtime.pool``)?"""
        ...

    def assign(self, view: View) -> tuple[Move, ...]:
        """Returns the peers that should serve another stage than now. If ``view`` has newcomers, it places them. Else,
        if the run rolls back (``View.stopped``), it fills stages without peers. Else it moves peers that are needed
        more elsewhere while the run goes on."""
        ...

    def choose(self, stage: int, index: int, there: Collection[str]) -> Sequence[str]:
        """Returns which of the peers of ``stage`` that are ``there`` may get microbatch ``index`` next; empty: all of
        them. Among several the sender chooses by what it measures (``policy.wiring``)."""
        ...

    def lane(self, index: int) -> int:
        """Returns which of a trainer's windows microbatch ``index`` needs a place in. A full window does not delay the
        others."""
        ...

    def window(self, capacity: int, serving: Sequence[int], trainers: int) -> int:
        """Returns the microbatches of one lane that a trainer has under way. ``capacity``: requests that a peer holds
        at once; ``serving``: number of peers, by stage."""
        ...

    def capacity(self, stages: int) -> int:
        """Returns the requests that a peer holds at once."""
        ...

    def order(self, stage: int, name: str) -> Order:
        """Returns the order of the compute slot of the peer ``name``."""
        ...

    def shard_owners(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the replicas that sum up a part of the gradient each, in order, of the ``members`` that reduce a
        stage's gradient together."""
        ...

    def has_place(self, name: str) -> bool:
        """Does a peer of that name take the place of an earlier one of the same name?"""
        ...

    def stand_ins(self, serving: Sequence[Collection[str]]) -> Mapping[StandIn, tuple[str, ...]]:
        """Returns the peers that take over for planned peers that are gone, where ``serving`` (names by stage) are
        there. Empty where all peers of a stage share the work."""
        ...


def capacity(stages: int) -> int:
    """Returns the requests that a peer holds at once: twice what trainers have under way for each, and at least 24, to
    cover a round trip of several service times. At 100 ms and 180 ms of service a fleet kept 0.84 of its throughput
    with 8 and 0.91 with 16 (benchmarks/slow_links). A pipeline computes all the time with as many microbatches under
    way for each of a stage's peers as there are stages. Half as many more keep narrow links busy, too, where what a
    sender has for one receiver often waits for another sender (benchmarks/sim_grid)."""
    return max(24, 9 * stages // 2)
