"""Checkpoint folders that a command writes: first weights for machines that join, and a checkpoint cut in another way.

A part may be larger than this machine's memory, so tensors are read and written one by one, in the format of
safetensors (eight bytes: the header's size; the header as JSON; the tensors).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from typing import TYPE_CHECKING, NamedTuple

import torch

from muletrain.errors import CheckpointError
from muletrain.wire.statefile import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor


class Part(NamedTuple):
    """The tensors of one stage: types and shapes by name, and what reads each."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    load: Callable[[str], Tensor]

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.tensors.values())


def write_checkpoint(
    final: Path, about: Mapping[str, object], tokenizer: bytes, parts: Sequence[Part], tell: Callable[[float], None]
) -> None:
    """Write the checkpoint folder ``final``, with what ``about`` says in its manifest. ``tell`` hears the share that is
    done. Raises CheckpointError."""
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
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _safetensors(part):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _safetensors(part: Part) -> Iterator[bytes | memoryview]:
    header, end = {}, 0
    names = sorted(part.tensors, key=lambda name: -part.tensors[name][0].itemsize)  # so all are aligned
    for name in names:
        dtype, shape = part.tensors[name]
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield part.load(name).contiguous().reshape(-1).view(torch.uint8).numpy().data
