"""Measures how fast this machine computes one block of the model, which takes nearly all of a peer's time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from muletrain.compute.probe import precision_dtype
from muletrain.errors import CapacityError
from muletrain.model.dropout import Masks
from muletrain.model.make import middle_block
from muletrain.model.stage import INIT_STD

if TYPE_CHECKING:
    from muletrain.config.schema import Precision
    from muletrain.model.chain import Model

BUDGET_S = 1.0
"""Seconds of measuring, unless one sequence takes more than a quarter of that."""
REPEATS = (4, 50)
"""Fewest repetitions, if time allows, and most."""


@dataclass(frozen=True)
class BlockTimes:
    """Median times of one block for a microbatch of ``sequences`` times ``tokens`` [s]."""

    forward_s: float
    backward_s: float
    sequences: int
    tokens: int


def block_times(spec: Model, sequences: int, device: torch.device, precision: Precision) -> BlockTimes:
    """Measure forward, and backward with gradients of weights and inputs, as in training: dropout, residuals, norms,
    attention over the whole context. Uses fewer than ``sequences`` to save time. Raises CapacityError if memory is too
    small."""
    try:
        return times(spec, sequences, device, precision)
    except RuntimeError as e:  # torch's lack of memory is one
        problem = " ".join(str(e).split())[:200]
        raise CapacityError(f"a block of the model could not be computed on {device}: {problem}") from e


def times(spec: Model, sequences: int, device: torch.device, precision: Precision) -> BlockTimes:
    dtype = precision_dtype(precision)
    block = middle_block(spec)
    shapes = block.shapes().items()
    block.bind({name: torch.randn(shape, device=device, dtype=dtype).mul_(INIT_STD) for name, shape in shapes})
    weights = [p for p in block.parameters() if p.requires_grad]

    def once(count: int) -> tuple[float, float]:
        inputs = torch.randn(count, spec.context, spec.width, device=device, dtype=dtype, requires_grad=True)
        begin = now(device)
        output = block(inputs, Masks(0, 0, 0))
        between = now(device)
        torch.autograd.grad(output, [inputs, *weights], torch.ones_like(output))
        return between - begin, now(device) - between

    once(1)  # libraries load, and choose how to compute
    one_s = sum(once(1))
    count = max(1, min(sequences, int(BUDGET_S / REPEATS[0] / one_s)))
    deadline = time.perf_counter() + BUDGET_S
    found = [once(count)]
    while len(found) < REPEATS[1] and time.perf_counter() < deadline:
        found.append(once(count))
    forward_s, backward_s = (median(times) for times in zip(*found, strict=True))
    return BlockTimes(forward_s, backward_s, count, spec.context)


def now(device: torch.device) -> float:
    """Seconds, once ``device`` has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
