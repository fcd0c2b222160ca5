"""Simulated annealing of the devices of each stage, with the best matching of each hop at every move; compiled by
numba.

For given devices of two neighbouring stages the best partners are a bottleneck matching (DT-FM eq. 3). So no moves
change only the matching. There are three kinds of moves: swap two devices; swap two runs of devices, each along one
pipeline, which keeps the fast links inside both runs; reverse the order of some neighbouring stages.

Arrays: K stages, P pipelines, n devices, S sizes of stages. Slot p of a stage of m devices is served by device p mod m,
so devices of a smaller stage serve several pipelines. All times in seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muletrain.planning.matching import Scratch, bottleneck, compiled, part, scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

LONGEST_RUN = 4
SINGLE, REVERSALS = 0.6, 0.02
"""Shares of moves that swap two devices, and that reverse stages; the remaining moves swap runs."""
SAME = 1e-9
"""Relative difference below which times are equal."""
LOOK = 1024
"""Moves after which all sums are recomputed, to limit rounding errors."""


class Problem(NamedTuple):
    """The task."""

    link: Floats
    """Seconds of activations between two devices, (n, n), symmetric, finite."""
    exchange: Floats
    """Seconds in which two devices exchange gradients, there and back, by size of the stage, (S, n, n)."""
    compute: Floats
    """(n,)"""
    sizes: Ints
    """(S,)"""


class Groups(NamedTuple):
    """A placement without matchings."""

    at: Ints
    """The device of each slot, (K, P)."""
    size: Ints
    """Index of each stage's size, (K,)."""
    spares: Ints
    """Devices that are not used."""


class Sums(NamedTuple):
    """Sums of a placement that are kept from move to move."""

    sums: Floats  # seconds for which each device exchanges with the stage, (n,)
    slowest: Floats  # by stage, the largest of ``sums``, (K,)
    computing: Floats  # by stage, (K,)
    hops: Floats  # the slowest link of each stage to the next, (K,); the last is 0
    guides: Floats  # of hops, (K,)
    match: Ints  # the next stage's slot for each slot, (K, P)


class Proposal(NamedTuple):
    """A move: devices that leave stages, replacements, and the resulting sums."""

    stage: Ints
    member: Ints
    leaves: Ints
    joins: Ints
    sums: Floats  # (changes, P)
    slowest: Floats
    computing: Floats
    hop: Ints  # indices of the changed hops
    hops: Floats
    guides: Floats
    match: Ints


Working = tuple[Sums, Proposal, Scratch]


def working(stages: int, pipelines: int, devices: int) -> Working:
    """Allocate the arrays of ``anneal``."""
    changes = 2 * LONGEST_RUN

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return (
        Sums(
            np.zeros(devices),
            np.zeros(stages),
            np.zeros(stages),
            np.zeros(stages),
            np.zeros(stages),
            ints(stages, pipelines),
        ),
        Proposal(
            ints(changes),
            ints(changes),
            ints(changes),
            ints(changes),
            np.zeros((changes, pipelines)),
            np.zeros(changes),
            np.zeros(changes),
            ints(changes + 2),
            np.zeros(changes + 2),
            np.zeros(changes + 2),
            ints(changes + 2, pipelines),
        ),
        scratch(pipelines),
    )


@part
def settle(problem: Problem, groups: Groups, kept: Sums, scratch: Scratch, weight: float) -> None:
    """Recompute all sums."""
    stages = len(groups.at)
    for k in range(stages):
        row, members = groups.at[k], problem.sizes[groups.size[k]]
        exchange = problem.exchange[groups.size[k]]
        kept.slowest[k] = kept.computing[k] = 0.0
        for i in range(members):
            total = 0.0
            for j in range(members):
                total += exchange[row[i], row[j]]
            kept.sums[row[i]] = total
            kept.slowest[k] = max(kept.slowest[k], total)
            kept.computing[k] = max(kept.computing[k], problem.compute[row[i]])
        if k + 1 < stages:
            kept.hops[k], kept.guides[k] = bottleneck(
                problem.link, row, groups.at[k + 1], weight, np.inf, kept.match[k], scratch
            )


@part
def cost(kept: Sums) -> float:
    slowest = others = 0.0
    for k in range(len(kept.slowest)):
        slowest = max(slowest, kept.slowest[k])
        others += kept.computing[k] + 2 * kept.hops[k]
    return slowest + others


@part
def _copy(groups: Groups, into: Groups) -> None:
    stages, width = groups.at.shape
    for k in range(stages):
        into.size[k] = groups.size[k]
        for p in range(width):
            into.at[k, p] = groups.at[k, p]
    for p in range(len(groups.spares)):
        into.spares[p] = groups.spares[p]


@part
def _put(groups: Groups, members: int, stage: int, member: int, device: int) -> None:
    row = groups.at[stage]
    for p in range(member, len(row), members):
        row[p] = device


