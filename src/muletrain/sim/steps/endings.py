"""Ends of steps in a play without messages (``steps``), as ``runtime.step`` makes them: trainers' last words, seals,
shards, means, word of who has them; then a peer applies the step."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from muletrain.planning.cost import averages_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.planning.cost import RunCost
    from muletrain.sim.steps.wires import Wires


class End:
    """One step: what each peer has heard."""

    def __init__(self, peers: int) -> None:
        self.words, self.seals, self.parts, self.means = ([0] * peers for _ in range(4))
        self.held: list[set[int]] = [set() for _ in range(peers)]
        """Stages of which some peer has the whole mean, by hearer."""
        self.told = set[tuple[int, int]]()
        """(stage, kind) whose first peer has announced its mean."""
        self.agreed, self.applied = set[int](), set[int]()
        self.begun_s = math.inf
        self.through_s = self.over_s = 0.0
        """Times at which the first trainer began, the last one had all answers, and the last peer had applied the
        step [s]."""


class Endings:
    """Ends of all steps. ``stages``: of each peer, in the order in which they reduce shards."""

    def __init__(
        self,
        wires: Wires,
        cost: RunCost,
        stages: Sequence[int],
        trainers: int,
        opened: Callable[[int, int], None],
        *,
        delayed: bool,
    ) -> None:
        """``opened`` is called with a peer and the step that it computes from now on."""
        self._wires, self._cost, self._stages, self._trainers = wires, cost, stages, trainers
        self._opened, self._delayed = opened, delayed
        self._here = [[p for p, s in enumerate(stages) if s == stage] for stage in range(len(cost.stages))]
        self.of = defaultdict[int, End](lambda: End(len(stages)))

    def begin(self, step: int) -> None:
        """A trainer begins."""
        self.of[step].begun_s = min(self._wires.now_s, self.of[step].begun_s)

    def through(self, trainer: int, step: int) -> None:
        """``trainer`` has all answers and tells every peer."""
        self.of[step].through_s = self._wires.now_s
        for p in range(len(self._stages)):
            self._wires.tell(trainer, p, partial(self._hear_through, p, step))

    def _replicas(self, p: int) -> list[int]:
        return self._here[self._stages[p]]

    def _hear_through(self, p: int, step: int) -> None:
        self.of[step].words[p] += 1
        self._perhaps_seal(p, step)

    def _perhaps_seal(self, p: int, step: int) -> None:
        """Seal when all trainers are through and the step before is applied."""
        if self.of[step].words[p] < self._trainers or (step and p not in self.of[step - 1].applied):
            return
        if self._delayed:
            self._opened(p, step + 1)
        for other in self._replicas(p):
            self._wires.tell(p, other, partial(self._hear_seal, other, step))

    def _hear_seal(self, p: int, step: int) -> None:
        end = self.of[step]
        end.seals[p] += 1
        if end.seals[p] == len(self._replicas(p)):
            self._to_all(p, partial(self._sum, step=step))

    def _to_all(self, p: int, then: Callable[[int], None]) -> None:
        """Send a shard to each replica, itself included, in the order of ``runtime.averaging.averager``."""
        here = self._replicas(p)
        k = here.index(p)
        shard = self._cost.stages[self._stages[p]].averaged_bytes / len(here)
        for other in here[k:] + here[:k]:
            up, down = self._wires.ends(p).up_bytes_per_s, self._wires.ends(other).down_bytes_per_s
            nbytes = shard / averages_at(len(here), up, down, delayed=self._delayed)
            self._wires.send(p, other, nbytes, partial(then, other), bulk=True)

    def _sum(self, p: int, step: int) -> None:
        """One more part of the shard that ``p`` reduces has arrived."""
        end = self.of[step]
        end.parts[p] += 1
        if end.parts[p] == len(self._replicas(p)):
            self._to_all(p, partial(self._take_mean, step=step))

    def _take_mean(self, p: int, step: int) -> None:
        end = self.of[step]
        end.means[p] += 1
        if end.means[p] == len(self._replicas(p)):
            stage, alike = self._stages[p], (self._stages[p], self._wires.kinds[p])
            self._hear_held(p, stage, step)
            if alike not in end.told:  # those that are linked alike hear nothing new from the others
                end.told.add(alike)
                for other in range(len(self._stages)):
                    self._wires.tell(p, other, partial(self._hear_held, other, stage, step))

    def _hear_held(self, p: int, stage: int, step: int) -> None:
        """Some peer has the whole mean of ``stage``. A record needs all stages; applying it also needs one's own
        mean."""
        end, own = self.of[step], self._stages[p]
        end.held[p].add(stage)
        if p in end.agreed or len(end.held[p]) < len(self._here) or end.means[p] < len(self._replicas(p)):
            return
        end.agreed.add(p)
        self._wires.after(self._wires.ending_s(p, own), partial(self._apply, p, step))

    def _apply(self, p: int, step: int) -> None:
        end = self.of[step]
        end.applied.add(p)
        end.over_s = self._wires.now_s
        if self._delayed:
            self._perhaps_seal(p, step + 1)
        else:
            self._opened(p, step + 1)
