"""HYBRID's allocation of a hub (sec. 3.3.3), one step after another: servers into stages by divisive clustering, stages
in order by annealing, servers into roles, clients to the nearest stage, layers by total speed.

Where the paper leaves something open: a cluster is divided between its two farthest members; the others follow, those
first for which it matters most, to the half that is nearer on average, and if both are, to the slower one (in a data
centre: halves of equal speed). The next one to be divided is the widest. Eq. 3 is taken as it is written, with the
speed of all servers, so that each level seems faster than the one before until transfers cost more than that; from
three stages on, equally slow transfers cost no more. The first stage has no stage before it, and all its servers go to
the other side, but for the slowest: the one with the longest way. Beyond the paper: levels at which memory does not
suffice are passed over, and clients that cannot hold or reach the nearest stage go to the nearest that they can.
"""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import CapacityError
from muletrain.planning.partition import cheapest_cut
from reproduction.hybrid_cost import HubStage, HubTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from muletrain.planning.partition import Cut

    Floats = NDArray[np.float64]

Cluster = tuple[int, ...]
"""Devices, sorted."""
MOVES = 200
"""Moves of the annealing, per stage."""
HOT, COLD = 1.0, 1e-3
"""First and last temperature, over the mean distance of two stages."""


def allocate(task: HubTask, *, seed: int, stages: int | None = None) -> list[HubStage]:
    """Allocate as the paper does. ``stages``: a fixed number instead of the stopping rule. Raises CapacityError if
    no level fits into memory."""
    edges = distances(task)
    best: list[Cluster] = []
    best_s = math.inf
    for ordered in orders(task, edges, seed):
        time_s = pipeline_s(task, ordered, edges)
        if stages is None and time_s > best_s:
            break
        if stages in (None, len(ordered)):
            best, best_s = ordered, time_s
    if not best:
        raise CapacityError(
            "at no level of the paper's clustering do all machines hold the layers of their stage; leave out those with the least memory"
        )
    return assemble(task, best, edges)


def orders(task: HubTask, edges: Floats, seed: int) -> Iterator[list[Cluster]]:
    """The ordered clusters of each level that fits into memory."""
    rng = np.random.default_rng(seed)
    for clusters in levels(task, edges):
        if len(clusters) > len(task.work):
            return
        ordered = in_order(clusters, edges, rng)
        with suppress(CapacityError):
            cut_by_speed(task, ordered)
            yield ordered


def distances(task: HubTask) -> Floats:
    """Seconds of a microbatch's activations between every two devices, mean of both directions, (N, N); a missing
    link counts as a hundred times the largest."""
    gbps = np.asarray(task.bandwidth_gbps, dtype=float)
    load = task.activation_bytes * 8e-9 / np.where(gbps > 0, gbps, np.nan)
    one_way = np.asarray(task.delay_ms, dtype=float) / 1000 + load
    mean: Floats = (one_way + one_way.T) / 2
    np.fill_diagonal(mean, 0.0)
    return np.where(np.isnan(mean), 100 * (np.nanmax(mean) or 1.0), mean)


def levels(task: HubTask, edges: Floats) -> Iterator[list[Cluster]]:
    """Levels of the divisive clustering of the reliable devices: one cluster, two, ... one per device."""
    clusters: list[Cluster] = [tuple(d for d, reliable in enumerate(task.reliable) if reliable)]
    yield list(clusters)
    while any(len(cluster) > 1 for cluster in clusters):
        widest = max(clusters, key=lambda c: (edges[np.ix_(c, c)].max(), len(c)) if len(c) > 1 else (-1.0, 0))
        clusters.remove(widest)
        clusters += _divide(task, widest, edges)
        yield list(clusters)


def _divide(task: HubTask, cluster: Cluster, edges: Floats) -> list[Cluster]:
    inside = edges[np.ix_(cluster, cluster)].copy()
    np.fill_diagonal(inside, -1.0)
    seeds = [cluster[i] for i in np.unravel_index(inside.argmax(), inside.shape)]
    halves, speeds = [[d] for d in seeds], [task.flops[d] for d in seeds]
    for d in sorted(set(cluster) - set(seeds), key=lambda d: (-abs(edges[d, seeds[0]] - edges[d, seeds[1]]), d)):
        a, b = (float(edges[d, half].mean()) for half in halves)
        half = int(speeds[1] < speeds[0]) if math.isclose(a, b) else int(b < a)
        halves[half].append(d)
        speeds[half] += task.flops[d]
    return [tuple(sorted(half)) for half in halves]


def coarse(clusters: Sequence[Cluster], edges: Floats) -> Floats:
    """Mean distance between every two clusters [s], (K, K)."""
    member = np.zeros((len(clusters), len(edges)))
    for k, cluster in enumerate(clusters):
        member[k, list(cluster)] = 1 / len(cluster)
    mean: Floats = member @ edges @ member.T
    return mean