@part
def reverse_stages(
    problem: Problem, groups: Groups, kept: Sums, new: Proposal, scratch: Scratch, weight: float, room: float, rng: Any
) -> bool:
    """Reverse the order of some stages, if the hops then take at most ``room`` longer in total."""
    stages, width = groups.at.shape
    first, last = int(rng.random() * stages), int(rng.random() * stages)
    if first > last:
        first, last = last, first
    if first == last or (first == 0 and last == stages - 1):
        return False
    for side in range(2):
        h, other = (first - 1, last) if side == 0 else (last, first)  # ``other`` is next to ``outside`` then
        outside = first - 1 if side == 0 else last + 1
        if 0 <= outside < stages and room >= -kept.hops[h] - weight * kept.guides[h]:
            room += kept.hops[h] + weight * kept.guides[h]
            time_s, guide = bottleneck(
                problem.link, groups.at[outside], groups.at[other], weight, room, new.match[0], scratch
            )
            room -= time_s + weight * guide
    if room < 0:
        return False
    a, b = first, last
    while a < b:
        for p in range(width):
            groups.at[a, p], groups.at[b, p] = groups.at[b, p], groups.at[a, p]
        groups.size[a], groups.size[b] = groups.size[b], groups.size[a]
        kept.slowest[a], kept.slowest[b] = kept.slowest[b], kept.slowest[a]
        kept.computing[a], kept.computing[b] = kept.computing[b], kept.computing[a]
        a, b = a + 1, b - 1
    for h in range(max(first - 1, 0), min(last + 1, stages - 1)):
        kept.hops[h], kept.guides[h] = bottleneck(
            problem.link, groups.at[h], groups.at[h + 1], weight, np.inf, kept.match[h], scratch
        )
    return True


