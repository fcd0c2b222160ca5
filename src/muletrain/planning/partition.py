"""Cutting the layers into pipeline stages.

SWARM (sec. 3.2) partitions the model into "evenly sized" stages of equally many layers. Counting layers forgets the
embedding and the output head: with a large vocabulary the head costs as much as several layers, and the stage that has
it holds up the others. Here the slowest stage is made as fast as can be, exactly: ``partition`` for stages that are
alike, ``partition_chain`` for stages of unequal speed and memory, and for layers that share weights (ALBERT's one
layer for all, SWARM app. G; an embedding tied to the head).

Arrays: K stages, L layers; ``cost[k, first, end]``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Cut = tuple[tuple[int, int], ...]
"""(first layer, end layer) of each stage: contiguous, at least one layer each."""


def partition(layer_costs: Sequence[float], stages: int, *, first_extra: float = 0.0, last_extra: float = 0.0) -> Cut:
    """The cut into ``stages`` contiguous runs whose largest cost is smallest, and among those the most even one.

    ``layer_costs``: one per layer; ``first_extra`` (embedding) goes to the first stage, ``last_extra`` (head and loss)
    to the last. Any unit, but one for all. Raises ValueError unless 1 <= stages <= layers.
    """
    layers = len(layer_costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"cannot cut {layers} layers into {stages} stages of at least one layer")
    costs = np.repeat(_sums(layer_costs)[None], stages, axis=0)
    costs[0] += first_extra
    costs[-1] += last_extra
    return _most_even(costs)


@dataclass(frozen=True)
class Shared:
    """Weights that several layers share; a stage with any of these layers holds them once."""

    nbytes: float
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """L layers to be cut, in order. The embedding belongs to the first one, head and loss to the last."""

    work: tuple[float, ...]
    """By layer, in the unit of the stages' speed times seconds: FLOPs and FLOP/s, or seconds measured at speed 1."""
    state_bytes: tuple[float, ...] = ()
    """By layer: its own weights, their gradient and the optimizer's part; (): none."""
    activation_bytes: tuple[float, ...] = ()
    """By layer: bytes of one microbatch kept until its backward; (): none."""
    shared: tuple[Shared, ...] = ()
    """What layers have in common, weights, gradient and optimizer; not in their ``state_bytes``."""

    def __post_init__(self) -> None:
        layers = len(self.work)
        for name in ("state_bytes", "activation_bytes"):
            if len(getattr(self, name)) not in (0, layers):
                raise ValueError(f"{name}: {len(getattr(self, name))} entries for {layers} layers; give one a layer")
        values = (*self.work, *self.state_bytes, *self.activation_bytes, *(s.nbytes for s in self.shared))
        if not all(0 <= value < math.inf for value in values):
            raise ValueError("work and bytes of a layer are finite and not negative")
        if not all(0 <= layer < layers for s in self.shared for layer in s.layers):
            raise ValueError(f"shared weights name a layer that is not there; layers are 0 to {layers - 1}")

    def memory_bytes(self, first: int, end: int, in_flight: float = 1.0) -> float:
        """Bytes that a machine needs for the layers from ``first`` to before ``end``."""
        own = sum(self.state_bytes[first:end]) + in_flight * sum(self.activation_bytes[first:end])
        return own + sum(s.nbytes for s in self.shared if any(first <= layer < end for layer in s.layers))


@dataclass(frozen=True)
class Capacity:
    """Speed and memory of a stage's machines."""

    speed: float = 1.0
    """Work per second of all its machines."""
    memory_bytes: float = math.inf
    """Bytes of its smallest machine: each holds the whole stage."""
    in_flight: float = 1.0
    """Microbatches whose activations it keeps at the same time (GPipe: all of a step; 1F1B: the stages from it to the
    last)."""
    overhead_s: float = 0.0
    """Seconds per microbatch that do not depend on its layers, such as transfers that do not overlap."""


@dataclass(frozen=True)
class Partition:
    """A cut with times and memory by stage."""

    cut: Cut
    time_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]


def partition_chain(chain: Chain, stages: Sequence[Capacity]) -> Partition:
    """The cut of ``chain`` for ``stages`` in this order whose slowest stage, overhead + work / speed, is fastest, and
    among those the one with the smallest sum of squares. Exact.

    Raises ValueError unless 1 <= stages <= layers and speeds are positive; CapacityError where memory suffices for no
    cut.
    """
    layers = len(chain.work)
    if not 1 <= len(stages) <= layers:
        raise ValueError(f"cannot cut {layers} layers into {len(stages)} stages of at least one layer")
    if not all(0 < s.speed < math.inf for s in stages):
        raise ValueError("the speed of a stage is positive and finite; leave out who does not compute")
    costs = stage_times(chain, stages)
    if not math.isfinite(_best(costs, np.maximum)[0]):
        raise CapacityError(_too_little(chain, stages, costs))
    cut = _most_even(costs)
    times = tuple(float(costs[k, first, end]) for k, (first, end) in enumerate(cut))
    memory = tuple(chain.memory_bytes(*run, s.in_flight) for run, s in zip(cut, stages, strict=True))
    return Partition(cut, times, memory)


