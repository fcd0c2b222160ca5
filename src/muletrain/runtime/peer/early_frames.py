"""Keeps frames of steps that this peer has not come to: others are ahead by a moment, and send nothing twice."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muletrain.network.base import Frame, PeerId

LIMIT, BYTES = 4096, 1 << 30
"""Frames that are kept, and bytes of their tensors, at most: with more than that we are far behind, and find that
out."""
NOTICES = 256
"""Frames without tensors that are kept of one sender. With tensors it is as many as this peer holds requests: with more
it would be full."""


class EarlyFrames:
    """Keeps frames in the order in which they came. No sender takes the room of others."""

    def __init__(self, capacity: int) -> None:
        """``capacity``: requests that this peer holds."""
        self._capacity = capacity
        self._frames: list[tuple[int, PeerId, Frame]] = []
        self._of: Counter[tuple[PeerId, bool]] = Counter()
        """Frames by sender, with tensors or without."""
        self._bytes = 0

    def keep(self, sender: PeerId, frame: Frame, step: int) -> None:
        """Keep a frame of ``step``, unless there are too many."""
        kind = sender, bool(frame.tensors)
        room = self._of[kind] < (self._capacity if frame.tensors else NOTICES)
        if room and len(self._frames) < LIMIT and self._bytes + _bytes(frame) <= BYTES:
            self._frames.append((step, sender, frame))
            self._of[kind] += 1
            self._bytes += _bytes(frame)

    def take(self) -> list[tuple[PeerId, Frame]]:
        """Take all frames out."""
        taken = [(sender, frame) for _, sender, frame in self._frames]
        self._keep([])
        return taken

    def forget(self, before: int) -> None:
        """Drop the frames of steps before ``before``."""
        self._keep([entry for entry in self._frames if entry[0] >= before])

    def _keep(self, kept: list[tuple[int, PeerId, Frame]]) -> None:
        self._frames, self._bytes = kept, sum(_bytes(frame) for _, _, frame in kept)
        self._of = Counter((sender, bool(frame.tensors)) for _, sender, frame in kept)


def _bytes(frame: Frame) -> int:
    return sum(t.nbytes for t in frame.tensors)
