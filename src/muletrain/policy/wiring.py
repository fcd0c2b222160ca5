"""Stochastic wiring (SWARM app. C, algorithm 1): who of a stage's peers gets the next microbatch.

Interleaved weighted round robin over an exponential average of measured time: each choice adds the chosen peer's
average to its running total, and the smallest total is chosen next, so that a peer twice as fast is chosen twice as
often.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping

GAMMA = 0.1
"""Weight of a new measurement (SWARM app. C)."""
WAYS = 32
"""The shortest of the last so many ways to a peer and back counts."""
MOST = 0.9
"""The usual length of a step follows from when this share of a sender's microbatches were back: the last ones may have
waited for a slow peer, and the next step shall not."""
PROMPT = 2.0
"""At the end of a step the others still count as fast enough if they take at most so many times as long as the first to
be through."""
TRY = 0.005
"""How often, divided by the number of peers, one that is too slow for what is left of a step gets its microbatch
anyway, because machines change, and estimates may be wrong. That is the share of a stage's time that it costs at
most."""


@dataclass
class _Entry:
    total_s: float
    mean_s: float = 0.0
    weight: float = 0.0  # 1 - (1 - gamma)^n: what the average has seen so far
    ways_s: deque[float] = field(default_factory=lambda: deque(maxlen=WAYS))
    banned: bool = False
    device_s: float = 0.0

    @property
    def measured_s(self) -> float | None:
        return max(self.mean_s / self.weight, min(self.ways_s)) if self.weight else None


class Wiring:
    """One sender's view of the peers of one stage. Measurements are the sender's own, so peers behind slow links look
    slow (sec. 3.2).

    Five departures from algorithm 1. Two because its start-up values distort shares: the average is corrected for its
    start at zero (as Adam's moments are), so that a rarely chosen peer is not mistaken for a fast one; and a newcomer
    starts at the smallest running total, not at epsilon, so that it is not flooded until it has caught up. The third
    because a peer computes while its links carry: what counts is the longer of the two, not their sum, by which a peer
    next door would get twice as much as one that computes as fast 200 ms away, and the fleet would wait for it. Of the
    ways the shortest counts, because the others tell how much else was on the links: by their mean a fast peer that
    gets much looks as slow as one that gets nothing. The fourth because the averages contain a little time that
    occupies nobody (scheduling), which weighs more for a fast peer: within the trainers' bounded window the slow peer's
    queue then grows until the fast one starves. So nothing is queued behind a peer's work while another would have
    finished it by then. The fifth because a step ends with its last microbatch: a peer that takes longer for one than
    is left of the usual length of a step gets none, where others take less. A CPU among GPUs would get one in a hundred
    steps, and make that one five times as long.
    """

    def __init__(self, rng: random.Random, gamma: float = GAMMA) -> None:
        self._rng = rng
        self._gamma = gamma
        self._entries: dict[str, _Entry] = {}
        self._step, self._begun_s, self._usual_s = -1, 0.0, math.inf
        """Of the current step: its number, when the first microbatch went, and the usual length."""
        self._back_s: list[float] = []
        """When its microbatches came back."""

    def add(self, peer: str, device_s: float = 0.0) -> None:
        """A peer announced itself: new ones join at the smallest total, banned ones are welcome again. ``device_s``:
        what its device is expected to take for a microbatch [s], 0 if unknown. By as much as that is longer than the
        fastest device's, it joins later: otherwise all senders try it at once, and the first steps of a fleet with a
        few CPUs wait for them. Add the fastest first."""
        entry = self._entries.get(peer)
        if entry is None:
            fastest_s = min((e.device_s for e in self._entries.values() if e.device_s), default=device_s)
            behind_s = max(0.0, device_s - fastest_s)
            self._entries[peer] = _Entry(self._floor() + behind_s, device_s=device_s)
        elif entry.banned:
            entry.banned, entry.total_s = False, max(entry.total_s, self._floor())

    def remove(self, peer: str) -> None:
        self._entries.pop(peer, None)

    def ban(self, peer: str) -> None:
        """Do not choose ``peer`` until it is added again. The last usable peer is never banned."""
        usable = [p for p, e in self._entries.items() if not e.banned]
        if peer in self._entries and usable != [peer]:
            self._entries[peer].banned = True

    def choose(
        self,
        exclude: Collection[str] = (),
        under_way: Mapping[str, int] | None = None,
        *,
        full: Collection[str] = (),
        step: int = 0,
        now_s: float = 0.0,
        waited_s: float = 0.0,
    ) -> str | None:
        """The peer with the smallest running total (ties at random). None when there is none outside ``exclude``, or
        when it is better to wait for one that is ``full``.

        ``under_way``: what each peer has of ours already; those passed over for it are not owed anything later.
        ``step``: of the microbatch, which has ``waited_s`` already.
        """
        if not self._step - 1 <= step <= self._step:  # two steps are under way at most, and a run may step back
            self._begin(step, now_s)
        under_way = under_way or {}
        fastest_s, mean_s = self._measured()
        expected_s = {
            p: _expected_s(e, fastest_s, mean_s) for p, e in self._entries.items() if not e.banned and p not in exclude
        }
        soonest_s = min(((under_way.get(p, 0) + 1) * s for p, s in expected_s.items()), default=0.0)
        left_s = max(self._begun_s + self._usual_s - now_s, PROMPT * soonest_s, waited_s)
        in_time = {p: s for p, s in expected_s.items() if s <= left_s and p not in full}
        if not in_time:
            return None
        prompt = _prompt(in_time, under_way)
        smallest = min(self._entries[p].total_s for p in prompt)
        for peer in sorted(expected_s.keys() - in_time.keys() - set(full)):
            entry = self._entries[peer]
            if entry.total_s <= smallest:
                entry.total_s += expected_s[peer]
                if self._rng.random() < TRY / len(expected_s):
                    return peer
        peer = self._rng.choice(sorted(p for p in prompt if self._entries[p].total_s == smallest))
        for passed in in_time.keys() - prompt:
            self._entries[passed].total_s = max(self._entries[passed].total_s, smallest)
        self._entries[peer].total_s += expected_s[peer]
        return peer

    def _begin(self, step: int, now_s: float) -> None:
        if self._step >= 0 and self._back_s:
            most = math.ceil(MOST * len(self._back_s))
            self._usual_s = (self._back_s[most - 1] - self._begun_s) * len(self._back_s) / most
        self._step, self._begun_s, self._back_s = step, now_s, []

    def measured(self, peer: str, busy_s: float, way_s: float = 0.0, now_s: float = 0.0) -> None:
        """A microbatch took ``busy_s`` of this peer's time, and ``way_s`` on the way there and back, with what waited
        for links. It came back at ``now_s``."""
        self._back_s.append(now_s)
        entry = self._entries.get(peer)
        if entry is not None:
            entry.mean_s += self._gamma * (busy_s - entry.mean_s)
            entry.weight += self._gamma * (1 - entry.weight)
            entry.ways_s.append(way_s)

    def expected_s(self, peer: str) -> float:
        """The average for ``peer``. Before its first measurement what its device takes, but no less than the fastest
        that was measured; if the device is unknown, the mean of the others, or 1 s when there are none."""
        return _expected_s(self._entries[peer], *self._measured())

    def _measured(self) -> tuple[float, float]:
        """The smallest average, and their mean."""
        known = [s for e in self._entries.values() if (s := e.measured_s) is not None]
        return (min(known), sum(known) / len(known)) if known else (0.0, 1.0)

    def peers(self) -> list[str]:
        return sorted(p for p, e in self._entries.items() if not e.banned)

    def _floor(self) -> float:
        return min((e.total_s for e in self._entries.values() if not e.banned), default=0.0)


def _expected_s(entry: _Entry, fastest_s: float, mean_s: float) -> float:
    if (measured_s := entry.measured_s) is not None:
        return measured_s
    return max(entry.device_s, fastest_s) if entry.device_s else mean_s


def _prompt(expected_s: Mapping[str, float], under_way: Mapping[str, int]) -> set[str]:
    """Those who would begin a microbatch before any other could have finished it."""
    soonest_s = min((under_way.get(p, 0) + 1) * s for p, s in expected_s.items())
    return {p for p, s in expected_s.items() if under_way.get(p, 0) * s <= soonest_s}
