"""A step while its microbatches are computed, and delayed parameter updates (DPU; SWARM sec. 3.2, Ren et al. 2021).

A step is computed, then agreed on: sealed, averaged, recorded, applied. Agreement goes step by step, always. Without
DPU step t + 1 is computed once R_t was applied. With it, a peer begins to compute t + 1 as soon as all microbatches of
t are through, so that t is averaged and applied meanwhile. At most these two are alive, for t + 1 computes with what
R_{t-1} made:

- **Weights.** W(k) has R_0..R_{k-1} in it. Step t computes with W(t - 1) (steps 0 and 1 with W(0)), its reruns
  included, whenever they come; R_t makes W(t + 1) out of W(t). So two versions are kept: while t is agreed on and t + 1
  computes, those are W(t - 1) and W(t), and R_t puts W(t + 1) in the place of W(t - 1), which nobody needs any more:
  with the whole record nothing of t runs again. A step that is not finite changes no weights, but they move on all the
  same. The reference: a single process that applies the gradient of a step after it has computed the next one.
- **What a step has of its own**: the accumulator (in ``Compute``), and the ledger, the losses and the counts here; the
  trainer. All the rest (seals, rounds, entries, the gradient held) is the agreement's, and there is one.
- **Lineage.** Frames of step t + 1 are sent before R_t is known, so they carry hash(R_{t-1}), the record of the weights
  they were computed with; frames of another are refused, as ever. The first two steps have the genesis'. The records
  are one chain none the less: R_t contains hash(R_{t-1}), which is known when t is agreed on.
- **Frames.** Those for computing t + 1 are taken while t is agreed on; those for agreeing on t + 1 (and all of t + 2)
  wait until R_t was applied, for their sender has applied it.
- **Behind.** Who missed R_t takes it from a holder and keeps what it computed of t + 1: the weights were right. Who
  takes a replica's state drops both steps. That state (also a checkpoint's) is before R_k: W(k), the moments, and W(k -
  1), with which k is computed.
- **Leaving.** Who asks in its seal of t to go takes no microbatch of t + 1 until R_t says that it stays.
- **The end.** No step is computed beyond the last; when R_t ends the run, what was computed of t + 1 is dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.runtime.microbatch.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Sequence


class TooLate(MuletrainError):
    """Nobody's fault: what was asked for is of no use any more."""


@dataclass
class InFlightStep:
    """One step's, at one peer."""

    step: int
    lineage: bytes
    microbatches: int
    """In the step."""
    ledger: Ledger = field(init=False)
    losses: dict[int, float] = field(default_factory=dict)
    """Of the microbatches known to be through [nats/token]."""
    accumulated: int = 0
    recomputed: int = 0
    """Microbatches this peer computed that count in its accumulator, and those that do not."""
    answered: dict[int, tuple[str, tuple[int, int, int, str]]] = field(default_factory=dict)
    """Sender and key of the last answered request to accumulate each microbatch."""
    serving: set[int] = field(default_factory=set)
    """Microbatches that this peer works on."""
    answering: Counter[int] = field(default_factory=Counter)
    """Microbatches of which the answer is being sent: on a narrow link it may wait for others."""
    round: bytes = b""
    """What is averaged now, or was last; empty: nothing was."""
    reduced: bool = False
    """This peer holds the stage's mean gradient."""
    gave_way: bool = False
    """A larger company of replicas goes on without this peer, so that the gradient it holds will not count."""
    over: bool = False
    """Its weights may change: nothing more is computed."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.lineage, self.step, self.microbatches)

    def end(self) -> None:
        """Its weights may change: what still waits for its turn is not computed any more."""
        self.over = True

    def check(self) -> None:
        """Raises TooLate."""
        if self.over:
            raise TooLate(f"step {self.step} is over, or was begun again")

    @property
    def all_completed(self) -> bool:
        """As ``missing`` says, without a look at each: it is asked at every frame."""
        return len(self.losses) == self.microbatches

    @property
    def covered(self) -> frozenset[int]:
        """Microbatches that are not to be accumulated again: ours; all of them once we hold the stage's mean gradient,
        unless it will not count."""
        if not self.reduced:
            return self.ledger.accumulated
        return frozenset() if self.gave_way else frozenset(range(self.microbatches))

    def missing(self) -> frozenset[int]:
        """Microbatches not known to be through."""
        return frozenset(range(self.microbatches)) - self.losses.keys()

    def complete(self, indices: Sequence[int], losses: Sequence[float]) -> bool:
        """Learn of them. False, and nothing is learnt, when they make no sense."""
        if len(indices) != len(losses) or any(i >= self.microbatches for i in indices):
            return False
        self.losses.update(zip(indices, losses, strict=True))
        return True

    def uncount(self) -> None:
        """What was accumulated counts as done twice."""
        self.accumulated -= len(self.ledger.accumulated)
        self.recomputed += len(self.ledger.accumulated)
