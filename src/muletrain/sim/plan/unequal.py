"""Strategy ``pipeline`` with stages of unequal size on a fleet: results of ``planning.groups`` as ``Placed``."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from muletrain.errors import CapacityError
from muletrain.planning.groups import Choice, Search, Work, counts_of_pipelines, pipelines
from muletrain.sim.fleet.rates import rates_of
from muletrain.sim.plan.placed import Placed
from muletrain.sim.setting import takes_s

if TYPE_CHECKING:
    from muletrain.config.plan_file import Prediction
    from muletrain.planning.groups import Serving
    from muletrain.planning.partition import Cut
    from muletrain.sim.fleet.rates import Rates
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
        self._scenes: dict[Cut, tuple[Scene, Rates] | None] = {}

    def _rated(self, cut: Cut) -> tuple[Scene, Rates] | None:
        if cut not in self._scenes:
            try:
                scene = self._question.scene(self._stages, self._microbatch, cut)
                self._scenes[cut] = scene, rates_of(scene.setting, scene.run)
            except CapacityError:
                self._scenes[cut] = None
        return self._scenes[cut]

    def roughly_s(self, serving: Serving, cut: Cut, slowest_s: float) -> float:
        """Estimate a step [s]: by rates, but the slowest machine of each stage, not the mean one, delays a pipeline."""
        if (rated := self._rated(cut)) is None:
            return math.inf
        setting, rates = rated[0].setting, rated[1]
        names = [m.name for m in self._question.fleet.machines]
        counts = [tuple(row[names.index(kind.name)] for kind in setting.kinds) for row in serving]
        per_s, late_s = rates.of(counts).throughput, 0.0
        for row, each_s in zip(counts, rates.service_s, strict=True):
            there = [(n, s) for n, s in zip(row, each_s, strict=True) if n]
            late_s += max(s for _, s in there) - sum(row) / sum(n / s for n, s in there)
        return setting.cost.microbatches / per_s + late_s if per_s else math.inf

    def fastest(self, choice: Choice) -> Placed:
        """Lay out ``choice`` with the best number of pipelines."""
        rated = self._rated(choice.cut)
        assert rated is not None  # only cuts with enough room are chosen
        scene, _ = rated
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
            i, j = every[a][0], every[b][0]
            on, home = setting.links[i][j], setting.links[j][i]
            busy_s = max(there / on.bandwidth_bytes_per_s, back / home.bandwidth_bytes_per_s)
            return busy_s, on.delay_s + home.delay_s

        assignment = pipelines(groups, lambda s, d: setting.kinds[every[d][0]].service_s(s), link_s, count)
        return Placed.of(scene, every, assignment)
