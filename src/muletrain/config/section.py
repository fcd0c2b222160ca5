"""The base of every section of a configuration file, and the types that sections share."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
PEER_NAME = r"\w[\w.-]{0,63}"
"""Pattern of a peer's name, which also names files."""


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    YIELDS: ClassVar[frozenset[str]] = frozenset()
    """Fields with defaults that yield to other fields, as sizes yield to a preset; a printed configuration omits
    these."""

    def stated(self) -> set[str]:
        """Fields (by attribute name) that a written copy of this section must contain to mean the same."""
        return set(type(self).model_fields)
