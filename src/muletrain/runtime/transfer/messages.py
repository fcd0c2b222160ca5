"""Messages that offer a large copy and transfer its blocks."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import FailFast, Field

from muletrain.network.base import Channel
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core.messages import Digest, Message, Natural, Past

MAX_RUN = 8
"""Blocks that one call may ask for."""


class AskSnapshot(Message):
    """A call that asks a peer of ``stage`` for a copy of its state before the current step. If the donor is busy, an
    existing copy of step ``after`` or later will do."""

    KIND: ClassVar[str] = "ask_snapshot"
    stage: Natural
    after: Natural = 0


class Snapshot(Message):
    """An offer of the weights and moments before ``step``. ``digest``: BLAKE3 of the copy's manifest. ``over``: no step
    follows. ``past``: lineages of the steps before, as many as are remembered."""

    KIND: ClassVar[str] = "snapshot"
    lineage: Digest
    step: Natural
    digest: Digest
    over: bool
    past: Past = ()

    @property
    def chain(self) -> Chain:
        """The history that led to this state."""
        return Chain(self.step, (*self.past, self.lineage), self.over)


class AskManifest(Message):
    """A call that asks for the manifest with that digest."""

    KIND: ClassVar[str] = "ask_manifest"
    digest: Digest


class AskBlocks(Message):
    """A call that asks for these blocks of the copy with that digest. They come as frames; the answer is empty."""

    KIND: ClassVar[str] = "ask_blocks"
    digest: Digest
    blocks: Annotated[tuple[Natural, ...], Field(max_length=MAX_RUN), FailFast()]


class Block(Message):
    """A frame with one block that its receiver asked for."""

    KIND: ClassVar[str] = "block"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    TENSORS: ClassVar[int] = 1
    digest: Digest
    block: Natural