def in_order(clusters: Sequence[Cluster], edges: Floats, rng: np.random.Generator) -> list[Cluster]:
    """A short way through all clusters (open travelling salesman), by annealing with 2-opt moves."""
    weights, count = coarse(clusters, edges), len(clusters)
    order = list(range(count))
    if count < 3:
        return [clusters[k] for k in order]
    w = weights.tolist()

    def length(path: Sequence[int]) -> float:
        return float(sum(w[a][b] for a, b in pairwise(path)))

    best, best_s, now_s, moves = list(order), length(order), length(order), MOVES * count
    scale = float(weights[~np.eye(count, dtype=bool)].mean()) or 1.0
    temperatures = scale * HOT * (COLD / HOT) ** np.linspace(0, 1, moves)
    ends = np.sort(rng.integers(count, size=(moves, 2)), axis=1).tolist()
    for (i, j), slack_s in zip(ends, (temperatures * rng.standard_exponential(moves)).tolist(), strict=True):
        other = [*order[:i], *order[i : j + 1][::-1], *order[j + 1 :]]
        then_s = length(other)
        if then_s <= now_s + slack_s:
            order, now_s = other, then_s
            if now_s < best_s:
                best, best_s = list(order), now_s
    return [clusters[k] for k in best]


def pipeline_s(task: HubTask, ordered: Sequence[Cluster], edges: Floats) -> float:
    """Seconds of one microbatch by eq. 2 and 3, by which levels are compared."""
    speed = sum(task.flops[d] for cluster in ordered for d in cluster)
    weights = coarse(ordered, edges)
    hops = [0.0, *(float(weights[k, k + 1]) for k in range(len(ordered) - 1)), 0.0]
    return max(a + b for a, b in pairwise(hops)) + sum(task.work) / (len(ordered) * speed)


def cut_by_speed(task: HubTask, groups: Sequence[Sequence[int]], servers: Sequence[Cluster] = ()) -> Cut:
    """Share out layers in proportion to each group's total speed. ``servers``: the devices that must hold them
    (default: the whole group). Raises CapacityError."""
    work, needs = (np.cumsum((0.0, *each)) for each in (task.work, task.layer_bytes or (0.0,) * len(task.work)))
    costs = np.array(
        [
            np.where(
                needs[None] - needs[:, None]
                <= min((task.memory_bytes[d] for d in holders if task.memory_bytes), default=math.inf),
                (work[None] - work[:, None]) / sum(task.flops[d] for d in group),
                math.inf,
            )
            for group, holders in zip(groups, servers or groups, strict=True)
        ]
    )
    if (found := cheapest_cut(costs)) is None:
        raise CapacityError(
            f"no cut of {len(task.work)} layers into {len(groups)} stages fits into their machines' memory"
        )
    return found[1]


def assemble(task: HubTask, ordered: Sequence[Cluster], edges: Floats) -> list[HubStage]:
    """Add roles, clients and layers to ordered clusters of servers."""
    roles = [_roles(ordered, k, edges) for k in range(len(ordered))]
    near: dict[int, list[int]] = {}  # client -> stages that it reaches, the nearest first
    for d in (d for d, reliable in enumerate(task.reliable) if not reliable):
        reached = [k for k, (front, back) in enumerate(roles) if _reaches(task, d, front, back)]
        near[d] = sorted(reached, key=lambda k: (edges[d, list(ordered[k])].mean(), k))
    clients = [[d for d, stages in near.items() if stages[:1] == [k]] for k in range(len(ordered))]
    cut = cut_by_speed(task, [(*s, *c) for s, c in zip(ordered, clients, strict=True)], ordered)
    if task.memory_bytes:
        holds = {d: [k for k in near[d] if sum(task.layer_bytes[slice(*cut[k])]) <= task.memory_bytes[d]] for d in near}
        clients = [[d for d, stages in holds.items() if stages[:1] == [k]] for k in range(len(ordered))]
    return [HubStage(*roles[k], tuple(clients[k]), cut[k]) for k in range(len(ordered))]


def _reaches(task: HubTask, client: int, front: Cluster, back: Cluster) -> bool:
    gbps = task.bandwidth_gbps
    return any(gbps[s][client] > 0 for s in front) and any(gbps[client][s] > 0 for s in back)


def _roles(ordered: Sequence[Cluster], k: int, edges: Floats) -> tuple[Cluster, Cluster]:
    """Frontal and backward servers of stage ``k``: each on the nearer side, at least one on each."""
    stage = ordered[k]
    if len(stage) == 1:
        return stage, stage
    sides = [ordered[n] if 0 <= n < len(ordered) else () for n in (k - 1, k + 1)]
    roles: tuple[list[int], list[int]] = ([], [])
    ways = {d: [float(edges[d, list(side)].mean()) if side else math.inf for side in sides] for d in stage}
    for d in stage:
        before, after = ways[d]
        roles[int(len(roles[1]) < len(roles[0])) if before == after else int(after < before)].append(d)
    for empty, other in ((0, 1), (1, 0)):
        if not roles[empty]:
            slowest = max(roles[other], key=lambda d: (ways[d][other], -d))
            roles[other].remove(slowest)
            roles[empty].append(slowest)
    return tuple(roles[0]), tuple(roles[1])
