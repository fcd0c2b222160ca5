"""The facts of a run that every peer knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from muletrain.policy.shards import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.schema import Codec
    from muletrain.strategies.base import Strategy


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
    strategy: Strategy
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
    delayed: bool = False
    """Steps are averaged and applied while the next one computes (``microbatch.inflight``)."""
    chunk: int = CHUNK
    """Elements of a gradient that are averaged, and sent, at a time."""
    trace: bool = False
    """Emit an event for every microbatch taken and served."""
