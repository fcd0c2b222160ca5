"""How fast a pipeline of stages goes, from who serves them: the flow fidelity's model of a step.

A stage does what its peers do, each as fast as its compute and its links allow; the pipeline what its slowest stage does, and no more
than the trainers' window lets under way (Little's law). A step is the longest of: what lies before a stage, there and back, and that
stage's share of all microbatches, in whole ones; and at its end gradients are averaged and the record is agreed on. Nothing in it is
fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from muletrain.policy.cost import all_reduce_s, makespan_s, steady_shares
from muletrain.swarm.context import CAPACITY

if TYPE_CHECKING:
    from muletrain.sim.machines import Setting

Counts = tuple[int, ...]
"""Peers of each kind at one stage."""
TRAINERS = 2
AGREEMENT_HOPS = 5
"""Messages one after the other at the end of a step, beside the gradient: all is through, seals, shards, their mean, entries."""
CACHED = 1 << 16


class Rate(NamedTuple):
    """Microbatches/s. What is lost from one to the next: to uneven stages, to links, to the ends of steps."""

    even: float
    """If what serves were spread evenly."""
    slowest: float
    linked: float
    throughput: float


NOTHING = Rate(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Rates:
    """Of one setting. ``delayed``: a step is averaged while the next one is computed."""

    setting: Setting
    trainers: int = TRAINERS
    delayed: bool = False

    def of(self, serving: tuple[Counts, ...]) -> Rate:
        """Of a whole fleet, by stage and kind."""
        kinds = self.setting.kinds
        even = sum(n * kinds[k].whole_per_s for counts in serving for k, n in enumerate(counts) if n)
        if not all(map(any, serving)):
            return Rate(even, 0.0, 0.0, 0.0)
        cost, stages = self.setting.cost, len(serving)
        around = [serving[s - 1] if s else None for s in range(stages)]
        facts = [
            self._stage(s, around[s], serving[s], serving[s + 1] if s + 1 < stages else None) for s in range(stages)
        ]
        slowest = min(f.computes for f in facts)
        before_s, busiest_s = 0.0, 0.0
        for f in facts:
            before_s += f.path_s
            busiest_s = max(busiest_s, before_s + f.makespan_s)
            before_s += f.service_s
        window = self.trainers * max(2, min(map(sum, serving)) * CAPACITY // (2 * self.trainers))
        linked = min(slowest, *(f.carries for f in facts), window / before_s)
        computing_s = max(busiest_s, cost.microbatches * before_s / window)
        ending_s = max(f.ending_s for f in facts)
        step_s = max(computing_s, ending_s) if self.delayed else computing_s + ending_s
        return Rate(even, slowest, linked, min(linked, cost.microbatches / step_s))

    @cached_property
    def _stage(self) -> _StageRates:
        return _StageRates(self.setting)

    def shares(self, stage: int, senders: Counts, receivers: Counts) -> list[list[float]]:
        """Of the microbatches that go from ``stage - 1`` to ``stage``: how many from each kind to each kind; sums to 1."""
        return self._stage.shares(stage, senders, receivers)


class _Stage(NamedTuple):
    """Of one stage in its place. ``computes``, ``carries``: microbatches/s; ``path_s``: to it from the stage before, and back;
    ``service_s``: a microbatch in it; ``makespan_s``: all of a step's; ``ending_s``: its part of a step's end."""

    computes: float
    carries: float
    path_s: float
    service_s: float
    makespan_s: float
    ending_s: float


class _StageRates:
    """Remembers what it computed: in a large fleet little changes from one moment to the next."""

    def __init__(self, setting: Setting) -> None:
        self._kinds, self._links, self._cost = setting.kinds, setting.links, setting.cost
        self._cached = lru_cache(CACHED)(self._compute)

    def __call__(self, stage: int, before: Counts | None, here: Counts, behind: Counts | None) -> _Stage:
        return self._cached(stage, before, here, behind)

    def _compute(self, stage: int, before: Counts | None, here: Counts, behind: Counts | None) -> _Stage:
        speeds = [1 / k.service_s(stage) for k in self._kinds]
        carried = [min(v, self._carries(stage, k, before, behind)) for k, v in enumerate(speeds)]
        computes, carries = (sum(n * v for n, v in zip(here, each, strict=True)) for each in (speeds, carried))
        present = [(n, 1 / v) for n, v in zip(here, carried, strict=True) if n]
        return _Stage(
            computes=computes, carries=carries, path_s=self._path_s(stage, before, here), service_s=sum(here) / computes,
            makespan_s=makespan_s(self._cost.microbatches, present), ending_s=self._ending_s(stage, here),
        )  # fmt: skip

    def _carries(self, stage: int, k: int, before: Counts | None, behind: Counts | None) -> float:
        """Microbatches/s that the links of a peer of kind ``k`` let through."""
        cost, own = self._cost, self._kinds[k]
        on, back = (cost.forward_bytes[stage + 1], cost.backward_bytes[stage + 1]) if behind else (0, 0)
        limits = [
            (own.up_bytes_per_s, on + cost.backward_bytes[stage]),
            (own.down_bytes_per_s, cost.forward_bytes[stage] + back),
        ]
        for others, sent in ((behind, on), (before, cost.backward_bytes[stage])):
            if others:
                limits.append((self._paths(k, others), sent))
        return min((rate / nbytes for rate, nbytes in limits if nbytes), default=math.inf)

    def _paths(self, k: int, others: Counts) -> float:
        """All paths from one peer of kind ``k`` to ``others`` together [bytes/s]."""
        return sum(n * self._links[k][o].bandwidth_bytes_per_s for o, n in enumerate(others) if n)

    def _path_s(self, stage: int, before: Counts | None, here: Counts) -> float:
        """From the stage before and back, as often as each pair is on the way. To the first from trainers, who may be any of it."""
        senders = here if before is None else before
        return sum(
            share * self._there_and_back_s(stage, a, b)
            for a, row in enumerate(self.shares(stage, senders, here))
            for b, share in enumerate(row)
        )

    def _there_and_back_s(self, stage: int, a: int, b: int) -> float:
        there, back = self._links[a][b], self._links[b][a]
        sent_s = self._cost.forward_bytes[stage] / there.bandwidth_bytes_per_s
        return there.delay_s + back.delay_s + sent_s + self._cost.backward_bytes[stage] / back.bandwidth_bytes_per_s

    def shares(self, stage: int, senders: Counts, receivers: Counts) -> list[list[float]]:
        """Each sender prefers receivers that answer soon, but none gets more than its part of what the stage computes."""
        kinds = self._kinds
        sends = [n / k.service_s(stage - 1 if stage else 0) for n, k in zip(senders, kinds, strict=True)]
        takes = [n / k.service_s(stage) for n, k in zip(receivers, kinds, strict=True)]
        total_sent, total_taken = sum(sends), sum(takes)
        limits = [t / total_taken for t in takes]
        rows = []
        for a, sent in enumerate(sends):
            expected = [k.service_s(stage) + self._there_and_back_s(stage, a, b) for b, k in enumerate(kinds)]
            rows.append([sent / total_sent * share for share in steady_shares(expected, receivers)])
        for _ in range(ROUNDS):
            taken = [sum(column) for column in zip(*rows, strict=True)]
            fit = [min(1.0, limit / t) if t else 1.0 for limit, t in zip(limits, taken, strict=True)]
            rows = [[share * f for share, f in zip(row, fit, strict=True)] for row in rows]
            room = [max(0.0, limit - t * f) for limit, t, f in zip(limits, taken, fit, strict=True)]
            if (left := sum(room)) <= EPSILON:
                break
            for a, row in enumerate(rows):
                short = sends[a] / total_sent - sum(row)
                rows[a] = [share + short * r / left for share, r in zip(row, room, strict=True)]
        return rows

    def _ending_s(self, stage: int, here: Counts) -> float:
        """Averaging, and what is said beside it; the stage's longest delay counts."""
        kinds, links = self._kinds, self._links
        there = [k for k, n in enumerate(here) if n]
        pairs = [links[a][b] for a in there for b in there if a != b or here[a] > 1]
        narrowest = min(min(kinds[k].up_bytes_per_s, kinds[k].down_bytes_per_s) for k in there)
        path = min((p.bandwidth_bytes_per_s for p in pairs), default=math.inf)
        averaging_s = all_reduce_s(self._cost.stages[stage].averaged_bytes, sum(here), narrowest, path)
        return averaging_s + AGREEMENT_HOPS * max((p.delay_s for p in pairs), default=0.0)


ROUNDS, EPSILON = 20, 1e-9
"""Of fitting what senders prefer to what receivers can take; all shares sum to 1."""
