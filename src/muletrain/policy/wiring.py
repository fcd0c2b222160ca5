"""Stochastic wiring (SWARM app. C, algorithm 1): who of a stage's peers gets the next microbatch.

Interleaved weighted round robin over an exponential average of measured time: each choice adds the chosen peer's average to
its running total, and the smallest total is chosen next, so that a peer twice as fast is chosen twice as often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping

GAMMA = 0.1
"""Weight of a new measurement (SWARM app. C)."""


@dataclass
class _Entry:
    total_s: float
    mean_s: float = 0.0
    weight: float = 0.0  # 1 - (1 - gamma)^n: what the average has seen so far
    banned: bool = False

    @property
    def measured_s(self) -> float | None:
        return self.mean_s / self.weight if self.weight else None


class Wiring:
    """One sender's view of the peers of one stage. Measurements are the sender's own, so peers behind slow links look slow (sec. 3.2).

    Four departures from algorithm 1. Two because its start-up values distort shares: the average is corrected for its
    start at zero (as Adam's moments are), so that a rarely chosen peer is not mistaken for a fast one; and a newcomer starts
    at the smallest running total, not at epsilon, so that it is not flooded until it has caught up. The third because a peer
    computes while its links carry: what is measured is the longer of the two, not their sum, by which a peer next door would
    get twice as much as one that computes as fast 200 ms away, and the fleet would wait for it. The fourth because the
    averages contain a little time that occupies nobody (scheduling), which weighs more for a fast peer: within the
    trainers' bounded window the slow peer's queue then grows until the fast one starves. So nothing is queued behind a peer's
    work while another would have finished it by then.
    """

    def __init__(self, rng: random.Random, gamma: float = GAMMA) -> None:
        self._rng = rng
        self._gamma = gamma
        self._entries: dict[str, _Entry] = {}

    def add(self, peer: str) -> None:
        """A peer announced itself: new ones join at the smallest total, banned ones are welcome again."""
        entry = self._entries.get(peer)
        if entry is None:
            self._entries[peer] = _Entry(self._floor())
        elif entry.banned:
            entry.banned, entry.total_s = False, max(entry.total_s, self._floor())

    def remove(self, peer: str) -> None:
        self._entries.pop(peer, None)

    def ban(self, peer: str) -> None:
        """Do not choose ``peer`` until it is added again. The last usable peer is never banned."""
        usable = [p for p, e in self._entries.items() if not e.banned]
        if peer in self._entries and usable != [peer]:
            self._entries[peer].banned = True

    def choose(self, exclude: Collection[str] = (), under_way: Mapping[str, int] | None = None) -> str | None:
        """The peer with the smallest running total (ties at random), or None when there is none outside ``exclude``.

        ``under_way``: what each peer has of ours already; those passed over for it are not owed anything later.
        """
        measured_s = {p: e.measured_s for p, e in self._entries.items() if not e.banned and p not in exclude}
        usual_s = self._usual_s() if None in measured_s.values() else 0.0
        expected_s = {p: usual_s if s is None else s for p, s in measured_s.items()}
        if not expected_s:
            return None
        prompt = _prompt(expected_s, under_way or {})
        smallest = min(self._entries[p].total_s for p in prompt)
        peer = self._rng.choice(sorted(p for p in prompt if self._entries[p].total_s == smallest))
        for late in expected_s.keys() - prompt:
            self._entries[late].total_s = max(self._entries[late].total_s, smallest)
        self._entries[peer].total_s += expected_s[peer]
        return peer

    def measured(self, peer: str, seconds: float) -> None:
        """A microbatch took ``seconds`` of this peer's time, or of the way there and back, whichever is longer (waiting in queues not
        included)."""
        entry = self._entries.get(peer)
        if entry is not None:
            entry.mean_s += self._gamma * (seconds - entry.mean_s)
            entry.weight += self._gamma * (1 - entry.weight)

    def expected_s(self, peer: str) -> float:
        """The average for ``peer``; before its first measurement the mean of the others', or 1 s when there are none."""
        own = self._entries[peer].measured_s
        return self._usual_s() if own is None else own

    def _usual_s(self) -> float:
        known = [e.measured_s for e in self._entries.values() if e.measured_s is not None]
        return sum(known) / len(known) if known else 1.0

    def peers(self) -> list[str]:
        return sorted(p for p, e in self._entries.items() if not e.banned)

    def _floor(self) -> float:
        return min((e.total_s for e in self._entries.values() if not e.banned), default=0.0)


def _prompt(expected_s: Mapping[str, float], under_way: Mapping[str, int]) -> set[str]:
    """Those who would begin a microbatch before any other could have finished it."""
    soonest_s = min((under_way.get(p, 0) + 1) * s for p, s in expected_s.items())
    return {p for p, s in expected_s.items() if under_way.get(p, 0) * s <= soonest_s}
