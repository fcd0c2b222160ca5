"""The ``Compute`` seam owns one stage's weights and computes with the weights.

Shapes: B sequences per microbatch, T tokens per sequence, D model width, P parameters of the stage (flat).

Every implementation promises:

* No call blocks the event loop, and all calls are made on the event loop's thread.
* ``forward``, ``backward``, ``loss_backward`` and ``apply`` take a ``Turn``: how urgent the call is, and a check to run
  right before the work. The implementation decides which call computes next, and may compute several microbatches
  together, or give parts of one away. Each check is called exactly once, right before the work of the call.
* A microbatch's gradient is in the accumulator exactly if its call returned. A cancelled or failed call adds nothing.
* ``gradient``, ``state`` and ``digest`` see every call that returned before.
* Forward and backward of a microbatch use the same weights, of the microbatch's step.
* The gradient of a *part* of a microbatch (``Microbatch.whole``) is kept beside the accumulator until ``count``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from muletrain.compute.slot import AT_ONCE, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from muletrain.compute.jobs import Jobs
    from muletrain.compute.results import Result
    from muletrain.optim.flat import FlatLayout
    from muletrain.optim.sketch import Sketch

R = TypeVar("R")


class Microbatch(NamedTuple):
    """Identity of a microbatch, or of a part of one, from which tokens and dropout masks follow (CONTRIBUTING, "How a
    step goes", 1)."""

    step: int
    index: int  # type: ignore[assignment]  # the field's name is the papers'; tuple.index is never used
    first: int = 0
    """The sequence with which the part begins."""
    whole: int = 0
    """Sequences of the whole microbatch; 0: this is no part. Losses and gradients of parts are weighted by share, so
    the sums are the microbatch's."""

    heldout: bool = False
    """Held-out text: the loss is measured without dropout, nothing is kept for a backward, and no gradient is returned.
    Targets equal to the vocabulary's size (padding) count for nothing."""

    def share(self, sequences: int) -> float:
        """Returns ``sequences`` as a share of the microbatch."""
        return sequences / self.whole if self.whole else 1.0


@dataclass(frozen=True)
class Update:
    """An optimizer step's inputs beside the gradient, from the step record."""

    step: int
    """The step being applied: schedule and bias corrections follow from it."""
    scale: float
    """Factor of the reduced gradient (global clipping)."""
    skip: bool
    """Leave weights and moments unchanged, since the gradient is not finite."""
    tied: Sequence[tuple[int, int, Tensor]] = ()
    """(begin, end, values fp32 on the CPU): another stage's gradient for the shared parameters, and their range in this
    stage's."""

    def write_scaled(self, gradient: Tensor, begin: int, out: Tensor) -> None:
        """Fill ``out``, fp32 on any device, with the numbers of ``gradient``, fp32 [G], from ``begin`` on: ``tied`` added,
        then scaled."""
        part = gradient[begin : begin + len(out)]
        if not self.tied and part.device == out.device:
            torch.mul(part, self.scale, out=out)
            return
        out.copy_(part)
        self.add_tied(out, begin)
        out.mul_(self.scale)

    def add_tied(self, gradient: Tensor, begin: int = 0) -> None:
        """Add ``tied`` to ``gradient``, fp32: numbers of the stage's from ``begin`` on, not scaled yet."""
        for a, b, values in self.tied:
            first, end = max(a, begin), min(b, begin + len(gradient))
            if first < end:
                gradient[first - begin : end - begin] += values[first - a : end - a].to(gradient.device)


class Compute(Protocol):
    """One stage of the model. The module docstring lists the promises of implementations.

    ``forward``, ``backward`` and ``loss_backward`` return as soon as the microbatch is computed; awaiting the
    ``Result`` copies the tensor to host memory while the next microbatch computes. Under delayed updates a step
    computes with the weights before the last update, and two steps have an accumulator at once.
    """

    stage: int
    stages: int
    delayed: bool
    """Updates are delayed: ``apply`` runs beside the next step. Otherwise nothing computes during ``apply``."""
    n_params: int
    """P: numbers of the weights."""
    n_trained: int
    """G: length of the flat gradient, which frozen parameters are not in (``optim.flat``)."""
    layout: FlatLayout
    """Where each parameter lies in the flat weights, and each trained one in the flat gradient."""
    parts: int
    """Parts of the stage that take turns on the device; 1: the whole stage stays there."""
    by_block: bool
    """Backward computes one block again at a time (``compute.checkpointing``)."""
    lends: bool
    """``state`` is no copy, since memory is too small, and may be on the device, in 16 bits: valid until the next
    ``apply`` or load."""
    jobs: Jobs
    """The operations that run now, and how long each usually takes."""

    @property
    def skipped(self) -> int:
        """Updates skipped in a row, up to the last one. The count is part of the state."""
        ...

    async def forward(
        self, mb: Microbatch, inputs: Tensor, turn: Turn = AT_ONCE, positions: Tensor | None = None
    ) -> Result:
        """Compute a stage before the last. ``inputs``: int64 tokens [B, T] at stage 0, else activations fp32 [B, T, D].
        ``positions``: see ``StageModule.forward``. Returns activations fp32 [B, T, D]. The inputs of ``backward`` are kept
        until ``backward`` or ``discard``. Raises ProtocolError for inputs that no correct peer sends."""
        ...

    async def backward(self, mb: Microbatch, grad: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool) -> Result | None:
        """Differentiate a stage before the last. ``grad``: fp32 [B, T, D], d loss / d output. Returns d loss / d inputs
        (None at stage 0), and adds the parameter gradient to the accumulator of ``mb.step`` if ``accumulate``. If
        ``turn.begins`` raises, ``mb`` may have another turn. Raises KeyError when nothing is kept for ``mb``, and
        ProtocolError for a gradient of another shape."""
        ...

    async def loss_backward(
        self, mb: Microbatch, inputs: Tensor, targets: Tensor, turn: Turn = AT_ONCE, *, accumulate: bool
    ) -> tuple[float, Result | None]:
        """Compute and differentiate the last stage. Returns the mean cross-entropy [nats/token] of ``targets`` int64
        [B, T], and d loss / d inputs (None at stage 0, and for a held-out microbatch). Accumulates as ``backward``
        does. Positions follow from the targets (``loss.positions_in``)."""
        ...

    def busy_s(self, mb: Microbatch, took_s: float) -> float:
        """Returns for how long the last call for ``mb``, which took ``took_s`` and has returned, kept this stage busy:
        microbatches computed together share the time."""
        ...

    def discard(self, mb: Microbatch) -> None:
        """Forget the activations that ``forward`` kept for ``mb``, and the gradient of a part that was not counted, if
        anything."""
        ...

    def count(self, mb: Microbatch) -> None:
        """Add the gradient of ``mb``, a part, to the accumulator. Raises KeyError when none is kept."""
        ...

    async def part_sketch(self, mb: Microbatch, seed: bytes) -> Sketch:
        """The sketch (``optim.sketch``, from ``seed``) of the gradient of ``mb``, a part, that was not counted yet. Raises
        KeyError when none is kept."""
        ...

    def add(self, step: int, gradient: Tensor) -> None:
        """Add a gradient that was summed elsewhere, flat fp32 [G] on the CPU, to the accumulator of ``step``."""
        ...

    async def gather(self, step: int) -> None:
        """Returns when the whole accumulator of ``step`` is here: ``gradient`` needs no remote machine then. Called
        before the accumulator is sealed."""
        ...

    async def gradient(self, step: int) -> Tensor:
        """The step's accumulator: flat fp32 [G] on the CPU, the *sum* of the accumulated microbatches' gradients. The
        caller must not use the tensor after ``apply`` or ``clear`` of that step. A caller that changes the tensor must
        ``apply`` the result, or ``clear``: more microbatches cannot be added."""
        ...

    async def room(self, numbers: int) -> Tensor:
        """Returns fp32 [numbers] on the CPU, with any values, for a gradient: in backing memory if the stage lives
        there."""
        ...

    async def apply(self, gradient: Tensor, update: Update, turn: Turn = AT_ONCE) -> None:
        """Update the weights with the reduced mean gradient (flat fp32 [G], CPU), then clear the step's accumulator. A
        cancelled call has either not begun or completes. When the update begins, no microbatch computes with the
        replaced weights."""
        ...

    def clear(self, step: int) -> None:
        """Empty the step's accumulator without an update."""
        ...

    async def digest(self) -> bytes:
        """BLAKE3 of the newest fp32 weights, which replicas of a lineage compare."""
        ...

    async def copied_weights(self, begin: int = 0, end: int | None = None) -> Tensor:
        """A copy of the newest fp32 weights from ``begin`` to ``end``, flat, on the CPU: the input of ``digest``. Does not
        wait for passes. If an update begins meanwhile, the copy may have the weights before or after."""
        ...

    def newest_for(self) -> tuple[int, ...]:
        """Returns the steps that compute with the newest weights, under delayed updates; else (): the one under way."""
        ...

    async def load_weights(self, weights: Tensor, steps: Collection[int] = ()) -> None:
        """Replace the weights that ``steps`` compute with, (): all, by ``weights``, flat fp32 [P] on the CPU."""
        ...

    async def state(self) -> dict[str, Tensor]:
        """A consistent copy (see ``lends``) of weights and optimizer moments: 'model/NAME', 'moment1/NAME',
        'moment2/NAME', fp32, CPU. Under delayed updates there is also 'delayed/NAME', the weights before the newest,
        and 'step', the step that uses 'delayed/NAME'."""
        ...

    async def load_state(self, state: dict[str, Tensor]) -> None:
        """Load a ``state``. Absent moments become zero, and absent delayed weights the newest ones. Raises
        CheckpointError for missing names or wrong shapes, and changes nothing then."""
        ...

    async def offload(self, fn: Callable[..., R], *args: object) -> R:
        """Run CPU work (quantising, summing, hashing) in a thread beside the compute thread."""
        ...

    async def end(self, *, over: bool) -> None:
        """This peer serves the stage no more; ``over``: because the run has ended."""
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...


class WrappedCompute:
    """A ``Compute`` around another one: everything not overridden is ``inner``'s."""

    def __init__(self, inner: Compute) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
