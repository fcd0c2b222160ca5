"""The stash keeps microbatches between forward and backward, within a budget of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.compute.base import Microbatch

Checkpointing = Literal["auto", "always", "never"]


@dataclass
class Kept:
    """One microbatch. ``output`` has the autograd graph if stashed; None: backward recomputes ``output`` from
    ``inputs``."""

    inputs: Tensor
    output: Tensor | None
    shape: tuple[int, ...]
    """The output's."""


class Stash:
    """Owns the stashed entries, by microbatch. Only the event loop's thread uses the stash, so there is no lock."""

    def __init__(self, checkpointing: Checkpointing, budget: int, token_bytes: int) -> None:
        """``budget`` [bytes] bounds the graphs kept under 'auto'; ``token_bytes``: size of the graph of one token."""
        self._checkpointing, self._budget, self._token_bytes = checkpointing, budget, token_bytes
        self._kept: dict[Microbatch, tuple[Kept, int]] = {}
        self._used = 0

    def reserve(self, tokens: int) -> int:
        """Take room for the graph of a microbatch [bytes]; 0: recompute it."""
        size = 0 if self._checkpointing == "always" else tokens * self._token_bytes
        if self._checkpointing == "auto" and self._used + size > self._budget:
            return 0
        self._used += size
        return size

    def release(self, reserved: int) -> None:
        """Give room back."""
        self._used -= reserved

    def put(self, mb: Microbatch, kept: Kept, reserved: int) -> None:
        """Keep ``kept``, which has ``reserved`` bytes, in place of the previous entry of ``mb``."""
        self.discard(mb)
        self._kept[mb] = kept, reserved

    def shape(self, mb: Microbatch) -> tuple[int, ...]:
        """Shape of the output. Raises KeyError when nothing is kept."""
        return self._kept[mb][0].shape

    def pop(self, mb: Microbatch) -> tuple[Kept, int]:
        """The entry, and the bytes to ``release`` after use."""
        return self._kept.pop(mb)

    def discard(self, mb: Microbatch) -> None:
        """Forget ``mb``."""
        if mb in self._kept:
            self.release(self._kept.pop(mb)[1])

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._used = 0
