"""Messages that offer a large copy and transfer its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import FailFast, Field

from muletrain.network.base import Channel
from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core.messages import Digest, Message, Natural, Past

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_RUN = 8
"""Most blocks that one call may ask for."""


class AskSnapshot(Message):
    """A call that asks a peer of ``stage`` for a copy of the state before the current step. If the donor is busy, an
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
    """A call that asks for ``blocks`` of the copy with that digest. The blocks come as frames; the answer is empty."""

    KIND: ClassVar[str] = "ask_blocks"
    digest: Digest
    blocks: Annotated[tuple[Natural, ...], Field(max_length=MAX_RUN), FailFast()]


class Block(Message):
    """A frame with one requested block."""

    KIND: ClassVar[str] = "block"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    TENSORS: ClassVar[int] = 1
    digest: Digest
    block: Natural


class AskBase(Message):
    """A call that asks for ``blocks`` of the part of the base (``transfer.base``) with that digest; ():
    for its manifest. The blocks come as frames; the answer is then empty."""

    KIND: ClassVar[str] = "ask_base"
    digest: Digest
    blocks: Annotated[tuple[Natural, ...], Field(max_length=MAX_RUN), FailFast()] = ()


class BaseBlock(Message):
    """A frame with one requested block of the base."""

    KIND: ClassVar[str] = "base_block"
    CHANNEL: ClassVar[Channel] = Channel.BULK
    TENSORS: ClassVar[int] = 1
    digest: Digest
    block: Natural


class Shared(Message):
    """Names the tokens in the welcome of a run that shares its tokens. ``digest``: BLAKE3 of the manifest; ``size``: of
    all tokens [bytes]; ``width``: of one token [bytes]. ``heldout``: SHA-256 of the held-out side, which is not shared,
    but gives ``Genesis.data`` together with the tokens."""

    KIND: ClassVar[str] = "shared"
    digest: Digest
    size: Annotated[int, Field(gt=0, lt=1 << 44)]
    width: Annotated[int, Field(ge=2, le=4, multiple_of=2)]
    heldout: Digest

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[npt.NBitBase]]:
        """Dtype of the file's numbers."""
        return np.dtype(f"<u{self.width}")
