"""Rows: what a peer says of itself in one step. Only its owner writes a row, so it does not matter who asks for the row,
how often, or in which order the answers come."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, ClassVar

import msgpack
from pydantic import BaseModel, ConfigDict, FailFast, Field

from muletrain.config.schema import MAX_MICROBATCHES
from muletrain.optim.sketch import SIZE as SKETCH
from muletrain.runtime.core.branches import BRANCH
from muletrain.runtime.core.messages import Call, Digest, Header, Id, Indices, Message, Natural

SketchBytes = Annotated[bytes, Field(min_length=4 * SKETCH, max_length=4 * SKETCH)]


MOST_LEAVE = 64
"""Members that the record names as wishing to leave: of a stage only one goes after a step; the rest asks again."""


class ShardFacts(BaseModel):
    """Facts of one reduced shard for the record: the hash of its decoded fp32 values, and their squared norm (0 if not
    finite)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    content: Digest
    square_norm: Annotated[float, Field(ge=0, le=1e100, allow_inf_nan=False)]
    """The bound holds for all fp32 values, and keeps sums finite."""
    finite: bool


class StageEntry(BaseModel):
    """One stage's part of the step record: its round. ``size``: number of members; ``content``: hash of the facts of the
    shards; ``square_norm``: of the stage's mean gradient. ``stop``: a member asked for an orderly end. ``leaves``: members
    that want to leave after this step; ``expelled``: replicas that no longer count, because of false gradients; both
    sorted. ``tied``: content of the gradient's part for parameters that another stage shares (``optim.tied.content``);
    empty: none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: Natural
    round: Digest
    size: Annotated[int, Field(ge=1, le=4096)]
    content: Digest
    square_norm: Annotated[float, Field(ge=0, le=1e104, allow_inf_nan=False)]
    finite: bool
    stop: bool = False
    leaves: Annotated[tuple[Id, ...], Field(max_length=MOST_LEAVE), FailFast()] = ()
    expelled: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()
    tied: Annotated[bytes, Field(max_length=32)] = b""


class Seal(BaseModel):
    """A member announces its accumulator: microbatches, sketch (``optim.sketch``, seeded by the lineage), and digest of
    the used weights. ``members``: the replicas that the member counts on, itself included. ``stop``: request for an
    orderly end after this step; ``leaves``: wish to leave. ``gave_up``: microbatches of an earlier seal that stood out,
    so other replicas compute them again. ``excused``: the inputs stood out, too, and no other peer could be asked.
    ``accused``: replicas that computed falsely (``runtime.step.audit``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
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


class RoundEntry(BaseModel):
    """``holder`` attests to holding this round's whole mean gradient. ``members`` are sorted, ``shards`` in the same
    order; for ``leaves``, ``expelled`` and ``tied`` see ``StageEntry``. ``without``: members that are down for the holder.
    All other fields are the same for every holder."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    lineage: Digest
    step: Natural
    stage: Natural
    round: Digest
    members: Annotated[tuple[Id, ...], Field(min_length=1, max_length=4096), FailFast()]
    shards: Annotated[tuple[ShardFacts, ...], Field(min_length=1, max_length=4096), FailFast()]
    stop: bool
    leaves: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()
    expelled: Annotated[tuple[Id, ...], Field(max_length=64), FailFast()] = ()
    tied: Annotated[bytes, Field(max_length=32)] = b""
    holder: Id
    without: Annotated[tuple[Id, ...], Field(max_length=4096), FailFast()] = ()

    def for_record(self) -> StageEntry:
        """The facts of the round that stand in the step record."""
        shards = [[s.content, s.square_norm, s.finite] for s in self.shards]
        return StageEntry(
            stage=self.stage,
            round=self.round,
            size=len(self.members),
            content=hashlib.sha256(msgpack.packb(shards)).digest(),
            square_norm=math.fsum(s.square_norm for s in self.shards),
            finite=all(s.finite for s in self.shards),
            stop=self.stop,
            leaves=self.leaves[:MOST_LEAVE],
            expelled=self.expelled,
            tied=self.tied,
        )


class TiedEntry(BaseModel):
    """The sender knows the parts of both ``rounds``' gradients for the parameters that the two stages share.
    ``product``: inner product of the two parts, for the global norm (``optim.tied``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rounds: tuple[Digest, Digest]
    product: Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)]


