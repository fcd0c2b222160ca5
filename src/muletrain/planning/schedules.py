"""GPipe and 1F1B: who does what in which order, and how long that takes where stages and links are unequal.

A schedule is one order of tasks a stage (GPipe: Huang et al. 2019, sec. 2.3; 1F1B: PipeDream, Narayanan et al. 2019,
sec. 3.2, here with a flush at the end of each step): ``gpipe`` and ``one_f_one_b``, which the baselines of the papers
play to the letter (``papers.baselines``). What trains (``runtime.microbatch.stage_server``) waits for no task that
could be done now, and its last stage computes forward and backward of a microbatch in one go, so ``play`` does the
same: GPipe does forward before backward where both wait, 1F1B backward before forward, with no more microbatches in
between than the order would have. Each stage has the three slots of DT-FM sec. 3.5: it receives, computes and sends at
the same time.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from muletrain.strategies.pipeline import in_flight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.strategies.pipeline import Schedule

Kind = Literal["forward", "backward"]
Task = tuple[Kind, int]
"""What, and of which microbatch."""
PLAYED = 128
"""Microbatches that are played (four times the stages, if that is more); beyond, each takes as long as those of the
second half did on average."""


@dataclass(frozen=True)
class Station:
    """One stage of one pipeline [s]: what it computes for a microbatch, and what its transfers take: activations to the
    next stage (``on``), gradients to the stage before (``back``). ``on_s``: on the path there, which carries one after
    the other; ``on_delay_s`` beyond that. ``on_up_s``: of this machine's uplink, ``on_down_s``: of the receiver's
    downlink, which all that they carry shares."""

    forward_s: float
    backward_s: float
    on_s: float = 0.0
    on_delay_s: float = 0.0
    back_s: float = 0.0
    back_delay_s: float = 0.0
    on_up_s: float = 0.0
    on_down_s: float = 0.0
    back_up_s: float = 0.0
    back_down_s: float = 0.0

    @property
    def unlinked(self) -> Station:
        """With links that take no time."""
        return Station(self.forward_s, self.backward_s)

    def slowed(self, by: float) -> Station:
        """The machine is busy with something else, too; paths are not."""
        return replace(
            self,
            forward_s=by * self.forward_s,
            backward_s=by * self.backward_s,
            on_up_s=by * self.on_up_s,
            back_up_s=by * self.back_up_s,
        )

    @property
    def busy_s(self) -> float:
        """Of a microbatch, whichever slot has most to do."""
        return max(self.forward_s + self.backward_s, self.on_s, self.back_s, self.on_up_s + self.back_up_s)


def gpipe(stages: int, microbatches: int) -> list[list[Task]]:
    """All forward passes, then all backward passes, the last microbatch's first."""
    forward: list[Task] = [("forward", m) for m in range(microbatches)]
    backward: list[Task] = [("backward", m) for m in reversed(range(microbatches))]
    return [forward + backward for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Task]]:
    """Stage s begins with as many forward passes as there are stages from it to the end, then one backward for each
    forward."""
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, microbatches)
        order: list[Task] = [("forward", m) for m in range(ahead)]
        for m in range(microbatches):
            order.append(("backward", m))
            if m + ahead < microbatches:
                order.append(("forward", m + ahead))
        orders.append(order)
    return orders


ORDERS = {"gpipe": gpipe, "1f1b": one_f_one_b}
FIRST: dict[Schedule, tuple[Kind, Kind]] = {"gpipe": ("forward", "backward"), "1f1b": ("backward", "forward")}
"""What a stage does first, of what waits."""


