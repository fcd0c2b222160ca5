"""Messages by which something large is offered, and taken block by block."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.network.base import Channel
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core.messages import Digest, Message, Natural, Past

MAX_RUN = 8
"""Blocks of a copy in one call."""


class AskSnapshot(Message):
    """Call to a peer of ``stage``: make a copy of the stage's state as it is before the current step, or offer one that
    is on its way to others, if it is not of a step before ``after``."""

    KIND: ClassVar[str] = "ask_snapshot"
    stage: Natural
    after: Natural = 0


class Snapshot(Message):
    """Weights and moments before ``step``. ``digest``: BLAKE3 of the copy's manifest. ``over``: no step follows.
    ``past``: lineages of the steps before, as many as are remembered."""

    KIND: ClassVar[str] = "snapshot"
    lineage: Digest
    step: Natural
    digest: Digest
    over: bool
    past: Past = ()

    @property
    def chain(self) -> Chain:
        return Chain(self.step, (*self.past, self.lineage), self.over)


class AskManifest(Message):
    """Call: the manifest of that digest, whole."""

    KIND: ClassVar[str] = "ask_manifest"
    digest: Digest


class AskBlocks(Message):
    """Call: send these blocks of the copy with that digest, as frames. The answer is empty."""

    KIND: ClassVar[str] = "ask_blocks"
    digest: Digest
    blocks: Annotated[tuple[Natural, ...], Field(max_length=MAX_RUN), FailFast()]


class Block(Message):
    """A block of a copy that its receiver asked for."""

    KIND: ClassVar[str] = "block"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    TENSORS: ClassVar[int] = 1
    digest: Digest
    block: Natural
