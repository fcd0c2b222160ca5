"""Plan with fewer machines than the fleet has. Where averaging, links or churn cost more than additional machines
bring, a subset of the machines is faster, down to a single machine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from muletrain.config.plan_file import Prediction
from muletrain.errors import CapacityError
from muletrain.planning.splits import ALIKE, clientless, title
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan import swap as plan_swap
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.subsets import Counts, Subsets
from muletrain.strategies import find
from muletrain.units import format_count, format_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muletrain.config.plan_file import Memory
    from muletrain.sim.plan.question import Question

STEADY = 0.9
"""A layout that keeps this share of its speed under churn loses little by departures."""
SMALL = 12
"""Up to this many machines, a subset is rated with every microbatch size; above, with the whole fleet's size."""
EXHAUSTIVE = 6
"""Up to this many machines, pipelines are planned on each subset that may win."""
PLANNED = 1.25
"""Assumed most speed of a planned pipeline, as a multiple of swarm's rate on the same machines; a subset on which even
that speed is no gain is not searched. A large fleet uses the multiple found on all its machines instead."""
HURRY = 8
"""Each subset's searches get this part of the time limit."""
SEARCH_S = 5.0
"""Time to search pipelines that do not swap, to compare with."""
ONLY_FEWER = "with all of them no strategy is possible"
"""Reason for leaving machines out if no layout on all machines exists."""
BEHIND = 0.5
"""A prediction is improved only to at least this part of the best prediction's tokens/s."""
LARGER = (4, 16)
"""Multiples of the batch to plan alternative layouts for; larger multiples are no advice."""

Predictions = Mapping[str, Sequence[Prediction]]
"""By strategy."""
Key = tuple[str, str]
"""Strategy and schedule."""


def unwatched(what: str, share: float) -> None:
    """Watches no search."""


class Improved(NamedTuple):
    """``complete``: the time limit did not end the search."""

    predictions: Predictions
    complete: bool


def improved(
    question: Question,
    predicted: Predictions,
    *,
    seed: int = 0,
    time_limit_s: float = 30.0,
    watch: Callable[[str, float], None] = unwatched,
) -> Improved:
    """Replace each prediction by a prediction on fewer machines, where that is faster under churn.

    Layouts are rated for each subset that might beat the best (``subsets``), and strategies predicted in the order of
    the rates. In a large fleet the search goes on around the best subset."""
    if question.paced and question.stages is None:
        return Improved(predicted, complete=True)  # one machine would do the work of many, for any number of layers
    search = _Search(question, predicted, seed, time_limit_s, watch)
    complete = search.run()
    own = {name: tuple(search.found[p.strategy, p.schedule] for p in ps) for name, ps in predicted.items()}
    return Improved(own, complete)


