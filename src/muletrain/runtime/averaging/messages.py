"""Messages with which replicas reduce their gradients."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from muletrain.network.base import Channel
from muletrain.runtime.core.messages import Digest, Message, Natural


class Shard(Message):
    """A member sends a chunk of its accumulator to the shard's owner."""

    KIND: ClassVar[str] = "shard"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    round: Digest
    step: Natural
    chunk: Natural


class Reduced(Message):
    """A shard's owner sends a chunk of the mean gradient, with its own value of the chunk's squared norm."""

    KIND: ClassVar[str] = "reduced"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    round: Digest
    step: Natural
    chunk: Natural
    square_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    finite: bool
