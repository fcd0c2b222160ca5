"""Delays and damage of messages between the peers of a virtual world."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from muletrain.wire.frame import frame_size

if TYPE_CHECKING:
    from muletrain.network.base import Channel, PeerId
    from muletrain.wire.frame import Frame


class Conditions:
    """Delays and damage of messages. This base class is calm: no time passes and nothing is damaged; subclasses
    differ."""

    def delay_s(self, sender: PeerId, receiver: PeerId) -> float:
        """How long the next message takes. Order within a stream still holds. On narrow links, queried once per
        connection."""
        return 0.0

    def stall_s(self, sender: PeerId, receiver: PeerId, channel: Channel) -> float:
        """How much longer the next frame of a stream takes: later frames wait, the remaining streams overtake."""
        return 0.0

    def path_bytes_per_s(self, sender: PeerId, receiver: PeerId) -> float:
        """Bandwidth of the path between two machines' own links."""
        return math.inf

    def weight(self, sender: PeerId, frame: Frame) -> int:
        """Bytes that a frame counts for."""
        return frame_size(frame)

    def sending(self, sender: PeerId, kind: str) -> None:
        """Called before each frame to another peer; may kill the sender."""

    def damage(self, sender: PeerId, receiver: PeerId, packed: bytes) -> bytes:
        """The frame that arrives for ``packed``."""
        return packed
