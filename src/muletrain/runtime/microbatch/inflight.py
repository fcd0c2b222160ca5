"""An ``InFlightStep`` is a step during the computation of its microbatches, also with delayed parameter updates (DPU;
SWARM sec. 3.2, Ren et al. 2021).

A step is computed, then agreed on: sealed, averaged, recorded, applied. Agreement always goes step by step. Without
DPU, step t + 1 is computed after R_t was applied. With DPU, a peer begins to compute t + 1 as soon as all microbatches
of t are through, and t is averaged and applied meanwhile. At most two steps are alive, since t + 1 computes with the
weights made by R_{t-1}:

- **Weights.** W(k) contains R_0..R_{k-1}. Step t and its reruns compute with W(t - 1) (steps 0 and 1 with W(0)); R_t
  makes W(t + 1) out of W(t). So two versions are kept: W(t - 1) and W(t), while t is agreed on and t + 1 computes. R_t
  puts W(t + 1) in the place of W(t - 1), which is no longer needed: after the whole record no part of t runs again. A
  step that is not finite changes no weights, but the versions move on. The reference is a single process that applies
  the gradient of a step after computing the next step.
- **State of a step.** Each step has its own accumulator (in ``Compute``), ledger, losses and counts (here), and
  trainer. Everything else (seals, rounds, entries, the gradient) belongs to the agreement, of which there is only one.
- **Lineage.** Frames of step t + 1 are sent before R_t is known, so each frame carries hash(R_{t-1}), the record that
  made its weights; frames of another lineage are refused. The first two steps have the genesis' lineage. The records
  are one chain all the same: R_t contains hash(R_{t-1}), which is known when t is agreed on.
- **Frames.** Frames for computing t + 1 are taken while t is agreed on. Frames for agreeing on t + 1, and all of t + 2,
  wait until R_t was applied, since the sender has applied R_t.
- **Behind.** A peer that missed R_t takes R_t from a holder and keeps the computed part of t + 1: the weights were
  right. A peer that takes a replica's state drops both steps. That state, also in a checkpoint, is before R_k: W(k),
  the moments, and W(k - 1), with which k is computed.
- **Leaving.** A peer that asks in its seal of t to leave takes no microbatch of t + 1, until R_t decides that the peer
  stays.
- **The end.** No step is computed beyond the last. When R_t ends the run, the computed part of t + 1 is dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


class Ledger:
    """Records the microbatches in this peer's accumulator (CONTRIBUTING, "How a step goes", 3). ``StageServer`` fills
    the ledger, room ``step`` seals and reopens it.

    A ledger is a pure state machine of one step. A peer accumulates each ``index`` at most once over all attempts.
    Announcing the set seals the ledger: later microbatches are recomputed without accumulating, until the step's record
    decides otherwise.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._accumulated: dict[int, float] = {}
        self._in_flight: set[int] = set()
        self._excused: set[int] = set()
        self.sealed = False
        self._gaps: Collection[int] | None = None
        """The missing microbatches; None: any microbatch may be missing."""
        self.barred = False
        """Nothing is accumulated, even while open: other peers compute this peer's microbatches."""

    def begin(self, index: int) -> bool:
        """Reserve ``index`` until ``commit`` or ``abort``. Returns False if the microbatch must not accumulate. Raises
        ProtocolError for an index that the step does not have."""
        if not 0 <= index < self._microbatches:
            raise ProtocolError(f"microbatch {index}: the step has 0..{self._microbatches - 1}")
        if not self._open(index) or index in self._accumulated or index in self._in_flight:
            return False
        self._in_flight.add(index)
        return True

    def takes(self, index: int) -> bool:
        """Returns False if ``index`` is not in the accumulator and cannot come in now: another replica may still be
        open for ``index``."""
        return self._open(index) or index in self._accumulated

    def commit(self, index: int, loss: float) -> None:
        """The gradient of ``index``, with its ``loss`` [nats/token], is now in the accumulator."""
        self._in_flight.remove(index)
        self._accumulated[index] = loss

    def abort(self, index: int) -> None:
        """No part of the reserved microbatch is in the accumulator, unless ``commit`` said so."""
        self._in_flight.discard(index)

    def excuse(self, index: int) -> None:
        """``index`` was computed from suspicious input; do not blame this peer for the result."""
        self._excused.add(index)

    def _open(self, index: int) -> bool:
        return not (self.sealed or self.barred) and (self._gaps is None or index in self._gaps)

    @property
    def excused(self) -> bool:
        """Is an excused microbatch in the accumulator?"""
        return bool(self._excused & self._accumulated.keys())

    def seal(self) -> frozenset[int]:
        """Fix the set, and return it for the announcement. Raises RuntimeError while a microbatch accumulates."""
        if self._in_flight:
            raise RuntimeError(f"sealing while {sorted(self._in_flight)} still accumulate")
        self.sealed = True
        return frozenset(self._accumulated)

    def reopen(self, *, keep: bool, gaps: Collection[int] | None = None) -> None:
        """Accept more indices, since the round failed or had ``gaps``: then only the gaps, because other reruns in
        progress belong to earlier gaps, before a peer came back. ``keep`` false: the accumulator was emptied."""
        self.sealed = False
        if gaps is not None or not keep:
            self._gaps = gaps
        if not keep:
            self._accumulated.clear()
            self._excused.clear()

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(self._in_flight)

    @property
    def accumulated(self) -> frozenset[int]:
        return frozenset(self._accumulated)

    @property
    def losses(self) -> dict[int, float]:
        """Losses of the accumulated microbatches [nats/token]."""
        return dict(self._accumulated)


