"""Messages by which a stage's replicas agree on a step, reduce their gradients, and attest to the mean."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field

from muletrain.network.base import Channel
from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.runtime.core.messages import Digest, Id, Indices, Message, Natural

SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]


class Seal(Message):
    """A member announces what its accumulator holds, a sketch of it (``optim.sketch``, seeded by the lineage), and the
    digest of the weights it was computed with. ``members``: the replicas it counts on, itself included. ``stop``: it
    asks for an orderly end after this step; ``leaves``: for its own. ``gave_up``: microbatches that it had sealed, whose
    gradient stood out; others compute them again. ``excused``: what others gave it stood out, too, and nobody else could
    be asked. ``accused``: replicas that it found to compute falsely (``runtime.step.audit``)."""

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
    """A chunk of one member's accumulator, to the member that reduces it."""

    KIND: ClassVar[str] = "shard"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    round: Digest
    step: Natural
    chunk: Natural


class Reduced(Message):
    """A chunk of the mean gradient, from the member that reduced it, with its squared norm as that member computed
    it."""

    KIND: ClassVar[str] = "reduced"
    CHANNEL: ClassVar[Channel] = Channel.AVERAGE
    TENSORS: ClassVar[int] = 1
    round: Digest
    step: Natural
    chunk: Natural
    square_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    finite: bool


class ShardFacts(BaseModel):
    """What the record needs to know of one reduced shard: the hash of its values (fp32, decoded), their squared norm (0
    where they are not finite)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    content: Digest
    square_norm: Annotated[float, Field(ge=0, le=1e100, allow_inf_nan=False)]
    """Of fp32 values it cannot be more, and sums of it stay finite."""
    finite: bool


class RoundEntry(Message):
    """``holder`` attests that it holds the whole mean gradient of this round. ``members`` are sorted, ``shards`` in
    their order. ``without``: members that the holder believes dead; everything but these two is the same from every
    holder."""

    KIND: ClassVar[str] = "round_entry"
    lineage: Digest
    step: Natural
    stage: Natural
    round: Digest
    members: Annotated[tuple[Id, ...], Field(min_length=1, max_length=4096), FailFast()]
    shards: Annotated[tuple[ShardFacts, ...], Field(min_length=1, max_length=4096), FailFast()]
    stop: bool
    leaves: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()
    """Members that want to go after this step, sorted."""
    expelled: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()
    """Replicas that are no members any more, sorted: their gradients were not what others computed."""
    holder: Id
    without: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()


class Abstain(Message):
    """The sender leaves this step to the other replicas of its stage: it takes what they agree on, and is not waited
    for. What it announced in attempts before ``attempt`` is void."""

    KIND: ClassVar[str] = "abstain"
    lineage: Digest
    step: Natural
    attempt: Natural


class AskEntries(Message):
    """Call: what do you attest to of this step? If you applied it: which record?"""

    KIND: ClassVar[str] = "ask_entries"
    lineage: Digest
    step: Natural


class Entries(Message):
    """The answerer is at ``step``. ``own``: what it holds itself; ``abstains``: see ``Abstain``. ``applied``: the
    rounds of the record that it applied, one of each stage; empty if it did not apply that step, or does not know any
    more. Nobody is believed about others' entries."""

    KIND: ClassVar[str] = "entries"
    step: Natural
    own: RoundEntry | None = None
    abstains: bool = False
    applied: Annotated[tuple[RoundEntry, ...], Field(max_length=4096), FailFast()] = ()
    record: Annotated[bytes, Field(max_length=32)] = b""
    """Its hash: under delayed updates frames of two histories may look alike for a step."""


class AskGradient(Message):
    """Call: the manifest of this round's mean gradient as it travels, to be taken as a copy of a state is. Of the
    current step, or of one that is kept; empty for any other."""

    KIND: ClassVar[str] = "ask_gradient"
    round: Digest


class AskSeal(Message):
    """Call to a replica: what did you announce last? The answer is a Seal, or empty."""

    KIND: ClassVar[str] = "ask_seal"
    lineage: Digest
    step: Natural
