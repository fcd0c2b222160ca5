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
    from muletrain.policy.passes import Part, Pass, Place


@dataclass
class Call:
    """A pass of a microbatch of ``sequences`` sequences that the stage server waits for. ``places``: parts whose
    gradients clients have accumulated; ``own``: parts computed here, which count once the whole microbatch does."""

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
    places: list[Place] = field(default_factory=list)
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


class Calls:
    """The calls under way."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Pass, int, int], Call] = {}

    def begin(self, call: Call) -> None:
        self._calls[call.key] = call

    def end(self, call: Call) -> None:
        del self._calls[call.key]

    def of(self, part: Part) -> Call | None:
        """Returns the call that waits for ``part``; None: no call does."""
        return self._calls.get((part.what, part.step, part.index))

    def of_step(self, step: int) -> list[Call]:
        return [call for call in self._calls.values() if call.mb.step == step]

    def accumulated(self, part: Part) -> Call | None:
        """Returns the call under way for which a client accumulated ``part``; None: there is none (any more)."""
        return next((call for call in self._calls.values() if part.place in call.places), None)
