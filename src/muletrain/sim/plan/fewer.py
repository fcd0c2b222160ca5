"""Plan with fewer machines than the fleet has. Where averaging or links take longer than more machines save, the
fastest few do more without the others, down to a single one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from muletrain.config.plan_file import Prediction
from muletrain.errors import CapacityError
from muletrain.planning.cost import service_s
from muletrain.planning.splits import ALIKE, title
from muletrain.sim.machine import flops_of
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan import swap as plan_swap
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.setting import run_cost
from muletrain.strategies import find
from muletrain.units import format_count, format_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from muletrain.config.plan_file import Memory
    from muletrain.sim.plan.question import Question

FEW = 8
"""Of at most so many machines every number is tried; of more, each half of the one before."""
LARGER = (4, 16)
"""Multiples of the batch for which others may be planned; more is no advice."""


Predictions = Mapping[str, Sequence[Prediction]]
"""By strategy."""
NONE: Predictions = MappingProxyType({})


def unswapped(question: Question, predicted: Predictions) -> Predictions:
    """Replace each prediction of what runs today by one without the machines that have room for a stage only if they swap
    it, where that is faster."""
    without = [p for p in _tried(_off(question)) if not p.problem]
    if not without:
        return predicted
    best = max(without, key=lambda p: p.tokens_per_s)
    idle = {name for names in question.names.values() for name in names}
    idle -= {name for stage in best.stages for name in stage.machines}
    return _where_faster(predicted, [question.without(idle)] if idle else [])


def improved(question: Question, predicted: Predictions) -> Predictions:
    """Replace each prediction of what runs today by one on fewer machines, where that is faster."""
    return _where_faster(predicted, _parts(question, _able(predicted)))


def _off(question: Question) -> Question:
    """The same question where no machine swaps its stage."""
    run = question.run
    return replace(question, run=run.model_copy(update={"swap": run.swap.model_copy(update={"backing": "off"})}))


def _able(predicted: Predictions) -> list[Prediction]:
    return [p for own in predicted.values() for p in own if p.runnable and not p.problem]


def _where_faster(predicted: Predictions, parts: Iterable[Question]) -> Predictions:
    found = predicted
    swaps = any(p.swapped for p in predicted["swap"])
    for part in parts:
        tried = {(p.strategy, p.schedule): p for p in _tried(part, found, swaps=swaps) if not p.problem}
        left_out = {"left_out": part.left_out}
        found = {
            name: [
                other.model_copy(update=left_out)
                if (other := tried.get((p.strategy, p.schedule))) is not None
                and not p.problem
                and other.tokens_per_s > (1 + ALIKE) * p.tokens_per_s
                else p
                for p in own
            ]
            for name, own in found.items()
        }
    return found


def _least(known: Predictions, *strategies: str) -> float:
    """Tokens/s of the slowest prediction that is to be improved."""
    return min((p.tokens_per_s for name in strategies for p in known.get(name, ()) if not p.problem), default=0.0)


def _tried(part: Question, known: Predictions = NONE, *, swaps: bool = False) -> list[Prediction]:
    """Predict strategy swarm, pipelines on its layout, and swap if a machine ``swaps`` under it: otherwise it is swarm with
    one stage. ``known``: predictions that are to be improved."""
    swarm = plan_swarm.predict(part, least=_least(known, "swarm", "pipeline"))
    whole = [plan_swap.predict(part, least=_least(known, "swap"))] if swaps else []
    blank = [
        Prediction(strategy="pipeline", schedule=s, runnable=find("pipeline").runs, problem="not tried")
        for s in plan_pipeline.SCHEDULES
    ]
    return [swarm, *plan_pipeline.tried_on(part, swarm, blank), *whole]


def swappers(question: Question, p: Prediction) -> dict[str, tuple[int, Memory]]:
    """Machines that swap their stage in ``p``, with the stage and what they hold."""
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


def worth(question: Question, chosen: Prediction, pipelines: Sequence[Prediction]) -> str:
    """Tell which machines swap their stage in ``chosen``, and how much faster that is than the fastest layout where none
    does (swap.backing = 'off'); empty: none does. ``pipelines``: those that were found, none of which swaps."""
    part = question.without(chosen.left_out)
    if not (found := swappers(part, chosen)):
        return ""
    rows = Counter((memory.machine, s, memory.device_has) for s, memory in found.values())
    needs = part.needs(part.scene_of(chosen))
    who = ", ".join(
        f"{f'{n} x ' if n > 1 else ''}{entry} (stage {s}, with {format_memory(has or 0)} of {needs[s].need(part.offer(entry))})"
        for (entry, s, has), n in rows.items()
    )
    off = _off(question)
    swarm = plan_swarm.predict(off, cuts=plan_pipeline.uneven(off, pipelines))
    without = [swarm, *plan_pipeline.tried_on(off, swarm, pipelines)]
    best = max((p.tokens_per_s for p in without if not p.problem), default=0.0)
    if not best:
        return f"{who}: without, there is no layout"
    return f"{who}: {chosen.tokens_per_s / best:.2f}x as fast as the fastest layout without"


def _parts(question: Question, found: Sequence[Prediction]) -> Iterator[Question]:
    """List the parts worth a look, the largest first: the fastest machines, as long as they could do more than is
    predicted for all if they never waited."""
    if question.paced or not found:
        return
    order = sorted(_alone_per_s(question), key=lambda row: row[:2], reverse=True)
    most = max(p.tokens_per_s for p in found) / question.spec.context
    for n in _sizes([entry for *_, entry in order]):
        if sum(rate for rate, *_ in order[:n]) > (1 + ALIKE) * most:
            yield question.of_first(Counter(entry for *_, entry in order[:n]))


def _alone_per_s(question: Question) -> list[tuple[float, float, str]]:
    """For each machine, sequences/s with the whole model and no waiting, upload [bytes/s] and entry of the file."""
    run, spec = question.with_microbatch(1), question.spec
    cost = run_cost(run, spec, spec.cut(1)).stages[0]
    found = []
    for n, (entry, names) in enumerate(question.names.items()):
        peer = question.firsts[n]
        rate = 1 / sum(service_s(cost, flops_of(n, peer)[0], recompute=False))
        found += [(rate, peer.up_bytes_per_s, entry)] * len(names)
    return found


def _sizes(entries: Sequence[str]) -> list[int]:
    """Numbers of machines to try, the largest first, also all that are as fast. ``entries``: of the machines, the
    fastest first."""
    count = len(entries)
    sizes = set(range(1, count)) if count <= FEW else {count >> n for n in range(1, count.bit_length())}
    return sorted(sizes | {n for n in range(1, count) if entries[n] != entries[n - 1]}, reverse=True)


def compared(question: Question, chosen: Prediction, whole: Prediction) -> str:
    """Tell how much ``chosen``, which leaves machines out, does against ``whole``, and when that changes."""
    few, many = (len({name for s in p.stages for name in s.machines}) for p in (chosen, whole))
    who = f"{few} machines" if few > 1 else f"{chosen.stages[0].machines[0]} alone"
    told = (
        f"{who} {'are' if few > 1 else 'is'} faster than {'more' if few > 1 else 'several'} machines: "
        f"{format_count(chosen.tokens_per_s)} tokens/s against {format_count(whole.tokens_per_s)} on {many} ({title(whole)}), "
        f"which {whole.limit} limits"
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
    """Sequences per step from which ``other`` is as fast: it averages for as long however large a step is. None: it
    never is, or that cannot be told."""
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
