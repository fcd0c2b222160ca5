"""One rule for peers that do not do their part in time, whatever the reason (a slow disk, a link that carries one way
only, a lie): other peers come first for some steps, and each time for twice as many."""

from __future__ import annotations

from muletrain.policy.recent import Recent

FIRST, MOST = 4, 1024
"""Steps in which an overdue peer comes last, at first and at most."""


class Overdue:
    """The peers that were overdue lately."""

    def __init__(self, first: int = FIRST) -> None:
        """``first``: steps of a first pause."""
        self._first = first
        self._pauses: Recent[tuple[int, int]] = Recent()
        """By peer: the end of the last pause, and its number of steps."""

    def note(self, peer: str, step: int) -> int:
        """``peer`` is overdue in ``step``. A peer that did its part for as many steps as its last pause begins anew.
        Returns the number of steps of the pause; 0: ``peer`` pauses already."""
        if peer in self.at(step):
            return 0
        until, steps = self._pauses.get(peer, (step, 0))
        steps = self._first if step - until >= steps else min(MOST, 2 * steps)
        self._pauses[peer] = step + steps, steps
        return steps

    def at(self, step: int) -> set[str]:
        """Returns the peers that come last in ``step``."""
        return {peer for peer, (until, steps) in self._pauses.items() if until - steps <= step < until}
