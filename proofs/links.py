"""The links of a scenario's world: delays, stalls, and frames that come damaged."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from muletrain.network.memory import Conditions
from muletrain.wire.frame import frame_size
from proofs.scenario import STALL_S

if TYPE_CHECKING:
    from muletrain.network.base import Channel, PeerId
    from muletrain.wire.frame import Frame
    from proofs.scenario import Scenario


class Links(Conditions):
    """Draws what happens to messages from the scenario's seed."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._rng = scenario, random.Random(f"world/{scenario.seed}")
        self.damaging: set[PeerId] = set()
        """Peers whose next frame comes damaged."""

    def delay_s(self, sender: PeerId, receiver: PeerId) -> float:
        return self._rng.uniform(0.3, 1.0) * self._scenario.delay_s

    def stall_s(self, sender: PeerId, receiver: PeerId, channel: Channel) -> float:
        stalls = self._scenario.stalls
        return self._rng.random() * STALL_S if stalls and self._rng.random() < stalls else 0.0

    def weight(self, sender: PeerId, frame: Frame) -> int:
        return frame_size(frame) + int((self._scenario.weight - 1.0) * sum(t.nbytes for t in frame.tensors))

    def damage(self, sender: PeerId, receiver: PeerId, packed: bytes) -> bytes:
        """Flip a bit in the prefix of a damaging peer's next frame, where libp2p's encryption would notice."""
        if sender not in self.damaging:
            return packed
        self.damaging.discard(sender)
        return bytes([packed[0] ^ 1]) + packed[1:]