class TooLate(MuletrainError):
    """The request is of no use any more. No peer is at fault."""


@dataclass
class InFlightStep:
    """One step at one peer. ``StageServer`` writes the counts, room ``step`` sets ``round``, ``reduced`` and
    ``gave_way``."""

    step: int
    lineage: bytes
    microbatches: int
    """Microbatches of the step."""
    ledger: Ledger = field(init=False)
    losses: dict[int, float] = field(default_factory=dict)
    """Losses of the microbatches that are known to be through [nats/token]."""
    computed: int = 0
    """Microbatches computed by this peer, in vain or not."""
    counted: dict[bytes, int] = field(default_factory=dict)
    """Microbatches of this peer in each round that it has averaged, or begun to."""
    answered: dict[int, tuple[str, tuple[int, int, int, str]]] = field(default_factory=dict)
    """Sender and key of the last answered request to accumulate each microbatch."""
    serving: set[int] = field(default_factory=set)
    """Microbatches that this peer works on."""
    given: set[int] = field(default_factory=set)
    """Microbatches that this peer's trainer has given out and waits for."""
    asking: set[int] = field(default_factory=set)
    """Microbatches that the trainer gives out unless another peer has them."""
    answering: Counter[int] = field(default_factory=Counter)
    """Microbatches whose answer is being sent, perhaps after other answers on a narrow link."""
    round: bytes = b""
    """The round that is averaged now, or was last; empty: none."""
    reduced: bool = False
    """This peer holds the stage's mean gradient."""
    gave_way: bool = False
    """A larger company of replicas goes on without this peer, so the gradient held here will not count."""
    over: bool = False
    """The weights may change: nothing more is computed."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.microbatches)

    def end(self) -> None:
        """The weights may change: waiting microbatches are not computed any more."""
        self.over = True

    def check(self) -> None:
        """Raises TooLate if the weights may have changed."""
        if self.over:
            raise TooLate(f"step {self.step} is over, or was begun again")

    @property
    def all_completed(self) -> bool:
        """Is ``missing`` empty? Answered without a look at each microbatch, since every frame asks."""
        return len(self.losses) == self.microbatches

    @property
    def covered(self) -> frozenset[int]:
        """Microbatches that must not be accumulated again: the microbatches in our accumulator, or all once we hold the
        stage's mean gradient, unless that gradient will not count."""
        if not self.reduced:
            return self.ledger.accumulated
        return frozenset() if self.gave_way else frozenset(range(self.microbatches))

    def missing(self) -> frozenset[int]:
        """Returns the microbatches that are not known to be through."""
        return frozenset(range(self.microbatches)) - self.losses.keys()

    def complete(
        self, indices: Sequence[int], losses: Sequence[float], of_trainer: Callable[[int], bool] = lambda index: False
    ) -> bool:
        """Note that microbatches are through. ``of_trainer`` tells whether the microbatch's own trainer reports; only
        that trainer replaces a known loss. Returns False, without a note, for invalid arguments."""
        if len(indices) != len(losses) or any(i >= self.microbatches for i in indices):
            return False
        for index, loss in zip(indices, losses, strict=True):
            if self.losses.setdefault(index, loss) != loss and of_trainer(index):
                self.losses[index] = loss
        return True
