"""Small stages, swapped and resident, closed at the end of a test, and their training."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.estimate import Offer
from muletrain.compute.swap.fit import swap_memory
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.schema import OptimizerConfig
from muletrain.model.spec import ModelSpec
from muletrain.optim.norms import square_norm
from tests.small_stages import SPEC, through

if TYPE_CHECKING:
    from collections.abc import Iterator


STEPS, MICROBATCHES, SEQUENCES = 20, 3, 2
CLIP = 0.3
ADAMW = OptimizerConfig(lr=0.01, warmup=2, clip=CLIP)
LAMB = OptimizerConfig(name="lamb", lr=0.01, warmup=2, clip=CLIP)
SETUP = StageSetup(ADAMW, STEPS, seed=9, sequences=SEQUENCES)


class Made:
    """Stages of both kinds in one process, closed at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened = folder, list[Any]()

    def resident(self, stages: int, spec: ModelSpec = SPEC, **changes: Any) -> list[TorchCompute]:
        setup = replace(SETUP, **changes)
        made = [TorchCompute(spec, spec.cut(stages), s, setup) for s in range(stages)]
        self.opened += made
        return made

    def swapped(
        self,
        stages: int,
        spec: ModelSpec = SPEC,
        *,
        budget: int = 0,
        disk: bool = True,
        most: int = 4,
        alone: bool = False,
        tight: bool = False,
        **changes: Any,
    ) -> list[SwappedCompute]:
        """``budget`` [bytes]; 0: the least with which the stage can be swapped at all; ``tight``: no more memory beside the
        device than it needs."""
        setup = replace(SETUP, **changes)
        made = []
        for s in range(stages):
            tokens, lamb = setup.sequences * spec.context, setup.optimizer.name == "lamb"
            memory = swap_memory(
                spec, spec.cut(stages), s, tokens, setup.precision, microbatches=most, lamb=lamb, disk=disk, alone=alone
            )
            folder = self.folder / "swap" if disk else None
            offer = Offer(budget or memory.least, None if disk else memory.on_host if tight else 1 << 31)
            swap = Swap(offer, folder, most, alone=alone)
            made.append(SwappedCompute(spec, spec.cut(stages), s, setup, swap))
        self.opened += made
        return made


def stages_in(tmp_path: Path) -> Iterator[Made]:
    opened = Made(tmp_path)
    yield opened
    for compute in opened.opened:
        compute.close()


async def train(stages: list[Any], steps: int = STEPS) -> tuple[list[float], int]:
    """Losses, and the number of steps in which the norm of the whole gradient was clipped."""
    losses, clipped = [], 0
    for step in range(steps):
        losses += await asyncio.gather(*(through(stages, Microbatch(step, i)) for i in range(MICROBATCHES)))
        means = [await stage.gradient(step) / MICROBATCHES for stage in stages]
        length = sum(square_norm(m) for m in means) ** 0.5
        scale = min(1.0, CLIP / length)
        clipped += scale < 1
        for stage, mean in zip(stages, means, strict=True):
            await stage.apply(mean, Update(step, scale, skip=False))
    return losses, clipped
