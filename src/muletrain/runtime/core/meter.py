"""What a peer measures of itself."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.policy.deadline import Pulse

if TYPE_CHECKING:
    from muletrain.events import TrafficClass

PULSE = 16.0
"""Of its own microbatches, in times that it usually takes from one to the next: a peer that does one more within that
is not held up."""


@dataclass
class StepStats:
    """Counted where it happens, since the last applied step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    averaging_s: float = 0.0
    apply_s: float = 0.0
    started: float = 0.0
    services: list[float] = field(default_factory=list)
    """Forward and backward of each [s]."""
    sent: defaultdict[str, Counter[TrafficClass]] = field(default_factory=lambda: defaultdict(Counter))
    """Bytes, by receiver."""


class Meter:
    """Of one peer."""

    def __init__(self) -> None:
        self.stats = StepStats()
        self.pulse = Pulse(PULSE)
        """Of its forward and backward passes."""
        self.late = False
        """Its device is at something for unusually long (``members.watchdog``)."""
        self.works = asyncio.Event()
        """Cleared while it is for so long that nobody is to count on this peer."""
        self.works.set()

    def begin(self, now_s: float) -> None:
        """Count anew."""
        self.stats = StepStats(started=now_s)
