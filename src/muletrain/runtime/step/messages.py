"""Messages with which replicas agree on a step."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.runtime.averaging.messages import RoundEntry  # noqa: TC001  (a field of Entries)
from muletrain.runtime.core.messages import Digest, Id, Indices, Message, Natural

SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]


class Seal(Message):
    """A member announces its accumulator: microbatches, sketch (``optim.sketch``, seeded by the lineage), and digest of
    the used weights. ``members``: the replicas that the member counts on, itself included. ``stop``: request for an
    orderly end after this step; ``leaves``: wish to leave. ``gave_up``: microbatches of an earlier seal that stood out,
    so other replicas compute them again. ``excused``: the inputs stood out, too, and no other peer could be asked.
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


class TiedEntry(Message):
    """The sender knows the parts of both ``rounds``' gradients for the parameters that the two stages share.
    ``product``: inner product of the two parts, for the global norm (``optim.tied``)."""

    KIND: ClassVar[str] = "tied_entry"
    lineage: Digest
    step: Natural
    rounds: tuple[Digest, Digest]
    product: Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)]


class Abstain(Message):
    """The sender accepts the agreement of its stage's other replicas, which need not wait. The sender's seals of
    attempts before ``attempt`` are void."""

    KIND: ClassVar[str] = "abstain"
    lineage: Digest
    step: Natural
    attempt: Natural


class AskEntries(Message):
    """A call that asks for the peer's attestation of this step, or for the record that the peer applied."""

    KIND: ClassVar[str] = "ask_entries"
    lineage: Digest
    step: Natural


class Entries(Message):
    """The answer to ``AskEntries`` of a peer at ``step``. ``own``: the peer's attestation; ``abstains``: see
    ``Abstain``. ``applied``: one round of each stage of the applied record; empty if the peer did not apply the step,
    or has forgotten the record. ``tied``: the peer's product. A peer is believed about its own entry only."""

    KIND: ClassVar[str] = "entries"
    step: Natural
    own: RoundEntry | None = None
    tied: TiedEntry | None = None
    abstains: bool = False
    applied: Annotated[tuple[RoundEntry, ...], Field(max_length=4096), FailFast()] = ()
    product: Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)] = 0.0
    """The record's product for tied parameters."""
    record: Annotated[bytes, Field(max_length=32)] = b""
    """Hash of the record: under delayed updates, frames of two histories may look alike for one step."""


class AskSeal(Message):
    """A call that asks a replica for its last seal. The answer is a Seal, or empty."""

    KIND: ClassVar[str] = "ask_seal"
    lineage: Digest
    step: Natural
