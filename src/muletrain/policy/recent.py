"""Tables by peer stay small with ``Recent``: in a long run machines come and go without end. ``Debts`` keeps one of what
each peer has cost lately."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

V = TypeVar("V")
MOST = 4096
"""Entries, at most: as many as a run may have members."""


class Recent(OrderedDict[str, V]):
    """Keeps the entries that were set last."""

    def __setitem__(self, peer: str, value: V) -> None:
        super().__setitem__(peer, value)
        self.move_to_end(peer)
        if len(self) > MOST:
            self.popitem(last=False)


class Debts:
    """A leaky bucket for each peer: what it owes are its costs, less ``per_s`` for every second since. Times are the caller's [s]."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._owed: Recent[tuple[float, float]] = Recent()

    def owed(self, peer: str, now: float) -> float:
        owed, at = self._owed.get(peer, (0.0, now))
        return max(0.0, owed - (now - at) * self._per_s)

    def add(self, peer: str, cost: float, now: float) -> float:
        """Add ``cost``. Returns what ``peer`` owes then."""
        owed = self.owed(peer, now) + cost
        self._owed[peer] = owed, now
        return owed
