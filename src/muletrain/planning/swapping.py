"""Plans the swapping of layers between a machine's memory and device: the layers that are loaded together, and the
number of minibatches that hides the loading.

ATOM (Wu et al. 2024) sec. III-C, III-D and the constraints of fig. 13. The model is a chain of layers, cut into
consecutive sub-models. While a sub-model computes C minibatches, the next sub-model is loaded, so that

- memory: the computing and the loading sub-model fit into the device together (in fig. 13, each alone);
- time: C x a sub-model's compute time for a minibatch >= loading time of the successor, forward and backward.

Of such cuts, fig. 13 chooses the cut with the fewest bytes crossing. The last sub-model stays for the backward, and the
first for the next forward (fig. 12). Beyond the paper: if the backward recomputes the forward, the last sub-model saves
that, since forward and backward are adjacent, so a large last sub-model may be worth more than hidden loads. Algorithm
1 of the paper is exhaustive. All constraints concern neighbours or the last sub-model only, so ``swapping`` finds the
optimum by dynamic programming over pairs of neighbours, in O(layers^3).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import CapacityError
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from muletrain.planning.partition import Cut

CROSSINGS = 5
"""Times that activations between two sub-models cross the bus: out, in for forward, in for backward, and the gradient
out and in."""
EQUAL = 1e-12
"""Relative difference below which two waiting times count as equal: sums of the same times in another order."""


@dataclass(frozen=True)
class Layer:
    """Time and memory of one layer."""

    forward_s: float
    """Seconds for a minibatch."""
    backward_s: float
    """Seconds for a minibatch, including recomputation."""
    load_bytes: float
    """Bytes of the weights in the precision of compute."""
    work_bytes: float
    """Bytes beside the weights while computing: a minibatch's graph, gradients."""
    cut_bytes: float = 1.0
    """Bytes passed to the next layer; by default all cuts are equal."""
    sum_bytes: float = 0.0
    """The part of ``work_bytes`` for the gradient that is summed over a round."""
    again_s: float = 0.0
    """Seconds of backward that recompute the forward; saved in the last sub-model, since the forward comes just
    before."""


@dataclass(frozen=True)
class Swapping:
    """The plan for a model on one device, with C minibatches for each load."""

    runs: Cut
    """Sub-models: (first layer, end layer). One sub-model: the model stays on the device."""
    minibatches: int
    """C."""
    accumulate: float
    """The smallest C, as a real number, with which the sub-models hide all loading."""
    device_bytes: float
    """Bytes that the device holds at most."""
    waits_s: float
    """Seconds of a round in which the device waits for weights."""
    round_s: float
    """Seconds for forward and backward of C minibatches."""
    kept: tuple[int, ...] = ()
    """Sub-models that stay on the device after the first load, until the weights change. The rest take turns."""

    @property
    def each_s(self) -> float:
        """Seconds of a round for each minibatch."""
        return self.round_s / self.minibatches

    @property
    def lost(self) -> float:
        """Share of the time in which the device waits for weights; 0: all loading is hidden."""
        return self.waits_s / self.round_s if self.round_s > 0 else 0.0


def swapping(layers: Sequence[Layer], memory_bytes: float, load_bytes_per_s: float, minibatches: int) -> Swapping:
    """Find the sub-models that take the least time for ``minibatches`` in a row. Of equal cuts, the cut with the fewest
    crossing bytes is taken. The search is exact. Raises CapacityError if single layers do not fit."""
    runs = _best(layers, memory_bytes, load_bytes_per_s, minibatches)
    if runs is None:
        alone = tuple((i, i + 1) for i in range(len(layers)))
        needs = held_bytes(layers, alone)
        raise CapacityError(
            f"a layer that computes and the next one beside it need {format_memory(needs)}, and there are {format_memory(memory_bytes)}: "
            f"take a machine with a larger device, a smaller microbatch or a narrower model"
        )
    return cut_into(layers, runs, load_bytes_per_s, minibatches)


