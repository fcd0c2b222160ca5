"""Blocks through ``torch.compile``: one callable for all blocks of a kind (regional compilation), for one shape.

A trial before training compiles forward and backward and compares their numbers with the block's own. So compiling
takes no time of a step, and an error leaves the blocks as they are. Other shapes (a part of a microbatch, a short
sequence, generated text) never go through the compiled callable, so nothing is compiled later.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muletrain.model.module import Fast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.model.module import StageModule

CLOSENESS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Largest relative difference of a block's output and gradients, compiled or not: a few roundings, by precision."""


@dataclass(frozen=True)
class Compiling:
    """What came of a stage's trial."""

    seconds: float
    error: str = ""
    """Why the blocks compute as they are; empty: they are compiled."""


def compile_blocks(versions: Sequence[StageModule], sequences: int, device: torch.device) -> Compiling:
    """Compile the blocks of a stage's ``versions``, whose weights are bound, for microbatches of ``sequences``. Never
    raises: an error leaves the blocks as they are."""
    begin = time.perf_counter()
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    try:
        fast = _tried(versions[0], sequences, device)
    except Exception as e:  # of dynamo, inductor, Triton, a C++ compiler, or the device
        text = str(e).strip() or type(e).__name__
        return Compiling(time.perf_counter() - begin, text.splitlines()[0][:200])
    for version in versions:
        version.fast = fast
    return Compiling(time.perf_counter() - begin)


def _tried(stage: StageModule, sequences: int, device: torch.device) -> Fast:
    """The compiled block, after a forward and a backward that agree with the block's own. Raises RuntimeError if the
    model has no such block or the numbers differ, and any error of compiling."""
    sample = stage.sample_block(sequences, device)
    if sample is None:
        raise RuntimeError("only blocks of the native decoder are compiled")
    plain, given = sample
    # one thread compiles: a pool of processes would outlive a peer that ends at once
    compiled = torch.compile(plain, dynamic=False, fullgraph=True, options={"compile_threads": 1})
    with torch.no_grad():
        compiled(*given)  # the forward whose graph is not kept
    for ours, others in zip(_passes(plain, given), _passes(compiled, given), strict=True):
        apart = float((ours - others).norm() / (ours.norm() + 1e-30))
        if not apart <= CLOSENESS[given[1].dtype]:
            raise RuntimeError(f"the compiled block differs by {apart:.1e}")
    return Fast(compiled, tuple(given[1].shape))


def _passes(compute: Callable[..., Any], given: tuple[Any, ...]) -> list[Tensor]:
    """Output of a block, and the gradients of input and parameters, in fp64."""
    block, x = given[:2]
    leaf = x.detach().requires_grad_()
    output = compute(block, leaf, *given[2:])
    wanted = [leaf, *block.parameters()]
    return [t.detach().double() for t in (output, *torch.autograd.grad(output, wanted, torch.ones_like(output)))]
