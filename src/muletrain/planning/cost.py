"""What the work of a run costs, in pure numbers: time to compute, to send, to average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class StageCost:
    """Of one stage, wherever it is served."""

    forward_flops: float
    """Of one microbatch; a backward takes twice as many, and once more where activations are recomputed."""
    recomputable: bool
    """Not the last stage, which does both at once."""
    state_bytes: int
    """What a newcomer copies: weights and moments."""
    averaged_bytes: int
    """The gradient, as it travels."""
    ending_s: float = 0.0
    """Of a step's end what takes neither messages nor links: what was measured, and updates on the CPU."""


@dataclass(frozen=True)
class RunCost:
    """Of a whole run. ``forward_bytes[s]``: what one microbatch sends to stage s (tokens to the first);
    ``backward_bytes[s]``: what stage s sends back for it."""

    stages: tuple[StageCost, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    microbatches: int
    """In a step."""
    sequences: int
    tokens: int
    """In a microbatch."""


def service_s(stage: StageCost, flops: float, *, recompute: bool) -> tuple[float, float]:
    """Forward and backward of one microbatch at ``flops`` operations a second [s]."""
    forward_s = stage.forward_flops / flops
    return forward_s, forward_s * (3 if recompute and stage.recomputable else 2)


def all_reduce_s(nbytes: float, members: int, narrowest: float, path: float) -> float:
    """Reduce-scatter and all-gather of ``nbytes`` among members each of which reduces an equal shard and exchanges it
    with every other: each sends and takes 2 (n-1)/n of it. ``narrowest``: of all members' up- and downlinks; ``path``:
    the narrowest between two of them [bytes/s]. Delays not included."""
    if members < 2:
        return 0.0
    return max(2 * (members - 1) / members * nbytes / narrowest, 2 * nbytes / members / path)


ALIKE = 1.5
"""Two bandwidths that differ by less are as narrow as each other."""


def averages_at(members: int, up: float, down: float, *, delayed: bool = False) -> float:
    """The share of its bandwidth that the narrowest link carries while so many replicas average. Pacing keeps queues
    short, so where three or more send to each other, and their uplinks are as narrow as the others' downlinks
    [bytes/s], a link waits now and then for those that are busy elsewhere (measured: tests/test_roads.py,
    benchmarks/full_links). ``delayed``: the next step's activations take what is left over, and make room for it
    elsewhere."""
    return 0.88 if members > 2 and 1 / ALIKE < up / down < ALIKE and not delayed else 0.97


def makespan_s(items: int, service: Sequence[tuple[int, float]]) -> float:
    """The time in which ``items`` pieces of work are done by machines as (how many, seconds apiece), each a whole piece
    at a time and given out as they come: the last one is left to one machine, on average for half of what the slowest
    takes."""
    present = [(n, s) for n, s in service if n]
    shared_s = items / sum(n / s for n, s in present)
    return shared_s if sum(n for n, _ in present) == 1 else shared_s + max(s for _, s in present) / 2


def circulating(jobs: int, demands_s: Sequence[float], away_s: float) -> float:
    """Pieces of work per second, of which so many go round and round through queues with one server each, one after the
    other, and are ``away_s`` in none of them. Mean value analysis (Reiser and Lavenberg 1980) for service that always
    takes as long: who comes finds those that wait, and half of what is served."""
    slowest = max(demands_s)
    waiting, busy = [0.0] * len(demands_s), [0.0] * len(demands_s)
    rate = 0.0
    for n in range(1, jobs + 1):
        spent_s = [d * (1 + q - u / 2) for d, q, u in zip(demands_s, waiting, busy, strict=True)]
        rate = min(n / (away_s + sum(spent_s)), 1 / slowest)
        waiting = [rate * s for s in spent_s]
        busy = [min(1.0, rate * d) for d in demands_s]
    return rate


def steady_shares(expected_s: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Of the microbatches of one sender, by kind of receiver: what ``policy.wiring`` comes to, each chosen in inverse
    proportion to its expected time."""
    weights = [n / s if n else 0.0 for n, s in zip(counts, expected_s, strict=True)]
    total = sum(weights)
    return [w / total for w in weights] if total else weights