def cheapest_cut(costs: Floats) -> tuple[float, Cut] | None:
    """The cut whose most expensive stage costs least, and among those the most even one; and what that stage costs.
    ``costs``: as above, inf: not possible; None: no cut is."""
    largest = _best(costs, np.maximum)[0]
    return (largest, _most_even(costs)) if math.isfinite(largest) else None


def stage_times(chain: Chain, stages: Sequence[Capacity]) -> Floats:
    """What each stage would take for the layers from ``first`` to before ``end`` [s], (K, L + 1, L + 1): inf where
    these do not fit into its memory."""
    work = _sums(chain.work)
    needs = {n: memory_table(chain, n) for n in {s.in_flight for s in stages}}
    return np.array(
        [np.where(needs[s.in_flight] <= s.memory_bytes, s.overhead_s + work / s.speed, np.inf) for s in stages]
    )


def memory_table(chain: Chain, in_flight: float) -> Floats:
    """``Chain.memory_bytes`` of the layers from ``first`` to before ``end``, (L + 1, L + 1); without meaning where end
    <= first."""
    layers = len(chain.work)
    none = (0.0,) * layers
    table = _sums(chain.state_bytes or none) + in_flight * _sums(chain.activation_bytes or none)
    first, end = np.indices(table.shape)
    for shared in chain.shared:
        used = np.zeros(layers)
        used[list(shared.layers)] = 1.0
        table = table + shared.nbytes * ((_sums(used) > 0) & (first < end))
    return table


def _sums(values: Sequence[float] | Floats) -> Floats:
    """Of those from ``first`` to before ``end``, (L + 1, L + 1); without meaning where end < first."""
    prefix: Floats = np.array([0.0, *np.cumsum(values)])
    between: Floats = prefix[None, :] - prefix[:, None]
    return between


def _most_even(costs: Floats) -> Cut:
    """The cut with the smallest largest cost, and among those the smallest sum of squares (a maximum alone says nothing
    about the other stages): two dynamic programs, O(K L^2) each."""
    largest, _ = _best(costs, np.maximum)
    bound = largest * (1 + 1e-9)  # sums of the same costs in another order differ in the last bits
    return _best(np.where(costs <= bound, costs * costs, np.inf), np.add)[1]


def _best(costs: Floats, combine: np.ufunc) -> tuple[float, Cut]:
    """The cheapest cut where the stages' costs are combined from left to right; of equal ones that with the earliest
    ends."""
    stages, layers = len(costs), costs.shape[1] - 1
    first, end = np.indices(costs.shape[1:])
    reached = np.full(layers + 1, np.inf)  # by layers given out so far: the cheapest way to do it
    reached[0] = 0.0
    choices = []
    for k in range(stages):
        options = np.where(first < end, combine(reached[:, None], costs[k]), np.inf)
        choices.append(options.argmin(0))
        reached = options.min(0)
    ends = [layers]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    ends.reverse()
    return float(reached[layers]), tuple(pairwise(ends))


def _too_little(chain: Chain, stages: Sequence[Capacity], costs: Floats) -> str:
    """Explain why no cut fits, with numbers, and what to do."""
    layers, remedy = len(chain.work), "machines with more memory, smaller microbatches or another optimizer"
    alone = np.isfinite(np.diagonal(costs, 1, 1, 2))  # (K, L): whether the stage holds this one layer
    if not alone.any(0).all():
        layer = int(alone.any(0).argmin())
        needs = min(chain.memory_bytes(layer, layer + 1, s.in_flight) for s in stages)
        most = max(s.memory_bytes for s in stages)
        return f"layer {layer} alone needs {_gib(needs)}, and no stage's machines have more than {_gib(most)} each; use {remedy}"
    if not alone.any(1).all():
        k = int(alone.any(1).argmin())
        needs = min(chain.memory_bytes(layer, layer + 1, stages[k].in_flight) for layer in range(layers))
        return (
            f"stage {k} holds no layer: the smallest needs {_gib(needs)}, and its smallest machine has "
            f"{_gib(stages[k].memory_bytes)}; leave that machine out, or use {remedy}"
        )
    reach, held = 0, []
    for k, stage in enumerate(stages):
        count = int(np.isfinite(costs[k, reach, reach + 1 :]).sum())
        held.append(f"{count} in {_gib(stage.memory_bytes)}")
        reach += count
    return (
        f"{layers} layers do not fit into {len(stages)} stages: filled in order, they hold {', '.join(held)} (a stage's smallest machine "
        f"counts); use more stages, {remedy}"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
