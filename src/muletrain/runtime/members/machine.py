"""A peer asks its machine about memory."""

from __future__ import annotations


class Machine:
    """The machine of one peer. This base class has memory for every stage."""

    def fits(self, stage: int) -> bool:
        """Does the memory of this machine have room for ``stage``?"""
        return True

    def prepares_s(self, stage: int) -> float:
        """About how many seconds ``prepare`` takes; 0: nothing lacks."""
        return 0.0

    async def prepare(self, stage: int) -> None:
        """Fetch what ``stage`` needs beside its state. Raises MuletrainError."""

    def memory(self) -> int:
        """Memory that the process has now, of its device [bytes]; 0: unknown."""
        return 0
