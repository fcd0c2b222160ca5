"""Messages about single microbatches: requests to a stage, answers, and notices to trainers."""

from __future__ import annotations

from enum import StrEnum
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
    """The answer to a forward: the microbatch went through this stage and all later stages, and back where a gradient was
    needed. With the gradient of the forward's output, unless the sender needs none, as a trainer. ``busy_s``: the
    answering peer's own service time (decoding, forward, backward); ``away_s``: the rest of the time that the peer held
    the request (queue, later stages). The remainder of the sender's measured time is the way there and back."""

    KIND: ClassVar[str] = "backward"
    CHANNEL: ClassVar[Channel] = Channel.PIPE
    MORE: ClassVar[int] = 1
    stage: Natural
    loss: float
    busy_s: Seconds
    away_s: Seconds


class Why(StrEnum):
    """Why a peer does not answer a forward."""

    GONE = "gone"
    """The peer lives, but will not finish the request: the peer is at an earlier step, its accumulator is sealed, the
    computation failed, or the next stage cannot be reached."""
    UNFINITE = "unfinite"
    """The peer found that the microbatch does not stay finite."""
    FULL = "full"
    """The peer has no room now."""
    AT_IT = "at_it"
    """The peer is already at the microbatch."""


class Lost(Request):
    """The receiver of a forward did not admit the forward, or will not finish it. The sender keeps the request and tries
    elsewhere, or later."""

    KIND: ClassVar[str] = "lost"
    stage: Natural
    why: Why
    reason: Text = ""


class Room(Request):
    """There is room again. ``index``: of the last forward of a sender that was refused, or has more."""

    KIND: ClassVar[str] = "room"
    stage: Natural


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