class _Search:
    """A search for subsets. ``found``: the best prediction of each strategy."""

    def __init__(
        self,
        question: Question,
        predicted: Predictions,
        seed: int,
        time_limit_s: float,
        watch: Callable[[str, float], None],
    ) -> None:
        self._subsets, self._seed, self._limit_s, self._watch = Subsets(question), seed, time_limit_s, watch
        self._small = len(question.fleet.peers()) <= SMALL
        self.found: dict[Key, Prediction] = {(p.strategy, p.schedule): p for own in predicted.values() for p in own}
        self._ends_s = time.monotonic() + time_limit_s
        self._pooled = ("hub", "") in self.found and self.found["hub", ""].expected_per_s >= BEHIND * self.best_per_s
        """A hub is tried on fewer machines if the hub of all machines is not far behind."""
        self._planned = math.inf if len(question.fleet.peers()) <= EXHAUSTIVE else PLANNED
        if not self._small and (rate := self._rate(question)):
            self._planned = self.best_per_s / rate

    def run(self) -> bool:
        """Returns whether the search is complete."""
        seen, todo, at = set[Counts](), self._subsets.first(), self._subsets.whole
        while todo:
            seen |= set(todo)
            before, rated = self.best_per_s, list[tuple[float, Counts]]()
            for n, counts in enumerate(todo):
                self._watch("fewer machines", n / len(todo) / 2)
                if time.monotonic() > self._ends_s:
                    return False
                if self._may_win(counts):
                    rated.append((self._rate(self._subsets.of(counts)), counts))
            for n, (rate, counts) in enumerate(sorted(rated, reverse=True)):
                self._watch("fewer machines", (1 + n / len(rated)) / 2)
                if time.monotonic() > self._ends_s:
                    return False
                best = self.best_per_s
                if self._may_win(counts):
                    self._try(counts, rate)
                    at = counts if self.best_per_s > best else at
            todo = [c for c in self._subsets.near(at) if c not in seen] if self.best_per_s > before else []
        return True

    @property
    def best_per_s(self) -> float:
        """Tokens/s of the layout that would be recommended now."""
        able = (p for p in self.found.values() if p.runnable and not p.problem and not clientless(p))
        return max((p.expected_per_s for p in able), default=0.0)

    def _least(self, *strategies: str) -> float:
        """Tokens/s of the slowest prediction of ``strategies``, at least ``BEHIND`` of the best: slower results are no
        news."""
        own = (p.expected_per_s for (name, _), p in self.found.items() if name in strategies)
        return max(min(own, default=math.inf), BEHIND * self.best_per_s)

    def _may_win(self, counts: Counts) -> bool:
        bound = self._subsets.bounds.of(counts, pooled=self._pooled and self._subsets.pooled(counts))
        return bound > (1 + ALIKE) * self.best_per_s

    def _rate(self, part: Question) -> float:
        """Tokens/s of the best layout by rates, under churn."""
        swarm = self.found.get(("swarm", ""))
        if not self._small and swarm is not None and not swarm.problem:
            part = replace(part, microbatch=swarm.microbatch)
        least, rated = self.best_per_s, list[plan_swarm.Settled]()
        for asked in (part, plan_swap.asked_of(part)):
            with suppress(CapacityError):
                rated += plan_swarm.rated(asked, least=least)[0]
        return max((s.roughly_per_s for s in rated), default=0.0)

    def _try(self, counts: Counts, rate: float) -> None:
        """Predict the strategies on a subset, as far as they may exceed known predictions."""
        part, limit_s = self._subsets.of(counts), self._limit_s / HURRY
        blank = [
            Prediction(
                strategy="pipeline",
                schedule=s,
                runnable=find("pipeline").runs,
                problem="not tried",
                tokens_per_s=self.found["pipeline", s].expected_per_s,
            )
            for s in plan_pipeline.SCHEDULES
            if ("pipeline", s) in self.found
        ]
        pipelines, cuts = blank, plan_pipeline.uneven(part, self.found.values())
        if blank and self._planned * rate > self.best_per_s < self._subsets.bounds.of(counts):
            least = self._least("pipeline")
            predicted, more = plan_pipeline.searched(part, self._seed, limit_s / 2, least=least)
            pipelines = [b if p.problem else p for b, p in zip(blank, predicted, strict=True)]
            cuts = [*dict.fromkeys([*more, *cuts])]
        least = self._least("swarm", "pipeline")
        swarm = plan_swarm.predict(part, cuts=cuts, least=least)
        found = [swarm, *plan_pipeline.tried_on(part, swarm, pipelines)]
        found.append(plan_swap.predict(part, least=self._least("swap")))
        if self._pooled and self._subsets.pooled(counts):
            found.append(plan_hub.predict(part, self._seed, limit_s / 2, least=self._least("hub")))
        for p in found:
            known = self.found.get((p.strategy, p.schedule))
            if (
                known is not None
                and not p.problem
                and (known.problem or p.expected_per_s > (1 + ALIKE) * known.expected_per_s)
            ):
                self.found[p.strategy, p.schedule] = p.model_copy(update={"left_out": part.left_out})


def _off(question: Question) -> Question:
    """Returns the same question without swapping."""
    run = question.run
    return replace(question, run=run.model_copy(update={"swap": run.swap.model_copy(update={"backing": "off"})}))


def swappers(question: Question, p: Prediction) -> dict[str, tuple[int, Memory]]:
    """Machines that swap their stage in ``p``, with the stage and the machine's memory."""
    if p.problem or find(p.strategy).pooled or not find(p.strategy).runs:
        return {}
    scene, found = question.scene_of(p), {}
    needs, kinds = question.needs(scene), {kind.name: kind for kind in scene.setting.kinds}
    entry = {name: m for m, names in question.names.items() for name in names}
    for s, stage in enumerate(p.stages):
        for name in stage.machines:
            if s in kinds[entry[name]].swaps:
                found[name] = s, question.memory(entry[name], s, needs[s])
    return found


def unswapped(question: Question, pipelines: Sequence[Prediction]) -> list[Prediction]:
    """Predict swarm and pipelines on all machines without swapping (swap.backing = 'off'). ``pipelines``: the layouts
    found on all machines."""
    off = replace(_off(question), weather=Weather())
    none = pipelines
    if any(swappers(question, p) for p in pipelines):  # on swarm's machines, which swap
        none = plan_pipeline.predict(off, 0, SEARCH_S)
    swarm = plan_swarm.predict(off, cuts=plan_pipeline.uneven(off, none))
    return [swarm, *plan_pipeline.tried_on(off, swarm, none)]


