"""Messages with which replicas agree on a step, reduce their gradients, and attest to the mean."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from muletrain.network.base import Channel
from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.runtime.core.messages import Digest, Id, Indices, Message, Natural

SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]


class Seal(Message):
    """A member announces its accumulator: its microbatches, its sketch (``optim.sketch``, seeded by the lineage), and
    the digest of the weights used. ``members``: the replicas it counts on, itself included. ``stop``: it asks for an
    orderly end after this step; ``leaves``: it wants to leave. ``gave_up``: microbatches of an earlier seal that stood
    out, so others compute them again. ``excused``: its inputs stood out, too, and no other peer could be asked.
    ``accused``: replicas that computed falsely (``runtime.step.audit``)."""

    KIND: ClassVar[str] = "seal"
    lineage: Digest
    step: Natural
    stage: Natural
    attempt: Natural
    indices: Indices
    members: Annotated[tuple[Id, ...], Field(min_length=1, max_length=4096), FailFast()]
    weights: Digest
    stop: bool
    leaves: bool
    sketch: SketchBytes
    gave_up: Indices = ()
    excused: bool = False
    accused: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()


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
    """``holder`` attests that it holds this round's whole mean gradient. ``members`` are sorted, ``shards`` in their
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
    """Replicas that are no members any more because of false gradients, sorted."""
    tied: Annotated[bytes, Field(max_length=32)] = b""
    """What the gradient holds for parameters that another stage shares (``optim.tied.content``); empty: none."""
    holder: Id
    without: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()


class TiedEntry(Message):
    """The sender holds what both rounds' gradients hold for the parameters that their stages share; ``product`` is the
    inner product, which the global norm needs."""

    KIND: ClassVar[str] = "tied_entry"
    lineage: Digest
    step: Natural
    rounds: tuple[Digest, Digest]
    product: Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)]


class Abstain(Message):
    """The sender accepts what the other replicas of its stage agree on; they need not wait for it. Its seals of attempts
    before ``attempt`` are void."""

    KIND: ClassVar[str] = "abstain"
    lineage: Digest
    step: Natural
    attempt: Natural


class AskEntries(Message):
    """A call that asks for the peer's attestation of this step, or for the record that it applied."""

    KIND: ClassVar[str] = "ask_entries"
    lineage: Digest
    step: Natural


class Entries(Message):
    """The answer to ``AskEntries`` of a peer at ``step``. ``own``: its attestation; ``abstains``: see ``Abstain``.
    ``applied``: one round of each stage of the record that it applied; empty if it did not apply the step, or has
    forgotten it. ``tied``: its other attestation. A peer is believed about its own entry only."""

    KIND: ClassVar[str] = "entries"
    step: Natural
    own: RoundEntry | None = None
    tied: TiedEntry | None = None
    abstains: bool = False
    applied: Annotated[tuple[RoundEntry, ...], Field(max_length=4096), FailFast()] = ()
    product: Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)] = 0.0
    """What the record states for tied parameters."""
    record: Annotated[bytes, Field(max_length=32)] = b""
    """The record's hash: under delayed updates frames of two histories may look alike for one step."""


class AskGradient(Message):
    """A call that asks for the manifest of a round's mean gradient, of the current or a kept step; ``tied``: only of what
    it holds for parameters that two stages share. The answer is empty for other rounds."""

    KIND: ClassVar[str] = "ask_gradient"
    round: Digest
    tied: bool = False


class AskSeal(Message):
    """A call that asks a replica for its last seal. The answer is a Seal, or empty."""

    KIND: ClassVar[str] = "ask_seal"
    lineage: Digest
    step: Natural
