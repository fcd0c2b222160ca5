"""Predict the speed of a pipeline from the peers of its stages: the closed form behind fidelity 'flow'.

A stage is as fast as its peers together, each limited by compute and links. One microbatch passes through all stages
and back alone, and the rest follow at the pace of the slowest stage. No more microbatches are in flight than the
trainers' window allows (Little's law). At the end of a step gradients are averaged and the record is agreed on; with
delayed updates averaging shares the links with the next step's activations. No constant is fitted; measured overheads
come with the setting (``calibration``).

A stage counts as one queue here, so on 44 unequal machines rates are 13 to 60 % too high. Of 37 fleets of
benchmarks/sim_grid steps take 8 % less or more than played in the mean, and 34 % at most. ``pace`` corrects rates by
played steps; uncorrected rates only seat machines and choose candidates to play.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from muletrain.planning.cost import steady_shares
from muletrain.sim.steps.endings import ended_s, halves, stage_ended_s
from muletrain.strategies.swarm import SWARM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.config.schema import RunConfig
    from muletrain.sim.setting import Setting

Counts = tuple[int, ...]
"""Number of peers of each kind in one stage."""
TRAINERS = 2


class Rate(NamedTuple):
    """Microbatches/s after each kind of loss: uneven stages, links, the bound on microbatches in flight, ends of
    steps."""

    even: float
    """With all serving peers spread evenly."""
    slowest: float
    linked: float
    windowed: float
    throughput: float


class Rates:
    """Rates of one setting. ``delayed``: a step is averaged during the computation of the next step. The stages of the
    last fleet are cached, because few stages change between two calls."""

    def __init__(self, setting: Setting, *, trainers: int = TRAINERS, delayed: bool = False) -> None:
        self.setting = setting
        self._trainers, self._delayed = trainers, delayed
        self._kinds, self._links, self._cost = setting.kinds, setting.links, setting.cost
        self.service_s = [[kind.service_s(s) for kind in self._kinds] for s in range(len(setting.cut))]
        self.whole_per_s = [kind.whole_per_s for kind in self._kinds]
        self.places = _places(setting)
        """Kinds with the same region and links."""
        self._serving: list[Counts | None] = [None] * len(setting.cut)
        self._stages: list[_Stage | None] = [None] * len(setting.cut)
        self._known: dict[tuple[str, int], tuple[tuple[Counts, ...], float]] = {}
        self.flowing = 0.0
        """Microbatches/s of the fleet in the last call, without corrections."""
        self._limited = any(
            min(k.up_bytes_per_s, k.down_bytes_per_s, *(link.bandwidth_bytes_per_s for link in row)) < math.inf
            for k, row in zip(self._kinds, self._links, strict=True)
        )

    def of(self, serving: Sequence[Counts]) -> Rate:
        """Rate a whole fleet. ``serving``: peers by stage and kind."""
        even = sum(n * v for n, v in zip(map(sum, zip(*serving, strict=True)), self.whole_per_s, strict=True))
        if not all(map(any, serving)):
            return Rate(even, 0.0, 0.0, 0.0, 0.0)
        microbatches = self._cost.microbatches
        stages = self._looked_at(serving)
        way_s = sum([stage.path_s + stage.service_s for stage in stages])
        slowest, carries = min([stage.computes for stage in stages]), min([stage.carries for stage in stages])
        ending_s = ended_s(self.setting, serving, [stage.ending_s for stage in stages])
        peers = [stage.peers for stage in stages]
        window = self._trainers * SWARM.window(SWARM.capacity(len(stages)), peers, self._trainers)
        linked = min(slowest, carries)
        windowed = min(linked, window / way_s)
        follow_s = (1 - 1 / microbatches) * max([stage.busy_s for stage in stages])
        computing_s = way_s + follow_s + microbatches * (1 / windowed - 1 / linked)
        step_s = max(computing_s, ending_s) if self._delayed else computing_s + ending_s
        self.flowing = min(windowed, microbatches / step_s)
        return Rate(even, slowest, linked, windowed, self.flowing)

    def lasts(self, serving: Sequence[Counts]) -> Rate:
        """Rate a membership that lasts."""
        return self.of(serving)

    def _looked_at(self, serving: Sequence[Counts]) -> list[_Stage]:
        """Update the stages that changed since the last call, with neighbours."""
        last = len(serving) - 1
        changed = [s for s, counts in enumerate(serving) if counts != self._serving[s]]
        for s in sorted({n for c in changed for n in (c - 1, c, c + 1) if 0 <= n <= last}):
            before, behind = serving[s - 1] if s else None, serving[s + 1] if s < last else None
            self._stages[s] = self._stage(s, before, serving[s], behind)
        self._serving = list(serving)
        return [stage for stage in self._stages if stage is not None]

    def _stage(self, stage: int, before: Counts | None, here: Counts, behind: Counts | None) -> _Stage:
        taken_s, items, peers = self.service_s[stage], self._cost.microbatches, sum(here)
        carried_s, shared_s = taken_s, 0.0

        def per_s(each_s: Sequence[float]) -> float:
            return sum(n / s for n, s in zip(here, each_s, strict=True))

        if self._limited:
            links_s = [max(1e-12, self._carried_s(stage, k, before, behind)) for k in range(len(taken_s))]
            carried_s = list(map(max, taken_s, links_s))
            if self._delayed and peers > 1:
                slowest_s, *_ = halves(self.setting, stage, here, delayed=True)
                shared_s = items / per_s(links_s) + 2 * slowest_s
        computes, carries = per_s(taken_s), per_s(carried_s)
        return _Stage(
            peers=peers,
            computes=computes,
            carries=carries,
            path_s=self._unless_known("path", self._path_s, stage, before or here, here),
            service_s=peers / computes,
            ending_s=self._unless_known("ending", self._ending_s, stage, here),
            busy_s=max(shared_s, items / carries),
        )

    def _unless_known(self, what: str, find: Callable[..., float], stage: int, *peers: Counts) -> float:
        """Look up a cached value of one stage that depends on ``peers`` only."""
        known = self._known.get((what, stage))
        if known is None or known[0] != peers:
            known = self._known[what, stage] = peers, find(stage, *peers)
        return known[1]

    def _carried_s(self, stage: int, k: int, before: Counts | None, behind: Counts | None) -> float:
        """Seconds per microbatch that the busiest link of a peer of kind ``k`` is busy: upload, download, or all paths
        to a neighbouring stage together."""
        cost, own = self._cost, self._kinds[k]
        on, back = (cost.forward_bytes[stage + 1], cost.backward_bytes[stage + 1]) if behind else (0, 0)
        longest_s = max(
            (on + cost.backward_bytes[stage]) / own.up_bytes_per_s,
            (cost.forward_bytes[stage] + back) / own.down_bytes_per_s,
        )
        for others, sent in ((behind, on), (before, cost.backward_bytes[stage])):
            if others:
                paths = sum([n * bandwidth for n, bandwidth in zip(others, self._bandwidths[k], strict=True) if n])
                longest_s = max(longest_s, sent / paths)
        return longest_s

    @cached_property
    def _bandwidths(self) -> list[list[float]]:
        return [[link.bandwidth_bytes_per_s for link in row] for row in self._links]

    def _path_s(self, stage: int, senders: Counts, receivers: Counts) -> float:
        """Seconds from the previous stage and back, averaged over communicating pairs. Trainers send to the first
        stage, belong to the first stage and prefer themselves."""
        ways = self._ways_s[stage]
        path_s = sum(
            share * way_s
            for row, ways_s in zip(self.shares(stage, senders, receivers), ways, strict=True)
            for share, way_s in zip(row, ways_s, strict=True)
        )
        if stage:
            return path_s
        peers, takes = sum(receivers), sum(n / s for n, s in zip(receivers, self.service_s[0], strict=True))
        served_s = peers / takes
        return steady_shares([served_s, max(served_s, path_s)], [1, peers - 1])[1] * path_s

    @cached_property
    def _ways_s(self) -> list[list[list[float]]]:
        """Seconds there and back, by stage, sender's place and receiver's place."""
        firsts = [place[0] for place in self.places]
        return [[[self._way_s(s, a, b) for b in firsts] for a in firsts] for s in range(len(self._stages))]

    def _way_s(self, stage: int, a: int, b: int) -> float:
        there, back = self._links[a][b], self._links[b][a]
        sent_s = self._cost.forward_bytes[stage] / there.bandwidth_bytes_per_s
        return there.delay_s + back.delay_s + sent_s + self._cost.backward_bytes[stage] / back.bandwidth_bytes_per_s

    def shares(self, stage: int, senders: Counts, receivers: Counts) -> list[list[float]]:
        """Shares of the microbatches between ``stage - 1`` and ``stage``, by sender's and receiver's place; the sum is
        1. Senders prefer receivers that answer soon, but no receiver gets more than its share of the stage's speed."""
        if len(self.places) == 1:
            return [[1.0]]
        there, takes = self._by_place(receivers, self.service_s[stage])
        _, sends = self._by_place(senders, self.service_s[max(0, stage - 1)])
        sent, taken = sum(sends), sum(takes)
        limits = [t / taken for t in takes]
        served_s = [n / t if t else 0.0 for n, t in zip(there, takes, strict=True)]
        rows = []
        for part, ways in zip(sends, self._ways_s[stage], strict=True):
            expected = [max(s, way) for s, way in zip(served_s, ways, strict=True)]
            rows.append([part / sent * share for share in steady_shares(expected, there)])
        for _ in range(ROUNDS):
            columns = [sum(column) for column in zip(*rows, strict=True)]
            fit = [min(1.0, limit / c) if c else 1.0 for limit, c in zip(limits, columns, strict=True)]
            room = [max(0.0, limit - c * f) for limit, c, f in zip(limits, columns, fit, strict=True)]
            if (left := sum(room)) <= EPSILON:
                break
            rows = [[share * f for share, f in zip(row, fit, strict=True)] for row in rows]
            short = [part / sent - sum(row) for part, row in zip(sends, rows, strict=True)]
            rows = [
                [share + s * r / left for share, r in zip(row, room, strict=True)]
                for s, row in zip(short, rows, strict=True)
            ]
        return rows

    def _by_place(self, counts: Counts, service_s: Sequence[float]) -> tuple[list[int], list[float]]:
        """Peers and microbatches/s of each place."""
        peers = [sum(counts[k] for k in place) for place in self.places]
        return peers, [sum(counts[k] / service_s[k] for k in place) for place in self.places]

    def _ending_s(self, stage: int, here: Counts) -> float:
        return stage_ended_s(self.setting, stage, here, delayed=self._delayed)

    def ending_s(self, serving: Sequence[Counts]) -> float:
        """Seconds at the end of a step in the slowest stage."""
        return ended_s(self.setting, serving, [self._ending_s(stage, here) for stage, here in enumerate(serving)])

    def pause_s(self, serving: Sequence[Counts]) -> float:
        """Seconds from a step's last gradient to the next step's first forward."""
        return self.ending_s(serving) + self._path_s(0, serving[0], serving[0]) / 2


def rates_of(setting: Setting, run: RunConfig) -> Rates:
    """The rates of a run's pipeline."""
    return Rates(setting, trainers=run.fleet.trainers or TRAINERS, delayed=run.optimizer.delayed)


class _Stage(NamedTuple):
    """One stage between its neighbours. ``computes``, ``carries``: microbatches/s; ``path_s``: from the previous stage
    and back; ``service_s``: one microbatch; ``busy_s``: all microbatches of a step, and with delayed updates the
    averaging of the previous step, which shares the links; ``ending_s``: the end of a step."""

    peers: int
    computes: float
    carries: float
    path_s: float
    service_s: float
    busy_s: float
    ending_s: float


def _places(setting: Setting) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[object, ...], list[int]] = {}
    for k, kind in enumerate(setting.kinds):
        key = kind.region, setting.links[k], tuple(row[k] for row in setting.links)
        found.setdefault(key, []).append(k)
    return tuple(map(tuple, found.values()))


ROUNDS, EPSILON = 4, 1e-9
"""Rounds that fit senders' preferences to receivers' speeds, and the share that may be left over."""
