"""Messages about checkpoints."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from muletrain.network.base import Channel
from muletrain.runtime.checkpoint.store import Key, PartFacts
from muletrain.runtime.core.messages import Digest, Message, Natural, Text

MAX_PART = 1 << 42
"""Largest part [bytes] if the stage's size is not known."""


class OfCheckpoint(Message):
    """Base of the messages about one checkpoint, of ``step`` steps; ``lineage``: of the next step."""

    CHANNEL: ClassVar[Channel] = Channel.BULK
    step: Natural
    lineage: Digest

    @property
    def key(self) -> Key:
        """The checkpoint."""
        return Key(self.step, self.lineage)


class PartReady(OfCheckpoint):
    """The sender has ``stage``'s part of the checkpoint. ``digest``: SHA-256 of the file; ``place``: the name of the place
    where the part is written, if any."""

    KIND: ClassVar[str] = "part_ready"
    stage: Natural
    size: Natural
    digest: Digest
    place: Annotated[str, Field(max_length=64)] = ""

    @property
    def facts(self) -> PartFacts:
        """Size and digest of the part."""
        return PartFacts(self.size, self.digest)


class CheckpointEnd(OfCheckpoint):
    """The checkpoint is complete or, for a ``reason``, will never be complete. ``left_out``: only the sender's part is
    missing, and the coordinator decides."""

    KIND: ClassVar[str] = "checkpoint_end"
    reason: Text = ""
    left_out: bool = False


def largest_part(state_bytes: int) -> int:
    """Largest file of a stage's part [bytes]: the tensors, and the names, which may need a tenth as much in tiny
    models. ``state_bytes``: 0 if not known."""
    return state_bytes + state_bytes // 4 + (1 << 20) if state_bytes else MAX_PART
