"""Repeat offenders, and how much is said about refusals.

Peers that keep sending what no correct peer sends are left out for a while. Only what is wrong whatever state its
sender is in counts (``Malformed``): a peer that is late, early, or on another lineage is merely refused, since a
correct one that was cut off may be all that.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT, WINDOW_S = 20, 60.0
"""So many within so long."""
BAN_S = 300.0
MAX_TRACKED = 1024
"""Peers remembered; the one whose last offence is the oldest goes first."""
REPORTS, REPORTS_PER_S = 200, 2.0
"""Refusals told at once, and per second after that."""


class Offences:
    """By peer, in a sliding window. ``now``: seconds, monotonic."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        self._until: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """Peers remembered: with offences, or banned."""
        return len(self._times.keys() | self._until.keys())

    def count(self, peer: str) -> bool:
        """One more. True if that bans it."""
        now = self._now()
        times = self._times.setdefault(peer, deque(maxlen=LIMIT))
        times.append(now)
        _bounded(self._times, peer)
        if len(times) < LIMIT or now - times[0] > WINDOW_S or self.banned(peer):
            return False
        self._until[peer] = now + BAN_S
        _bounded(self._until, peer)
        del self._times[peer]
        return True

    def banned(self, peer: str) -> bool:
        return self._until.get(peer, self._now()) > self._now()


class Reports:
    """Refusals that are told: strangers may cause any number, under any number of names."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left, self._at, self._untold = float(REPORTS), now(), 0

    def take(self, reason: str) -> str | None:
        """What to tell; None when it was enough for now. Those left out are counted in the next."""
        now = self._now()
        self._left, self._at = min(float(REPORTS), self._left + (now - self._at) * REPORTS_PER_S), now
        if self._left < 1:
            self._untold += 1
            return None
        untold, self._untold, self._left = self._untold, 0, self._left - 1
        return f"{reason} (and {untold} refusals that were not told)" if untold else reason


def _bounded(table: OrderedDict[str, deque[float]] | OrderedDict[str, float], newest: str) -> None:
    table.move_to_end(newest)
    if len(table) > MAX_TRACKED:
        table.popitem(last=False)