@lru_cache(maxsize=512)
def pass_s(schedule: Schedule, stations: tuple[Station, ...], microbatches: int) -> float:
    """Until the last stage is done with its last task [s]; of many microbatches (``PLAYED``) the rest is
    extrapolated."""
    played = max(PLAYED, 4 * len(stations))
    if microbatches <= played:
        return play(schedule, stations, microbatches)
    half_s, played_s = (pass_s(schedule, stations, n) for n in (played // 2, played))
    return played_s + (microbatches - played) * (played_s - half_s) / (played - played // 2)


def play(schedule: Schedule, stations: Sequence[Station], microbatches: int) -> float:
    """Until the last stage is done with its last task [s]. Transfers take turns in the order in which they were
    computed."""
    return _Play(schedule, stations, microbatches).run()


class _Play:
    """Of one step of one pipeline."""

    def __init__(self, schedule: Schedule, stations: Sequence[Station], microbatches: int) -> None:
        self._stations, self._last, self._first = stations, len(stations) - 1, FIRST[schedule]
        self._room = [in_flight(schedule, len(stations), s, microbatches) for s in range(len(stations))]
        """Microbatches whose forward may begin before the backward of another is through."""
        self._room[-1] = microbatches  # it does both at once
        self._waiting: list[dict[Kind, deque[int]]] = [{"forward": deque(), "backward": deque()} for _ in stations]
        self._waiting[0]["forward"].extend(range(microbatches))
        self._free = {name: [0.0] * len(stations) for name in ("forward", "backward", "up", "down")}
        """When paths (by what they carry, and sender), uplinks and downlinks are free again."""
        self._computing = [False] * len(stations)
        self._events: list[tuple[float, bool, int, Kind, int]] = []
        """(when, is it computed? else it arrives, where, what, microbatch)"""

    def run(self) -> float:
        now_s = 0.0
        self._begin(now_s, 0)
        while self._events:
            now_s, touched = self._events[0][0], set[int]()
            while self._events and self._events[0][0] == now_s:  # all of that moment, before anything is chosen
                _, computed, stage, kind, microbatch = heapq.heappop(self._events)
                touched.add(stage)
                if computed:
                    self._done(now_s, stage, kind, microbatch)
                else:
                    self._waiting[stage][kind].append(microbatch)
            for stage in sorted(touched):
                self._begin(now_s, stage)
        return now_s

    def _begin(self, now_s: float, stage: int) -> None:
        if self._computing[stage]:
            return
        for kind in self._first:
            if self._waiting[stage][kind] and (kind == "backward" or self._room[stage]):
                self._computing[stage] = True
                self._room[stage] -= kind == "forward"
                end_s = now_s + self._takes_s(stage, kind)
                heapq.heappush(self._events, (end_s, True, stage, kind, self._waiting[stage][kind].popleft()))
                return

    def _takes_s(self, stage: int, kind: Kind) -> float:
        here = self._stations[stage]
        if stage == self._last:
            return here.forward_s + here.backward_s
        return here.forward_s if kind == "forward" else here.backward_s

    def _done(self, now_s: float, stage: int, kind: Kind, microbatch: int) -> None:
        self._computing[stage] = False
        if kind == "forward" and stage < self._last:
            self._send(now_s, stage, stage + 1, "forward", microbatch)
            return
        self._room[stage] += 1
        if stage:
            self._send(now_s, stage, stage - 1, "backward", microbatch)

    def _send(self, now_s: float, stage: int, receiver: int, kind: Kind, microbatch: int) -> None:
        """As ``network.shaped`` does: a slow path leaves the uplink to others; a downlink takes no time for what comes
        alone."""
        s, on = self._stations[stage], kind == "forward"
        path_s, delay_s, up_s, down_s = (
            (s.on_s, s.on_delay_s, s.on_up_s, s.on_down_s)
            if on
            else (s.back_s, s.back_delay_s, s.back_up_s, s.back_down_s)
        )
        free = self._free
        free[kind][stage] = max(now_s, free[kind][stage]) + path_s
        free["up"][stage] = max(now_s, free["up"][stage]) + up_s
        came_s = max(free[kind][stage], free["up"][stage]) + delay_s
        free["down"][receiver] = came_s = max(came_s - down_s, free["down"][receiver]) + down_s
        heapq.heappush(self._events, (came_s, False, receiver, kind, microbatch))


def unlinked(stations: Sequence[Station]) -> tuple[Station, ...]:
    return tuple(s.unlinked for s in stations)
