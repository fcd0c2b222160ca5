"""Explain a prediction: its limit, changes of the run that would help, and reasons for machines without work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from muletrain.config.plan_file import Improvement
from muletrain.errors import CapacityError, MuletrainError
from muletrain.sim.fleet.advice import MOST, WORTH, changes
from muletrain.sim.machine import AMPLE
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.hub_step import BUBBLE
from muletrain.sim.steps.endings import ENDING_DELAYS
from muletrain.strategies import find
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muletrain.compute.estimate import Offer
    from muletrain.config.plan_file import Prediction
    from muletrain.sim.fleet.advice import Change
    from muletrain.sim.plan.question import Question, Scene


def limited(question: Question, p: Prediction) -> Prediction:
    """Add its limit to a prediction that can run today."""
    if p.problem or not p.runnable or p.split is None:
        return p
    part = question.without(p.left_out)
    split, scene = p.split, part.scene_of(p)
    if find(p.strategy).pooled:
        return p.model_copy(update={"limit": plan_hub.as_told(part, scene, p).step.limit()})
    most_s = max(split.compute_s, split.pipeline_s, split.data_parallel_s, split.bubble_s)
    if most_s == split.compute_s:
        limit = _computing(part, scene, p)
    elif most_s == split.pipeline_s:
        limit = _links(part, scene, p)
    elif most_s == split.data_parallel_s:
        limit = _averaging(part, scene, p)
    else:
        limit = BUBBLE
    return p.model_copy(update={"limit": limit})


def _entries(question: Question, p: Prediction) -> list[list[str]]:
    """Entries of the fleet file, by stage and machine."""
    entry = {name: m for m, names in question.names.items() for name in names}
    return [[entry[name] for name in dict.fromkeys(stage.machines)] for stage in p.stages]


def _computing(question: Question, scene: Scene, p: Prediction) -> str:
    kinds = {kind.name: kind for kind in scene.setting.kinds}
    serving = _entries(question, p)
    times_s = [1 / sum(1 / kinds[m].service_s(s) for m in here) for s, here in enumerate(serving)]
    stage = max(range(len(times_s)), key=times_s.__getitem__)
    who = ", ".join(dict.fromkeys(serving[stage]))
    return f"computing on {who}" + (f" (stage {stage})" if len(serving) > 1 else "")


def _ways(scene: Scene, senders: Sequence[str], receivers: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Bandwidths [bytes/s] that may limit transfers between machines, with names."""
    index = {kind.name: k for k, kind in enumerate(scene.setting.kinds)}
    for m in dict.fromkeys(senders):
        yield scene.setting.kinds[index[m]].up_bytes_per_s, f"the upload of {m}"
    for m in dict.fromkeys(receivers):
        yield scene.setting.kinds[index[m]].down_bytes_per_s, f"the download of {m}"
    for a in dict.fromkeys(senders):
        for b in dict.fromkeys(receivers):
            yield scene.setting.links[index[a]][index[b]].bandwidth_bytes_per_s, f"the path from {a} to {b}"


def _delay_s(scene: Scene, senders: Sequence[str], receivers: Sequence[str]) -> float:
    index = {kind.name: k for k, kind in enumerate(scene.setting.kinds)}
    return max(scene.setting.links[index[a]][index[b]].delay_s for a in set(senders) for b in set(receivers))


def _named(way: tuple[float, str]) -> str:
    return f"{way[1]} ({8e-6 * way[0]:,.3g} Mb/s)" if way[0] < math.inf else way[1]


def _links(question: Question, scene: Scene, p: Prediction) -> str:
    """The transfer that takes longest, for machines that share a stage's microbatches equally."""
    cost, serving = scene.setting.cost, _entries(question, p)
    worst_s, told = 0.0, "links between stages"
    for s in range(1, len(serving)):
        for here, there, nbytes in (
            (serving[s - 1], serving[s], cost.forward_bytes[s]),
            (serving[s], serving[s - 1], cost.backward_bytes[s]),
        ):
            way = min(_ways(scene, here, there), key=lambda way: way[0])
            delay_s = _delay_s(scene, here, there)
            sends_s = nbytes / way[0]
            if max(sends_s, delay_s) > worst_s:
                worst_s = max(sends_s, delay_s)
                told = f"links between stages: {_named(way)}"
                if delay_s > sends_s:
                    told = f"links between stages: {1000 * delay_s:.3g} ms one way"
    return told


