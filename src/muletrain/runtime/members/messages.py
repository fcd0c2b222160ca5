"""These messages tell who takes part: introductions, and questions whether a peer is there and how far it is."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.config.schema import MAX_MICROBATCHES
from muletrain.runtime.core.branches import BRANCH
from muletrain.runtime.core.messages import (
    Address,
    Digest,
    Id,
    Indices,
    Message,
    Name,
    Natural,
    Rate,
    Text,
)


class Member(Message):
    """Describes one peer of the run. ``device``: its kind. ``flops``: what it is expected to compute [FLOP/s], 0 if
    unknown. ``since``: counts up with every stage it serves; a later one replaces an earlier."""

    KIND: ClassVar[str] = "member"
    id: Id
    name: Name
    stage: Natural
    trainer: bool
    addresses: Annotated[tuple[Address, ...], Field(max_length=64), FailFast()]
    device: Text = "cpu"
    flops: Rate = 0
    since: Natural = 0
    place: Annotated[str, Field(max_length=64)] = ""
    """Where it can write checkpoints (``CheckpointStore.name``). Members with the same name share the place."""


class GetProgress(Message):
    """Call: which microbatches of this step are in your accumulator, or on their way into it? ``brief``: only whether
    you are there, and where; the answer names no microbatches."""

    KIND: ClassVar[str] = "get_progress"
    lineage: Digest
    step: Natural
    brief: bool = False


class Progress(Message):
    """The answer: how far a peer is. ``current``: it is at the lineage and step asked about, or computes them ahead. It
    is at ``step``, to which ``lineage`` led. ``rival``: it did the step asked about in another lineage.

    ``accumulated``: microbatches in its accumulator, with ``accumulated_losses`` [nats/token] (nan if unknown);
    ``in_flight``: requests it still works on; ``answering``: their answer is on its way; ``given``: what its trainer has
    given out and waits for; ``asking``: what that gives out unless somebody else has it; ``completed``: microbatches it
    knows to be through all stages, with ``losses`` [nats/token]. ``round``: the round it averages now, or holds.
    ``moved``: bytes of tensors that it sent and received in its life, so two answers tell whether it makes progress.
    """

    KIND: ClassVar[str] = "progress"
    current: bool
    step: Natural
    stage: Natural
    lineage: Annotated[bytes, Field(max_length=32)] = b""
    branch: Annotated[bytes, Field(min_length=BRANCH, max_length=BRANCH)] = bytes(BRANCH)
    """Branch of its lineage: steps of different branches are unrelated."""
    accumulated: Indices = ()
    accumulated_losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()] = ()
    in_flight: Indices = ()
    answering: Indices = ()
    given: Indices = ()
    asking: Indices = ()
    completed: Indices = ()
    losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()] = ()
    rival: bool = False
    round: Annotated[bytes, Field(max_length=32)] = b""
    moved: Natural = 0
    late: bool = False
    """Its device takes unusually long for an operation."""

    def beyond(self, step: int) -> bool:
        """Has it done ``step``, in our lineage?"""
        return self.step > step and not self.rival

    def loss(self, index: int) -> float | None:
        """Returns the loss of microbatch ``index`` [nats/token]; None if the answerer does not hold it, or does not
        know its loss."""
        known = [loss for i, loss in zip(self.accumulated, self.accumulated_losses, strict=False) if i == index]
        return known[0] if known and not math.isnan(known[0]) else None


class Suspected(Message):
    """``peer`` does not answer the sender. The receivers ask it, too, before they need it; nobody is marked down on
    hearsay."""

    KIND: ClassVar[str] = "suspected"
    lineage: Digest
    step: Natural
    peer: Id


class Introduce(Message):
    """Call to everyone that the sender knows: it serves ``member``'s stage from now on."""

    KIND: ClassVar[str] = "introduce"
    member: Member


class Acquaintances(Message):
    """The answer to an introduction: everyone that the answerer knows, itself included."""

    KIND: ClassVar[str] = "acquaintances"
    members: Annotated[tuple[Member, ...], Field(max_length=4096), FailFast()]


class WhoAreYou(Message):
    """Call to a peer that speaks to us and that we do not know. The answer is a Member."""

    KIND: ClassVar[str] = "who_are_you"
