"""Room for microbatches at the peers of a stage: as one of their senders sees it, and as a peer deals it out.

A refused microbatch has crossed the network in vain, so senders should not just try again. A full peer notes whom it refused.
Once it has room, it tells these senders, one after the other. It keeps a place for each of them for a while. So a sender that
came late, or is far away, gets as much as the others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

from muletrain.policy.deadline import backoff_s

if TYPE_CHECKING:
    from collections.abc import Collection

FIRST, LONGEST = 4.0, 32.0
"""Pause before a full peer that says nothing is tried again, in times that it takes for a microbatch; doubles."""
LEAST_S = 0.005, 0.5
"""The first pause and the longest, at least [s], whatever the peer says of its speed."""
UNMEASURED_S = 30.0, 300.0
"""The first pause and the longest, before that is known [s]."""
KEPT_S = 10.0
"""Seconds for which a full peer keeps a place for a sender that it told of room. The sender may have nothing to send any more."""
UNTRUE = 3
"""Refusals of what a peer said that it has room for, after which its word is worth nothing until it answers. Other senders may
be faster."""
FULL_STEPS = 4
"""Steps in which a peer that was full for long is asked last, the first time; doubles until it takes something."""

R = TypeVar("R")


class Rooms:
    """Which peers have no room, as one sender sees it."""

    def __init__(self) -> None:
        self._full: dict[str, tuple[float, float]] = {}
        """When a full peer is tried again, if it says nothing before, and the pause until then."""
        self._refused: Counter[str] = Counter()
        """Times that each peer refused something since its last answer."""
        self._offers: set[str] = set()
        """Peers that said that they have room for what we sent last, or send next."""
        self._untrue: Counter[str] = Counter()
        """Times that they refused that, since their last answer."""
        self._never: dict[str, tuple[int, int]] = {}
        """Who said for long that it is full, while others were there: from which step on it is asked last, and in how many."""

    def serve(self, peers: Collection[str]) -> None:
        """``peers`` serve the stage now: forget the others."""
        for table in (self._full, self._refused, self._untrue, self._never):
            for gone in table.keys() - {*peers}:
                del table[gone]
        self._offers.intersection_update(peers)

    def begin(self) -> None:
        """A step begins, and all may have room."""
        self._full, self._offers = {}, set()

    def refused(self, peer: str, now_s: float, each_s: float | None) -> None:
        """``peer`` said that it is full. ``each_s``: what it takes for a microbatch, if that is known."""
        first_s, longest_s = UNMEASURED_S if each_s is None else (FIRST * each_s, LONGEST * each_s)
        pause_s = backoff_s(self._refused[peer], max(LEAST_S[0], first_s), max(LEAST_S[1], longest_s))
        self._full[peer] = now_s + pause_s, pause_s
        self._refused[peer] += 1
        self._untrue[peer] += peer in self._offers
        self._offers.discard(peer)

    def sent(self, peer: str, now_s: float, *, more: bool) -> None:
        """``peer`` is sent a microbatch. If there are ``more``, it will tell us when it has room again."""
        if peer in self._full:
            pause_s = self._full.pop(peer)[1]
            if more:
                self._full[peer] = now_s + pause_s, pause_s

    def offered(self, peer: str, now_s: float) -> bool:
        """``peer`` says that it has room for one. Returns whether that is believed, and was not known."""
        if believed := peer in self._full and self._untrue[peer] < UNTRUE:
            self._full[peer] = now_s, self._full[peer][1]
            self._offers.add(peer)
        return believed

    def try_again(self, peers: Collection[str], now_s: float) -> None:
        """These ``peers`` were full for long: each is sent one microbatch, to see whether that is true."""
        for peer in self._full.keys() & {*peers}:
            self._full[peer] = now_s, self._full[peer][1]

    def answered(self, peer: str, *, took: bool) -> None:
        """``peer`` is done with a microbatch of ours; it ``took`` that, or it failed."""
        self._refused.pop(peer, None)
        self._untrue.pop(peer, None)
        if not took:
            self._full.pop(peer, None)
        else:
            self._never.pop(peer, None)

    def full(self, now_s: float) -> set[str]:
        """Returns the peers to which nothing is sent now."""
        return {peer for peer, (open_s, _) in self._full.items() if open_s > now_s}

    def asked_last(self, step: int) -> set[str]:
        """Returns the peers that are asked last in ``step``."""
        return {peer for peer, (since, steps) in self._never.items() if since <= step < since + steps}

    def ask_last(self, peers: Collection[str], step: int) -> None:
        """These ``peers`` were full for long. Ask them last, each time for twice as many steps: to find out again costs
        minutes where nothing was measured yet."""
        for peer in {*peers} - self.asked_last(step):
            self._never[peer] = step, 2 * self._never.get(peer, (step, FULL_STEPS // 2))[1]


class Turns(Generic[R]):
    """Whose turn it is when a full peer has room. ``R``: a request."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: requests that the peer holds at once."""
        self._capacity = capacity
        self._waiting: dict[str, R] = {}
        """By sender: the latest request of each that waits, in the order of their turns."""
        self._kept_s: dict[str, float] = {}
        """By sender: when the place that is kept for it is given to another one."""

    def clear(self) -> None:
        """A step is over, and nobody waits any more."""
        self._waiting, self._kept_s = {}, {}

    def admits(self, sender: str, request: R, held: int, now_s: float, *, more: bool) -> bool:
        """Is there room for this ``request`` beside the ``held`` ones? If not, or if ``sender`` has ``more``, it waits for its
        turn."""
        self._kept_s.pop(sender, None)
        room = self._free(held, now_s) > 0
        if more or not room:
            self._waiting[sender] = request
        return room

    def next(self, held: int, now_s: float) -> list[tuple[str, R]]:
        """Returns the senders that may send now, beside the ``held`` requests, with the latest of each, and keeps a place for
        them."""
        turns = list(self._waiting.items())[: max(0, self._free(held, now_s))]
        for sender, _ in turns:
            del self._waiting[sender]
            self._kept_s[sender] = now_s + KEPT_S
        return turns

    def _free(self, held: int, now_s: float) -> int:
        self._kept_s = {sender: until_s for sender, until_s in self._kept_s.items() if until_s > now_s}
        return self._capacity - held - len(self._kept_s)
