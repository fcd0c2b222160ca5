"""Passes of microbatches, and the parts of these that workers of a hub take (``pool``)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Pass(StrEnum):
    """What is to be computed of a part."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    """Forward and backward of the last stage."""
    AGAIN = "again"
    """Forward and backward for the parameter gradient alone: it was lost with the worker that had it."""
    CHECK = "check"
    """Forward and backward to compare with what other workers brought back. Nothing is accumulated."""

    @property
    def cost(self) -> int:
        """Compute per sequence, in forward passes."""
        return {Pass.FORWARD: 1, Pass.BACKWARD: 2}.get(self, 3)


LAST = Pass.AGAIN, Pass.CHECK
"""Passes that nobody waits for before the step's end."""


class Part(NamedTuple):
    """Sequences ``first`` to ``first + rows - 1`` of a microbatch, in one pass."""

    what: Pass
    step: int
    index: int  # type: ignore[assignment]  # the field's name is the papers'; tuple.index is never used
    first: int
    rows: int

    @property
    def cost(self) -> int:
        return self.what.cost * self.rows


class Given(NamedTuple):
    """A part that a worker took."""

    number: int
    part: Part


@dataclass
class Uncut:
    """Sequences from ``next`` to ``end`` of a pass that nobody has taken yet. ``since``: when it was put in."""

    what: Pass
    step: int
    index: int
    next: int
    end: int
    since: float
