"""Room for microbatches at the peers of a stage: as one sender sees the room, and as a peer grants room.

A refused microbatch has crossed the network in vain, so senders should not just try again. A full peer records refused
senders, later offers room to each in turn, and keeps a place for each sender for a while. So a late or distant sender
gets as much as the rest.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

from muletrain.policy.deadline import backoff_s

if TYPE_CHECKING:
    from collections.abc import Collection

FIRST, LONGEST = 4.0, 32.0
"""Pause before trying a silent full peer again, in multiples of the peer's time for a microbatch; doubles."""
LEAST_S = 0.005, 0.5
"""The first pause and the longest, at least [s], for any claimed speed."""
UNMEASURED_S = 30.0, 300.0
"""The first pause and the longest, before that is known [s]."""
KEPT_S = 10.0
"""Seconds for which a full peer keeps a place after offering room to a sender, which may have nothing to send any
more."""
UNTRUE = 3
"""Refusals after offers of room, after which a peer's offers are ignored until an answer. Other senders may be
faster."""

R = TypeVar("R")


class Rooms:
    """The peers without room, as one sender sees them."""

    def __init__(self) -> None:
        self._full: dict[str, tuple[float, float]] = {}
        """When a silent full peer is tried again, and the pause until then."""
        self._refused: Counter[str] = Counter()
        """Refusals of each peer since the last answer."""
        self._offers: dict[str, float] = {}
        """When peers offered room for our last or next microbatch."""
        self._untrue: Counter[str] = Counter()
        """Refusals of each peer after an offer, since the last answer."""

    def serve(self, peers: Collection[str]) -> None:
        """``peers`` serve the stage now: forget the rest."""
        for table in (self._full, self._refused, self._untrue, self._offers):
            for gone in table.keys() - {*peers}:
                del table[gone]

    def begin(self) -> None:
        """A step begins, and all may have room."""
        self._full, self._offers = {}, {}

    def refused(self, peer: str, now_s: float, each_s: float | None) -> None:
        """``peer`` reported to be full. ``each_s``: the peer's time for a microbatch, if known."""
        first_s, longest_s = UNMEASURED_S if each_s is None else (FIRST * each_s, LONGEST * each_s)
        pause_s = backoff_s(self._refused[peer], max(LEAST_S[0], first_s), max(LEAST_S[1], longest_s))
        self._full[peer] = now_s + pause_s, pause_s
        self._refused[peer] += 1
        self._untrue[peer] += self._offers.pop(peer, None) is not None

    def sent(self, peer: str, now_s: float, *, more: bool) -> None:
        """``peer`` is sent a microbatch. If there are ``more``, ``peer`` will offer room again."""
        if now_s - self._offers.get(peer, now_s) >= KEPT_S:
            del self._offers[peer]  # too late: a refusal is no sign of a lie
        if peer in self._full:
            pause_s = self._full.pop(peer)[1]
            if more:
                self._full[peer] = now_s + pause_s, pause_s

    def offered(self, peer: str, now_s: float) -> bool:
        """``peer`` offers room for one. Returns whether the offer is believed, and new."""
        if believed := peer in self._full and self._untrue[peer] < UNTRUE:
            self._full[peer] = now_s, self._full[peer][1]
            self._offers[peer] = now_s
        return believed

    def answered(self, peer: str, *, took: bool) -> None:
        """``peer`` is done with a microbatch of ours: ``took``, or failed."""
        self._refused.pop(peer, None)
        self._untrue.pop(peer, None)
        if not took:
            self._full.pop(peer, None)

    def full(self, now_s: float) -> set[str]:
        """Returns the peers to which nothing is sent now."""
        return {peer for peer, (open_s, _) in self._full.items() if open_s > now_s}


class Turns(Generic[R]):
    """The order of waiting senders at a full peer. ``R``: a request."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: requests that the peer holds at once."""
        self._capacity = capacity
        self._waiting: dict[str, R] = {}
        """By sender: the latest waiting request, in order."""
        self._kept_s: dict[str, float] = {}
        """By sender: when the kept place expires."""

    def clear(self) -> None:
        """A step is over, and nobody waits any more."""
        self._waiting, self._kept_s = {}, {}

    def admits(self, sender: str, request: R, held: int, now_s: float, *, more: bool) -> bool:
        """Is there room for this ``request`` beside the ``held`` ones? If not, or if ``sender`` has ``more``, the
        request waits."""
        self._kept_s.pop(sender, None)
        room = self._free(held, now_s) > 0
        if more or not room:
            self._waiting[sender] = request
        return room

    def next(self, held: int, now_s: float) -> list[tuple[str, R]]:
        """Returns the senders that may send now, beside the ``held`` requests, with the latest of each, and keeps a
        place for each."""
        turns = list(self._waiting.items())[: max(0, self._free(held, now_s))]
        for sender, _ in turns:
            del self._waiting[sender]
            self._kept_s[sender] = now_s + KEPT_S
        return turns

    def _free(self, held: int, now_s: float) -> int:
        self._kept_s = {sender: until_s for sender, until_s in self._kept_s.items() if until_s > now_s}
        return self._capacity - held - len(self._kept_s)
