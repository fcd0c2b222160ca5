"""Plan how layers are swapped between a machine's memory and its GPU: which are loaded together, and how many
minibatches hide the loading.

ATOM (Wu et al. 2024) sec. III-C, III-D and the constraints of fig. 13. The model is a chain of layers, cut into
consecutive sub-models. While one computes C minibatches, the next one is loaded, so that

- memory: the computing sub-model and the loading one fit into the GPU together (fig. 13 asks it of each by itself);
- time: C x what a sub-model computes for a minibatch >= what loading its successor takes, forward and backward.

All cuts between blocks of a decoder send equally much, so the cut with the fewest sub-models is the cheapest (fig. 13's
objective). The last sub-model stays for its backward, and the first one for the next forward (fig. 12).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from muletrain.errors import CapacityError
from muletrain.planning.partition import partition
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.planning.partition import Cut


@dataclass(frozen=True)
class Layer:
    """Time and memory of one layer."""

    forward_s: float
    """Seconds for a minibatch."""
    backward_s: float
    """Seconds for a minibatch, including recomputation."""
    load_bytes: float
    """Bytes of the weights in the precision they compute in."""
    work_bytes: float
    """Bytes beside the weights while it computes: a minibatch's graph, gradients."""


@dataclass(frozen=True)
class Swapping:
    """How a model goes through one GPU."""

    runs: Cut
    """Sub-models: (first layer, end layer). One: the model stays where it is."""
    accumulate: float
    """C as a real number: so many minibatches hide all loading."""
    device_bytes: float
    """Bytes that the GPU holds at most."""


def swapping(layers: Sequence[Layer], memory_bytes: float, load_bytes_per_s: float) -> Swapping:
    """Find the fewest sub-models that fit, cut as evenly as possible. Raises CapacityError if single layers do not
    fit."""
    sizes = [layer.load_bytes + layer.work_bytes for layer in layers]
    for count in range(1, len(layers) + 1):
        runs = partition(sizes, count)
        needs = held_bytes(layers, runs)
        if needs <= memory_bytes:
            return Swapping(runs, accumulation(layers, runs, load_bytes_per_s), needs)
    raise CapacityError(
        f"a layer that computes and the next one beside it need {format_memory(needs)}, and there are {format_memory(memory_bytes)}: take "
        f"a machine with a larger GPU, a smaller microbatch or a narrower model"
    )


def held_bytes(layers: Sequence[Layer], runs: Cut) -> float:
    """Bytes of two neighbouring sub-models, one of which computes."""
    loads = [sum(layer.load_bytes for layer in layers[first:end]) for first, end in runs]
    works = [sum(layer.work_bytes for layer in layers[first:end]) for first, end in runs]
    return max([loads[0] + works[0], *(a + b + max(works[i : i + 2]) for i, (a, b) in enumerate(pairwise(loads)))])


def accumulation(layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float) -> float:
    """C: the smallest number of minibatches that keeps the GPU busy, as a real number; 0 if nothing is loaded."""
    return max([load / spent for spent, load in _beside(layers, runs, load_bytes_per_s)], default=0.0)


def round_s(layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float, minibatches: int) -> float:
    """Seconds for forward and backward of ``minibatches`` in a row: each sub-model takes as long as its compute or
    its neighbour's loading."""
    ends = [*layers[slice(*runs[-1])]], [*layers[slice(*runs[0])]]
    alone_s = sum(layer.forward_s for layer in ends[0]) + sum(layer.backward_s for layer in ends[1])
    return minibatches * alone_s + sum(
        max(minibatches * s, load) for s, load in _beside(layers, runs, load_bytes_per_s)
    )


def _beside(layers: Sequence[Layer], runs: Cut, load_bytes_per_s: float) -> list[tuple[float, float]]:
    """For each sub-model beside which another one is loaded, forward and then backward: its seconds per minibatch,
    and the loading [s]."""
    loads = [sum(layer.load_bytes for layer in layers[first:end]) / load_bytes_per_s for first, end in runs]
    ahead = [sum(layer.forward_s for layer in layers[first:end]) for first, end in runs]
    back = [sum(layer.backward_s for layer in layers[first:end]) for first, end in runs]
    return [*zip(ahead[:-1], loads[1:], strict=True), *zip(back[1:], loads[:-1], strict=True)]
