"""A peer asks its process about memory, and reports steps to the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muletrain.events import Event
    from muletrain.runtime.step.record import StepRecord


class PeerHost:
    """The process of one peer. This base class has memory for every stage, and ignores reports."""

    def fits(self, stage: int) -> bool:
        """Does the memory of this machine have room for ``stage``?"""
        return True

    def prepares_s(self, stage: int) -> float:
        """See ``members.rebalancing.Mover``."""
        return 0.0

    async def prepare(self, stage: int) -> None:
        """See ``members.rebalancing.Mover``."""

    def memory(self) -> int:
        """Memory that the process has now, of its device [bytes]; 0: unknown."""
        return 0

    def applied(self, record: StepRecord) -> bool:
        """The peer applied a step. Returns True to end the run after that step."""
        return False

    def reported(self, event: Event, name: str) -> None:
        """The peer ``name``, on another machine, counted ``event``; only the coordinator's host gets this call."""
