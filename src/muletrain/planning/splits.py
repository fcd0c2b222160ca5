"""What a step takes under strategies with planned membership, in pure numbers; and which strategy to recommend.

``pipeline``: stages and pipelines as placed, GPipe or 1F1B (``schedules``); ``swap``: every machine computes the whole
model (``swapping``). What strategy ``swarm`` does, and what whole steps of ``pipeline`` take, is the simulator's to say
(``sim.steps.steps``).

Parts of a step are told apart by what would be gone without them: a step without links and without averaging is compute
(the busiest machine's) and bubble; what links between stages add is pipeline; what a step's end adds is data-parallel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.config.plan_file import Split
from muletrain.planning.cost import all_reduce_s, makespan_s
from muletrain.planning.schedules import Station, pass_s, unlinked
from muletrain.planning.swapping import round_s

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.plan_file import Prediction
    from muletrain.planning.partition import Cut
    from muletrain.planning.swapping import Layer
    from muletrain.strategies.pipeline import Schedule

ENDING_DELAYS = 4
"""One after the other at the end of a step: all is through, seals, shards, means (``sim.fleet.rates``)."""


ALIKE = 0.01
"""Throughputs that differ by less are the same."""


@dataclass(frozen=True)
class Member:
    """A replica of a stage: its own links [bytes/s], both directions."""

    up_bytes_per_s: float
    down_bytes_per_s: float


def averaging_s(nbytes: float, members: Sequence[Member], bandwidth: float, delay_s: float) -> float:
    """A stage's gradient among its replicas [s]. ``bandwidth``: of the narrowest path between two of them [bytes/s];
    ``delay_s``: of the longest, one way."""
    if len(members) < 2:
        return 0.0
    narrowest = min(min(m.up_bytes_per_s, m.down_bytes_per_s) for m in members)
    return all_reduce_s(nbytes, len(members), narrowest, bandwidth) + ENDING_DELAYS * delay_s


def shared_out(items: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """``items`` in proportion to ``speeds``, in whole ones; the largest remainders get one more, the first of
    equals."""
    total = sum(speeds)
    exact = [items * v / total for v in speeds]
    found = [math.floor(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: found[i] - exact[i])[: items - sum(found)]:
        found[i] += 1
    return tuple(found)


def pipeline_shares(
    pipelines: Sequence[tuple[Station, ...]], microbatches: int, machines: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """Of a step's microbatches, by pipeline. ``machines``: by stage and pipeline, where some serve several pipelines;
    default: each one. One after the other goes where the busiest machine has least to do then, and among those where
    all have; which is the least that can be where each machine serves one."""
    if not machines:
        machines = np.arange(len(pipelines) * len(pipelines[0])).reshape(len(pipelines[0]), -1).tolist()
    at, busy_s = np.array(machines), np.array([[s.busy_s for s in stations] for stations in pipelines]).T
    load_s, shares = np.zeros(at.max() + 1), [0] * len(pipelines)
    for _ in range(microbatches):
        after = load_s[at] + busy_s
        most = after.max(0)
        p = int(np.where(most <= most.min() * (1 + 1e-9), after.sum(0), np.inf).argmin())
        load_s[at[:, p]] = after[:, p]
        shares[p] += 1
    return tuple(shares)


def pipeline_split(
    pipelines: Sequence[tuple[Station, ...]], shares: Sequence[int], schedule: Schedule, ending_s: float
) -> Split:
    """Of a step of GPipe or 1F1B, which ends when the slowest pipeline has flushed and all stages have averaged
    (``ending_s``)."""
    given = [(p, m) for p, m in zip(pipelines, shares, strict=True) if m]
    linked_s = max(pass_s(schedule, p, m) for p, m in given)
    free_s = max(pass_s(schedule, unlinked(p), m) for p, m in given)
    compute_s = max(m * max(s.forward_s + s.backward_s for s in p) for p, m in given)
    return Split(
        compute_s=compute_s,
        pipeline_s=max(0.0, linked_s - free_s),
        data_parallel_s=ending_s,
        bubble_s=max(0.0, free_s - compute_s),
    )


def parted(compute_s: float, free_s: float, linked_s: float, step_s: float) -> Split:
    """Of a step of ``step_s``, which computes for ``linked_s``, without links for ``free_s``, and if nobody waited
    ``compute_s``."""
    linked_s = min(linked_s, step_s)
    free_s = min(free_s, linked_s)
    compute_s = min(compute_s, free_s)
    return Split(
        compute_s=compute_s,
        bubble_s=free_s - compute_s,
        pipeline_s=linked_s - free_s,
        data_parallel_s=step_s - linked_s,
    )


def roughly_s(stations: Sequence[Station], microbatches: int) -> float:
    """Of one pipeline, without playing it: the busiest slot all the time, and each other one once [s]."""
    filling_s = sum(s.forward_s + s.backward_s + s.on_s + s.on_delay_s + s.back_s + s.back_delay_s for s in stations)
    return filling_s + (microbatches - 1) * max(s.busy_s for s in stations)


@dataclass(frozen=True)
class Swapper:
    """A machine that computes the whole model."""

    layers: tuple[Layer, ...]
    runs: Cut
    load_bytes_per_s: float
    accumulate: int
    """Minibatches in a row."""

    @property
    def busy_s(self) -> float:
        """A minibatch, without waiting for weights."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def round_s(self) -> float:
        return round_s(self.layers, self.runs, self.load_bytes_per_s, self.accumulate)


def swap_split(swappers: Sequence[Swapper], microbatches: int, ending_s: float) -> Split:
    """Of a step in which each machine computes minibatches until all together have so many, and then averages the whole
    model (ATOM sec. III-E)."""
    compute_s = microbatches / sum(1 / s.busy_s for s in swappers)
    usual = sum(s.accumulate for s in swappers) / len(swappers)
    rounds = max(1, round(microbatches / usual))
    takes_s = makespan_s(rounds, [(1, s.round_s * usual / s.accumulate) for s in swappers])
    return Split(compute_s=compute_s, pipeline_s=0.0, data_parallel_s=ending_s, bubble_s=max(0.0, takes_s - compute_s))


def recommend(predictions: Sequence[Prediction]) -> tuple[int | None, str]:
    """Of what runs today and is possible the fastest; and why."""
    possible = [i for i, p in enumerate(predictions) if not p.problem]
    able = [i for i in possible if predictions[i].runnable]
    if not able:
        return None, "nothing that runs today is possible on this fleet"
    best = max(able, key=lambda i: predictions[i].tokens_per_s)
    chosen = predictions[best]
    faster = [predictions[i] for i in possible if predictions[i].tokens_per_s > (1 + ALIKE) * chosen.tokens_per_s]
    why = f"{title(chosen)} does most of what runs today"
    if faster:
        rest = ", ".join(f"{title(p)} ({p.tokens_per_s / chosen.tokens_per_s:.2f} times as fast)" for p in faster)
        why += f"; predicted to do more, but not yet runnable: {rest}"
    elif len(possible) > 1:
        why = f"{title(chosen)} is predicted to do most, and runs today"
    return best, why


def title(p: Prediction) -> str:
    """'pipeline, 1F1B'."""
    names = {"": "", "gpipe": ", GPipe", "1f1b": ", 1F1B"}
    return p.strategy + names[p.schedule]
