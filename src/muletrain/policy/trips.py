"""How long the peers of one stage take to answer, as one sender measures it.

A peer reports for how long a microbatch was computed there (busy), and waited or was with later peers (away). A false
report must neither make a peer look fast and attract all work, nor stretch all deadlines.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from muletrain.policy.deadline import FLOOR_S, UNMEASURED_S, Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

GAMMA = 0.25
"""Weight of a new answer in a peer's average."""
OWN = 2.0
"""Times that a peer's answer may take longer than most peers' before part of the excess is attributed to that peer."""
LONGEST = 16.0
"""Times that an answer may take longer than most peers', before deadlines count less than the measured time."""
LONG, LONG_UNMEASURED = 3, 7
"""Deadlines after which a request has been out for long, and before any answer was measured."""
LONG_OWN = 2
"""Or times that an answer takes by our own device, before any was measured: where our device needs a minute for a
forward, so do most peers."""
DOUBTS, LONG_MOST_S = 4, 3600.0
"""Doubts before any answer was measured, at most, each of which doubles the time after which the next request is doubted;
and the longest such time [s]: nobody holds everything for more than an hour."""


class Trips:
    """Learns from each answer."""

    def __init__(self, capacity: int, stages: int = 1, late_s: Callable[[], float] = lambda: 0.0) -> None:
        """``capacity``: microbatches that a peer holds at once. ``stages``: how many stages a request goes through.
        ``late_s``: returns when our own device's longest operation is late [s] (``Jobs.longest_s``)."""
        self._capacity, self._stages, self._late_s = capacity, stages, late_s
        self._deadline = Deadline()
        self._mean_s: dict[str, float] = {}
        """By peer."""
        self._doubted = 0
        """Requests that were out for long before any answer was measured."""

    @property
    def known(self) -> bool:
        """Was any answer measured?"""
        return self._deadline.known

    def serve(self, peers: Collection[str]) -> None:
        """``peers`` serve the stage now: forget the rest."""
        self._mean_s = {peer: seconds for peer, seconds in self._mean_s.items() if peer in peers}

    def measured(self, peer: str, took_s: float, busy_s: float, away_s: float) -> tuple[float, float]:
        """``peer`` answered after ``took_s``, and reports ``busy_s`` and ``away_s``. Returns a lower bound of the busy
        time, and the time on the network [s]."""
        before = self._mean_s.setdefault(peer, took_s)
        self._mean_s[peer] = before + GAMMA * (took_s - before)
        usual_s = statistics.median(self._mean_s.values())
        self._deadline.measured(min(took_s, LONGEST * max(FLOOR_S, usual_s)))
        # the peer may have spent the excess on ``capacity`` microbatches at once
        own_s = (took_s - OWN * usual_s) / self._capacity
        busy_s = max(min(busy_s, took_s), own_s, 1e-6)
        return busy_s, max(0.0, took_s - busy_s - away_s)

    def deadline_s(self, attempt: int = 0) -> float:
        """Returns how long to wait for an answer, in try number ``attempt``. Before any was measured we look often, since
        another request's answer may tell us that this one is late."""
        return self._deadline.seconds(attempt if self._deadline.known else min(attempt, 1))

    def usual_s(self) -> float:
        """Returns the seconds within which an answer comes as a rule."""
        return self._deadline.seconds() if self._deadline.known else max(2 * UNMEASURED_S, self._own_s())

    def long_s(self) -> float:
        """Returns the seconds after which a request has been out for long, whatever the peer reports."""
        if self._deadline.known:
            return LONG * self._deadline.seconds(longest_s=math.inf)
        first_s = max(LONG_UNMEASURED * self._deadline.seconds(), LONG_OWN * self._own_s())
        return min(LONG_MOST_S, first_s * 2.0 ** min(self._doubted, DOUBTS))

    def _own_s(self) -> float:
        """Returns the seconds that an answer takes if each stage takes as long as our own device may."""
        return min(LONG_MOST_S, self._stages * self._late_s())

    def is_long(self, waited_s: float) -> bool:
        """Has a request been out for long after ``waited_s``? Before any measurement all peers may be slow, so one
        request at a time is doubted, each after twice as long as the one before."""
        if waited_s < self.long_s():
            return False
        self._doubted += not self._deadline.known
        return True
