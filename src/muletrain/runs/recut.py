"""A checkpoint cut into other stages than it was written in: each tensor goes to the stages that have its parameter."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from muletrain.errors import CheckpointError
from muletrain.model.make import make_stage
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.parts import Part, write_checkpoint
from muletrain.wire.statefile import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.runs.assemble import RunFacts

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


def fitting(checkpoint: Checkpoint, facts: RunFacts, tell: Callable[[float], None]) -> Checkpoint:
    """``checkpoint``, or a copy beside it that is cut as ``facts`` say. ``tell`` hears the share that is written. Raises
    CheckpointError, also if the parameters are not those of the model."""
    cut = [list(stage) for stage in facts.cut]
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in checkpoint.parts]
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{checkpoint.folder} cannot be read ({e}); use another checkpoint of the run") from e
        where = {key: file for file in reversed(files) for key in file.keys()}  # noqa: SIM118 # no mapping
        parts = [_part(facts, stage, where, checkpoint) for stage in range(len(cut))]
        if checkpoint.manifest["cut"] == cut:
            return checkpoint
        name = hashlib.sha256(json.dumps([cut, checkpoint.manifest["parts"]]).encode()).hexdigest()[:12]
        folder = checkpoint.folder.with_name(f"step-{checkpoint.step:08d}-{name}")
        about = {key: value for key, value in checkpoint.manifest.items() if key not in ("parts", "files")}
        write_checkpoint(folder, {**about, "cut": cut}, checkpoint.tokenizer_json, parts, tell)
    return Checkpoint.intact(folder)


def _part(facts: RunFacts, stage: int, where: dict[str, Any], checkpoint: Checkpoint) -> Part:
    """What ``stage`` has: each parameter and its moments, and what is none of a parameter's, such as the loss scale."""
    shapes = make_stage(facts.spec, stage, facts.cut).shapes()
    tensors = {}
    for key in where:
        piece = where[key].get_slice(key)
        kind, _, name = key.partition("/")
        if not name or name in shapes:
            tensors[key] = (_TYPES[piece.get_dtype()], tuple(piece.get_shape()))
        if kind == "model" and name in shapes and tensors[key][1] != tuple(shapes[name]):
            raise CheckpointError(
                f"{checkpoint.folder}: {name} has shape {list(tensors[key][1])}, but the model needs {list(shapes[name])}"
            )
    if lacking := [name for name in shapes if f"model/{name}" not in tensors]:
        raise CheckpointError(f"{checkpoint.folder}: {lacking[0]} is missing: a checkpoint of another model")
    return Part(tensors, lambda key: torch.as_tensor(where[key].get_tensor(key)))
