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
        self._frames: list[tuple[PeerId, Frame]] = []
        self._bytes = 0

    def keep(self, sender: PeerId, frame: Frame) -> None:
        """Unless there are too many of them."""
        if len(self._frames) < LIMIT and self._bytes < BYTES:
            self._frames.append((sender, frame))
            self._bytes += _bytes(frame)

    def take(self) -> list[tuple[PeerId, Frame]]:
        """All of them; none is left."""
        taken, self._frames, self._bytes = self._frames, [], 0
        return taken

    def forget(self, before: int) -> None:
        """Those of the steps before ``before``."""
        for sender, frame in self.take():
            if frame.header.get("step", 0) >= before:
                self.keep(sender, frame)


def _bytes(frame: Frame) -> int:
    return sum(t.nbytes for t in frame.tensors)
