"""Frames of steps that this peer has not come to: others are ahead of it by a moment, and their frames are not sent twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muletrain.network.base import Frame, PeerId

LIMIT = 4096
BYTES = 1 << 30
"""Frames that are kept, and the bytes of their tensors: with more than that we are far behind, and find that out."""


class Early:
    """In the order in which they came."""

    def __init__(self) -> None:
        self._frames: list[tuple[int, PeerId, Frame]] = []
        self._bytes = 0

    def keep(self, sender: PeerId, frame: Frame, step: int) -> None:
        """A frame of ``step``, as its header was read; unless there are too many of them."""
        if len(self._frames) < LIMIT and self._bytes < BYTES:
            self._frames.append((step, sender, frame))
            self._bytes += _bytes(frame)

    def take(self) -> list[tuple[PeerId, Frame]]:
        """All of them; none is left."""
        taken = [(sender, frame) for _, sender, frame in self._frames]
        self._frames, self._bytes = [], 0
        return taken

    def forget(self, before: int) -> None:
        """Those of the steps before ``before``."""
        kept = [entry for entry in self._frames if entry[0] >= before]
        self._frames, self._bytes = kept, sum(_bytes(frame) for _, _, frame in kept)


def _bytes(frame: Frame) -> int:
    return sum(t.nbytes for t in frame.tensors)
