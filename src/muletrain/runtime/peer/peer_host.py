"""A peer reports steps to its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.runtime.members.machine import Machine

if TYPE_CHECKING:
    from muletrain.events import Event
    from muletrain.runtime.step.record import StepRecord


class PeerHost(Machine):
    """The process of one peer. This base class ignores reports."""

    def applied(self, record: StepRecord) -> bool:
        """The peer applied a step. Returns True to end the run after that step."""
        return False

    def reported(self, event: Event, name: str) -> None:
        """The peer ``name``, on another machine, counted ``event``; only the coordinator's host gets this call."""
