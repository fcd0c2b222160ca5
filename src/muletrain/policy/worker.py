"""A worker of a hub's pool (``pool``): current work and speed."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.policy.deadline import Usual
from muletrain.policy.recent import Recent

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping, Sequence

    from muletrain.policy.passes import Part, Pass

LATE, FLOOR_S, UNMEASURED_S = 4.0, 0.5, 30.0
"""A part is late after this multiple of the worker's usual time, but not before ``FLOOR_S``; without any measurement,
after ``UNMEASURED_S`` [s]."""
UNKNOWN = 4
"""Workers that are enough for a server before an accumulator has come."""
MOST_OUT = 16
"""Most steps for which a worker is left out."""


@dataclass
class Standing:
    """What a server remembers of a client, in all of its sessions. ``lapses``: times in a row that its work was lost;
    ``until``: version of the weights from which on it works again. The first loss costs nothing, as machines come and
    go. After the second one the client is left out for a step, then for twice as many each time. So does a client leave
    out a server that gives no work; versions are then steps."""

    lapses: int = 0
    until: int = 0

    def lapsed(self, version: int) -> None:
        """Work with the ``version`` of the weights, or an earlier one, was lost."""
        self.lapses += 1
        if self.lapses > 1:
            self.until = version + 1 + min(MOST_OUT, 2 ** (self.lapses - 2))

    def kept(self) -> None:
        """An accumulator came whole."""
        self.lapses = 0

    def left_out(self, version: int) -> bool:
        """Is the worker left out of the steps with this ``version`` of the weights?"""
        return version < self.until


class Standings(Recent[Standing]):
    """What is remembered of each machine."""

    def __missing__(self, name: str) -> Standing:
        self[name] = found = Standing()
        return found


class Worker:
    """Speeds are measured here: what a worker says of its own speed counts for nothing."""

    def __init__(self) -> None:
        self.room = 0
        self.out: set[int] = set()
        """Numbers of the givings that have not come back, wanted or not."""
        self.reserved: deque[Part] = deque()
        """Parts that this worker should compute, because of the forward there."""
        self.late = False
        self._steps: frozenset[int] = frozenset()
        """Steps with weights here; empty: ready for any."""
        self._unit_s: dict[Pass, Usual] = {}
        """Seconds for a forward pass of a sequence, as each kind of pass says: with recomputed outputs, a backward
        takes longer than the nominal cost."""
        self._free_at = -math.inf
        """When the last part came back."""

    def make_ready(self, room: int, steps: Collection[int]) -> None:
        """The worker takes up to ``room`` parts at once, from now on also of ``steps``; (): of any."""
        self.room = room
        if steps:  # a step later, the weights of the oldest are replaced
            self._steps = frozenset(s for s in self._steps if s >= min(steps) - 1) | {*steps}

    def rest(self) -> None:
        """The worker takes nothing until ready again."""
        self.room, self._steps = 0, frozenset()

    def has(self, step: int) -> bool:
        """Are the weights of ``step`` there, once the worker is ready?"""
        return not self._steps or step in self._steps

    @property
    def ready(self) -> bool:
        return self.room > 0

    @property
    def measured(self) -> bool:
        return bool(self._unit_s)

    @property
    def speed(self) -> float:
        """Forward passes of a sequence per second; 0: unmeasured."""
        return 1 / self._usual_s() if self.measured else 0.0

    def _usual_s(self) -> float:
        """Returns the seconds for a forward pass of a sequence: kinds of passes weigh as in a microbatch."""
        return sum(p.cost * unit_s.seconds() for p, unit_s in self._unit_s.items()) / sum(p.cost for p in self._unit_s)

    def due_s(self, cost: int, slowest: float) -> float:
        """Seconds until parts of so much ``cost`` should be back. ``slowest``: speed of the slowest measured worker; 0:
        none."""
        if self.measured:
            return max(FLOOR_S, LATE * self._usual_s() * cost)
        return max(FLOOR_S, LATE * LATE * cost / slowest) if slowest else UNMEASURED_S

    def came_back(self, part: Part, since: float, now: float) -> None:
        unit_s = self._unit_s.setdefault(part.what, Usual(unmeasured_s=math.inf, floor_s=0.0, times=1.0))
        unit_s.measured(max(1e-6, now - max(since, self._free_at)) / part.cost)
        self._free_at = now


def worth_their_accumulators(work: Sequence[float], speeds: Sequence[float], handing_over_s: float) -> int:
    """Returns how many more workers, of the mean of ``speeds`` [forward passes of a sequence per second], would end the
    step sooner: workers share parts of so much ``work`` [forward passes of a sequence], and each hands an accumulator
    over, which takes ``handing_over_s``; 0: unknown, and four workers are enough. The least of work / (sum + k mean) +
    k handing_over_s."""
    if not (work and speeds):
        return 0
    together, each = sum(speeds), sum(speeds) / len(speeds)
    best = math.sqrt(sum(work) * each / handing_over_s) if handing_over_s else UNKNOWN * each
    return int(min(len(work), max(0.0, (best - together) / each)))


def server_to_move_to(speeds: Mapping[str, float], home: str, clients: int, draw: random.Random) -> str | None:
    """Returns the server to which one of the ``clients`` of ``home`` moves, of like speed; None: no move. All clients
    of a stage decide at once, so moves have the probability that makes all servers equally fast on average. A client
    moves to no server that is then faster than the current one was. ``speeds``: of each server's clients together, in
    any unit."""
    mean, own = sum(speeds.values()) / len(speeds), speeds[home] / max(1, clients)
    lacking = {server: mean - speed for server, speed in sorted(speeds.items()) if speed + own < speeds[home]}
    lacking = {server: by for server, by in lacking.items() if by > 0}
    if not lacking or draw.random() * speeds[home] >= speeds[home] - mean:
        return None
    return draw.choices([*lacking], [*lacking.values()])[0]
