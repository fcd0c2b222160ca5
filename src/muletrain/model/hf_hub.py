"""Fetches a model from the Hugging Face Hub, once, into the cache of ``transformers``."""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.errors import CheckpointError
from muletrain.model.hf_files import (
    CONFIG,
    GENERATION,
    INDEX,
    TEXT_FILES,
    TOKENIZER,
    check_folder,
    check_kind,
    indexed,
    weights_among,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

TIMEOUT_S = 10.0
"""Longest wait for the Hub's list of a model's files."""
_NOTED = (CONFIG, TOKENIZER)
"""Files of which a model or a tokenizer has one: the first of them tells which commit is in the cache."""


def is_hub_name(name: str) -> bool:
    """Does ``name`` look like OWNER/NAME of the Hub, or OWNER/NAME@REVISION, and is no folder here?"""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\w[\w./-]*)?", name)) and not Path(name).exists()


def local_folder(name: str, check: Callable[[Path], object] = lambda folder: None, *, weights: bool = True) -> Path:
    """The folder ``name``, or the folder with the fetched Hub model of that name, with a check of all files by headers.
    ``check`` is called before any large download: with ``config.json``, and with the tokenizer if ``weights`` follow.
    Raises CheckpointError for a model that is missing, gated, without safetensors, or out of reach; errors of ``check``
    pass through."""
    if not is_hub_name(name):
        check_folder(Path(name), weights=weights)
        return Path(name)
    found = _found(name)
    try:
        return _folder_of(found, check, weights=weights)
    except CheckpointError as e:
        if found.cached is None:
            raise
        raise CheckpointError(
            f"{e}; 'hf download {found.repository}' fetches all of it where there is a network"
        ) from e


def text_folder(name: str, files: Collection[str]) -> Path:
    """The folder with all of ``files`` that the Hub has of the model ``name``. Raises CheckpointError."""
    found = _found(name)
    folders = {found.fetched(file).parent for file in found.files.intersection(files)}
    if not folders:
        raise CheckpointError(f"{found.title} has none of {', '.join(files)}; give another model")
    return folders.pop()


def _folder_of(found: _Found, check: Callable[[Path], object], *, weights: bool) -> Path:
    check_kind(found.files, found.title)
    first = weights_among(found.files, found.title) if weights else CONFIG
    folder = found.fetched(CONFIG).parent
    for file in found.files.intersection((TOKENIZER, GENERATION, *TEXT_FILES)) if weights else ():
        found.fetched(file)
    check_folder(folder, weights=False)
    check(folder)
    if weights:
        found.fetched(first)
        for file in sorted({*indexed(folder / INDEX).values()}) if first == INDEX else ():
            found.fetched(file)
        check_folder(folder, weights=True)
    return folder


@dataclass(frozen=True)
class _Found:
    """A model on the Hub, or in the cache of the Hub."""

    repository: str
    commit: str
    files: frozenset[str]
    """Files on the Hub, or in the cache if the Hub is out of reach."""
    cached: Path | None
    """The folder in the cache, if the Hub is out of reach."""

    @property
    def title(self) -> str:
        """The model's name for people."""
        from huggingface_hub import constants

        return f"{self.repository} at {constants.ENDPOINT}" if self.cached is None else str(self.cached)

    def fetched(self, file: str) -> Path:
        """``file`` in the cache, fetched if missing. Raises CheckpointError."""
        return _fetch(self.repository, file, self.commit) if self.cached is None else self.cached / file


@functools.cache
def _found(name: str) -> _Found:
    """The model ``name``, requested once in a process. Raises CheckpointError."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as Missing

    repository, _, revision = name.partition("@")
    try:
        about = HfApi().model_info(repository, revision=revision or None, timeout=TIMEOUT_S)
    except RevisionNotFoundError as e:
        raise CheckpointError(f"{repository} at {constants.ENDPOINT} has no branch, tag or commit {revision!r}") from e
    except Missing as e:
        raise CheckpointError(
            f"there is neither a folder {name} here nor a model of that name at {constants.ENDPOINT}; check the name, or "
            f"sign in by 'hf auth login' if it is private"
        ) from e
    except Exception as e:  # of the library, and of its HTTP library
        offline = isinstance(e, OfflineModeIsEnabled)
        if (folder := _cached(repository, revision)) is None:
            problem = (
                f"HF_HUB_OFFLINE=1 keeps it from being fetched; call 'hf download {repository}' where there is a network"
                if offline
                else f"{constants.ENDPOINT} cannot be reached ({_reason(e)}); give a folder, or try again"
            )
            raise CheckpointError(
                f"there is no folder {name} here, the cache {constants.HF_HUB_CACHE} does not have it, and {problem}"
            ) from e
        if not offline:
            logging.getLogger("muletrain").warning(
                "%s cannot be reached (%s): %s is taken from the cache, commit %s",
                constants.ENDPOINT,
                _reason(e),
                name,
                folder.name,
            )
        return _Found(repository, folder.name, frozenset(path.name for path in folder.iterdir()), folder)
    assert about.sha is not None, "it is None only where it was not asked for"
    found = _Found(repository, about.sha, frozenset(file.rfilename for file in about.siblings or ()), None)
    if noted := found.files.intersection(_NOTED):
        _fetch(repository, min(noted), revision or None)  # the cache notes the revision's commit
    return found


def _cached(repository: str, revision: str) -> Path | None:
    """The folder of a model that was fetched before; None: never fetched."""
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(repository, file, revision=revision or None) for file in _NOTED]
    return next((Path(file).parent for file in files if isinstance(file, str)), None)


def _fetch(name: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import GatedRepoError

    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except GatedRepoError as e:
        raise CheckpointError(
            f"{name} is gated: accept its terms at {constants.ENDPOINT}/{name}, and sign in by 'hf auth login'"
        ) from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} of {name} cannot be fetched from {constants.ENDPOINT}: {_reason(e)}") from e


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
