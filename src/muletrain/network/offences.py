"""Bans of repeat offenders, and a limit on reports of refusals.

A peer that keeps sending messages that no correct peer sends is banned for a while. Only frames and calls that are
wrong in every state of the sender count (``Malformed``). A peer that is late, early or on another lineage is merely
refused: a correct peer that was cut off may be all that.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from muletrain.policy.recent import Bucket, Recent

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT, WINDOW_S = 20, 60.0
"""Offences that ban a peer, and the time within which offences count [s]."""
BAN_S = 300.0
"""Length of a ban [s]."""
REPORTS, REPORTS_PER_S = 200, 2.0
"""Refusals reported at once, and per second after that."""


class Offences:
    """Counts offences by peer, in a sliding window. ``now``: a monotonic clock [s]."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._times: Recent[deque[float]] = Recent()
        self._until: Recent[float] = Recent()

    def __len__(self) -> int:
        """Peers remembered: with offences, or banned."""
        return len(self._times.keys() | self._until.keys())

    def count(self, peer: str) -> bool:
        """Count one offence. True: ``peer`` is now banned."""
        now = self._now()
        self._times[peer] = times = self._times.get(peer, deque(maxlen=LIMIT))
        times.append(now)
        if len(times) < LIMIT or now - times[0] > WINDOW_S or self.banned(peer):
            return False
        self._until[peer] = now + BAN_S
        del self._times[peer]
        return True

    def banned(self, peer: str) -> bool:
        return self._until.get(peer, self._now()) > self._now()


class Reports:
    """Limits the refusals that are reported: strangers may cause any number, under any number of names."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._bucket, self._untold = Bucket(REPORTS, REPORTS_PER_S), 0

    def take(self, reason: str) -> str | None:
        """The report of ``reason``, with the number of reports left out before; None: enough was reported for now."""
        if not self._bucket.take(self._now()):
            self._untold += 1
            return None
        untold, self._untold = self._untold, 0
        return f"{reason} (and {untold} refusals that were not told)" if untold else reason
