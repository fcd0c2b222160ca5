"""The ``Compute`` seam: one stage's weights and the arithmetic on them.

Shapes: B sequences per microbatch, T tokens per sequence, D model width, P parameters of the stage (flat). No call
blocks the event loop. ``forward``, ``backward``, ``loss_backward`` and ``apply`` take a ``Turn``: how urgent the call
is, and what to check right before the work. The implementation decides which call computes next, and how many
microbatches compute together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from muletrain.compute.slot import AT_ONCE, Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from muletrain.compute.jobs import Jobs
    from muletrain.compute.results import Result

R = TypeVar("R")


class Microbatch(NamedTuple):
    """Identity of a microbatch: a fact, from which its tokens and dropout masks follow (DESIGN "Microbatches are
    facts")."""

    step: int
    index: int  # type: ignore[assignment]  # the field's name is the papers'; tuple.index is never used


@dataclass(frozen=True)
class Update:
    """What an optimizer step needs beyond the gradient; a pure function of the step record."""

    step: int
    """The step being applied; the schedule and bias corrections derive from it."""
    scale: float
    """The reduced gradient is multiplied by this (global clipping)."""
    skip: bool
    """A non-finite step: weights and moments stay as they are."""


class Compute(Protocol):
    """One stage of the model, resident on some device. Under delayed updates a step computes with the weights before
    the update by the step before it, and two steps have an accumulator at once.

    ``forward``, ``backward`` and ``loss_backward`` return as soon as the microbatch is computed. Its gradient is in the
    accumulator exactly if the call returned: a cancelled call leaves nothing. The ``Result`` may still be on its way to
    the host, while the next microbatch computes.
    """

    stage: int
    stages: int
    delayed: bool
    """Updates are delayed: ``apply`` runs beside the next step. Otherwise nothing computes during ``apply``."""
    n_params: int
    """P: length of the flat gradient."""
    jobs: Jobs
    """What its threads are at."""

    async def forward(self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE) -> Result:
        """Stages before the last. ``inputs``: int64 tokens [B, T] at stage 0, else activations fp32 [B, T, D].
        Returns activations fp32 [B, T, D]. Keeps what ``backward`` needs until it or ``discard``."""
        ...

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        """Stages before the last. ``grad``: fp32 [B, T, D], d loss / d output. Returns d loss / d inputs (None at stage
        0), and adds this microbatch's parameter gradient to the accumulator if ``accumulate``. Raises KeyError when
        ``mb`` is not held."""
        ...

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        """Last stage: mean cross-entropy [nats/token] of ``targets`` int64 [B, T], and d loss / d inputs (None if also
        stage 0)."""
        ...

    def discard(self, mb: Microbatch) -> None:
        """Forget what ``forward`` kept for ``mb``."""
        ...

    async def gradient(self, step: int) -> Tensor:
        """The step's accumulator: flat fp32 [P] on the CPU, the *sum* of the accumulated microbatches' gradients.
        Read-only for the caller."""
        ...

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        """Optimizer step with the reduced mean gradient (flat fp32 [P], CPU), then clear the step's accumulator. When
        its turn begins, no microbatch is computing with the weights that it replaces."""
        ...

    def clear(self, step: int) -> None:
        """Empty the step's accumulator without an update."""
        ...

    async def digest(self) -> bytes:
        """BLAKE3 over the fp32 weights: replicas of a lineage compare it."""
        ...

    async def state(self) -> dict[str, Tensor]:
        """A consistent copy of weights and optimizer moments: 'model/NAME', 'moment1/NAME', 'moment2/NAME', fp32, CPU;
        under delayed updates also 'delayed/NAME', the weights before the newest, and 'step', the one that computes with
        them."""
        ...

    async def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``state``; raises CheckpointError on missing names or other shapes. Moments may be absent
        (zeros then), and so may delayed weights (the newest then)."""
        ...

    async def offload(self, fn: Callable[..., R], *args: object) -> R:
        """Run CPU work (quantising, summing, hashing) beside the compute thread, so that it overlaps compute."""
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...
