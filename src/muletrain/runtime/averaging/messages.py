"""Messages with which replicas reduce their gradients, attest to the mean, and take the mean from each other."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from muletrain.network.base import Channel
from muletrain.runtime.core.messages import Digest, Id, Message, Natural


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


class ShardFacts(BaseModel):
    """Facts of one reduced shard for the record: the hash of its decoded fp32 values, and their squared norm (0 if not
    finite)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    content: Digest
    square_norm: Annotated[float, Field(ge=0, le=1e100, allow_inf_nan=False)]
    """The bound holds for all fp32 values, and keeps sums finite."""
    finite: bool


class RoundEntry(Message):
    """``holder`` attests to holding this round's whole mean gradient. ``members`` are sorted, ``shards`` in the same
    order. ``without``: members that are down for the holder. All other fields are the same for every holder."""

    KIND: ClassVar[str] = "round_entry"
    lineage: Digest
    step: Natural
    stage: Natural
    round: Digest
    members: Annotated[tuple[Id, ...], Field(min_length=1, max_length=4096), FailFast()]
    shards: Annotated[tuple[ShardFacts, ...], Field(min_length=1, max_length=4096), FailFast()]
    stop: bool
    leaves: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()
    """Members that want to leave after this step, sorted."""
    expelled: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()
    """Replicas that were expelled because of false gradients, sorted."""
    tied: Annotated[bytes, Field(max_length=32)] = b""
    """Content of the gradient's part for parameters that another stage shares (``optim.tied.content``); empty: none."""
    holder: Id
    without: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()


class AskGradient(Message):
    """A call that asks for the manifest of a round's mean gradient, of the current or a kept step. ``tied``: only of
    the part for parameters that two stages share. The answer is empty for other rounds."""

    KIND: ClassVar[str] = "ask_gradient"
    round: Digest
    tied: bool = False
