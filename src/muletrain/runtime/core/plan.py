"""A plan holds the facts of a run that every peer knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from muletrain.model.chain import TOKENS
from muletrain.policy.shards import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.schema import Codec
    from muletrain.model.chain import TensorType
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Plan:
    """The facts of a run that every peer knows. They never change after genesis."""

    stages: int
    steps: int
    microbatches: int
    sequences: int
    """Sequences of a microbatch, B."""
    width: int
    vocab: int
    """Integers of inputs and targets are smaller."""
    sequence_length: Callable[[int], int]
    """Maps a step to its sequence length T."""
    activations: Codec
    gradients: Codec
    clip: float | None
    lr: Callable[[int], float]
    checkpoint_every: int
    capacity: int
    """Requests that a peer holds at once: the bound of admission, with room for the backward of each."""
    strategy: Strategy
    inputs: TensorType = TOKENS
    """What the first stage takes."""
    targets: TensorType = TOKENS
    """What the last stage's loss takes."""
    adopt_after_s: float = 30.0
    """Seconds without a peer of a stage, after which the run rolls back and other peers adopt the stage."""
    from_seed: bool = False
    """The first weights are drawn from a seed, so any peer can make those of any stage."""
    rebalance: Literal["off", "paper", "throughput"] = "off"
    rebalance_s: float = 60.0
    """Seconds between two decisions whether peers move."""
    work: tuple[float, ...] = ()
    """Forward of a microbatch at each stage [FLOP]."""
    state_bytes: tuple[int, ...] = ()
    """Bytes that a newcomer to each stage copies."""
    delayed: bool = False
    """Steps are averaged and applied while the next step computes (``microbatch.inflight``)."""
    chunk: int = CHUNK
    """Elements of a gradient that are averaged, and sent, at a time."""
    verify: float = 0.0
    """Share of parts that clients' results are checked of (strategy ``hub``)."""
    trace: bool = False
    """Emit an event for every microbatch taken and served."""
