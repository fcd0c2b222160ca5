"""Messages about participation: introductions, and questions about a peer's presence and progress."""

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
    """Describes one peer of the run. ``device``: kind. ``flops``: expected speed [FLOP/s], 0 if unknown. ``since``:
    counts served stages; a later description replaces an earlier."""

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
    """Place where the peer can write checkpoints (``CheckpointStore.name``), shared by members with the same name."""


class GetProgress(Message):
    """Call: which microbatches of this step are in your accumulator, or on the way there? ``brief``: ask only for
    presence and step; the answer names no microbatches."""

    KIND: ClassVar[str] = "get_progress"
    lineage: Digest
    step: Natural
    brief: bool = False


class Progress(Message):
    """The answer: a peer's progress. ``current``: the peer is at the requested lineage and step, or computes them
    ahead. The peer is at ``step``, to which ``lineage`` led. ``rival``: the peer did the requested step in another
    lineage.

    ``accumulated``: microbatches in the accumulator, with ``accumulated_losses`` [nats/token] (nan if unknown);
    ``in_flight``: requests in work; ``answering``: requests with an answer on the way; ``given``: microbatches that the
    peer's trainer gave out and waits for; ``asking``: microbatches to give out unless found elsewhere; ``completed``:
    microbatches known to be through all stages, with ``losses`` [nats/token]. ``round``: the present or held round of
    averaging. ``moved``: bytes of tensors sent and received in total, so that two answers show progress.
    """

    KIND: ClassVar[str] = "progress"
    current: bool
    step: Natural
    stage: Natural
    lineage: Annotated[bytes, Field(max_length=32)] = b""
    branch: Annotated[bytes, Field(min_length=BRANCH, max_length=BRANCH)] = bytes(BRANCH)
    """Branch of the peer's lineage: steps of different branches are unrelated."""
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
    """The peer's device takes unusually long for an operation."""

    def beyond(self, step: int) -> bool:
        """Has the peer done ``step``, in our lineage?"""
        return self.step > step and not self.rival

    def loss(self, index: int) -> float | None:
        """Returns the loss of microbatch ``index`` [nats/token]; None if the peer does not hold the microbatch, or does
        not know its loss."""
        known = [loss for i, loss in zip(self.accumulated, self.accumulated_losses, strict=False) if i == index]
        return known[0] if known and not math.isnan(known[0]) else None


class Suspected(Message):
    """``peer`` does not answer the sender. The receivers ask ``peer``, too, before any need; no peer is marked down on
    hearsay."""

    KIND: ClassVar[str] = "suspected"
    lineage: Digest
    step: Natural
    peer: Id


class Introduce(Message):
    """Call to all peers that the sender knows: the sender serves ``member``'s stage from now on."""

    KIND: ClassVar[str] = "introduce"
    member: Member


class Acquaintances(Message):
    """The answer to an introduction: all peers known to the answering peer, itself included."""

    KIND: ClassVar[str] = "acquaintances"
    members: Annotated[tuple[Member, ...], Field(max_length=4096), FailFast()]


class WhoAreYou(Message):
    """Call to an unknown peer that has sent a message. The answer is a Member."""

    KIND: ClassVar[str] = "who_are_you"
