"""Writes the files of a new Hugging Face folder, all or nothing."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from muletrain.errors import CheckpointError
from muletrain.model.finite import NAMES, unfit
from muletrain.model.hf_files import INDEX, WEIGHTS
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Weights files are no larger than this, unless one tensor is (Hugging Face's custom)."""


def check_new(out: Path) -> None:
    """Raises CheckpointError if something is in ``out``, such as the model that training started from."""
    if out.is_symlink() or out.exists():
        if not out.is_dir():
            raise CheckpointError(f"--hf: {out} is no folder; choose a new one")
        if any(out.iterdir()):
            raise CheckpointError(f"--hf: {out} is not empty, and an export replaces nothing; choose a new folder")


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """An empty folder to write into. After an error, the folder is emptied. Raises CheckpointError."""
    check_new(out)
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except BaseException:
            for file in out.iterdir():
                file.unlink()
            if made:
                out.rmdir()
            raise
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"--hf: cannot write {out}: {e}; free space or choose another folder") from e


def cast(
    tensors: Mapping[str, Tensor], dtype: str, exact: Collection[str] = ()
) -> tuple[dict[str, Tensor], str | None]:
    """``tensors`` in ``dtype``, a name of ``finite.NAMES``. ``exact``: names of tensors that stay in fp32. Also returned:
    a remark for people on such tensors, and on values that become zero, if any. Raises CheckpointError for values that
    ``dtype`` cannot hold."""
    found: dict[str, Tensor] = {}
    lost = total = 0
    for name, tensor in tensors.items():
        if name in exact:
            found[name] = tensor
            continue
        if (why := unfit(tensor, NAMES[dtype])) is not None:
            raise CheckpointError(f"--dtype {dtype}: {name}: {why}; use bf16 or fp32")
        found[name] = tensor.to(NAMES[dtype]) if tensor.is_floating_point() else tensor
        lost += int(tensor.count_nonzero()) - int(found[name].count_nonzero())
        total += tensor.numel()
    remarks = [f"{lost:,} of {total:,} weights are too small for {dtype} and became 0"] if lost else []
    if kept := [] if dtype == "fp32" else [name for name in tensors if name in exact]:
        remarks.append(
            f"{plural(len(kept), 'tensor')} stayed in fp32 (such as {kept[0]}), which training or transformers keeps exact"
        )
    return found, "\n".join(remarks) or None


def write_weights(out: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    """Write ``tensors`` as one safetensors file, or as shards of at most ``shard_bytes`` and then the index."""
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        _save(shards[0], out / WEIGHTS)
        return
    places = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, out / file)
        places.update(dict.fromkeys(shard, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _save(shard: dict[str, Tensor], path: Path) -> None:
    """Save clones, since safetensors refuses two names for one storage (repeated layers) and strided tensors."""
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in shard.items()}, path, {"format": "pt"}
    )
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)  # ``save_file`` leaves files that only the owner can read


def _shards(tensors: dict[str, Tensor], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Runs of tensors of at most ``shard_bytes``, or of a single larger tensor."""
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor
        filled += size
    yield shard


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content``, indented for people."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
