"""GPipe and 1F1B: who does what in which order, and how long that takes where stages and links are unequal.

A schedule is one order of tasks a stage (GPipe: Huang et al. 2019, sec. 2.3; 1F1B: PipeDream, Narayanan et al. 2019, sec. 3.2, here with
a flush at the end of each step). ``play`` gives each stage the three slots of DT-FM sec. 3.5: it receives, computes and sends at the same
time, each slot one thing after another. (The baselines of the papers, whose sends block, are in ``papers.baselines``.)
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["forward", "backward"]
Task = tuple[Kind, int]
"""What, and of which microbatch."""
Schedule = Literal["gpipe", "1f1b"]
PLAYED = 128
"""Microbatches that are played (four times the stages, if that is more); beyond, each takes as long as those of the second half did on
average."""


@dataclass(frozen=True)
class Station:
    """One stage of one pipeline [s]: what it computes for a microbatch, and its links. ``on_s``: activations to the next stage, without
    ``on_delay_s``; ``back_s``: their gradients to the stage before."""

    forward_s: float
    backward_s: float
    on_s: float = 0.0
    on_delay_s: float = 0.0
    back_s: float = 0.0
    back_delay_s: float = 0.0

    @property
    def unlinked(self) -> Station:
        """With links that take no time."""
        return Station(self.forward_s, self.backward_s)

    @property
    def busy_s(self) -> float:
        """Of a microbatch, whichever slot has most to do."""
        return max(self.forward_s + self.backward_s, self.on_s + self.back_s)


def gpipe(stages: int, microbatches: int) -> list[list[Task]]:
    """All forward passes, then all backward passes, the last microbatch's first."""
    forward: list[Task] = [("forward", m) for m in range(microbatches)]
    backward: list[Task] = [("backward", m) for m in reversed(range(microbatches))]
    return [forward + backward for _ in range(stages)]


def one_f_one_b(stages: int, microbatches: int) -> list[list[Task]]:
    """Stage s begins with as many forward passes as there are stages from it to the end, then one backward for each forward."""
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


def in_flight(schedule: Schedule, stages: int, stage: int, microbatches: int) -> int:
    """Microbatches whose backward a stage owes at most at once."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


@lru_cache(maxsize=512)
def pass_s(schedule: Schedule, stations: tuple[Station, ...], microbatches: int) -> float:
    """Until the last stage is done with its last task [s]; of many microbatches (``PLAYED``) the rest is extrapolated."""
    played = max(PLAYED, 4 * len(stations))
    if microbatches <= played:
        return play(ORDERS[schedule](len(stations), microbatches), stations)
    half_s, played_s = (pass_s(schedule, stations, n) for n in (played // 2, played))
    return played_s + (microbatches - played) * (played_s - half_s) / (played - played // 2)


def play(orders: Sequence[Sequence[Task]], stations: Sequence[Station]) -> float:
    """Until the last stage is done with its last task [s]. Transfers take turns in the order in which they were computed."""
    stages = len(orders)
    done, free_s, sends_s, receives_s = [0] * stages, [0.0] * stages, [0.0] * stages, [0.0] * stages
    computing = [False] * stages
    arrived: dict[tuple[int, Kind, int], float] = {(0, "forward", m): 0.0 for _, m in orders[0]}
    arrived |= {(stages - 1, "backward", m): 0.0 for _, m in orders[-1]}
    ends: list[tuple[float, int]] = []
    """Of what is computed now: when, and where."""

    def begin(stage: int) -> None:
        if computing[stage] or done[stage] == len(orders[stage]):
            return
        kind, microbatch = orders[stage][done[stage]]
        if (came_s := arrived.get((stage, kind, microbatch))) is not None:
            spent_s = stations[stage].forward_s if kind == "forward" else stations[stage].backward_s
            heapq.heappush(ends, (max(free_s[stage], came_s) + spent_s, stage))
            computing[stage] = True

    for stage in range(stages):
        begin(stage)
    while ends:
        now_s, stage = heapq.heappop(ends)
        (kind, microbatch), here = orders[stage][done[stage]], stations[stage]
        computing[stage], free_s[stage] = False, now_s
        done[stage] += 1
        receiver = stage + 1 if kind == "forward" else stage - 1
        if 0 <= receiver < stages:
            takes_s, delay_s = (here.on_s, here.on_delay_s) if kind == "forward" else (here.back_s, here.back_delay_s)
            sent_s = max(now_s, sends_s[stage], receives_s[receiver]) + takes_s
            sends_s[stage] = receives_s[receiver] = sent_s
            arrived[receiver, kind, microbatch] = sent_s + delay_s
            begin(receiver)
        begin(stage)
    return max(free_s)


def unlinked(stations: Sequence[Station]) -> tuple[Station, ...]:
    return tuple(s.unlinked for s in stations)


def recomputing(stations: Sequence[Station]) -> tuple[Station, ...]:
    """Activations are computed again before each backward, but in the last stage, which does both at once."""
    return (*(replace(s, backward_s=3 * s.forward_s) for s in stations[:-1]), stations[-1])