class Statements(Message):
    """What a peer states about one step: told to the peers that it concerns when it changes, and part of the peer's
    ``Row``. ``stage``: the sender's.

    ``seal`` and ``entry`` (the peer's attestation) and ``tied`` are the peer's last. ``filled``: microbatches missing from
    the stage's last seals that the peer has accumulated since. ``abstains``: the peer accepts the
    agreement of its stage's other replicas, which need not wait, and its seals of attempts before this number are void.
    ``entries``: the stages of the record that the peer applied, with the record's ``product`` for tied parameters and
    its hash. Without a hash, a speaker (``policy.speakers``) says which round of its stage counts."""

    KIND: ClassVar[str] = "statements"
    lineage: Digest
    step: Natural
    stage: Natural
    seal: Seal | None = None
    entry: RoundEntry | None = None
    tied: TiedEntry | None = None
    filled: Indices = ()
    abstains: Natural | None = None
    entries: Annotated[tuple[StageEntry, ...], Field(max_length=4096), FailFast()] = ()
    product: Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)] = 0.0
    record: Annotated[bytes, Field(max_length=32)] = b""
    """Under delayed updates, statements of two histories may look alike for one step, but for this hash."""


class Row(Header):
    """What a peer says of itself in the step that was asked about.

    Presence. ``current``: the peer is at the requested lineage and step, or computes them ahead. The peer is at
    ``step``, to which ``lineage`` led. ``rival``: the peer did the requested step in another lineage. ``round``: the
    present or held round of averaging. ``moved``: bytes of tensors sent and received in total, so that two answers show
    progress.

    Microbatches. ``accumulated``: those in the accumulator, with ``accumulated_losses`` [nats/token] (nan if unknown);
    ``in_flight``: requests in work; ``answering``: requests with an answer on the way; ``given``: microbatches that the
    peer's trainer gave out and waits for; ``asking``: microbatches to give out unless found elsewhere; ``completed``:
    microbatches known to be through all stages, with ``losses`` [nats/token], if the caller wants the record.

    ``said``: the peer's statements, as of ``version`` (0: there are none); left out if the caller has that version.
    """

    current: bool
    step: Natural
    stage: Natural
    lineage: Annotated[bytes, Field(max_length=32)] = b""
    branch: Annotated[bytes, Field(min_length=BRANCH, max_length=BRANCH)] = bytes(BRANCH)
    """Branch of the peer's lineage: steps of different branches are unrelated."""
    rival: bool = False
    round: Annotated[bytes, Field(max_length=32)] = b""
    moved: Natural = 0
    late: bool = False
    """The peer's device takes unusually long for an operation."""
    accumulated: Indices = ()
    accumulated_losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()] = ()
    in_flight: Indices = ()
    answering: Indices = ()
    given: Indices = ()
    asking: Indices = ()
    completed: Indices = ()
    losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()] = ()
    version: Natural = 0
    said: Statements | None = None

    def beyond(self, step: int) -> bool:
        """Has the peer done ``step``, in our lineage?"""
        return self.step > step and not self.rival

    def loss(self, index: int) -> float | None:
        """Returns the loss of microbatch ``index`` [nats/token]; None if the peer does not hold the microbatch, or does
        not know its loss."""
        known = [loss for i, loss in zip(self.accumulated, self.accumulated_losses, strict=False) if i == index]
        return known[0] if known and not math.isnan(known[0]) else None


class Sync(Call[Row]):
    """Asks for the peer's row of a step. ``known``: version of the statements that the caller has. ``stage``:
    the caller's; seals are for replicas. ``brief``: no microbatches. ``record``: the caller wants the record of the
    step, too, if the peer applied one, and the microbatches that are through: a thousand answers with all microbatches of a
    step would fill the caller's link."""

    KIND: ClassVar[str] = "sync"
    lineage: Digest
    step: Natural
    stage: Natural = 0
    known: Natural = 0
    brief: bool = False
    record: bool = False
