"""Finds and checks the weights in a Hugging Face folder, by names and headers alone.

Nothing is unpickled. A folder of another kind, and an incomplete file, are refused with a remedy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from muletrain.errors import CheckpointError
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import Tensor

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
TEXT_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""Files that ``transformers`` reads beside the tokenizer, or instead: vocabularies, special tokens, the chat template."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_QUANTISED = ("quantization_config", "quantization", "compression_config")
"""Keys of ``config.json`` for the quantisation of weights: of ``transformers``, MLX, and compressed-tensors."""
_QUANTISED_FILES = {"quantize_config.json", "quant_config.json", "hf_quant_config.json"}
_POINTER = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors has the same bound."""


@dataclass(frozen=True)
class Stored:
    """The header's description of a tensor in a safetensors file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def check(self, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError if the tensor has another shape than ``shape``."""
        if self.shape != shape:
            raise CheckpointError(f"{self.name} in {self.file} has shape {self.shape}, config.json says {shape}")

    def read(self) -> Tensor:
        """The values as fp32. Raises CheckpointError for integers that fp32 does not have, and if the file cannot be read."""
        try:
            with safe_open(self.file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(self.name)
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"cannot read {self.name} from {self.file}: {e}") from e
        numbers = tensor.float()
        if not tensor.is_floating_point() and bool((numbers.to(tensor.dtype) != tensor).any()):
            raise CheckpointError(
                f"{self.name} in {self.file} has integers beyond {1 << 24}, and weights are kept in fp32; take another model"
            )
        return numbers


def mapped(tensors: Iterable[Stored]) -> Callable[[Stored], Tensor]:
    """A loader of the values of ``tensors`` as they are, on pages of the files, which all processes share; each file is
    mapped once. Raises CheckpointError, and so does the loader."""
    files: dict[Path, Any] = {}
    for file in {tensor.file for tensor in tensors}:
        try:
            files[file] = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"cannot read {file}: {e}") from e

    def load(stored: Stored) -> Tensor:
        try:
            tensor: Tensor = files[stored.file].get_tensor(stored.name)
        except SafetensorError as e:
            raise CheckpointError(f"cannot read {stored.name} from {stored.file}: {e}") from e
        return tensor

    return load


def weights_among(files: Collection[str], where: str) -> str:
    """The name among ``files`` that leads to the weights: ``WEIGHTS`` or else ``INDEX``, as in ``transformers``.
    ``where``: the folder or the Hub's model with ``files``. Raises CheckpointError for another kind."""
    check_kind(files, where)
    if found := next((name for name in (WEIGHTS, INDEX) if name in files), None):
        return found
    load = "AutoModelForCausalLM.from_pretrained"
    if gguf := _first(files, ".gguf"):
        raise CheckpointError(
            f"{where} has {gguf}, and muletrain reads safetensors alone. transformers converts it: "
            f"{load}({where!r}, gguf_file={gguf!r}).save_pretrained('NEW'); the tokenizer in the same way; then give NEW"
        )
    if pickled := _first(files, ".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise CheckpointError(
            f"{where} has no weights as safetensors but {pickled}, a pickle, which can run code when it is read. If you trust it, "
            f"convert it: {load}({where!r}).save_pretrained('NEW'); the tokenizer in the same way; then give NEW"
        )
    if other := _first(files, ".safetensors", ".h5", ".msgpack", ".onnx", ".npz"):
        raise CheckpointError(
            f"{where} has {other}, but neither {WEIGHTS} nor {INDEX}, which transformers writes; convert it to a folder of "
            f"transformers, or rename it if it is one file of all weights"
        )
    raise CheckpointError(f"{where} has no weights as safetensors ({WEIGHTS} or {INDEX}); take a model that has")


def check_kind(files: Collection[str], where: str) -> None:
    """Raises CheckpointError unless ``files`` are a complete model for ``transformers``."""
    if "adapter_config.json" in files:
        raise CheckpointError(
            f"{where} holds an adapter of peft, which is no whole model. Give the model that it belongs to, and the adapter as "
            f"adapter.from={where}"
        )
    if CONFIG not in files:
        if "snapshots" in files or any(name.startswith("snapshots/") for name in files):
            raise CheckpointError(
                f"{where} is a model's place in the cache of the Hub: give the model's name, OWNER/NAME, or the folder "
                f"{where}/snapshots/COMMIT"
            )
        raise CheckpointError(
            f"{where} has no {CONFIG}; name a model on the Hub as OWNER/NAME, or the folder of one (--set model.from=FOLDER if "
            f"a run's moved)"
        )


