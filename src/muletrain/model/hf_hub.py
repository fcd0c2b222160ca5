"""Fetches a model from the Hugging Face Hub, once, into the cache that ``transformers`` uses too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muletrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, GENERATION = "tokenizer.json", "generation_config.json"
TEXT_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files that ``transformers`` reads beside the tokenizer: special tokens, and the chat template."""


def is_hub_name(name: str) -> bool:
    """Does ``name`` look like OWNER/NAME of the Hub, and is no folder here?"""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and not Path(name).exists()


def local_folder(name: str, check: Callable[[Path], object] = lambda folder: None, *, weights: bool = True) -> Path:
    """The folder ``name``, or the one into which the Hub's model of that name was fetched. ``check`` sees the folder before
    anything large comes: with ``config.json``, and with the tokenizer if ``weights`` follow. Raises CheckpointError for a
    model that is missing, gated, without safetensors, or out of reach, and what ``check`` raises."""
    if not is_hub_name(name):
        return Path(name)
    folder = _fetch(name, CONFIG, None).parent
    commit = folder.name
    if weights:
        _optional(name, TOKENIZER, commit)
    check(folder)
    if weights:
        for file in (GENERATION, *TEXT_FILES):
            _optional(name, file, commit)
        index = _optional(name, INDEX, commit)
        for file in [WEIGHTS] if index is None else sorted({*indexed(index).values()}):
            _fetch(name, file, commit)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(
            f"cannot read {path}: {e}; name a model on the Hub as OWNER/NAME, or the folder of one (--set model.from=FOLDER if "
            f"a run's moved)"
        ) from e
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def indexed(index: Path) -> dict[str, str]:
    """Tensor name -> name of the file that it is in. Raises CheckpointError."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index} has no table weight_map from tensor names to files")
    if strange := sorted(file for file in {*files.values()} if Path(file).name != file):
        raise CheckpointError(f"{index} names {strange[0]!r}, which is no file beside it")
    return files


def _optional(name: str, file: str, commit: str) -> Path | None:
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return _fetch(name, file, commit)
    except CheckpointError as e:
        if isinstance(e.__cause__, EntryNotFoundError) and not isinstance(e.__cause__, LocalEntryNotFoundError):
            return None
        raise


def _fetch(name: str, file: str, commit: str | None) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as Missing

    try:
        return Path(hf_hub_download(name, file, revision=commit))
    except GatedRepoError as e:
        raise CheckpointError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, and sign in by 'hf auth login'"
        ) from e
    except Missing as e:
        raise CheckpointError(
            f"there is neither a folder {name} here nor a model of that name at {constants.ENDPOINT}; check the name, or "
            f"sign in by 'hf auth login' if it is private"
        ) from e
    except LocalEntryNotFoundError as e:
        raise CheckpointError(
            f"there is no folder {name} here, and {constants.ENDPOINT} cannot be reached; give a folder, or try again"
        ) from e
    except EntryNotFoundError as e:
        what = "weights as safetensors" if file == WEIGHTS else file
        raise CheckpointError(f"{name} at {constants.ENDPOINT} has no {what}; take a model that has") from e
    except (OSError, ValueError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise CheckpointError(f"{file} of {name} cannot be fetched from {constants.ENDPOINT}: {reason}") from e
