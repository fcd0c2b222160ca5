"""The fork choice rule says which of two histories of a run stays when a partition heals.

Both are right: in either, a state labelled t contains steps 1..t, each microbatch once. One must go all the same, and
both sides must reach the same answer during further training, at different moments, peer by peer. So the rule compares
properties that hardly change: a clearly longer history stays; otherwise the history with the lower hash of the first
own record. (With the hashes of the newest records the answer would change at every step.)
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 1024
"""Number of steps with a remembered lineage: 32 kB."""
LEAD = 2
"""Steps by which a history is clearly longer: peers of one lineage may be a step apart."""


@dataclass(frozen=True)
class Chain:
    """A peer's history. ``lineages``: of the last steps up to ``step``, the current one; ``over``: no step follows."""

    step: int
    lineages: tuple[bytes, ...]
    over: bool = False

    def at(self, step: int) -> bytes | None:
        """Returns the lineage of ``step``; None for a later step, and for one that is forgotten."""
        k = len(self.lineages) - 1 - (self.step - step)
        return self.lineages[k] if 0 <= k < len(self.lineages) else None

    def then(self, lineage: bytes) -> Chain:
        """Returns the history one step later."""
        return Chain(self.step + 1, (*self.lineages, lineage)[-MEMORY:])


def forked_at(a: Chain, b: Chain) -> int | None:
    """Returns the first step at which the two are known to differ; None without a difference, as far as both reach."""
    known = range(max(a.step - len(a.lineages), b.step - len(b.lineages)) + 1, min(a.step, b.step) + 1)
    return next((step for step in known if a.at(step) != b.at(step)), None)


def gives_way(own: Chain, other: Chain, *, stalled: bool) -> bool:
    """Should a peer in ``own`` go over to ``other``? ``stalled``: ``own`` has lacked a stage or a trainer for long. A
    history that has ended stays."""
    fork = forked_at(own, other)
    if fork is None or own.over:
        return False
    if stalled or other.over:
        return True
    if abs(own.step - other.step) >= LEAD:
        return own.step < other.step
    mine, others = own.at(fork), other.at(fork)
    assert mine is not None  # both reach
    assert others is not None
    return others < mine
