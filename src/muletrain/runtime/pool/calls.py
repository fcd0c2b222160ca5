"""A call of the stage server, while its parts are computed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from muletrain.runtime.pool.parts import KeptPart
from muletrain.wire.codec import encode, encode_samples

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Compute, Microbatch
    from muletrain.compute.slot import Turn
    from muletrain.config.schema import Codec
    from muletrain.policy.passes import Part, Pass


@dataclass
class Call:
    """A pass of a microbatch of ``sequences`` sequences that the stage server waits for. ``own``: parts
    computed here, which count once the whole microbatch does."""

    mb: Microbatch
    what: Pass
    turn: Turn
    accumulate: bool
    sequences: int
    inputs: Tensor | None = None
    targets: Tensor | None = None
    positions: Tensor | None = None
    begun: bool = False
    loss: float = 0.0
    output: Tensor | None = None
    own: list[Microbatch] = field(default_factory=list)
    done: asyncio.Future[None] = field(default_factory=asyncio.Future)

    @property
    def key(self) -> tuple[Pass, int, int]:
        return self.what, self.mb.step, self.mb.index

    def __post_init__(self) -> None:
        self._left = self.sequences

    async def cut(self, part: Part, compute: Compute, codec: Codec) -> KeptPart:
        """Returns the inputs of ``part``."""
        assert self.inputs is not None  # a backward is cut as the forward was
        rows = slice(part.first, part.first + part.rows)
        inputs = self.inputs[rows]
        targets, positions = (None if x is None else encode_samples(x[rows]) for x in (self.targets, self.positions))
        sent = encode_samples(inputs) if compute.stage == 0 else await compute.offload(encode, inputs, codec)
        return KeptPart(part.rows, sent, targets, positions)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def fill(self, part: Part, loss: float, values: Tensor | None) -> None:
        """Take the result of ``part``: the share of the loss, and the output [rows, T, D], if any."""
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
