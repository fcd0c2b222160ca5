"""Stochastic wiring (SWARM app. C, algorithm 1) chooses which of a stage's peers gets the next microbatch. Rendezvous
hashing chooses the trainer that builds it, so that losing a trainer moves only that trainer's microbatches.

Interleaved weighted round robin over an exponential average of measured time: each choice adds the chosen peer's
average to a running total, and the smallest total is chosen next, so a peer twice as fast is chosen twice as often.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Mapping


GAMMA = 0.1
"""Weight of a new measurement (SWARM app. C)."""
WAYS = 32
"""The shortest of this many last ways to a peer and back counts."""
MOST = 0.9
"""Share of a sender's returned microbatches that defines the usual length of a step. The last ones may have waited for
a slow peer, and the next step should not."""
OUTLIER, PARDON = 4.0, 64
"""A measurement above this multiple of the expectation does not count, unless one of the peer's last so many was as
long."""
PROMPT = 2.0
"""At the end of a step, peers that take at most this multiple of the fastest time still count as fast enough."""
TRY = 0.005
"""Probability, divided by the number of peers, that a peer too slow for the rest of a step gets a microbatch anyway,
since machines change and estimates may be wrong. This costs at most that share of a stage's time."""


@dataclass
class _Entry:
    total_s: float
    mean_s: float = 0.0
    weight: float = 0.0  # 1 - (1 - gamma)^n: what the average has seen so far
    ways_s: deque[float] = field(default_factory=lambda: deque(maxlen=WAYS))
    banned: bool = False
    device_s: float = 0.0
    since_long: float = math.inf
    """Measurements after the last one above ``OUTLIER`` times the expectation."""

    @property
    def measured_s(self) -> float | None:
        return max(self.mean_s / self.weight, min(self.ways_s)) if self.weight else None


