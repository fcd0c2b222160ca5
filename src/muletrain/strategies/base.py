"""The interface through which the step protocol (``runtime``) consults a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from muletrain.policy.assignment import Move, View


@dataclass(frozen=True)
class Order:
    """Priorities of a peer's compute slot when forward and backward passes wait."""

    backward_first: bool = True
    most_between: int | None = None
    """Most microbatches between forward and backward at the same time; None: no limit."""


class StandIn(NamedTuple):
    """A planned peer is gone, and other peers serve its pipeline at that stage."""

    stage: int
    pipeline: int
    name: str
    """Name of the absent peer."""


class Strategy(Protocol):
    """Decides the differences between the systems. All methods are pure: measurements and counts of a running peer stay
    with the peer.

    Peers have names as in a plan, but ids in ``assign`` and ``shard_owners``.
    """

    @property
    def fixed(self) -> bool:
        """Does ``choose`` name a single peer for each microbatch while all peers are present?"""
        ...

    @property
    def pooled(self) -> bool:
        """Do clients compute for the peers of a stage (``runtime.pool``)?"""
        ...

    def assign(self, view: View) -> tuple[Move, ...]:
        """Returns the peers that should serve another stage than now: places the newcomers of ``view``, if any;
        otherwise, if the run rolls back (``View.stopped``), fills stages without peers; otherwise moves peers to stages
        with greater need, while the run goes on."""
        ...

    def choose(self, stage: int, index: int, there: Collection[str]) -> Sequence[str]:
        """Returns the peers of ``stage``, among those ``there``, that may get microbatch ``index`` next; empty: all.
        Among several, the sender chooses by measurements (``policy.wiring``)."""
        ...

    def lane(self, index: int) -> int:
        """Returns the trainer's window for microbatch ``index``. A full window does not delay other windows."""
        ...

    def window(self, capacity: int, serving: Sequence[int], trainers: int) -> int:
        """Returns the number of microbatches of one lane that a trainer has in flight. ``capacity``: requests that a
        peer holds at once; ``serving``: number of peers, by stage."""
        ...

    def capacity(self, stages: int) -> int:
        """Returns the requests that a peer holds at once."""
        ...

    def order(self, stage: int, name: str) -> Order:
        """Returns the order of the compute slot of the peer ``name``."""
        ...

    def shard_owners(self, members: tuple[str, ...]) -> tuple[str, ...]:
        """Returns, in order, the replicas that each sum up a part of the gradient, among the ``members`` that reduce a
        stage's gradient together."""
        ...

    def has_place(self, name: str) -> bool:
        """Does a peer of that name take the place of an earlier peer of the same name?"""
        ...

    def stand_ins(self, serving: Sequence[Collection[str]]) -> Mapping[StandIn, tuple[str, ...]]:
        """Returns the peers that replace absent planned peers, given the present peers ``serving`` (names by stage).
        Empty if all peers of a stage share the work."""
        ...


def capacity(stages: int) -> int:
    """Returns the requests that a peer holds at once: twice the number of microbatches in flight per peer, and at least
    24, to cover a round trip of several service times. With a 100 ms link and 180 ms of service, a fleet kept 0.84 of
    its throughput with 8 requests, and 0.91 with 16 (benchmarks/slow_links). A pipeline computes all the time if the
    microbatches in flight, per peer of a stage, number as many as the stages. Half as many more keep narrow links busy,
    too, on which one sender's requests often wait for another sender's (benchmarks/sim_grid)."""
    return max(24, 9 * stages // 2)
