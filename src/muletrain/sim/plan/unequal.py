"""Strategy ``pipeline`` with stages of unequal size on a fleet: results of ``planning.groups`` as ``Placed``."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from muletrain.errors import CapacityError
from muletrain.planning.groups import Choice, Search, Work, counts_of_pipelines, pipelines
from muletrain.sim.plan.placed import Placed, ending_s
from muletrain.sim.plan.question import UNLIMITED_GBPS, matrices
from muletrain.sim.setting import takes_s

if TYPE_CHECKING:
    from muletrain.config.plan_file import Prediction
    from muletrain.planning.groups import Serving
    from muletrain.planning.partition import Cut
    from muletrain.sim.plan.question import Question, Scene


def unequal(question: Question, stages: int, microbatch: int, seed: int, time_limit_s: float) -> list[Placed]:
    """Find a few layouts that may be the fastest; none without room, or if the file declares a stage's times."""
    if question.paced or not 1 < stages <= min(question.spec.most_stages, len(question.fleet.peers())):
        return []
    fleet = _Fleet(question, stages, microbatch)
    rounds = question.with_microbatch(microbatch).microbatches
    search = Search(fleet.work, fleet.roughly_s, rounds, seed=seed, deadline=time.monotonic() + time_limit_s)
    choices = sorted(
        {search.descended(begun, fleet.work.counts) for begun in search.begun()}, key=lambda c: (c.cost_s, c.serving)
    )
    complete = not search.over
    return [replace(fleet.fastest(choice), complete=complete) for choice in choices]


def laid_out(question: Question, chosen: Prediction) -> Placed:
    """Lay out ``chosen``'s machines and layers as pipelines."""
    asked = question.updated_on(chosen.state_device)
    fleet, cut = _Fleet(asked, len(chosen.stages), chosen.microbatch), tuple(stage.layers for stage in chosen.stages)
    entry = {name: n for n, names in enumerate(question.names.values()) for name in names}
    serving = tuple(
        tuple(map(Counter(entry[name] for name in stage.machines).__getitem__, range(len(question.names))))
        for stage in chosen.stages
    )
    return fleet.fastest(Choice(0.0, serving, cut))


class _Fleet:
    """A fleet's machines by entry of the file."""

    def __init__(self, question: Question, stages: int, microbatch: int) -> None:
        fleet, run = question.fleet, question.with_microbatch(microbatch)
        self._question, self._stages, self._microbatch = question, stages, microbatch
        self._names = [question.names[m.name] for m in fleet.machines]
        self.work = Work(takes_s(fleet, run, question.spec, stages), tuple(map(len, self._names)))
        firsts = question.firsts
        links = [[fleet.between_kinds(a.index, b.index) for b in firsts] for a in firsts]
        delay_ms, gbps = matrices(links, range(len(firsts)))
        self._delay_s, self._per_byte_s = delay_ms / 1000, 8e-9 / gbps
        self._up, self._down = (
            np.minimum([getattr(p, f"{way}_bytes_per_s") for p in firsts], UNLIMITED_GBPS / 8e-9)
            for way in ("up", "down")
        )
        self._scenes: dict[Cut, Scene | None] = {}

    def scene(self, cut: Cut) -> Scene | None:
        if cut not in self._scenes:
            try:
                self._scenes[cut] = self._question.scene(self._stages, self._microbatch, cut)
            except CapacityError:
                self._scenes[cut] = None
        return self._scenes[cut]

    def roughly_s(self, serving: Serving, cut: Cut, slowest_s: float) -> float:
        """Estimate a step [s]: the busiest stage or its links all the time, each other stage once, and averaging."""
        if (scene := self.scene(cut)) is None:
            return math.inf
        cost, here = scene.setting.cost, np.array(serving, dtype=float)
        busiest_s, way_s = slowest_s, 0.0
        for s in range(1, self._stages):
            there, back = cost.forward_bytes[s], cost.backward_bytes[s]
            pairs = np.outer(here[s - 1], here[s])
            pairs /= pairs.sum()
            most = max(here[s - 1].sum(), here[s].sum())
            busiest_s = max(
                busiest_s,
                there * (pairs * self._per_byte_s).sum() / most,
                back * (pairs * self._per_byte_s.T).sum() / most,
                there / (here[s - 1] @ self._up),
                there / (here[s] @ self._down),
                back / (here[s] @ self._up),
                back / (here[s - 1] @ self._down),
            )
            way_s += float((pairs * (self._delay_s + self._delay_s.T)).sum())
        takes = self.work.takes_s
        once_s = sum(
            max(takes[s, k, end - first] for k, n in enumerate(serving[s]) if n) for s, (first, end) in enumerate(cut)
        )
        names = [m.name for m in self._question.fleet.machines]
        counts = [[row[names.index(kind.name)] for kind in scene.setting.kinds] for row in serving]
        return float(cost.microbatches * busiest_s + once_s + way_s + ending_s(scene.setting, counts))

    def fastest(self, choice: Choice) -> Placed:
        """Lay out ``choice`` with the best number of pipelines."""
        scene = self.scene(choice.cut)
        assert scene is not None  # only cuts with enough room are chosen
        sizes = list(map(sum, choice.serving))
        every = [
            self._placed(scene, choice.serving, n) for n in counts_of_pipelines(sizes, scene.setting.cost.microbatches)
        ]
        return min(every, key=lambda placed: placed.roughly_s("1f1b"))

    def _placed(self, scene: Scene, serving: Serving, count: int) -> Placed:
        setting, entries = scene.setting, [m.name for m in self._question.fleet.machines]
        of_entry = [entries.index(kind.name) for kind in setting.kinds]
        every = [(k, name) for k, e in enumerate(of_entry) for name in self._names[e]]
        left = {k: [d for d, (own, _) in enumerate(every) if own == k] for k in range(len(of_entry))}
        groups = [[left[k].pop(0) for k, e in enumerate(of_entry) for _ in range(row[e])] for row in serving]
        there, back = (
            max(nbytes[1:], default=0) for nbytes in (setting.cost.forward_bytes, setting.cost.backward_bytes)
        )

        def link_s(a: int, b: int) -> tuple[float, float]:
            i, j = of_entry[every[a][0]], of_entry[every[b][0]]
            busy_s = max(there * self._per_byte_s[i, j], back * self._per_byte_s[j, i])
            return float(busy_s), float(self._delay_s[i, j] + self._delay_s[j, i])

        assignment = pipelines(groups, lambda s, d: setting.kinds[every[d][0]].service_s(s), link_s, count)
        used = {d for row in assignment for d in row}
        spares = tuple(machine for d, machine in enumerate(every) if d not in used)
        return Placed(scene, tuple(k for k, _ in every), tuple(name for _, name in every), assignment, spares)
