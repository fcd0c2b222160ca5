"""Messages about participation: introductions, and questions about a peer's presence and progress."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.runtime.core.messages import (
    Address,
    Digest,
    Id,
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


class Suspected(Message):
    """``peer`` does not answer the sender. The receivers ask ``peer``, too, before any need; no peer is marked down on
    hearsay. As a call, about a replica of the sender: the answer is empty unless the receiver counts on ``peer``."""

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
