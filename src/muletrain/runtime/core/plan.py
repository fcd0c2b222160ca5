"""A plan holds the facts of a run that every peer knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from muletrain.config.schema import Codec
from muletrain.model.chain import TOKENS
from muletrain.policy.shards import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.schema import TrainConfig
    from muletrain.model.chain import Model, TensorType
    from muletrain.optim.tied import Tied
    from muletrain.strategies.base import Strategy


@dataclass(frozen=True)
class Validation:
    """Schedule and text of held-out loss measurements during training (``microbatch.validator``)."""

    every: int
    """Updates between two measurements; the first measurement precedes the first update."""
    microbatches: int
    """Most held-out microbatches. Their indices follow the indices of the step's own microbatches."""
    context: int
    """Sequence length T of held-out microbatches."""
    own_loss: bool = False
    """A user's module computes the loss, so there is no perplexity."""

    @classmethod
    def of(cls, train: TrainConfig, spec: Model) -> Validation | None:
        """Returns the configured validation, if any."""
        if not train.validate_every:
            return None
        microbatches = -(-train.validate_tokens // (train.microbatch * spec.context))
        return cls(train.validate_every, microbatches, spec.context, spec.own_loss)


@dataclass(frozen=True)
class Plan:
    """The facts of a run that every peer knows, constant after genesis."""

    stages: int
    steps: int
    microbatches: int
    sequences: int
    """Sequences of a microbatch, B."""
    width: int
    vocab: int
    """Integers of inputs and targets are smaller."""
    sequence_length: Callable[[int], int]
    """Maps a step to the sequence length T."""
    activations: Codec
    gradients: Codec
    clip: float | None
    lr: Callable[[int], float]
    checkpoint_every: int
    capacity: int
    """Requests that a peer holds at once: the bound of admission, with room for the backward of each."""
    strategy: Strategy
    inputs: TensorType = TOKENS
    """Type of the first stage's inputs."""
    targets: TensorType = TOKENS
    """Type of the last stage's targets."""
    adopt_after_s: float = 30.0
    """Seconds without a peer of a stage, after which the run rolls back and other peers adopt the stage."""
    from_seed: bool = False
    """The first weights are drawn from a seed, so any peer can make any stage's first weights."""
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
    """Number of gradient elements that are averaged, and sent, at a time."""
    verify: float = 0.0
    """Share of parts for which clients' results are checked (strategy ``hub``)."""
    trace: bool = False
    """Emit an event for every microbatch taken and served."""
    tied: Tied | None = None
    """The parameters that two stages share, if any."""
    max_skipped: int = 0
    """Number of consecutive skipped updates after which the run ends; 0: no limit."""
    alone: bool = False
    """The run has no other peer, and no peer can join: nothing is kept for other peers."""
    validation: Validation | None = None
    """None: the held-out loss is not measured during training."""

    def updates(self, step: int) -> int:
        """Returns the number of updates in the weights for ``step``."""
        return max(0, step - 1) if self.delayed else step

    def validates(self, step: int) -> bool:
        """Is the held-out loss of the weights of ``step`` measured? Under delayed updates steps 0 and 1 have the same
        weights."""
        due = self.validation is not None and self.updates(step) % self.validation.every == 0
        return due and not (self.delayed and step == 1)

    def validates_with(self, step: int, index: int) -> bool:
        """Does ``index`` belong to a held-out microbatch of ``step``?"""
        most = 0 if self.validation is None or not self.validates(step) else self.validation.microbatches
        return self.microbatches <= index < self.microbatches + most

    def shape(self, step: int, index: int) -> tuple[int, int]:
        """Returns (B, T) of a microbatch, held-out or not."""
        if self.validation is not None and index >= self.microbatches:
            return self.sequences, self.validation.context
        return self.sequences, self.sequence_length(step)

    def codec(self, index: int) -> Codec:
        """Returns the codec of a microbatch's activations. Held-out activations are not rounded: the loss measures the
        weights alone."""
        return Codec.FP32 if index >= self.microbatches else self.activations
