"""What a virtual world does to the messages between its peers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from muletrain.wire.frame import frame_size

if TYPE_CHECKING:
    from muletrain.network.base import Channel, PeerId
    from muletrain.wire.frame import Frame


class Conditions:
    """What a world does to messages. These are calm: no time passes and nothing is damaged; subclasses differ."""

    def delay_s(self, sender: PeerId, receiver: PeerId) -> float:
        """How long the next message takes. Order within a stream holds all the same. On narrow links it is asked once
        per connection."""
        return 0.0

    def stall_s(self, sender: PeerId, receiver: PeerId, channel: Channel) -> float:
        """How much longer the next frame of a stream takes: later ones wait for it, other streams overtake."""
        return 0.0

    def path_bytes_per_s(self, sender: PeerId, receiver: PeerId) -> float:
        """Bandwidth of the path between two machines' own links."""
        return math.inf

    def weight(self, sender: PeerId, frame: Frame) -> int:
        """Bytes that a frame counts for."""
        return frame_size(frame)

    def sending(self, sender: PeerId, kind: str) -> None:
        """Called before each frame to another peer; it may kill the sender."""

    def damage(self, sender: PeerId, receiver: PeerId, packed: bytes) -> bytes:
        """The frame that arrives for ``packed``."""
        return packed
