"""How long the peers of one stage take to answer, as one sender measures it.

A peer reports for how long a microbatch was computed there (busy), and waited or was with later peers (away). The report
is believed as far as the sender's own measurement allows: a peer that claims to need no time gets more work than its
share, and the run as slow as that peer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from muletrain.policy.deadline import UNMEASURED_S, Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 3
"""Deadlines after which a request is overdue."""
LONG_MOST_S = 3600.0
"""Longest time until a request is overdue [s], unless a full queue takes longer; and the time before any answer was
measured, for nobody is late then compared with others."""


class Trips:
    """Learns from each answer."""

    def __init__(
        self, stages: int = 1, late_s: Callable[[], float] = lambda: 0.0, queue_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """``stages``: how many stages a request goes through. ``late_s``: returns when our own device's longest
        operation is late [s] (``Jobs.longest_s``), ``queue_s`` how long a full queue takes on such a device."""
        self._stages, self._late_s, self._queue_s = stages, late_s, queue_s
        self._deadline = Deadline()

    @property
    def known(self) -> bool:
        """Was any answer measured?"""
        return self._deadline.known

    def measured(self, took_s: float, busy_s: float, away_s: float) -> tuple[float, float]:
        """A peer answered after ``took_s``, and reports ``busy_s`` and ``away_s``. Returns the busy time, and the time on
        the network [s]."""
        self._deadline.measured(took_s)
        busy_s = max(min(busy_s, took_s), 1e-6)
        return busy_s, max(0.0, took_s - busy_s - away_s)

    def deadline_s(self, attempt: int = 0) -> float:
        """Returns how long to wait for an answer, in try number ``attempt``. Before any was measured we look often, since
        another request's answer may tell us that this one is late."""
        return self._deadline.seconds(attempt if self._deadline.known else min(attempt, 1))

    def usual_s(self) -> float:
        """Returns the seconds within which an answer comes as a rule."""
        own_s = min(LONG_MOST_S, self._stages * self._late_s())
        return self._deadline.seconds() if self._deadline.known else max(2 * UNMEASURED_S, own_s)

    def long_s(self) -> float:
        """Returns the seconds after which a request is overdue, whatever the peer reports: not before a peer with a device
        like ours is through with a full queue."""
        long_s = LONG * self._deadline.seconds(longest_s=math.inf) if self._deadline.known else LONG_MOST_S
        return max(min(LONG_MOST_S, long_s), self._queue_s())