def check_folder(folder: Path, *, weights: bool) -> None:
    """Check that a folder is of the right kind, holds files instead of git-lfs pointers and no quantised weights; with
    ``weights`` also that all tensors are there, in complete files and of a usable type. Raises CheckpointError."""
    try:
        files = {path.name for path in folder.iterdir()}
    except OSError as e:
        raise CheckpointError(
            f"{folder} is no folder that can be read ({e.strerror}); name a model on the Hub as OWNER/NAME, or the folder of one "
            f"(--set model.from=FOLDER if a run's moved)"
        ) from e
    check_kind(files, str(folder))
    for name in files.intersection((CONFIG, TOKENIZER, GENERATION, INDEX, *TEXT_FILES)):
        _refuse_pointer(folder / name)
    config = read_json(folder / CONFIG)
    marks = [f"{CONFIG} has {name}" for name in _QUANTISED if config.get(name)] + sorted(files & _QUANTISED_FILES)
    if marks:
        raise CheckpointError(
            f"{folder} holds quantised weights ({marks[0]}), which cannot be trained; give the model that they were made from"
        )
    for name, tensor in stored(folder).items() if weights else ():
        if tensor.dtype not in _FLOATS and (name.endswith("weight") or tensor.dtype.startswith("F")):  # else a buffer
            raise CheckpointError(
                f"{name} in {tensor.file} is stored as {tensor.dtype}, not as floats of 16 bits or more: the weights are "
                f"quantised. Give the model that they were made from"
            )


def stored(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name, from the headers of the files, after a check that each file is complete. Raises
    CheckpointError."""
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    if weights_among(files, str(folder)) == WEIGHTS:
        return _header(folder / WEIGHTS)
    places = indexed(folder / INDEX)
    shards = sorted({*places.values()})
    if missing := [shard for shard in shards if shard not in files]:
        raise CheckpointError(
            f"{folder} lacks {missing[0]} ({len(missing)} of {plural(len(shards), 'shard')} that {INDEX} names); fetch the "
            f"model again"
        )
    found = {shard: _header(folder / shard) for shard in shards}
    for name, shard in places.items():
        if name not in found[shard]:
            raise CheckpointError(f"{folder / shard} has no {name}, which {INDEX} puts there; fetch the model again")
    every = {name: tensor for shard in shards for name, tensor in found[shard].items()}
    return every | {name: found[shard][name] for name, shard in places.items()}  # a name may be left over elsewhere


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        if isinstance(e, ValueError):
            _refuse_pointer(path)
        raise CheckpointError(
            f"cannot read {path}: {e}; name a model on the Hub as OWNER/NAME, or the folder of one (--set model.from=FOLDER if "
            f"a run's moved)"
        ) from e
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def indexed(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises CheckpointError."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index} has no table weight_map from tensor names to files")
    if strange := sorted(file for file in {*files.values()} if Path(file).name != file):
        raise CheckpointError(f"{index} names {strange[0]!r}, which is no file beside it")
    return files


def _first(files: Collection[str], *endings: str) -> str | None:
    return next((name for name in sorted(files) if name.endswith(endings)), None)


def _refuse_pointer(path: Path) -> None:
    """Raises CheckpointError for the pointer that git leaves in place of a large file."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:  # reported by the read
        return
    if pointer:
        raise CheckpointError(
            f"{path} is a pointer of git-lfs, not the file itself; call 'git lfs pull' in {path.parent}, or fetch the model by "
            f"'hf download'"
        )


def _header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. The library refuses an incomplete file, but does not tell the missing size."""
    _refuse_pointer(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, _LONGEST_HEADER))
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from e
    if length > _LONGEST_HEADER:
        raise CheckpointError(f"{path} is no safetensors file; fetch the model again, or save it with safetensors")
    try:
        table = json.loads(text) if len(text) == length and size >= 8 else None
        entries = {} if table is None else {name: about for name, about in table.items() if name != "__metadata__"}
        found = {name: Stored(path, name, about["dtype"], tuple(about["shape"])) for name, about in entries.items()}
        whole = 8 + length + max((int(about["data_offsets"][1]) for about in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path} is no safetensors file ({e}); save the model with safetensors") from e
    if table is None or size != whole:
        much = "its header" if table is None else f"{whole:,}"
        raise CheckpointError(f"{path} is not whole: it has {size:,} bytes of {much}; fetch it again")
    return found


def same(a: Stored, b: Stored) -> bool:
    """Do two tensors hold the same numbers? Raises CheckpointError."""
    return a.shape == b.shape and bool((a.read() == b.read()).all())


def without_place(folder: Path, names: Sequence[str]) -> str:
    """The error for tensors of a folder that no parameter takes."""
    return (
        f"{folder}: {names[0]} has no place in the model that config.json describes ({plural(len(names), 'such tensor')}); correct "
        f"config.json, or remove from the files what the model does not have"
    )
