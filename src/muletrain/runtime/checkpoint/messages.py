"""What peers tell each other of checkpoints."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from muletrain.network.base import Channel
from muletrain.runtime.checkpoint.store import Key, PartFacts
from muletrain.runtime.core.messages import Digest, Message, Natural, Text

MAX_PART = 1 << 42
"""Bytes that a part may have where the size of its stage is not known."""


class PartReady(Message):
    """The sender has stage ``stage``'s part of the checkpoint of ``step`` steps. ``digest``: SHA-256 of the file;
    ``place``: where it wrote it, if it did."""

    KIND: ClassVar[str] = "part_ready"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    step: Natural
    lineage: Digest
    stage: Natural
    size: Natural
    digest: Digest
    place: Annotated[str, Field(max_length=64)] = ""

    @property
    def key(self) -> Key:
        return Key(self.step, self.lineage)

    @property
    def facts(self) -> PartFacts:
        return PartFacts(self.size, self.digest)


class CheckpointEnd(Message):
    """The checkpoint is complete or, for a ``reason``, never will be. ``left_out``: the sender does not write its
    stage's part; what comes of that its coordinator says."""

    KIND: ClassVar[str] = "checkpoint_end"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    step: Natural
    lineage: Digest
    reason: Text = ""
    left_out: bool = False

    @property
    def key(self) -> Key:
        return Key(self.step, self.lineage)


class AskPart(Message):
    """Call: offer a copy of this part; the answer is a Snapshot, whose manifest and blocks can be asked for."""

    KIND: ClassVar[str] = "ask_part"
    step: Natural
    lineage: Digest
    stage: Natural

    @property
    def key(self) -> Key:
        return Key(self.step, self.lineage)


def largest_part(state_bytes: int) -> int:
    """Bytes that a stage's part may have as a file: its tensors, and their names, of which layers as small as those of
    tests have a tenth as many. ``state_bytes``: 0 if not known."""
    return state_bytes + state_bytes // 4 + (1 << 20) if state_bytes else MAX_PART
