"""Messages about single microbatches: requests to a stage, answers, and notices to trainers."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.config.schema import MAX_MICROBATCHES
from muletrain.network.base import Channel
from muletrain.runtime.core.messages import (
    Digest,
    Id,
    Indices,
    Message,
    Natural,
    Request,
    Seconds,
    Text,
)

MAX_WITHOUT = 64
"""Peers that a message can leave out."""


class Attempt(Request):
    """One attempt at one microbatch, passed from stage to stage. ``without``: peers to avoid if possible, because
    replicas do not count on their accumulators."""

    without: Annotated[tuple[Id, ...], Field(max_length=MAX_WITHOUT), FailFast()] = ()


class Forward(Attempt):
    """Inputs and targets for one stage. ``accumulate``: the stages that add this microbatch to their gradient.
    ``gradient``: the sender needs d loss / d inputs; false if the microbatch is run again for a later stage alone.
    ``unfinite``: a peer found that the microbatch does not stay finite, so inputs need not be finite, and outputs are
    passed on even if not finite. ``more``: the sender has more microbatches that wait for room in the stage."""

    KIND: ClassVar[str] = "forward"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 2
    stage: Natural
    accumulate: Annotated[tuple[Natural, ...], Field(max_length=4096), FailFast()]
    gradient: bool
    unfinite: bool = False
    more: bool = False

    @property
    def wanted(self) -> bool:
        """Should the receiver accumulate the microbatch? Otherwise this is a copy, and there may be many copies."""
        return self.stage in self.accumulate


class Backward(Request):
    """The gradient of a forward's output, back to the sender. ``busy_s``: the answering peer's own service time
    (decoding, forward, backward); ``away_s``: the rest of the time that the peer held the request (queue, later
    stages). The remainder of the sender's measured time is the way there and back."""

    KIND: ClassVar[str] = "backward"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    TENSORS: ClassVar[int] = 1
    stage: Natural
    loss: float
    busy_s: Seconds
    away_s: Seconds


class Done(Request):
    """The microbatch went through this stage and all later stages, and back where a gradient was needed: the answer to
    a sender that needs no gradient, such as a trainer."""

    KIND: ClassVar[str] = "done"
    stage: Natural
    loss: float
    busy_s: Seconds
    away_s: Seconds


class Busy(Request):
    """A forward was not admitted, since the queue is ``full``, or the receiver is already at that microbatch. The
    sender keeps the request and tries elsewhere, or later."""

    KIND: ClassVar[str] = "busy"
    stage: Natural
    full: bool


class Room(Request):
    """There is room again. ``index``: of the last forward of a sender that was refused, or has more."""

    KIND: ClassVar[str] = "room"
    stage: Natural


class Lost(Request):
    """The receiver will not finish a forward: the receiver is at an earlier step, its accumulator is sealed, the
    computation failed, or the next stage cannot be reached. ``unfinite``: the inputs or outputs are not finite."""

    KIND: ClassVar[str] = "lost"
    stage: Natural
    reason: Text
    unfinite: bool = False


class TrainerDone(Message):
    """A trainer's hint to all peers: microbatches ``indices`` of the step are through, with ``losses`` [nats/token]."""

    KIND: ClassVar[str] = "trainer_done"
    lineage: Digest
    step: Natural
    indices: Indices
    losses: Annotated[tuple[float, ...], Field(max_length=MAX_MICROBATCHES), FailFast()]


class Gap(Message):
    """Microbatches ``indices`` are in no accumulator of a stage: trainers rerun these, for that stage alone. Every
    replica sends this. ``early``: sent before all microbatches are through, after a replica died; some died with the
    replica, the rest has not reached this stage yet. ``turn``: times that this was sent without effect; each time the
    next trainer is responsible. ``without``: replicas that the sender does not count on, regardless of their
    accumulators."""

    KIND: ClassVar[str] = "gap"
    lineage: Digest
    step: Natural
    stage: Natural
    indices: Indices
    early: bool = False
    turn: Natural = 0
    without: Annotated[tuple[Id, ...], Field(max_length=MAX_WITHOUT), FailFast()] = ()
