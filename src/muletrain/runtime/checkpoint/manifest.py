"""A checkpoint's manifest as it is read: from a folder that may hold anything."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Sha256 = Field(pattern="^[0-9a-f]{64}$")


class Listed(BaseModel):
    """A file of a checkpoint. ``size``: its bytes; 0: not said."""

    file: str
    sha256: str = Sha256
    size: int = Field(default=0, ge=0)


class Parts(BaseModel):
    """Which checkpoint it is, and its parts by stage. Other fields may be there."""

    model_config = ConfigDict(extra="allow")
    step: int = Field(ge=0)
    lineage: str = Field(default="", pattern="^([0-9a-f]{2})*$")
    parts: list[Listed]


class Versioned(BaseModel):
    """The format of a manifest, which says what else is in it."""

    format: int


class Manifest(Parts, Versioned):
    """What every reader of a checkpoint needs."""

    files: list[Listed]
    spec: dict[str, Any]
    config: dict[str, Any]


def read_manifest(text: bytes, expected: int) -> dict[str, Any]:
    """Returns the fields of a manifest. Raises ValueError for a text that is none, however deep it is nested, and for one
    in another format than ``expected``."""
    try:
        if (written := Versioned.model_validate_json(text).format) != expected:
            raise ValueError(f"it is written in format {written}, this version reads {expected}")
        Manifest.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}") from None
    found: dict[str, Any] = json.loads(text)
    return found
