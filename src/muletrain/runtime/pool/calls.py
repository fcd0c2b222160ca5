"""A call of the stage server, while its parts are computed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Microbatch
    from muletrain.compute.slot import Turn
    from muletrain.policy.pool import Part, Pass
    from muletrain.runtime.pool.parts import Place


@dataclass
class Call:
    """A pass of a microbatch of so many ``sequences`` that the stage server waits for. ``places``: parts whose gradients
    clients have accumulated for it; ``own``: parts that were computed here, and count once the whole microbatch does."""

    mb: Microbatch
    what: Pass
    turn: Turn
    accumulate: bool
    sequences: int
    inputs: Tensor | None = None
    targets: Tensor | None = None
    begun: bool = False
    loss: float = 0.0
    output: Tensor | None = None
    places: list[Place] = field(default_factory=list)
    own: list[Microbatch] = field(default_factory=list)
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def __post_init__(self) -> None:
        self._left = self.sequences

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def fill(self, part: Part, loss: float, values: Tensor | None) -> None:
        """Take the result of ``part``: its share of the loss, and its output [rows, T, D], if any."""
        if self.done.done():
            return
        if values is not None:
            if self.output is None:
                self.output = torch.empty(self.sequences, *values.shape[1:])
            self.output[part.first : part.first + part.rows] = values
        self.loss += loss
        self._left -= part.rows
        if self._left == 0:
            self.done.set_result(None)
