"""A leaky bucket for each of many peers tells what it has cost lately."""

from __future__ import annotations

from muletrain.policy.recent import Recent


class Debts:
    """What peers owe: their costs, less ``per_s`` for every second since. Times are the caller's [s]."""

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
