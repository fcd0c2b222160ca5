"""How much may be on its way to one receiver: a congestion window that keeps the queue it causes short.

Routers at home queue seconds of data. A sender that fills such a queue delays everything that shares the link: probes, seals, activations.
So the window follows the delay, not losses, as LEDBAT (RFC 6817), FAST TCP (Wei et al. 2006) and BBR do: the one-way delay above the
smallest one seen lately is the queue in front of the receiver. In equilibrium that queue is ``target_s`` long. Traffic with a smaller
target yields to traffic with a larger one wherever the two share a link, at either end.
"""

from __future__ import annotations

from collections import deque

SMALLEST, FIRST, LARGEST = 1 << 13, 1 << 14, 1 << 25
"""Bytes of a window: at least, at first, and at most. ``SMALLEST`` lets the lowest class come through on a full link, too."""
PIECE_MIN, PIECE_MAX = 1 << 12, 1 << 18
"""Bytes that are handed to the transport at once."""
PIECES = 8
"""In a window."""
COARSE = 2
"""Windows that a piece of a virtual world is at most: a pause follows one that is larger than the window, so that as much goes in all."""
GAIN = 0.2
"""Of the way to the window that the measured delay asks for, in one round trip (FAST TCP's gamma)."""
MEMORY_S = 60.0
"""The smallest delay is that of the last one to two of these periods: routes change, and clocks drift by some 50 us in a second."""
RECENT_S = 0.01
"""Of the acknowledgements that came within that time, the smallest delay counts: a busy process acknowledges late now and then. More would
be a lag, and the queue would swing."""


INSTANT_S = 1e-6
"""A round trip takes at least that."""


FADES = 0.9
"""Of a long queue, with each acknowledgement that saw a shorter one."""


class Smallest:
    """The smallest value of the last ``MEMORY_S`` to ``2 * MEMORY_S`` seconds."""

    def __init__(self) -> None:
        self._before = self._now = float("inf")
        self._since_s = float("-inf")

    def known(self, now_s: float) -> bool:
        return now_s - self._since_s <= 2 * MEMORY_S

    def add(self, value: float, now_s: float) -> float:
        """Returns the smallest, ``value`` included."""
        if now_s - self._since_s > MEMORY_S:
            self._before = self._now if self.known(now_s) else float("inf")
            self._now, self._since_s = value, now_s
        self._now = min(self._now, value)
        return min(self._before, self._now)


class Window:
    """Of one sender to one receiver. ``size`` [bytes]; ``queue_s``: the queue in front of the receiver, as measured last;
    ``late_s``: with those on the way back, the longest of late; ``measured_s``: when."""

    def __init__(self) -> None:
        self.size = float(FIRST)
        self.queue_s = self.late_s = 0.0
        self.measured_s = float("-inf")
        self._starts = True
        """It doubles with each round trip until a queue is seen."""
        self._one_way, self._round_trip = Smallest(), Smallest()
        self._recent: deque[tuple[float, float]] = deque()
        """(when it was known, one-way delay)."""

    def measured(self, now_s: float) -> bool:
        """Is the delay without a queue known?"""
        return self._one_way.known(now_s)

    @property
    def piece(self) -> int:
        """Bytes to hand over at once: a small part of the window, so that other traffic comes between two pieces."""
        return min(PIECE_MAX, max(PIECE_MIN, int(self.size) // PIECES))

    @property
    def coarse(self) -> int:
        """What a virtual world, where each piece costs events, hands over at once, at most."""
        return int(self.size) // PIECES if self._starts else COARSE * int(self.size)

    def acknowledged(
        self, nbytes: int, sent_s: float, received_s: float, now_s: float, *, target_s: float, filled: bool
    ) -> None:
        """``nbytes``, handed over at ``sent_s``, arrived at ``received_s`` of the receiver's clock, as is known here since ``now_s``.
        ``filled``: the window was the limit. Clocks need not agree: only changes of the one-way delay count."""
        one_way_s = received_s - sent_s
        self._recent.append((now_s, one_way_s))
        while now_s - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        base_s = self._one_way.add(one_way_s, now_s)
        if one_way_s - base_s > now_s - sent_s + INSTANT_S:  # no queue is that long: a clock has jumped, or lies
            self._one_way = Smallest()
            base_s = self._one_way.add(one_way_s, now_s)
            self._recent = deque([(now_s, one_way_s)])
        round_trip_s = self._round_trip.add(max(INSTANT_S, now_s - sent_s), now_s)
        self.late_s, self.measured_s = max(now_s - sent_s - round_trip_s, FADES * self.late_s), now_s
        self.queue_s = min(delay_s for _, delay_s in self._recent) - base_s
        # what is sent at once is a queue for a moment, too: not every one that is seen is the link's
        self._starts = self._starts and self.queue_s < max(target_s / 2, round_trip_s / 4)
        # FAST TCP, eq. 1, with a queue of target_s instead of so many packets; stable for any round trip
        asked = (round_trip_s + target_s) / (round_trip_s + self.queue_s) - 1.0
        change = nbytes if self._starts else nbytes * GAIN * min(1.0, max(-1.0, asked))
        if change < 0.0 or filled:
            self.size = min(LARGEST, max(SMALLEST, self.size / 2, self.size + change))
