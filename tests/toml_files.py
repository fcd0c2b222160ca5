"""Settings in a file of a folder, and the errors that come of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muletrain.config.load import load_config
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def write(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


def message(folder: Path, text: str | None, *overrides: str) -> str:
    """The error, with the folder taken out so that it reads as a user sees it in the current directory."""
    with pytest.raises(ConfigError) as caught:
        load_config(None if text is None else write(folder, text), overrides)
    return str(caught.value).replace(f"{folder}/", "")


def check(error: str, expected: str) -> None:
    """``expected``: the place and the field that an error begins with, and the facts that it tells."""
    place, *facts = expected.split(" ... ")
    assert error.startswith(place + " ")
    for fact in facts:
        assert fact in error