@part
def _drawn(problem: Problem, groups: Groups, kept: Sums, new: Proposal, rng: Any) -> tuple[int, int, int, int]:
    """Draw two devices or runs to swap into ``new``; return the first stages of both, the length, and the spare
    device's index or -1. Length 0: no change."""
    stages, width = groups.at.shape
    longest, length, spare = min(stages, len(new.stage)) // 2, 1, -1
    if longest > 1 and rng.random() >= SINGLE:
        length = 2 + int(rng.random() * (longest - 1))
        f, g = int(rng.random() * (stages - length + 1)), int(rng.random() * (stages - length + 1))
        if abs(f - g) < length:  # a stage loses one device at most
            return f, g, 0, spare
    else:
        f, other = int(rng.random() * stages), int(rng.random() * (stages * width + len(groups.spares)))
        g = min(other // width, stages)
        if g == stages:
            spare = other - stages * width
    f, g = min(f, g), max(f, g)
    p = int(rng.random() * problem.sizes[groups.size[f]])
    q = int(rng.random() * problem.sizes[groups.size[g]]) if spare < 0 else 0
    if f == g:
        more = width % problem.sizes[groups.size[f]]  # number of devices that serve one more pipeline
        if (p < more) == (q < more):
            return f, g, 0, spare
    c = 0
    for s in range(length):
        p %= problem.sizes[groups.size[f + s]]
        a = groups.at[f + s, p]
        if spare < 0:
            q %= problem.sizes[groups.size[g + s]]
            b = groups.at[g + s, q]
            new.stage[c + 1], new.member[c + 1], new.leaves[c + 1], new.joins[c + 1] = g + s, q, b, a
        else:
            b = groups.spares[spare]
        new.stage[c], new.member[c], new.leaves[c], new.joins[c] = f + s, p, a, b
        c += 2
        if s + 1 < length:
            p, q = kept.match[f + s, p], kept.match[g + s, q]
    return f, g, length, spare


@part
def _stages_after(
    problem: Problem,
    groups: Groups,
    kept: Sums,
    new: Proposal,
    changes: int,
    f: int,
    g: int,
    length: int,
    weight: float,
    room: float,
) -> float:
    """Rest of ``room`` after the stages' exchange and compute; negative as soon as the room is used up."""
    stages, slowest, before = len(groups.at), 0.0, 0.0
    for k in range(stages):
        before = max(before, kept.slowest[k])
        if not (f <= k < f + length or g <= k < g + length):
            slowest = max(slowest, kept.slowest[k])
    room += before
    for c in range(changes):
        room += kept.computing[new.stage[c]] + weight / stages * kept.slowest[new.stage[c]]
    for c in range(changes):
        k, a, b = new.stage[c], new.leaves[c], new.joins[c]
        exchange = problem.exchange[groups.size[k]]
        own, most, computing_s = 0.0, 0.0, problem.compute[b]
        for i in range(problem.sizes[groups.size[k]]):
            d = groups.at[k, i]
            if d != a:
                own += exchange[b, d]
                new.sums[c, i] = kept.sums[d] - exchange[d, a] + exchange[d, b]
                most = max(most, new.sums[c, i])
                computing_s = max(computing_s, problem.compute[d])
        new.sums[c, new.member[c]] = own
        new.slowest[c], new.computing[c] = max(most, own), computing_s
        slowest = max(slowest, new.slowest[c])
        room -= computing_s + weight / stages * new.slowest[c]
        if slowest > room:
            return -1.0
    return room - slowest


@part
def _hops_after(
    problem: Problem,
    groups: Groups,
    kept: Sums,
    new: Proposal,
    scratch: Scratch,
    changes: int,
    touched: int,
    weight: float,
    room: float,
) -> float:
    """Rest of ``room`` after the changed hops; negative as soon as the room is used up."""
    stages, width = groups.at.shape
    for c in range(changes):  # each joining device must reach a neighbour in time
        for k in (new.stage[c] - 1, new.stage[c] + 1):
            if 0 <= k < stages:
                nearest_s, row = np.inf, problem.link[new.joins[c]]
                for p in range(width):
                    nearest_s = min(nearest_s, row[groups.at[k, p]])
                if nearest_s > room:
                    return -1.0
    for t in range(touched):
        h = new.hop[t]
        for p in range(width):
            new.match[t, p] = kept.match[h, p]
        new.hops[t], new.guides[t] = bottleneck(
            problem.link, groups.at[h], groups.at[h + 1], weight, room, new.match[t], scratch
        )
        room -= new.hops[t] + weight * new.guides[t]
        if room < 0:
            break
    return room


@part
def swap_devices(
    problem: Problem, groups: Groups, kept: Sums, new: Proposal, scratch: Scratch, weight: float, room: float, rng: Any
) -> bool:
    """Swap two devices or runs, if the cost rises by at most ``room``."""
    stages, width = groups.at.shape
    f, g, length, spare = _drawn(problem, groups, kept, new, rng)
    if length == 0:
        return False
    changes, touched = 1 if spare >= 0 else 2 * length, 0
    for side in range(2):
        start = g if side else f
        for h in range(max(start - 1, side * (f + length)), min(start + length, stages - 1)):
            new.hop[touched] = h
            room += 2 * (kept.hops[h] + weight * kept.guides[h])
            touched += 1
    if f != g:
        room = _stages_after(problem, groups, kept, new, changes, f, g, length, weight, room)
    if room >= 0:
        for c in range(changes):
            _put(groups, problem.sizes[groups.size[new.stage[c]]], new.stage[c], new.member[c], new.joins[c])
        room = _hops_after(problem, groups, kept, new, scratch, changes, touched, weight, room / 2)
        if room < 0:
            for c in range(changes):
                _put(groups, problem.sizes[groups.size[new.stage[c]]], new.stage[c], new.member[c], new.leaves[c])
    if room < 0:
        return False
    for t in range(touched):
        kept.hops[new.hop[t]], kept.guides[new.hop[t]] = new.hops[t], new.guides[t]
        for p in range(width):
            kept.match[new.hop[t], p] = new.match[t, p]
    for c in range(changes if f != g else 0):
        k = new.stage[c]
        kept.slowest[k], kept.computing[k] = new.slowest[c], new.computing[c]
        for i in range(problem.sizes[groups.size[k]]):
            kept.sums[groups.at[k, i]] = new.sums[c, i]
    if spare >= 0:
        groups.spares[spare] = new.leaves[0]
    return True


@compiled
def anneal(
    problem: Problem,
    groups: Groups,
    best: Groups,
    working: Working,
    rng: Any,
    moves: int,
    temperature: float,
    weight: float,
) -> tuple[float, float]:
    """Anneal at one temperature [s] by Metropolis' rule, on the cost plus ``weight`` times the smoother guide: for
    hops see ``bottleneck``, for stages the mean data-parallel cost. ``groups`` becomes the last placement, ``best``
    the cheapest one; return the cost of ``best``, and the last cost with the guide. ``rng``: numpy's Generator."""
    kept, new, scratch = working
    best_s = cost_s = np.inf
    moved = True
    for move in range(moves + 1):
        if move % LOOK == 0 or move == moves:
            settle(problem, groups, kept, scratch, weight)
        if moved:
            cost_s = cost(kept)
            if cost_s < best_s * (1 - SAME):
                best_s = cost_s
                _copy(groups, best)
        if move < moves:
            room = temperature * -math.log(1.0 - rng.random())
            if rng.random() < REVERSALS:
                moved = reverse_stages(problem, groups, kept, new, scratch, weight, room / 2, rng)
            else:
                moved = swap_devices(problem, groups, kept, new, scratch, weight, room, rng)
    energy = cost_s
    for k in range(len(kept.hops)):
        energy += weight * (kept.slowest[k] / len(kept.hops) + 2 * kept.guides[k])
    return best_s, energy