def faster_planned(p: Prediction, others: Sequence[Prediction]) -> Prediction:
    """Replace ``p`` by a faster one of ``others`` with the same schedule: a plan names the machines of each stage, so
    it needs no other setting of the run."""
    able = [q for q in others if q.schedule and q.schedule == p.schedule]
    return next((q for q in able if p.problem or q.tokens_per_s > (1 + ALIKE) * p.tokens_per_s), p)


def worth(question: Question, chosen: Prediction, without: Sequence[Prediction]) -> str:
    """Tell which machines swap their stage in ``chosen``, and the speedup over the fastest layout ``without`` swapping;
    empty: no machine swaps."""
    part = question.without(chosen.left_out)
    if not (found := swappers(part, chosen)):
        return ""
    rows = Counter((memory.machine, s, memory.device_has) for s, memory in found.values())
    needs = part.needs(part.scene_of(chosen))
    who = ", ".join(
        f"{f'{n} x ' if n > 1 else ''}{entry} (stage {s} needs {format_memory(needs[s].of_device(part.offer(entry)))} of a device, "
        f"which has {format_memory(has or 0)})"
        for (entry, s, has), n in rows.items()
    )
    best = max((p.tokens_per_s for p in without), default=0.0)
    if not best:
        return f"{who}: without, there is no layout"
    return f"{who}: {chosen.tokens_per_s / best:.2f}x as fast as the fastest layout without"


def machines(p: Prediction) -> set[str]:
    """The names of the machines in a layout."""
    return {name for stage in p.stages for name in stage.machines}


def compared(question: Question, chosen: Prediction, whole: Prediction) -> str:
    """Compare ``chosen``, which leaves machines out, with ``whole`` under churn, and name the batch that turns the
    result."""
    few, many = (len(machines(p)) for p in (chosen, whole))
    who = f"{few} machines" if few > 1 else f"{chosen.stages[0].machines[0]} alone"
    stays = ""
    if whole.expected_per_s < STEADY * whole.tokens_per_s:
        stays = f"{format_count(whole.tokens_per_s)} while nobody leaves, "
    told = (
        f"{who} {'are' if few > 1 else 'is'} faster than {'more' if few > 1 else 'several'} machines: "
        f"{format_count(chosen.expected_per_s)} tokens/s against {format_count(whole.expected_per_s)} on {many} ({title(whole)}, "
        f"{stays}limited by {whole.limit})"
    )
    batches = [_pays_from(question, chosen, p) for p in (whole, *_of_larger_steps(_off(question)))]
    batch = min((b for b in batches if b is not None), default=None)
    return f"{told}; from about --batch {batch} on, more machines are faster" if batch else told


def _of_larger_steps(question: Question) -> Iterator[Prediction]:
    """Predict, for this step, the layouts that are best by rates for larger steps."""
    microbatch, batch = question.microbatches()[0], question.run.train.batch
    for times in LARGER:
        train = question.run.train.model_copy(update={"batch": times * batch})
        larger, found = replace(question, run=question.run.model_copy(update={"train": train})), []
        for stages in question.stage_counts():
            with suppress(CapacityError):
                found.append((plan_swarm.settled_on(larger, stages, microbatch).roughly_s, stages))
        if found:
            yield plan_swarm.told(question, plan_swarm.settled_on(question, min(found)[1], microbatch))


def _pays_from(question: Question, chosen: Prediction, other: Prediction) -> int | None:
    """Sequences per step from which ``other`` is as fast as ``chosen``, since averaging takes the same time for any
    step size. None: never, or unknown."""
    if chosen.split is None or other.split is None or question.run.optimizer.delayed:
        return None
    batch = question.run.train.batch
    ends_s = chosen.split.data_parallel_s, other.split.data_parallel_s
    each_s = [(p.step_s - end_s) / batch for p, end_s in zip((chosen, other), ends_s, strict=True)]
    if each_s[1] >= each_s[0]:
        return None
    pays = max(1.0, (ends_s[1] - ends_s[0]) / (each_s[0] - each_s[1]))
    digit = 10 ** max(0, math.floor(math.log10(pays)) - 1)
    rounded = digit * math.ceil(pays / digit)
    return rounded if batch < rounded <= max(LARGER) * batch else None
