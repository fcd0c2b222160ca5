"""Checkpoint folders that a command writes: first weights for machines that join, and a checkpoint with a new cut.

A part may be larger than this machine's memory, so tensors are read and written one by one.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from muletrain.errors import CheckpointError
from muletrain.model.make import make_stage
from muletrain.runs.assemble import initial_weights
from muletrain.runs.checkpoint import Checkpoint
from muletrain.wire.statefile import DTYPES, header, tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from muletrain.data.samples import Data
    from muletrain.runs.assemble import RunFacts

_TYPES = {name: dtype for dtype, name in DTYPES.items()}


class Part(NamedTuple):
    """The tensors of one stage: types and shapes by name, and a loader."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    load: Callable[[str], Tensor]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.tensors.values())


def write_checkpoint(
    final: Path, about: Mapping[str, object], tokenizer: bytes, parts: Sequence[Part], tell: Callable[[float], None]
) -> None:
    """Write the checkpoint folder ``final``, with ``about`` in the manifest. ``tell`` gets the share that is done.
    Raises CheckpointError."""
    partial = final.with_name(f".{final.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "tokenizer.json").write_bytes(tokenizer)
        written = []
        for stage, part in enumerate(parts):
            file = f"stage-{stage}.safetensors"
            written.append({"file": file, "sha256": _write(partial / file, part)})
            tell((stage + 1) / len(parts))
        files = [{"file": "tokenizer.json", "sha256": hashlib.sha256(tokenizer).hexdigest()}]
        manifest = {**about, "parts": written, "files": files}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
    except OSError as e:
        raise CheckpointError(
            f"{final} cannot be written ({e.strerror or e}); free {sum(part.size for part in parts) / 1e9:.1f} GB or start "
            f"from another folder"
        ) from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, part: Part) -> str:
    digest, (head, names) = hashlib.sha256(), header(part.tensors)
    with path.open("wb") as file:
        for piece in chain([memoryview(head)], (tensor_bytes(part.load(name)) for name in names)):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def write_first_checkpoint(
    facts: RunFacts, cache: Data, folder: Path, run_id: str, tell: Callable[[float], None]
) -> Path:
    """Write ``folder``/step-00000000 with the first weights of ``model.from`` or ``model.factory``. Machines that join
    lack these weights, so each loads its stage's part, as in a resumed run. ``tell`` gets the share that is done.
    Raises CheckpointError."""
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


def fitting(checkpoint: Checkpoint, facts: RunFacts, tell: Callable[[float], None]) -> Checkpoint:
    """``checkpoint``, or a sibling copy with the cut of ``facts``, where each tensor goes to the stages that have its
    parameter. ``tell`` gets the share that is written. Raises CheckpointError, also if the parameters do not match the
    model."""
    cut = [list(stage) for stage in facts.cut]
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in checkpoint.parts]
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{checkpoint.folder} cannot be read ({e}); use another checkpoint of the run") from e
        where = {key: file for file in reversed(files) for key in file.keys()}  # noqa: SIM118 # no mapping
        parts = [_recut_part(facts, stage, where, checkpoint) for stage in range(len(cut))]
        if checkpoint.manifest["cut"] == cut:
            return checkpoint
        name = hashlib.sha256(json.dumps([cut, checkpoint.manifest["parts"]]).encode()).hexdigest()[:12]
        folder = checkpoint.folder.with_name(f"step-{checkpoint.step:08d}-{name}")
        about = {key: value for key, value in checkpoint.manifest.items() if key not in ("parts", "files")}
        write_checkpoint(folder, {**about, "cut": cut}, checkpoint.tokenizer_json, parts, tell)
    return Checkpoint.intact(folder)


def _recut_part(facts: RunFacts, stage: int, where: dict[str, Any], checkpoint: Checkpoint) -> Part:
    """The tensors of ``stage``: parameters, moments, and the remaining tensors, such as the loss scale."""
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
