"""The most device memory that a stage's tensors take, against what the estimates say that it needs, for each way of
checkpointing. ``python -m benchmarks.gpu.memory --size small``."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.cases import SIZES, Found, parser, tell, weights
from benchmarks.swap.gpu import Case
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import stage_memory
from muletrain.compute.torch_compute import TorchCompute
from muletrain.model.make import make_stage

STAGES = 2
GRAPHS = 2
"""Microbatches of the first stage between forward and backward."""
WAYS = ("never", "always", "block")


async def worked(case: Case, compute: TorchCompute, stage: int) -> None:
    """One step of two microbatches."""
    shape = (case.row.sequences, case.spec.context, case.spec.width)
    mbs = [Microbatch(0, index) for index in range(GRAPHS)]
    if stage == 0:
        for mb in mbs:
            await (await compute.forward(mb, case.batch(mb)[0]))
        for mb in mbs:
            await compute.backward(mb, torch.full(shape, 1e-6), accumulate=True)
    else:
        for mb in mbs:
            await compute.loss_backward(mb, torch.ones(shape), case.batch(mb)[1], accumulate=True)
    gradient = await compute.gradient(0)
    await compute.apply(gradient, Update(0, 1.0, skip=False))


def measured(case: Case, stage: int, way: Any) -> Found:
    """The first or the last stage of two, under one way of checkpointing."""
    cut, first = case.spec.cut(STAGES), weights(case)
    shapes = make_stage(case.spec, stage, cut).shapes()
    setup = replace(case.setup, checkpointing=way)
    graphs = GRAPHS if way == "never" and stage == 0 else 1
    need = stage_memory(
        case.spec, cut, stage, tokens=case.tokens, precision=setup.precision, checkpointing=way, graphs=graphs
    )
    gc.collect()
    before = 0
    if case.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    compute = TorchCompute(case.spec, cut, stage, setup, lambda name: first(name, shapes[name]))
    asyncio.run(worked(case, compute, stage))
    case.sync()
    compute.close()
    most = torch.cuda.max_memory_allocated() - before if case.gpu else None
    return {
        "stage": stage,
        "checkpointing": way,
        "graphs": graphs,
        "peak_bytes": most,
        "estimate_bytes": need.on_device,
    }


def main() -> None:
    given = parser(__doc__).parse_args()
    case = Case(SIZES[given.size], torch.device(given.device))
    tell(case, {"rows": [measured(case, stage, way) for stage in range(STAGES) for way in WAYS]})


if __name__ == "__main__":
    main()
