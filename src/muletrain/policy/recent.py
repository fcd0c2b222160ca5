"""Tables by peer stay small with ``Recent``: in a long run machines come and go without end. ``Debts`` is a table of
recent costs of each peer; a ``Bucket`` limits the total cost. ``Seldom`` limits how often an act is done for one peer."""

from __future__ import annotations

import math
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


class Seldom:
    """Limits an act for each peer to once in ``each_s``. Times are the caller's [s]."""

    def __init__(self, each_s: float) -> None:
        self._each_s, self._last = each_s, Recent[float]()

    def due(self, peer: str, now: float) -> bool:
        """May the act be done for ``peer`` now? If so, it counts as done."""
        if now - self._last.get(peer, -math.inf) < self._each_s:
            return False
        self._last[peer] = now
        return True


class Debts:
    """A leaky bucket for each peer: the debt is the sum of costs, less ``per_s`` for every second since. Times are the
    caller's [s]."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._owed: Recent[tuple[float, float]] = Recent()

    def owed(self, peer: str, now: float) -> float:
        owed, at = self._owed.get(peer, (0.0, now))
        return max(0.0, owed - (now - at) * self._per_s)

    def add(self, peer: str, cost: float, now: float) -> float:
        """Add ``cost``. Returns the new debt of ``peer``."""
        owed = self.owed(peer, now) + cost
        self._owed[peer] = owed, now
        return owed


class Bucket:
    """A token bucket: ``most`` at once, and ``per_s`` more each second. Times are the caller's [s]."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most, self._per_s, self._left, self._at = most, per_s, most, 0.0

    def take(self, now: float) -> bool:
        """Take one. False: none is left."""
        self._left, self._at = min(self._most, self._left + (now - self._at) * self._per_s), now
        if self._left < 1:
            return False
        self._left -= 1
        return True
