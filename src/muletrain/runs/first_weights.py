"""The checkpoint of step 0 of a run with ``model.from`` or ``model.factory``. Machines that join lack these weights, so
each loads its stage's part of this checkpoint, as in a resumed run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from muletrain.model.make import make_stage
from muletrain.runs.assemble import initial_weights
from muletrain.runs.parts import Part, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from muletrain.data.samples import Data
    from muletrain.runs.assemble import RunFacts


def write_first_checkpoint(
    facts: RunFacts, cache: Data, folder: Path, run_id: str, tell: Callable[[float], None]
) -> Path:
    """Write ``folder``/step-00000000 with the first weights. ``tell`` hears the share that is done. Raises
    CheckpointError."""
    final = folder / "step-00000000"
    parts = [_part(facts, stage) for stage in range(len(facts.cut))]
    about = {**facts.manifest(run_id), "data": cache.digest, "step": 0, "lineage": ""}
    write_checkpoint(final, about, cache.tokenizer_json, parts, tell)
    return final


def _part(facts: RunFacts, stage: int) -> Part:
    load = initial_weights(facts, stage)
    assert load is not None
    shapes = make_stage(facts.spec, stage, facts.cut).shapes()

    def tensor(name: str) -> Tensor:
        return load(name.removeprefix("model/")).float()

    return Part({f"model/{name}": (torch.float32, tuple(shape)) for name, shape in shapes.items()}, tensor)
