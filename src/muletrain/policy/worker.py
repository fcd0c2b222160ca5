"""A worker of a hub's pool (``pool``): what it computes now, and how fast it is."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from muletrain.policy.deadline import Usual

if TYPE_CHECKING:
    from muletrain.policy.passes import Part

LATE, FLOOR_S, UNMEASURED_S = 4.0, 0.5, 30.0
"""A part is late after this multiple of the time that its worker usually takes, but not within the first of these times,
nor before any measurement within the second [s]."""


class Worker:
    """``hint``: forward passes of a sequence per second, by its own word."""

    def __init__(self, hint: float) -> None:
        self.hint, self.room = hint, 0
        self.out: set[int] = set()
        """Numbers of the givings that have not come back, wanted or not."""
        self.reserved: deque[Part] = deque()
        """Parts that it should compute, because it has their forward."""
        self.late = False
        self._unit_s = Usual(unmeasured_s=math.inf, floor_s=0.0, times=1.0)
        self._free_at = -math.inf
        """When its last part came back."""
        self.measured = False

    @property
    def ready(self) -> bool:
        return self.room > 0

    @property
    def speed(self) -> float:
        """Forward passes of a sequence per second."""
        return 1 / self._unit_s.seconds() if self.measured else self.hint

    def due_s(self, cost: int, slowest: float) -> float:
        """Seconds until it should have brought back parts of so much ``cost``. ``slowest``: speed of the slowest worker
        that was measured; 0: none was."""
        if self.measured:
            return max(FLOOR_S, LATE * self._unit_s.seconds() * cost)
        return max(FLOOR_S, LATE * LATE * cost / slowest) if slowest else UNMEASURED_S

    def came_back(self, part: Part, since: float, now: float) -> None:
        self._unit_s.measured(max(1e-6, now - max(since, self._free_at)) / part.cost)
        self.measured, self._free_at = True, now
