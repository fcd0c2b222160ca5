"""The ledger says which microbatches are in this peer's accumulator (CONTRIBUTING, "How a step goes", 3).

It is a pure state machine. A peer accumulates ``(lineage, step, index)`` at most once, whatever the attempt. Announcing
the set seals it: what arrives later is recomputed without accumulating, until the step's record says otherwise.
"""

from __future__ import annotations

from muletrain.errors import ProtocolError


class Ledger:
    """The ledger of one step at one peer. ``StageServer`` fills it, room ``step`` seals and reopens it."""

    def __init__(self, lineage: bytes, step: int, microbatches: int) -> None:
        self.lineage = lineage
        self.step = step
        self._microbatches = microbatches
        self._accumulated: dict[int, float] = {}
        self._in_flight: set[int] = set()
        self._excused: set[int] = set()
        self._sealed = False
        self.barred = False
        """Nothing is accumulated, even if it is open: others compute what this peer should have computed."""

    def begin(self, index: int) -> bool:
        """Reserve ``index`` until ``commit`` or ``abort``. Returns False if the microbatch must not accumulate. Raises
        ProtocolError for an index that the step does not have."""
        if not 0 <= index < self._microbatches:
            raise ProtocolError(f"microbatch {index} of step {self.step}: the step has 0..{self._microbatches - 1}")
        if not self._open or index in self._accumulated or index in self._in_flight:
            return False
        self._in_flight.add(index)
        return True

    def takes(self, index: int) -> bool:
        """Returns False if ``index`` is not in the accumulator and cannot come in now: another replica may still be
        open for it."""
        return self._open or index in self._accumulated

    def commit(self, index: int, loss: float) -> None:
        """The gradient of ``index``, with its ``loss`` [nats/token], is now in the accumulator."""
        self._in_flight.remove(index)
        self._accumulated[index] = loss

    def abort(self, index: int) -> None:
        """The reserved microbatch did not finish; nothing from it is in the accumulator."""
        self._in_flight.discard(index)

    def excuse(self, index: int) -> None:
        """``index`` was computed from suspicious input; do not blame this peer for the result."""
        self._excused.add(index)

    @property
    def _open(self) -> bool:
        return not (self._sealed or self.barred)

    @property
    def excused(self) -> bool:
        """Is an excused microbatch in the accumulator?"""
        return bool(self._excused & self._accumulated.keys())

    def seal(self) -> frozenset[int]:
        """Fix the set, and return it to be announced. Raises RuntimeError while a microbatch accumulates."""
        if self._in_flight:
            raise RuntimeError(f"sealing step {self.step} while {sorted(self._in_flight)} still accumulate")
        self._sealed = True
        return frozenset(self._accumulated)

    def reopen(self, *, keep: bool) -> None:
        """Accept more indices, since the round failed or had gaps. ``keep`` false: the accumulator was emptied."""
        self._sealed = False
        if not keep:
            self._accumulated.clear()
            self._excused.clear()

    @property
    def sealed(self) -> bool:
        return self._sealed

    @property
    def in_flight(self) -> frozenset[int]:
        return frozenset(self._in_flight)

    @property
    def accumulated(self) -> frozenset[int]:
        return frozenset(self._accumulated)

    @property
    def losses(self) -> dict[int, float]:
        """Losses of what is in the accumulator [nats/token]."""
        return dict(self._accumulated)
