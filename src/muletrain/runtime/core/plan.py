"""The facts of a run that every peer knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from muletrain.policy.shards import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.schema import Codec
    from muletrain.policy.seats import Seats


def capacity(stages: int, seats: Seats | None = None) -> int:
    """Requests a peer holds at once, twice of what trainers have under way for each. At least 24, to cover a round trip of several service
    times: at 100 ms and 180 ms of service a fleet kept 0.84 of its throughput with 8 and 0.91 with 16 (benchmarks/slow_links). A
    pipeline computes all the time with as many microbatches under way for each of a stage's peers as there are stages; half as many more
    keep narrow links busy, too, where what a sender has for one receiver often waits for another sender (benchmarks/sim_grid). GPipe has a
    whole step's. With planned membership a peer may have several seats, each of which counts."""
    each = max(24, 9 * stages // 2)
    if seats is None:
        return each
    return max(each, max(seats.microbatches) if seats.schedule == "gpipe" else 0) * seats.most_seats


@dataclass(frozen=True)
class Plan:
    """The facts of a run that every peer knows: they never change after genesis."""

    stages: int
    steps: int
    microbatches: int
    sequences: int
    """per microbatch, B"""
    width: int
    vocab: int
    sequence_length: Callable[[int], int]
    """step -> T"""
    activations: Codec
    gradients: Codec
    clip: float | None
    lr: Callable[[int], float]
    checkpoint_every: int
    capacity: int
    """Requests a peer holds at once: admission's bound, with room for each one's backward."""
    adopt_after_s: float = 30.0
    """How long a stage may be without a peer before the run steps back and others adopt it [s]."""
    from_seed: bool = False
    """The first weights are drawn: any peer can make those of any stage."""
    rebalance: Literal["off", "paper", "throughput"] = "off"
    rebalance_s: float = 60.0
    """Period [s]."""
    work: tuple[float, ...] = ()
    """Forward of a microbatch at each stage [FLOP]."""
    state_bytes: tuple[int, ...] = ()
    """What a newcomer to each stage copies."""
    seats: Seats | None = None
    """Strategy 'pipeline'; None: 'swarm'."""
    delayed: bool = False
    """Steps are averaged and applied while the next one computes (``microbatch.inflight``)."""
    chunk: int = CHUNK
    """Elements of a gradient that are averaged, and sent, at a time."""
    trace: bool = False
    """Emit an event for every microbatch taken and served."""
