"""Find an allocation of a hub, and check it with the independent evaluator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import CapacityError, ConfigError
from muletrain.planning import hub_annealing, hub_clustering
from muletrain.planning.hub_task import HubCost, HubStage, HubTask, evaluate

if TYPE_CHECKING:
    from collections.abc import Sequence

SEARCHES = ("muletrain", "hybrid")
"""Searches: ours and the paper's."""


@dataclass(frozen=True)
class Allocation:
    """A solution and its quality."""

    stages: tuple[HubStage, ...]
    cost: HubCost
    lower_bound_s: float
    """Lower bound of a step [s]: all machines compute all the time."""
    idle: tuple[int, ...]
    """Unused devices, which would slow the others down, or lack memory or links."""
    tried: int
    complete: bool
    """True: the search ended by itself, and the same seed finds the same again; false: the time limit ended it."""

    @property
    def gap(self) -> float:
        """Bound on how much slower it is than the best allocation, as a share of its step."""
        return 1 - self.lower_bound_s / self.cost.step_s if self.cost.step_s else 0.0


def allocate(
    task: HubTask, search: str = "muletrain", *, seed: int = 0, stages: int | None = None, time_limit_s: float = 30.0
) -> Allocation:
    """Find the fastest step with ``stages`` stages (None: any number). "hybrid" is the paper's heuristic;
    "muletrain" begins with its solution, if there is one, and is never slower. Raises ConfigError if nothing can be
    allocated, and CapacityError for lack of memory."""
    check(task, stages)
    if search == "hybrid":
        found = hub_annealing.Found(tuple(hub_clustering.allocate(task, seed=seed, stages=stages)), 1, complete=True)
    else:
        found = hub_annealing.search(task, seed=seed, stages=stages, time_limit_s=time_limit_s)
    cost = evaluate(task, found.stages)
    if not math.isfinite(cost.step_s):
        raise ConfigError(
            f"the {search} search found no allocation without missing links (bandwidth 0): change the number of stages, leave devices out "
            f"that reach few others, or search longer"
        )
    used = {d for stage in found.stages for d in stage.devices}
    idle = tuple(d for d in range(len(task.flops)) if d not in used)
    bound_s = task.microbatches * sum(task.chain.work) / sum(task.flops)
    return Allocation(found.stages, cost, bound_s, idle, found.tried, found.complete)


def check(task: HubTask, stages: int | None) -> None:
    """Check the task. Raises ConfigError if it is impossible for any search, and CapacityError if no reliable device
    holds the largest layer."""
    count, servers, layers = len(task.flops), [d for d, r in enumerate(task.reliable) if r], len(task.chain.work)
    _check_numbers(task)
    if not servers:
        raise ConfigError(
            f"none of {count} devices is reliable, and a hub needs reliable ones as servers; use the swarm strategy"
        )
    if stages is not None and not 1 <= stages <= layers:
        raise ConfigError(
            f"{layers} layers cannot be cut into {stages} stages of at least one layer; use 1 to {layers} stages"
        )
    if stages is not None and stages > len(servers):
        raise ConfigError(
            f"{stages} stages need a reliable device each, and there are {len(servers)}; use fewer stages"
        )
    if cut_off := _cut_off(task, servers):
        raise ConfigError(
            f"the network of reliable devices falls apart: devices {', '.join(map(str, cut_off))} have no links to the others (bandwidth "
            f"0 in one or both directions); leave them out, or give them links"
        )
    needs = max(task.chain.memory_bytes(n, n + 1) for n in range(layers))
    if task.memory_bytes and needs > (most := max(task.memory_bytes[d] for d in servers)):
        raise CapacityError(
            f"the largest layer needs {needs / 2**30:.3g} GiB, and no reliable device has more than {most / 2**30:.3g} GiB; use machines "
            f"with more memory, smaller microbatches or another optimizer"
        )


def _check_numbers(task: HubTask) -> None:
    count = len(task.flops)
    for name in ("delay_ms", "bandwidth_gbps"):
        numbers = np.asarray(getattr(task, name), dtype=float)
        if numbers.shape != (count, count):
            raise ConfigError(f"{name}: {count} devices need {count} x {count} numbers, not {numbers.shape}")
        wrong = ~(numbers >= 0) | (np.isinf(numbers) & (name == "delay_ms"))
        np.fill_diagonal(wrong, False)
        if wrong.any():
            a, b = np.argwhere(wrong)[0]
            raise ConfigError(
                f"{name}: {numbers[a, b]} from device {a} to {b}; give a number from 0 on (no link is bandwidth 0)"
            )
    if len(task.reliable) != count or len(task.memory_bytes) not in (0, count):
        raise ConfigError(f"reliable and memory_bytes need an entry for each of {count} devices")
    for device, flops in enumerate(task.flops):
        if not 0 < flops < math.inf:
            raise ConfigError(f"flops: device {device} has {flops}; leave it out, or give its speed")


def _cut_off(task: HubTask, servers: Sequence[int]) -> list[int]:
    """Reliable devices outside the fastest connected part of the network."""
    gbps = np.asarray(task.bandwidth_gbps, dtype=float)
    linked = np.minimum(gbps, gbps.T) > 0
    left, parts = set(servers), []
    while left:
        part, ends = set[int](), [min(left)]
        while ends:
            device = ends.pop()
            part.add(device)
            left.discard(device)
            ends += [d for d in left if linked[device, d] and d not in ends]
        parts.append(part)
    largest = max(parts, key=lambda part: sum(task.flops[d] for d in part))
    return sorted(set(servers) - largest)
