"""Passes of microbatches, and the parts that workers of a hub take (``pool``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

Place = tuple[int, int, int]
"""Step, microbatch and first sequence of a part."""


class Pass(StrEnum):
    """The computation of a part."""

    FORWARD = "forward"
    BACKWARD = "backward"
    LOSS = "loss"
    """Forward and backward of the last stage."""
    AGAIN = "again"
    """Forward and backward for the parameter gradient alone: lost with the worker that had computed the gradient."""
    CHECK = "check"
    """Forward and backward to compare with the results of other workers. Nothing is accumulated."""

    @property
    def cost(self) -> int:
        """Compute per sequence, in forward passes."""
        return {Pass.FORWARD: 1, Pass.BACKWARD: 2}.get(self, 3)

    @property
    def alone(self) -> int:
        """The same where the forward is not there."""
        return 1 if self is Pass.FORWARD else 3


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

    @property
    def place(self) -> Place:
        return self.step, self.index, self.first


class Given(NamedTuple):
    """A part that a worker took."""

    number: int
    part: Part


@dataclass
class Uncut:
    """Sequences from ``next`` to ``end`` of a pass that nobody has taken yet. ``since``: time of putting in."""

    what: Pass
    step: int
    index: int
    next: int
    end: int
    since: float


@dataclass
class Giving:
    """A part that a worker has, from ``since`` until ``due``."""

    worker: str
    part: Part
    since: float
    due: float
    sent_at: float = math.inf


@dataclass
class Open:
    """A part that is wanted. ``givings``: numbers of the givings that have not come back; ``failed``: workers unable to
    compute the part; ``since``: when the part became free for anyone; ``barred``: excluded workers; ``only``: the only
    allowed worker."""

    givings: set[int] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    since: float = math.inf
    barred: frozenset[str] = frozenset()
    only: str | None = None
