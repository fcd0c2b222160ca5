"""Finds a placement, and checks the cost with the independent evaluator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import ConfigError
from muletrain.planning import annealing
from muletrain.planning.placement import Cost, evaluate, link_times, lower_bound_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.planning.annealing import Found
    from muletrain.planning.placement import Assignment, Task

    Search = Callable[..., Found]
    """Takes a task, ``seed``, ``time_limit_s`` and ``watch``."""


@dataclass(frozen=True)
class Placement:
    """A solution and its quality."""

    assignment: Assignment
    cost: Cost
    lower_bound_s: float
    spares: tuple[int, ...]
    """Unused devices."""
    tried: int
    complete: bool
    """True: the search ended by itself, and the same seed gives the same result; false: the time limit ended the
    search."""

    @property
    def gap(self) -> float:
        """Upper bound on the excess over the best placement's cost, as a share of ``cost``."""
        return max(0.0, 1 - self.lower_bound_s / self.cost.cost_s) if self.cost.cost_s else 0.0

    @property
    def matching(self) -> list[list[tuple[int, int]]]:
        """Pairs of communicating devices, by pair of neighbouring stages."""
        return [list(zip(a, b, strict=True)) for a, b in zip(self.assignment, self.assignment[1:], strict=False)]


def place(
    task: Task,
    *,
    search: Search = annealing.search,
    seed: int = 0,
    time_limit_s: float = 30.0,
    watch: Callable[[float, float], None] = lambda share, best_s: None,
) -> Placement:
    """Place a task. ``watch`` gets the share of the work done and the best cost [s]. Raises ConfigError without a
    possible placement."""
    check(task)
    found = search(task, seed=seed, time_limit_s=time_limit_s, watch=watch)
    cost = evaluate(task, found.assignment)
    if not np.isfinite(cost.cost_s):
        raise ConfigError(
            "no placement was found without missing links (bandwidth 0 in one or both directions), and all devices of a "
            "stage need links to each other: change stages and pipelines, leave devices out, or search longer"
        )
    used = {d for stage in found.assignment for d in stage}
    spares = tuple(d for d in range(len(task.delay_ms)) if d not in used)
    return Placement(found.assignment, cost, lower_bound_s(task), spares, found.tried, found.complete)


def check(task: Task) -> None:
    """Check a task. Raises ConfigError for too few devices, too little memory, or too few connected devices."""
    places, total = sum(task.replicas), len(task.delay_ms)
    if total < places:
        raise ConfigError(
            f"{len(task.replicas)} stages need {places} devices, and there are {total}; plan fewer stages or pipelines"
        )
    if len(task.devices) < places:
        raise ConfigError(
            f"{places} devices are needed, and a stage fits into the memory of {len(task.devices)} of {total}; plan more stages, which are "
            f"smaller, or fewer pipelines"
        )
    if places > 1 and len(largest := _largest_component(task)) < places:
        cut_off = [d for d in task.devices if d not in largest]
        raise ConfigError(
            f"the network falls apart: {places} devices must reach each other, and at most {len(largest)} do; "
            f"{_some(cut_off)} no links to these (bandwidth 0 in one or both directions)"
        )


def _largest_component(task: Task) -> set[int]:
    linked = np.isfinite(link_times(task, 1.0))
    left, largest = set(task.devices), set[int]()
    while left:
        component, ends = set[int](), [min(left)]
        while ends:
            device = ends.pop()
            component.add(device)
            left.discard(device)
            near = [other for other in left if linked[device, other]]
            left.difference_update(near)
            ends += near
        largest = max(largest, component, key=len)
    return largest


def _some(devices: list[int]) -> str:
    if len(devices) == 1:
        return f"device {devices[0]} has"
    more = f" and {len(devices) - 8} more" if len(devices) > 8 else ""
    return f"devices {', '.join(map(str, devices[:8]))}{more} have"
