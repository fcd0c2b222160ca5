"""A congestion window bounds the bytes under way to one receiver, and keeps the resulting queue short.

Routers at home queue seconds of data. A sender that fills such a queue delays everything that shares the link: probes,
seals, activations. So the window follows the delay, not losses, as LEDBAT (RFC 6817), FAST TCP (Wei et al. 2006) and
BBR do: the one-way delay above the smallest one seen lately is the queue in front of the receiver. In equilibrium that
queue is ``target_s`` long. Traffic with a smaller target yields to traffic with a larger one wherever the two share a
link, at either end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SMALLEST, FIRST, LARGEST = 1 << 13, 1 << 14, 1 << 25
"""Bytes of a window: at least, at first, and at most. ``SMALLEST`` lets the lowest class come through on a full link,
too."""
PIECE_MIN, PIECE_MAX = 1 << 12, 1 << 18
"""Bytes that are handed to the transport at once."""
PIECES = 8
"""In a window."""
COARSE = 2
"""A virtual world sends pieces of up to this many windows, and pauses after each one larger than a window, so that the
rate is the same."""
GAIN = 0.2
"""Share of the distance to the target window that is covered in one round trip (FAST TCP's gamma)."""
EMPTY = 0.25
"""A queue shorter than this share of the target counts as empty."""
MEMORY_S = 60.0
"""The base delay is the smallest of the last one to two periods of this length: routes change, and clocks drift by
about 50 us/s."""
RECENT_S = 0.01
"""We take the smallest delay of the acknowledgements within this time, because a busy process acknowledges late now and
then. A longer time would lag behind, and the queue would oscillate."""
INSTANT_S = 1e-6
"""Smallest round trip that we believe."""
BESIDE = 3.0
"""All flows together may have so many times as much under way as the uplink is known to need. With 2, three flows that
begin at the same time take a fifth longer than necessary."""
SAMPLE_S = 0.5
"""The rate of all flows is measured over this time: several pieces and receipts."""
FADES = 0.9
"""A remembered delay shrinks by this factor with each acknowledgement that saw a shorter one."""


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


class Uplink:
    """Bound of all flows of one sender together, because all share the uplink.

    The window of an idle flow is the last message's. If many flows begin at the same time, each with a window for the
    whole uplink, seconds of data queue up. The bound is ``BESIDE`` times what the uplink is known to need: the largest
    window, or one round trip at the highest rate of all flows together. So the bound doubles with each round trip where
    the receivers are the bottleneck."""

    def __init__(self) -> None:
        self._largest = self._acknowledged = self._bytes_per_s = 0.0
        self._since_s = float("-inf")
        self._rates = Smallest()
        """Negative, so that the smallest is the highest."""

    def acknowledged(self, nbytes: int, now_s: float, windows: Iterable[Window]) -> None:
        """Take a sample every ``SAMPLE_S``."""
        self._acknowledged += nbytes
        if now_s - self._since_s >= SAMPLE_S:
            self._bytes_per_s = -self._rates.add(-self._acknowledged / (now_s - self._since_s), now_s)
            self._largest = max(window.size for window in windows)
            self._acknowledged, self._since_s = 0.0, now_s

    def size(self, window: Window, target_s: float) -> float:
        """Bytes that all flows may have under way when ``window``'s flow sends more."""
        return BESIDE * max(window.size, self._largest, self._bytes_per_s * (window.round_trip_s + target_s))


class Window:
    """Congestion window of one sender to one receiver.

    ``size``: the window [bytes]. ``queue_s``: the queue in front of the receiver as measured last. ``late_s``: the
    longest recent round trip above the shortest one. ``measured_s``: time of that measurement."""

    def __init__(self) -> None:
        self.size = float(FIRST)
        self.queue_s = self.late_s = 0.0
        self.measured_s = float("-inf")
        self.round_trip_s = INSTANT_S
        """The base round trip."""
        self._starts = True
        """Slow start: the window doubles with each round trip until we see a queue."""
        self._reached = 0.0
        """Largest size so far. Below half of it the window doubles again while there is no queue."""
        self._one_way, self._round_trip = Smallest(), Smallest()
        self._recent: deque[tuple[float, float]] = deque()
        """(when the acknowledgement came, one-way delay) [s]."""

    def measured(self, now_s: float) -> bool:
        """Is the base delay known?"""
        return self._one_way.known(now_s)

    @property
    def piece(self) -> int:
        """Bytes to hand to the transport at once: a small part of the window, so that urgent traffic gets between two
        pieces."""
        return min(PIECE_MAX, max(PIECE_MIN, int(self.size) // PIECES))

    @property
    def coarse(self) -> int:
        """Largest piece in a virtual world, where each piece costs simulator events."""
        return int(self.size) // PIECES if self._starts else COARSE * int(self.size)

    def acknowledged(
        self, nbytes: int, sent_s: float, received_s: float, now_s: float, *, target_s: float, filled: bool
    ) -> None:
        """Adapt the window: the receiver got ``nbytes``, sent at ``sent_s`` (our clock), at ``received_s`` (receiver's
        clock), and we learn this at ``now_s``. The clocks need not agree, because only changes of the one-way delay
        count. ``filled``: the window was the limit."""
        one_way_s = received_s - sent_s
        self._recent.append((now_s, one_way_s))
        while now_s - self._recent[0][0] > RECENT_S:
            self._recent.popleft()
        base_s = self._one_way.add(one_way_s, now_s)
        if one_way_s - base_s > now_s - sent_s + INSTANT_S:  # longer than the round trip: a clock jump, or a lie
            self._one_way = Smallest()
            base_s = self._one_way.add(one_way_s, now_s)
            self._recent = deque([(now_s, one_way_s)])
        round_trip_s = self.round_trip_s = self._round_trip.add(max(INSTANT_S, now_s - sent_s), now_s)
        self.late_s, self.measured_s = max(now_s - sent_s - round_trip_s, FADES * self.late_s), now_s
        self.queue_s = min(delay_s for _, delay_s in self._recent) - base_s
        # a burst of ours is a short queue, too, so we tolerate a quarter of the round trip
        self._starts = self._starts and self.queue_s < max(target_s / 2, round_trip_s / 4)
        # FAST TCP, eq. 1, with a queue of target_s instead of so many packets; stable for any round trip
        asked = (round_trip_s + target_s) / (round_trip_s + self.queue_s) - 1.0
        self._reached = max(self._reached, self.size)
        back = self.queue_s < EMPTY * target_s and self.size < self._reached / 2  # other traffic has left the link
        change = nbytes if self._starts or back else nbytes * GAIN * min(1.0, max(-1.0, asked))
        if change < 0.0 or filled:
            self.size = min(LARGEST, max(SMALLEST, self.size / 2, self.size + change))
