"""Rebalancing on a trace of peers that come and go: the production rules (``policy.rebalance``) on counts of equal
peers.

A stage is as fast as the number of its peers, the pipeline as its smallest stage; the optimum is all peers spread
evenly (SWARM 4.4, app. D, I). A departure takes a peer of a random stage. An arrival goes to the smallest stage, or
without rebalancing to a random one. With a rule, a stage that lost all its peers is adopted as in every run
(``policy.assignment``); the steps that such a run rolls back are not counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import numpy as np

from muletrain.errors import DataError
from muletrain.policy.assignment import Load, View, filled
from muletrain.policy.rebalance import by_queue, by_throughput
from muletrain.runtime.members.rebalancing import HORIZON_PERIODS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from muletrain.sim.fleet.trace import Change

_Decision = Callable[[tuple[int, ...]], tuple[tuple[int, int], ...]]
"""Peers by stage, including those on their way, -> moves (source, target)."""
Rule = Literal["none", "swarm", "muletrain"]
HORIZON_S = 32 * 3600.0
"""Duration of SWARM's trace."""
HOUR_S = 3600.0
ADOPT_AFTER_S = 30.0
"""Seconds until an empty stage gets a peer of another one: the default of ``fleet.adopt_after``."""


@dataclass(frozen=True)
class Course:
    """One run over time: from each ``begin_s`` to the next one, the smallest stage served ``slowest`` microbatches
    at a time, and all peers spread evenly would have served ``best``."""

    begin_s: NDArray[np.float64]
    slowest: NDArray[np.float64]
    best: NDArray[np.float64]
    moves: int

    def share(self, begin_s: float, end_s: float) -> float:
        """Share of the optimum between two times [%]; 100 if nobody was present."""
        ends_s = np.append(self.begin_s[1:], HORIZON_S)
        seconds = np.clip(np.minimum(ends_s, end_s) - np.maximum(self.begin_s, begin_s), 0, None)
        optimum = float(seconds @ self.best)
        return 100 * float(seconds @ self.slowest) / optimum if optimum else 100.0

    def at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Microbatches that the smallest stage served at these times."""
        return self.slowest[np.searchsorted(self.begin_s, times_s, side="right") - 1]


@dataclass(frozen=True)
class Throughput:
    """What the pipeline did, in % of all its peers spread evenly over the stages, and the moves of peers per hour."""

    overall: float
    first_hour: float
    last_hour: float
    moves_per_hour: float

    @classmethod
    def mean(cls, runs: Iterable[Course]) -> Throughput:
        """Average over ``courses``."""
        rows = [
            (
                course.share(0.0, HORIZON_S),
                course.share(0.0, HOUR_S),
                course.share(HORIZON_S - HOUR_S, HORIZON_S),
                course.moves / (HORIZON_S / HOUR_S),
            )
            for course in runs
        ]
        return cls(*map(fmean, zip(*rows, strict=True)))


def courses(
    trace: Sequence[Change],
    *,
    peers: int,
    stages: int,
    rule: Rule,
    period_s: float = 60.0,
    downtime_s: float = 0.0,
    runs: int = 100,
    seed: int = 0,
) -> Iterator[Course]:
    """Play ``runs`` that draw other stages for the peers that come and go. A peer that moves serves nobody for
    ``downtime_s``. Raises DataError if the trace takes more peers than there are."""
    present = peers
    for change in trace:
        present += change.peers
        if change.time_s <= HORIZON_S and present < 0:
            raise DataError(
                f"the trace takes the last peer at {change.time_s:.0f} s: it needs more than {peers} at the start"
            )
    decide = _rule(rule, stages, period_s, downtime_s)
    for k in range(runs):
        draw = random.Random(f"{seed}/{k}")
        yield _Run(trace, peers, stages, rule != "none", period_s, downtime_s, draw).play(decide)


def _rule(rule: Rule, stages: int, period_s: float, downtime_s: float) -> _Decision:
    """The production rule on a view of equal peers, remembered by counts, which recur."""
    work, state = (1.0,) * stages, (downtime_s,) * stages

    @cache
    def decide(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        # requests wait where there are few to serve them
        loads = {
            f"{s:04}": Load(s, 1 / count**2, {s: 1.0}, bytes_per_s=1.0, alike=count)
            for s, count in enumerate(counts)
            if count
        }
        view = View(loads, work, state)
        moves = by_queue(view) if rule == "swarm" else by_throughput(view, HORIZON_PERIODS * period_s)
        return tuple((m.source, m.target) for m in moves)

    return decide if rule != "none" else lambda counts: ()


class _Run:
    """One run: peers by stage, serving or on their way from one to another."""

    def __init__(
        self,
        trace: Sequence[Change],
        peers: int,
        stages: int,
        balanced: bool,
        period_s: float,
        downtime_s: float,
        draw: random.Random,
    ) -> None:
        self._changes = [c for c in trace if c.time_s < HORIZON_S]
        self._balanced, self._period_s, self._downtime_s = balanced, period_s, downtime_s
        self._draw = draw
        self._serving = [peers // stages + (s < peers % stages) for s in range(stages)]
        self._moving = [0] * stages
        """Peers on their way, by destination."""
        self._moves = 0
        self._empty: dict[int, float] = {}
        """Stages without a peer, and since when [s]."""
        self._arrivals: list[tuple[float, int]] = []
        """Heap: (time, stage)."""
        self._steps: list[tuple[float, int, int]] = []
        """(time, the smallest stage's peers, all peers)."""

    def play(self, decide: _Decision) -> Course:
        upcoming, tick, settled = 0, 1, False
        now_s = 0.0
        while now_s < HORIZON_S:
            self._steps.append((now_s, min(self._serving), sum(self._serving) + sum(self._moving)))
            change_s = self._changes[upcoming].time_s if upcoming < len(self._changes) else math.inf
            arrival_s = self._arrivals[0][0] if self._arrivals else math.inf
            adoption_s = self._adoption_s(now_s)
            if settled:  # the rule has nothing to say until somebody comes or goes
                tick = max(tick, math.ceil(min(change_s, arrival_s, adoption_s, HORIZON_S) / self._period_s))
            tick_s = tick * self._period_s
            now_s = min(change_s, tick_s, arrival_s, adoption_s, HORIZON_S)
            if now_s >= HORIZON_S:
                break
            if arrival_s == now_s:
                stage = heappop(self._arrivals)[1]
                self._moving[stage] -= 1
                self._serving[stage] += 1
                settled = False
            elif change_s == now_s:
                self._change(self._changes[upcoming].peers)
                upcoming += 1
                settled = False
            elif adoption_s == now_s:
                self._adopt(now_s)
                settled = False
            else:
                tick += 1
                settled = not self._rebalance(decide, now_s)
        begin_s, slowest, present = np.array(self._steps, dtype=float).T
        return Course(begin_s, slowest, present / len(self._serving), self._moves)

    def _rebalance(self, decide: _Decision, now_s: float) -> bool:
        """Move peers as the rule says; return whether it wanted anything."""
        moves = decide(tuple(a + b for a, b in zip(self._serving, self._moving, strict=True)))
        for source, target in moves:
            if self._serving[source]:  # else all of them are on their way here
                self._move(source, target, now_s)
        return bool(moves)

    def _move(self, source: int, target: int, now_s: float) -> None:
        self._moves += 1
        self._serving[source] -= 1
        if self._downtime_s > 0:
            self._moving[target] += 1
            heappush(self._arrivals, (now_s + self._downtime_s, target))
        else:
            self._serving[target] += 1

    def _adoption_s(self, now_s: float) -> float:
        """When the next empty stage is adopted [s]; inf if no stage can spare a peer."""
        if not self._balanced:  # SWARM's baseline: nobody moves
            return math.inf
        counts = map(sum, zip(self._serving, self._moving, strict=True))
        self._empty = {s: self._empty.get(s, now_s) for s, n in enumerate(counts) if not n}
        if not self._empty or max(self._serving) < 2:
            return math.inf
        return max(now_s, min(self._empty.values()) + ADOPT_AFTER_S)

    def _adopt(self, now_s: float) -> None:
        """Fill all empty stages at once, as a rollback does; peers on their way count at their destination and stay
        there."""
        loads = {f"{s:04}.{k:06}": Load(s) for s, n in enumerate(self._serving) for k in range(n)}
        loads |= {f"{s:04}.coming": Load(s, targets=frozenset()) for s, n in enumerate(self._moving) if n}
        for move in filled(View(loads, (1.0,) * len(self._serving), stopped=True)):
            self._move(move.source, move.target, now_s)

    def _change(self, peers: int) -> None:
        served = [s for s, n in enumerate(self._serving) if n]
        for _ in range(-peers):
            if served:
                stage = self._draw.choice(served)
                self._serving[stage] -= 1
                if not self._serving[stage]:
                    served.remove(stage)
            else:  # all that are left are on their way
                _, stage = self._arrivals.pop()
                self._moving[stage] -= 1
        counts = [a + b for a, b in zip(self._serving, self._moving, strict=True)]
        for _ in range(peers):
            stage = counts.index(min(counts)) if self._balanced else self._draw.randrange(len(counts))
            counts[stage] += 1
            self._serving[stage] += 1