def cut_into(
    layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float, minibatches: int, kept: tuple[int, ...] = ()
) -> Swapping:
    """The plan for given sub-models."""
    takes_s = round_s(layers, runs, load_bytes_per_s, minibatches, kept)
    return Swapping(
        runs=runs,
        minibatches=minibatches,
        accumulate=accumulation(layers, runs, load_bytes_per_s),
        device_bytes=held_bytes(layers, runs),
        waits_s=_waits_s(layers, runs, load_bytes_per_s, minibatches, kept),
        round_s=takes_s,
        kept=kept,
    )


def staying(layers: Sequence[Layer], runs: Cut, memory_bytes: float) -> tuple[int, ...]:
    """As many sub-models as can stay on the device, evenly spread: while several such sub-models compute, the next
    streamed sub-model is loaded."""
    for count in range(len(runs), 0, -1):
        kept = tuple((2 * i + 1) * len(runs) // (2 * count) for i in range(count))
        if places_bytes(layers, runs, kept) <= memory_bytes:
            return kept
    return ()


def crossing_bytes(layers: Sequence[Layer], found: Swapping, minibatches: int) -> float:
    """Bytes between memory and device in a round of ``minibatches``, without gradients."""
    streamed = [n for n in range(len(found.runs)) if n not in found.kept]
    loads = sum(layer.load_bytes for n in streamed for layer in layers[slice(*found.runs[n])])
    return 2 * loads + CROSSINGS * minibatches * sum(layers[end - 1].cut_bytes for _, end in found.runs[:-1])


def hidden(layers: Sequence[Layer], memory_bytes: float, load_bytes_per_s: float, most: int) -> Swapping:
    """Find the best sub-models for the smallest C at which a minibatch takes no longer than at C = ``most``. Raises
    CapacityError as ``swapping`` does."""
    found = swapping(layers, memory_bytes, load_bytes_per_s, most)
    enough_s = found.each_s + EQUAL * sum(layer.forward_s + layer.backward_s for layer in layers)
    low, high = 1, most  # more minibatches never take longer, each
    while low < high:
        middle = (low + high) // 2
        tried = swapping(layers, memory_bytes, load_bytes_per_s, middle)
        if tried.each_s <= enough_s:
            found, high = tried, middle
        else:
            low = middle + 1
    return found


def held_bytes(layers: Sequence[Layer], runs: Cut) -> float:
    """Bytes of two neighbouring sub-models, one of which computes."""
    loads = [sum(layer.load_bytes for layer in layers[first:end]) for first, end in runs]
    works = [sum(layer.work_bytes for layer in layers[first:end]) for first, end in runs]
    return max([loads[0] + works[0], *(a + b + max(works[i : i + 2]) for i, (a, b) in enumerate(pairwise(loads)))])


def places_bytes(layers: Sequence[Layer], runs: Cut, kept: Collection[int] = ()) -> float:
    """Bytes of a device on which weights and the summed gradient have fixed places, so that nothing is allocated or
    freed between sub-models: each place has the size of the largest use, perhaps by different sub-models. Sub-models
    that are ``kept`` have a place each."""
    models = [layers[first:end] for first, end in runs]
    loads, sums = ([sum(getattr(x, name) for x in m) for m in models] for name in ("load_bytes", "sum_bytes"))
    rest: float = max(sum(x.work_bytes - x.sum_bytes for x in m) for m in models)
    streamed = [load for n, load in enumerate(loads) if n not in kept]
    places = max([*streamed, *(a + b for a, b in pairwise(streamed))], default=0.0)
    return float(places + sum(loads[n] for n in kept) + max(sums) + rest)


def accumulation(layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float) -> float:
    """C: the smallest number of minibatches that keeps the device busy, as a real number; 0 if nothing is loaded."""
    return max([load / spent for spent, load in _beside(layers, runs, load_bytes_per_s)], default=0.0)


def round_s(
    layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float, minibatches: int, kept: Collection[int] = ()
) -> float:
    """Seconds for forward and backward of ``minibatches`` in a row: each sub-model takes the longer of computing and
    loading the neighbour."""
    last = range(*runs[-1])
    busy_s = sum(x.forward_s + x.backward_s - (x.again_s if n in last else 0.0) for n, x in enumerate(layers))
    return minibatches * busy_s + _waits_s(layers, runs, load_bytes_per_s, minibatches, kept)


def _waits_s(
    layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float, minibatches: int, kept: Collection[int] = ()
) -> float:
    return sum(max(0.0, load - minibatches * spent) for spent, load in _beside(layers, runs, load_bytes_per_s, kept))


def _beside(
    layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float, kept: Collection[int] = ()
) -> list[tuple[float, float]]:
    """Returns two times [s] for each load, loads for forward first: the computing per minibatch that hides the load,
    and the load itself. Sub-models that are ``kept`` are loaded once after each update, for forward, and are still
    there in backward."""
    loads = [sum(layer.load_bytes for layer in layers[first:end]) / load_bytes_per_s for first, end in runs]
    ahead = [sum(layer.forward_s for layer in layers[first:end]) for first, end in runs]
    back = [sum(layer.backward_s for layer in layers[first:end]) for first, end in runs]
    streamed = [n for n in range(len(runs)) if n not in kept]
    return [
        *zip(ahead[:-1], loads[1:], strict=True),
        *((sum(back[a + 1 : b + 1]), loads[a]) for a, b in pairwise(streamed)),
    ]


def _best(layers: Sequence[Layer], memory_bytes: float, load_bytes_per_s: float, minibatches: int) -> Cut | None:
    """The best cut, None if no cut fits. State [i, j]: the last sub-model so far has the layers from i to before j. All
    later sub-models depend on nothing else."""
    count = len(layers)
    ahead_s, back_s, again_s, load, work = (
        np.array([0.0, *np.cumsum([getattr(layer, name) for layer in layers])])
        for name in ("forward_s", "backward_s", "again_s", "load_bytes", "work_bytes")
    )
    if load[count] + work[count] <= memory_bytes:
        return ((0, count),)
    ahead_s, back_s, load_s = minibatches * ahead_s, minibatches * back_s, load / load_bytes_per_s
    waits_s = np.full((count, count + 1), np.inf)
    crossed, before = np.zeros_like(waits_s), np.zeros(waits_s.shape, dtype=np.int64)
    waits_s[0, 1:] = 0.0
    slack_s = EQUAL * (ahead_s[count] + back_s[count] + load_s[count])
    for i in range(1, count):
        begins = np.flatnonzero((load[i] - load[:i] <= memory_bytes) & np.isfinite(waits_s[:i, i]))
        ends = np.arange(i + 1, int(np.searchsorted(load - load[i], memory_bytes, side="right")))
        if not len(begins) or not len(ends):
            continue
        cost = load_s[ends] - load_s[i] - (ahead_s[i] - ahead_s[begins])[:, None]  # beside forward
        np.maximum(cost, 0.0, out=cost)
        spent = (load_s[i] - load_s[begins])[:, None] - (back_s[ends] - back_s[i])  # beside backward
        cost += np.maximum(spent, 0.0, out=spent)
        cost += waits_s[begins, i][:, None]
        held = np.maximum((work[i] - work[begins])[:, None], work[ends] - work[i], out=spent)
        held += load[ends] - load[begins][:, None]
        cost[held > memory_bytes] = np.inf
        so_far = crossed[begins, i] + layers[i - 1].cut_bytes
        least = cost.min(0)
        best = np.where(cost <= least + slack_s, so_far[:, None], np.inf).argmin(0)
        waits_s[i, ends] = cost[best, np.arange(len(ends))]
        crossed[i, ends], before[i, ends] = so_far[best], begins[best]
    takes_s = waits_s[1:, count] + minibatches * again_s[1:count]  # plus a constant for all cuts
    least = takes_s.min(initial=np.inf)
    if not np.isfinite(least):
        return None
    able = np.where(takes_s <= least + slack_s, crossed[1:, count], np.inf)
    return _traced(before, 1 + int(able.argmin()), count)


def _traced(before: NDArray[np.int64], first: int, end: int) -> Cut:
    """The cut with the layers from ``first`` to before ``end`` as last sub-model."""
    runs = [(first, end)]
    while first > 0:
        first, end = int(before[first, end]), first
        runs.append((first, end))
    return tuple(reversed(runs))
