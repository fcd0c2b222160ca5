"""A peer measures its own work: times, bytes, and whether its device makes progress."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.policy.deadline import Pulse

if TYPE_CHECKING:
    from muletrain.events import TrafficClass, Validated

PULSE = 16.0
"""A peer is making progress if its last pass ended within this many usual intervals."""


class DeviceHung(MuletrainError):
    """An operation of the device does not return."""


@dataclass
class StepStats:
    """Counts since the last applied step. Each counter has one writer: ``StageServer`` writes forward, backward and
    services, ``Context.send`` bytes, and room ``step`` averaging and applying."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    averaging_s: float = 0.0
    apply_s: float = 0.0
    started: float = 0.0
    services: list[float] = field(default_factory=list)
    """Forward plus backward of each microbatch [s]."""
    sent: defaultdict[str, Counter[TrafficClass]] = field(default_factory=lambda: defaultdict(Counter))
    """Bytes, by receiver and class of traffic."""


class Meter:
    """The measurements of one peer."""

    def __init__(self) -> None:
        self.stats = StepStats()
        self.pulse = Pulse(PULSE)
        """Ends of the peer's forward and backward passes; written by ``StageServer``."""
        self.late = ""
        """Names the device operation that takes unusually long, and the remedy; written by ``Watchdog``."""
        self.validated: Validated | None = None
        """The held-out loss measured last by this peer; written by ``Validator``."""
        self.works = asyncio.Event()
        """Cleared by ``Watchdog`` while an operation takes so long that no peer should count on this peer."""
        self.works.set()
        self.absences = 0
        """Times that this peer or its device stood still, so that other peers may have believed this peer dead;
        ``Watchdog`` counts."""

    def begin(self, now_s: float) -> None:
        """Begin new counts."""
        self.stats = StepStats(started=now_s)
