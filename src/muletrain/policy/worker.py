"""A worker of a hub's pool (``pool``): what it computes now, and how fast it is."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from muletrain.policy.deadline import Usual

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping, Sequence

    from muletrain.policy.passes import Part, Pass

LATE, FLOOR_S, UNMEASURED_S = 4.0, 0.5, 30.0
"""A part is late after this multiple of the time that its worker usually takes, but not within the first of these times,
nor before any measurement within the second [s]."""
UNKNOWN = 4
"""Workers that are enough for a server before an accumulator has come."""


class Worker:
    """``hint``: forward passes of a sequence per second, by its own word."""

    def __init__(self, hint: float) -> None:
        self.hint, self.room = hint, 0
        self.out: set[int] = set()
        """Numbers of the givings that have not come back, wanted or not."""
        self.reserved: deque[Part] = deque()
        """Parts that it should compute, because it has their forward."""
        self.late = False
        self._steps: frozenset[int] = frozenset()
        """Steps whose weights it has; empty: it is ready for any."""
        self._unit_s: dict[Pass, Usual] = {}
        """Seconds for a forward pass of a sequence, as each kind of pass says: where outputs are computed again, a backward
        takes longer than its cost says."""
        self._free_at = -math.inf
        """When its last part came back."""

    def make_ready(self, room: int, hint: float, steps: Collection[int]) -> None:
        """It takes up to ``room`` parts at once, from now on also of ``steps``; (): of any."""
        self.room, self.hint = room, hint
        if steps:  # a step later, the weights of the oldest are replaced
            self._steps = frozenset(s for s in self._steps if s >= min(steps) - 1) | {*steps}

    def rest(self) -> None:
        """It takes nothing until it is ready again."""
        self.room, self._steps = 0, frozenset()

    def has(self, step: int) -> bool:
        """Has it the weights that ``step`` computes with, once it is ready?"""
        return not self._steps or step in self._steps

    @property
    def ready(self) -> bool:
        return self.room > 0

    @property
    def measured(self) -> bool:
        return bool(self._unit_s)

    @property
    def speed(self) -> float:
        """Forward passes of a sequence per second."""
        return 1 / self._usual_s() if self.measured else self.hint

    def _usual_s(self) -> float:
        """Returns the seconds for a forward pass of a sequence: kinds of passes weigh as they do in a microbatch."""
        return sum(p.cost * unit_s.seconds() for p, unit_s in self._unit_s.items()) / sum(p.cost for p in self._unit_s)

    def due_s(self, cost: int, slowest: float) -> float:
        """Seconds until it should have brought back parts of so much ``cost``. ``slowest``: speed of the slowest worker
        that was measured; 0: none was."""
        if self.measured:
            return max(FLOOR_S, LATE * self._usual_s() * cost)
        return max(FLOOR_S, LATE * LATE * cost / slowest) if slowest else UNMEASURED_S

    def came_back(self, part: Part, since: float, now: float) -> None:
        unit_s = self._unit_s.setdefault(part.what, Usual(unmeasured_s=math.inf, floor_s=0.0, times=1.0))
        unit_s.measured(max(1e-6, now - max(since, self._free_at)) / part.cost)
        self._free_at = now


def worth_their_accumulators(work: Sequence[float], speeds: Sequence[float], handing_over_s: float) -> int:
    """Returns how many more workers, of the mean of ``speeds`` [forward passes of a sequence per second], would end the step
    sooner: they share parts that are so much ``work`` [forward passes of a sequence], and each hands an accumulator over,
    which takes ``handing_over_s``; 0: it is not known, and four workers are enough. The least of
    work / (sum + k mean) + k handing_over_s. Speeds that clients made up change nothing but a number up to that of the
    parts."""
    if not (work and speeds):
        return 0
    together, each = sum(speeds), sum(speeds) / len(speeds)
    best = math.sqrt(sum(work) * each / handing_over_s) if handing_over_s else UNKNOWN * each
    return int(min(len(work), max(0.0, (best - together) / each)))


def server_to_move_to(speeds: Mapping[str, float], home: str, clients: int, draw: random.Random) -> str | None:
    """Returns the server to which one of the ``clients`` of ``home`` moves, of like speed; None: it stays. All clients of a
    stage decide at once, so as many leave a server, and come to one, on the average as make all equally fast. A client
    moves to no server that is then faster than its own one was. ``speeds``: of each server's clients together, in any
    unit."""
    mean, own = sum(speeds.values()) / len(speeds), speeds[home] / max(1, clients)
    lacking = {server: mean - speed for server, speed in sorted(speeds.items()) if speed + own < speeds[home]}
    lacking = {server: by for server, by in lacking.items() if by > 0}
    if not lacking or draw.random() * speeds[home] >= speeds[home] - mean:
        return None
    return draw.choices([*lacking], [*lacking.values()])[0]
