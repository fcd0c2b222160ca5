"""Messages that offer a large copy; ``core.blocks`` transfers its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field

from muletrain.policy.fork_choice import Chain
from muletrain.runtime.core.messages import Call, Digest, Header, Natural, Past

if TYPE_CHECKING:
    import numpy.typing as npt


class Snapshot(Header):
    """An offer of the weights and moments before ``step``. ``digest``: BLAKE3 of the copy's manifest. ``over``: no step
    follows. ``past``: lineages of the steps before, as many as are remembered."""

    lineage: Digest
    step: Natural
    digest: Digest
    over: bool
    past: Past = ()

    @property
    def chain(self) -> Chain:
        """The history that led to this state."""
        return Chain(self.step, (*self.past, self.lineage), self.over)


class AskSnapshot(Call[Snapshot]):
    """Asks a peer of ``stage`` for a copy of the state before the current step. If the donor is busy, an
    existing copy of step ``after`` or later will do."""

    KIND: ClassVar[str] = "ask_snapshot"
    stage: Natural
    after: Natural = 0


class Shared(Header):
    """Names the tokens in the welcome of a run that shares its tokens. ``digest``: BLAKE3 of the manifest; ``size``: of
    all tokens [bytes]; ``width``: of one token [bytes]. ``heldout``: SHA-256 of the held-out side, which is not shared,
    but gives ``Genesis.data`` together with the tokens."""

    digest: Digest
    size: Annotated[int, Field(gt=0, lt=1 << 44)]
    width: Annotated[int, Field(ge=2, le=4, multiple_of=2)]
    heldout: Digest

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[npt.NBitBase]]:
        """Dtype of the file's numbers."""
        return np.dtype(f"<u{self.width}")