class Wiring:
    """One sender's view of the peers of one stage. Measurements are the sender's own, so peers behind slow links look
    slow (sec. 3.2). Six departures from algorithm 1:

    - The average is bias-corrected, as Adam's moments are: otherwise a rarely chosen peer looks fast.
    - A newcomer starts at the smallest running total, not at epsilon: otherwise every microbatch goes there until the
      total has caught up.
    - The longer of computing and sending counts, not the sum, since both overlap. By the sum a peer next door would get
      twice as much as an equally fast one 200 ms away, and the fleet would wait for the former. The shortest way
      counts, since longer ways reflect other load on the links: by the mean, a fast peer with much work looks as slow
      as one without.
    - Nothing is queued behind a peer's work while another peer could finish the microbatch by then, even a peer that is
      full now. The averages contain a little time that occupies no peer (scheduling), which weighs more for a fast
      peer. Within the trainers' bounded window, the slow peer's queue would grow until the fast one starves.
    - A peer that takes longer for a microbatch than is left of the usual length of a step gets none, if there are
      faster peers, since a step ends with the last microbatch. A CPU among GPUs would get one in a hundred steps, and
      make that step five times as long.
    - One long time does not make a slow peer: a first call allocates and compiles, and a device may be busy for a
      moment. Such a peer would get too few microbatches to correct the average. A second long time counts, since rare
      ones cost as much as many: each holds up a step.
    """

    def __init__(self, rng: random.Random, gamma: float = GAMMA) -> None:
        """``gamma``: weight of a new measurement."""
        self._rng, self._gamma = rng, gamma
        self._entries: dict[str, _Entry] = {}
        self._step, self._begun_s, self._usual_s = -1, 0.0, math.inf
        """The current step: number, sending time of the first microbatch, and the usual length of a step."""
        self._back_s: list[tuple[str, float]] = []
        """Peers and return times of the step's microbatches."""

    def serve(self, peers: Mapping[str, float]) -> None:
        """``peers`` serve the stage now, with the devices' expected times (``add``)."""
        for gone in set(self.peers()) - peers.keys():
            self.remove(gone)
        for peer in sorted(peers, key=lambda p: peers[p]):
            self.add(peer, peers[peer])

    def add(self, peer: str, device_s: float = 0.0) -> None:
        """A peer was announced: a new one joins at the smallest total, a banned one is welcome again. ``device_s``:
        expected time of the device for a microbatch [s], 0 if unknown. A device slower than the fastest joins later by
        the difference: otherwise all senders try that device at once, and the first steps of a fleet with a few CPUs
        are slow. Add the fastest first."""
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
        """Do not choose ``peer`` until added again. The last usable peer is never banned."""
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
        """Returns the peer with the smallest running total (ties at random). Returns None if there is none outside
        ``exclude``, or if waiting for a ``full`` one is better.

        ``under_way``: microbatches of ours that each peer has already; a peer passed over for that is owed nothing
        later. ``step``: of the microbatch, which has ``waited_s`` already.
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
        in_time = {p: s for p, s in expected_s.items() if s <= left_s}
        if not (prompt := _prompt(in_time, under_way) - set(full)):
            return None
        smallest = min(self._entries[p].total_s for p in prompt)
        for peer in sorted(expected_s.keys() - in_time.keys() - set(full)):
            entry = self._entries[peer]
            if entry.total_s <= smallest:
                entry.total_s += expected_s[peer]
                if self._rng.random() < TRY / len(expected_s):
                    return peer
        peer = self._rng.choice(sorted(p for p in prompt if self._entries[p].total_s == smallest))
        for passed in in_time.keys() - prompt - set(full):
            self._entries[passed].total_s = max(self._entries[passed].total_s, smallest)
        self._entries[peer].total_s += expected_s[peer]
        return peer

    def _begin(self, step: int, now_s: float) -> None:
        fastest_s, mean_s = self._measured()
        expected_s = {p: _expected_s(e, fastest_s, mean_s) for p, e in self._entries.items()}
        fast = {p for p, s in expected_s.items() if s <= PROMPT * min(expected_s.values())}
        if self._step >= 0 and (back_s := [s for p, s in self._back_s if p in fast]):
            most = math.ceil(MOST * len(back_s))
            self._usual_s = (back_s[most - 1] - self._begun_s) * len(back_s) / most
        self._step, self._begun_s, self._back_s = step, now_s, []

    def measured(self, peer: str, busy_s: float, way_s: float = 0.0, now_s: float = 0.0) -> None:
        """A microbatch took ``busy_s`` of this peer's time, and ``way_s`` on the way there and back, including waits
        for links. The microbatch came back at ``now_s``."""
        self._back_s.append((peer, now_s))
        entry = self._entries.get(peer)
        if entry is None:
            return
        entry.since_long += 1
        if busy_s > OUTLIER * self.expected_s(peer):
            since, entry.since_long = entry.since_long, 0
            if since > PARDON:
                return
        entry.mean_s += self._gamma * (busy_s - entry.mean_s)
        entry.weight += self._gamma * (1 - entry.weight)
        entry.ways_s.append(way_s)

    def expected_s(self, peer: str) -> float:
        """Returns the average for ``peer``. Before the first measurement: the device's expected time, but at least the
        fastest measured average; for an unknown device, the mean of the rest, or 1 s."""
        return _expected_s(self._entries[peer], *self._measured())

    def _measured(self) -> tuple[float, float]:
        """Returns the smallest and the mean average."""
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
    """Returns the peers that would begin a microbatch before any peer could have finished one."""
    soonest_s = min(((under_way.get(p, 0) + 1) * s for p, s in expected_s.items()), default=0.0)
    return {p for p, s in expected_s.items() if under_way.get(p, 0) * s <= soonest_s}


def claimant(step: int, index: int, trainers: Iterable[str], turn: int = 0) -> str:
    """Returns the live trainer that should build microbatch ``(step, index)``; with each ``turn`` the next one, after
    earlier ones failed to. A hint against double work, not a promise. Raises ValueError if there is no trainer."""

    def rank(trainer: str) -> tuple[bytes, str]:
        return hashlib.blake2b(f"{step}/{index}/{trainer}".encode(), digest_size=8).digest(), trainer

    first = max(trainers := [*trainers], key=rank)
    return first if turn == 0 else sorted(trainers, key=rank, reverse=True)[turn % len(trainers)]
