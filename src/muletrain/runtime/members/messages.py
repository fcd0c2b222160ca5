"""Messages about participation: introductions, and questions about a peer's presence and progress."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.runtime.core.messages import (
    Call,
    Digest,
    Header,
    Id,
    Message,
    Name,
    Natural,
    Rate,
    Text,
)


class Member(Header):
    """Describes one peer of the run. ``device``: kind. ``flops``: expected speed [FLOP/s], 0 if unknown. ``since``:
    counts served stages; a later description replaces an earlier."""

    id: Id
    name: Name
    stage: Natural
    trainer: bool
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


class Acquaintances(Header):
    """The answer to an introduction: all peers known to the answering peer, itself included. ``comes``: the answering
    peer has no state yet."""

    members: Annotated[tuple[Member, ...], Field(max_length=4096), FailFast()]
    comes: bool = False


class Introduce(Call[Acquaintances]):
    """The sender serves ``member``'s stage from now on. None: the receiver, unknown to the sender, has sent a message;
    the answer names the receiver alone."""

    KIND: ClassVar[str] = "introduce"
    member: Member | None = None