def _averaging(question: Question, scene: Scene, p: Prediction) -> str:
    """The slowest of averaging in each stage, updates on the CPU, and delays."""
    worst_s, told = 0.0, "agreement at the end of a step"
    for stage, here in zip(scene.setting.cost.stages, _averaging_entries(question, scene, p), strict=True):
        causes = [(stage.ending_s, "updating the weights on the CPU")]
        if len(here) > 1:
            way = min(_ways(scene, here, here), key=lambda way: way[0])
            sent = 2 * (len(here) - 1) / len(here) * stage.averaged_bytes
            causes.append((sent / way[0], f"averaging over {_named(way)}"))
            causes.append((ENDING_DELAYS * _delay_s(scene, here, here), "delays between replicas while they average"))
        worst_s, told = max((worst_s, told), *causes)
    return told


def _averaging_entries(question: Question, scene: Scene, p: Prediction) -> list[list[str]]:
    """Like ``_entries``, with spares, which average too."""
    if not p.schedule:
        return _entries(question, p)
    placed, names = plan_pipeline.as_told(question, scene, p), [kind.name for kind in scene.setting.kinds]
    return [[names[k] for k, n in enumerate(row) for _ in range(n)] for row in placed.serving]


# Changes --------------------------------------------------------------------------------------------------------------


def improvements(question: Question, chosen: Prediction, others: Sequence[Prediction]) -> tuple[Improvement, ...]:
    """List the changes with the largest gains on the layout of ``chosen`` or of ``others``, at most one for each field.
    The numbers of stages and microbatches are the planner's own choice."""
    best = dict[str, Improvement]()
    for change in changes(question.run, paced=True, quality=question.quality):
        for layout in (chosen, *others):
            try:
                tokens_per_s = _again(question, layout, change)
            except MuletrainError:
                continue
            gain = tokens_per_s / (change.longer * chosen.tokens_per_s) - 1
            if gain >= max(WORTH, best[change.field].gain if change.field in best else 0.0):
                best[change.field] = Improvement(
                    change=change.text,
                    tokens_per_s=tokens_per_s,
                    gain=gain,
                    machines=len({name for stage in layout.stages for name in stage.machines}),
                    training=change.training,
                )
    return tuple(sorted(best.values(), key=lambda found: -found.gain)[:MOST])


def _again(question: Question, layout: Prediction, change: Change) -> float:
    """Tokens/s of a layout in the changed run. Raises MuletrainError for an impossible layout."""
    changed = question.without(layout.left_out).changed(change)
    cut = tuple(stage.layers for stage in layout.stages)
    if find(layout.strategy).pooled:
        return plan_hub.told(plan_hub.as_told(changed, changed.scene_of(layout), layout)).tokens_per_s
    asked = changed.updated_on(layout.state_device)
    if not layout.schedule:
        return plan_swarm.settled_on(asked, len(cut), layout.microbatch, cut).tokens_per_s
    scene = plan_pipeline.scheduled(
        asked, asked.scene(len(cut), layout.microbatch, cut), layout.schedule, len(layout.microbatches)
    )
    found = plan_pipeline.told(asked, plan_pipeline.as_told(asked, scene, layout), layout.schedule)
    if any(m.device_needs > (m.device_has or math.inf) for m in found.memory):
        raise CapacityError("a machine lacks memory for that")
    return found.tokens_per_s


# Machines without work ------------------------------------------------------------------------------------------------


def _has(offer: Offer) -> str:
    beside = "" if offer.host in (None, AMPLE) else f" and {format_memory(offer.host or 0)} beside it"
    return f"{format_memory(offer.device)}{beside}"


def without_work(question: Question, chosen: Prediction) -> tuple[str, ...]:
    """Name the machines of each entry that have no work in ``chosen``, and why."""
    pooled = find(chosen.strategy).pooled
    told, needs = [], question.needs(question.without(chosen.left_out).scene_of(chosen))
    for entry, names in question.names.items():
        offer = question.offer(entry)
        least = min(needs, key=lambda need: need.of_device(offer))
        idle = [name for name in names if name in chosen.spares or name in chosen.left_out]
        if not idle:
            continue
        who = entry if len(names) == 1 else f"{len(idle)} x {entry}"
        if not any(need.fits(offer) for need in needs):
            why = f"too little memory for a stage of this plan, which needs {least.need(offer)}; it has {_has(offer)}"
            why += least.swapping(offer)
        elif any(name in chosen.left_out for name in idle):
            why = "the run is faster without; do not let them join" if len(idle) > 1 else "the run is faster without it"
            if not any(need.resident(offer) for need in needs):
                why += f", for it would have to swap a stage: it has {_has(offer)}, and {least.need(offer)} are needed"
        else:
            why = f"no place in the fastest layout; joins as a {'client' if pooled else 'spare'}"
        told.append(f"{who}: {why}")
    return tuple(told)
