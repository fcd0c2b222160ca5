"""The checkpoint of step 0 of a run with ``model.from`` or ``model.factory``. Machines that join lack these weights, so
each loads its stage's part of this checkpoint, as in a resumed run.

A part may be larger than this machine's memory, so tensors are read and written one by one, in the format of
safetensors (eight bytes: the header's size; the header as JSON; the tensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from typing import TYPE_CHECKING

from muletrain.errors import CheckpointError
from muletrain.model.make import make_stage
from muletrain.runs.assemble import initial_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from muletrain.data.samples import Data
    from muletrain.runs.assemble import RunFacts


def write_first_checkpoint(
    facts: RunFacts, cache: Data, folder: Path, run_id: str, tell: Callable[[float], None]
) -> Path:
    """Write ``folder``/step-00000000 with the first weights. ``tell`` hears the share that is done. Raises
    CheckpointError."""
    partial, final = folder / ".step-00000000.partial", folder / "step-00000000"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "tokenizer.json").write_bytes(cache.tokenizer_json)
        parts = []
        for stage in range(len(facts.cut)):
            file = f"stage-{stage}.safetensors"
            parts.append({"file": file, "sha256": _write_part(partial / file, facts, stage)})
            tell((stage + 1) / len(facts.cut))
        files = [{"file": "tokenizer.json", "sha256": hashlib.sha256(cache.tokenizer_json).hexdigest()}]
        about = {"data": cache.digest, "step": 0, "lineage": "", "parts": parts, "files": files}
        manifest = {**facts.manifest(run_id), **about}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: the first weights cannot be written for the machines that join ({e.strerror or e}); free "
            f"{4 * facts.spec.params / 1e9:.1f} GB or start from another folder"
        ) from e
    return final


def _write_part(path: Path, facts: RunFacts, stage: int) -> str:
    load = initial_weights(facts, stage)
    assert load is not None
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _safetensors(make_stage(facts.spec, stage, facts.cut).shapes(), load):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _safetensors(shapes: Mapping[str, tuple[int, ...]], load: Callable[[str], Tensor]) -> Iterator[bytes | memoryview]:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[f"model/{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in shapes:
        yield load(name).contiguous().numpy().data.cast("B")
