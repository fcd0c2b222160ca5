"""Cutting the layers into pipeline stages.

SWARM (sec. 3.2) partitions the model into "evenly sized" stages of equally many layers. Counting layers forgets the
embedding and the output head: with a large vocabulary the head costs as much as several layers, and the stage that has
it holds up the others. Here the largest *compute cost* of a stage is minimised, exactly.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Cut = tuple[tuple[int, int], ...]
"""(first layer, end layer) of each stage: contiguous, at least one layer each."""


def partition(layer_costs: Sequence[float], stages: int, *, first_extra: float = 0.0, last_extra: float = 0.0) -> Cut:
    """The cut into ``stages`` contiguous runs whose largest cost is smallest, and among those the most even one.

    ``layer_costs``: one per layer; ``first_extra`` (embedding) goes to the first stage, ``last_extra`` (head and loss)
    to the last. Any unit, but one for all. Two dynamic programs, O(stages * layers^2): the first finds the smallest
    possible maximum, the second, among cuts that keep to it, the smallest sum of squares (a maximum alone says nothing
    about the other stages). Raises ValueError unless 1 <= stages <= layers.
    """
    layers = len(layer_costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"cannot cut {layers} layers into {stages} stages of at least one layer")
    prefix = [0.0]
    for cost in layer_costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(stage: int, first: int, end: int) -> float:
        extra = first_extra * (stage == 0) + last_extra * (stage == stages - 1)
        return prefix[end] - prefix[first] + extra

    largest, _ = _best(layers, stages, stage_cost, max)
    bound = largest * (1 + 1e-9)  # sums of the same costs in another order differ in the last bits

    def squared(stage: int, first: int, end: int) -> float:
        cost = stage_cost(stage, first, end)
        return cost * cost if cost <= bound else math.inf

    return _best(layers, stages, squared, lambda a, b: a + b)[1]


def _best(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, Cut]:
    """The cheapest cut where ``cost(stage, first, end)`` of the stages are combined from left to right."""
    best: dict[int, tuple[float, Cut]] = {0: (0.0, ())}  # layers given out so far -> the cheapest way to do it
    for stage in range(stages):
        left = stages - stage - 1
        reached: dict[int, tuple[float, Cut]] = {}
        for end in range(stage + 1, layers - left + 1):
            options = (
                (combine(total, cost(stage, first, end)), (*cut, (first, end)))
                for first, (total, cut) in best.items()
                if first < end
            )
            reached[end] = min(options, key=lambda option: option[0])  # the first of equals: deterministic
        best = reached
    return best[layers]
