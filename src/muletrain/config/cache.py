"""The user's cache: results of one command, for later ones. An entry is a file of JSON that is checked on reading, and
never executed. Losing an entry costs time only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from muletrain.config.model_sections import DataConfig
from muletrain.config.section import Section
from muletrain.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = 64
"""Entries of a kind; when there are more, the oldest are removed."""

S = TypeVar("S", bound=Section)


def cache_folder(config: DataConfig) -> Path:
    """The folder of all caches, which may not exist yet. Raises DataError for a user without a home."""
    try:
        if config.cache:
            return Path(config.cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muletrain"
    except RuntimeError as e:
        raise DataError(
            "data.cache: this user has no home folder, so there is none for caches; set data.cache, XDG_CACHE_HOME or HOME"
        ) from e


def kept(kind: str, about: Mapping[str, object], section: type[S]) -> S | None:
    """The entry that was kept under ``about``; None: missing, or unreadable."""
    try:
        return section.model_validate_json(_path(kind, about).read_bytes())
    except (OSError, DataError, ValidationError):
        return None


def keep(kind: str, about: Mapping[str, object], entry: Section) -> None:
    """Write ``entry`` to the cache. A reader finds the old entry or the new one, never half of one. A cache that cannot
    be written stays unchanged."""
    with contextlib.suppress(OSError, DataError):
        path = _path(kind, about)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(entry.model_dump_json())
            os.replace(partial, path)
        except OSError:
            os.unlink(partial)
            raise
        for old in sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime)[:-MOST]:
            old.unlink(missing_ok=True)


def _path(kind: str, about: Mapping[str, object]) -> Path:
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder(DataConfig()) / kind / f"{key}.json"
