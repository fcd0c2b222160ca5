"""Plan strategy ``pipeline`` on a fleet: planned membership (DT-FM), schedules GPipe and 1F1B.

For each number of stages two searches run once: for equal stages on machines that hold any stage (``planning.place``),
and for unequal stages (``unequal``), in layers, machines, and pipelines per machine. Both schedules are tried on the
results with every microbatch that fits, and ranked by an estimate. The best few layouts of each schedule are played
(``steps``) with averaging and trainers; the played times are the prediction.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from muletrain.config.plan_file import Prediction, Split, Stage
from muletrain.errors import CapacityError, ConfigError
from muletrain.planning.place import place
from muletrain.planning.placement import Task
from muletrain.planning.splits import parted
from muletrain.sim.fleet.planned import Planned
from muletrain.sim.machine import stash_room
from muletrain.sim.plan import churn
from muletrain.sim.plan.placed import Placed
from muletrain.sim.plan.question import Bytes, fullest, matrices, mixing, traffic, with_haste
from muletrain.sim.plan.unequal import laid_out, unequal
from muletrain.sim.steps.steps import play
from muletrain.sim.steps.wires import without_links
from muletrain.strategies import find
from muletrain.strategies.pipeline import Pipeline, in_flight
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from muletrain.config.plan_file import Memory
    from muletrain.planning.partition import Cut
    from muletrain.sim.plan.question import Question, Scene
    from muletrain.sim.setting import Kind
    from muletrain.strategies.pipeline import Schedule

SHORTLIST, NEARLY = 3, 0.9
"""Most layouts of a schedule to play, and their least estimated part of the best layout's speed."""
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")
STAND_IN = "nobody leaves: where a machine is lost, a spare or the others of its stage stand in"


def predict(
    question: Question,
    seed: int,
    time_limit_s: float,
    watch: Callable[[float], None] = lambda share: None,
    least: float = 0.0,
) -> list[Prediction]:
    """Predict each schedule. ``least``: tokens/s of interest; layouts with a lower estimate are not played."""
    return searched(question, seed, time_limit_s, watch, least)[0]


def searched(
    question: Question,
    seed: int,
    time_limit_s: float,
    watch: Callable[[float], None] = lambda share: None,
    least: float = 0.0,
) -> tuple[list[Prediction], list[Cut]]:
    """Predict each schedule, and list uneven cuts to try with other strategies, also of layouts that are not played: a
    cut that is slow as a pipeline may be fast as a swarm."""
    counts, tokens = question.stage_counts(), question.run.train.batch * question.spec.context
    best: dict[Schedule, list[tuple[float, Placed]]] = {schedule: [] for schedule in SCHEDULES}
    problem = ""
    too_full: dict[Schedule, str] = {}
    for n, stages in enumerate(counts):
        for search in (alike, unequal):
            try:
                for first in search(question, stages, question.microbatches()[0], seed, time_limit_s / len(counts) / 2):
                    for schedule, fastest in _fastest(question, first, question.microbatches()).items():
                        if isinstance(fastest, str):
                            too_full[schedule] = fastest
                            continue
                        left = churn.kept(question, fastest[1].scene, fastest[1].serving)
                        best[schedule].append((fastest[0] / left if left else math.inf, fastest[1]))
            except (CapacityError, ConfigError) as e:
                problem = str(e)
        watch((n + 1) / len(counts))
    hurried = any(not placed.complete for found in best.values() for _, placed in found)
    shortlists = {schedule: promising(found) for schedule, found in best.items() if found}
    cuts = [placed.scene.setting.cut for near in shortlists.values() for _, placed in near]
    played = {
        schedule: [(_expected_s(question, placed, schedule), placed) for placed in near]
        for schedule, shortlist in shortlists.items()
        if (near := [placed for s, placed in shortlist if NEARLY * s * least <= tokens])
    }
    winners = [(schedule, min(found, key=itemgetter(0))[1]) for schedule, found in played.items()]
    for winner, placed in winners:
        for schedule in (s for s in SCHEDULES if s != winner):
            other = _fastest(question, placed, [placed.scene.setting.cost.sequences]).get(schedule)
            if isinstance(other, tuple):
                played.setdefault(schedule, []).append((_expected_s(question, other[1], schedule), other[1]))
    predictions = [
        with_haste(told(question, min(played[schedule], key=itemgetter(0))[1], schedule), hurried=hurried)
        if schedule in played
        else Prediction(
            strategy="pipeline",
            schedule=schedule,
            runnable=find("pipeline").runs,
            problem="others are faster by estimate" if best[schedule] else too_full.get(schedule, problem),
        )
        for schedule in SCHEDULES
    ]
    return predictions, _both_ways(question, [*_cuts_of(predictions), *cuts])


def tried_on(question: Question, swarm: Prediction, pipelines: Sequence[Prediction]) -> list[Prediction]:
    """Replace each of ``pipelines`` by its schedule on ``swarm``'s machines and layers, if that is faster."""
    if swarm.problem:
        return list(pipelines)
    placed = laid_out(question, swarm)
    every = _fastest(question, placed, question.microbatches())
    found, tokens = [], question.run.train.batch * question.spec.context
    for p in pipelines:
        other = every.get(p.schedule) if p.schedule else None
        if isinstance(other, tuple) and p.schedule and other[0] * NEARLY * p.expected_per_s <= tokens:
            q = told(question, other[1], p.schedule)
            p = q if p.problem or q.expected_per_s > p.expected_per_s else p
        found.append(p)
    return found


def promising(found: Sequence[tuple[float, Placed]]) -> list[tuple[float, Placed]]:
    """Select the layouts that may be the fastest, by estimated step times under churn [s]."""
    near = sorted((pair for pair in found if pair[0] * NEARLY <= min(found, key=itemgetter(0))[0]), key=itemgetter(0))
    return near[:SHORTLIST]


def alike(question: Question, stages: int, microbatch: int, seed: int, time_limit_s: float) -> list[Placed]:
    """Search for equal stages, cut evenly. Raises CapacityError and ConfigError."""
    return [found(question, question.scene(stages, microbatch), seed, time_limit_s)]


def _fastest(
    question: Question, first: Placed, microbatches: Iterable[int]
) -> dict[Schedule, tuple[float, Placed] | str]:
    """For each schedule, estimate a step with the fastest of the ``microbatches``, with its layout, or name a machine
    that lacks room. If stages of ``first`` mix devices, the CPU updates the weights."""
    best: dict[Schedule, tuple[float, Placed] | str] = {}
    cut, asked = first.scene.setting.cut, question.once_mixed(first.scene.setting, first.serving)
    for microbatch in microbatches:
        try:
            scene = asked.scene(len(cut), microbatch, cut)
        except CapacityError:
            break  # larger microbatches do not fit either
        for schedule in SCHEDULES:
            placed = first.on(scheduled(question, scene, schedule, len(first.assignment[0])))
            if placed is None:
                return best
            known = best.get(schedule, "")
            if full := [row for row in _memory(question, placed, schedule) if not _fits(row)]:
                best[schedule] = known or _too_full(full[0], schedule)
                continue
            step_s = placed.roughly_s(schedule)
            if isinstance(known, str) or step_s < known[0]:
                best[schedule] = step_s, placed
    return best


def scheduled(question: Question, scene: Scene, schedule: Schedule, pipelines: int) -> Scene:
    """Let machines recompute if GPipe's activations of a whole step do not fit (but not in the last stage)."""
    if schedule != "gpipe" or question.run.compute.checkpointing != "auto":
        return scene
    needs, setting = question.needs(scene), scene.setting
    kept = math.ceil(setting.cost.microbatches / pipelines)

    def backward_s(kind: Kind, stage: int) -> float:
        offer, need = question.offer(kind.name), needs[stage]
        if kind.declared or stage == len(needs) - 1 or kept * need.on(offer).graph <= stash_room(offer, need):
            return kind.backward_s[stage]
        cost = setting.cost.stages[stage]
        return max(kind.backward_s[stage], (3 - cost.frozen_flops / cost.forward_flops) * kind.forward_s[stage])

    kinds = (replace(kind, backward_s=tuple(backward_s(kind, s) for s in range(len(needs)))) for kind in setting.kinds)
    return replace(scene, setting=replace(setting, kinds=tuple(kinds)))


def _able(scene: Scene) -> list[int]:
    """Kinds that hold every stage without swapping."""
    return [k for k, kind in enumerate(scene.setting.kinds) if len(kind.fits - kind.swaps) == len(scene.setting.cut)]


def found(question: Question, scene: Scene, seed: int, time_limit_s: float) -> Placed:
    """Run the placement search. Raises CapacityError."""
    setting = scene.setting
    every = [(k, name) for k in _able(scene) for name in question.names[setting.kinds[k].name]]
    stages = len(setting.cut)
    pipelines = min(len(every) // stages, setting.cost.microbatches)
    if not pipelines:
        short = next((k.name for k in setting.kinds if len(k.fits - k.swaps) < stages), None)
        room = f"; '{short}' has no room for the largest" if short is not None else ""
        raise CapacityError(
            f"{len(every)} machines hold any stage, and {stages} stages need one each{room}: plan other stages"
        )
    kinds, names = tuple(k for k, _ in every), tuple(name for _, name in every)
    delay_ms, gbps = matrices(setting.links, kinds)
    each = setting.cost.microbatches / pipelines
    times_s = [each * max(map(setting.kinds[k].service_s, range(stages))) for k in kinds]
    task = Task(
        delay_ms,
        gbps,
        (pipelines,) * stages,
        each * max(setting.cost.backward_bytes),
        max(s.averaged_bytes for s in setting.cost.stages),
        compute_s=tuple(times_s),
    )
    placement = place(task, seed=seed, time_limit_s=time_limit_s)
    placed = {names[d] for stage in placement.assignment for d in stage}
    spares = [
        (k, name) for k, kind in enumerate(setting.kinds) for name in question.names[kind.name] if name not in placed
    ]
    return Placed(scene, kinds, names, placement.assignment, tuple(spares), placement.complete)


def _memory(question: Question, placed: Placed, schedule: Schedule) -> tuple[Memory, ...]:
    setting, stages = placed.scene.setting, len(placed.assignment)
    needs, rows = question.needs(placed.scene), {}
    boundary = 4.0 * setting.cost.tokens * question.spec.passed
    for s, devices in enumerate(placed.assignment):
        owed = Counter[int]()
        for d, share in zip(devices, placed.shares, strict=True):
            owed[d] += in_flight(schedule, stages, s, share) if s else 0  # of the first stage the inputs are tokens
        for d, n in owed.items():
            kind = setting.kinds[placed.kinds[d]].name
            if (kind, s, n) not in rows:
                rows[kind, s, n] = question.memory(kind, s, needs[s], inputs=n * boundary)
    return fullest(rows.values())


def _fits(row: Memory) -> bool:
    return row.device_needs <= (row.device_has or math.inf) and row.host_needs <= (row.host_has or math.inf)


def _too_full(row: Memory, schedule: Schedule) -> str:
    rest = "; it keeps the inputs of a whole step" if schedule == "gpipe" else ""
    return (
        f"'{row.machine}' needs {format_memory(row.device_needs)} for stage {row.stage} and has {format_memory(row.device_has or 0)}{rest}"
        f": take a smaller batch or more stages"
    )


def told(question: Question, placed: Placed, schedule: Schedule) -> Prediction:
    """Predict ``placed`` with a schedule."""
    setting, shares = placed.scene.setting, placed.shares
    split = _split(placed, schedule)
    stages = tuple(
        Stage(layers=layers, machines=tuple(placed.names[d] for d in devices))
        for layers, devices in zip(setting.cut, placed.assignment, strict=True)
    )
    used = {name for stage in stages for name in stage.machines}
    tokens = question.run.train.batch * question.spec.context
    left = churn.kept(question, placed.scene, placed.serving)
    return Prediction(
        strategy="pipeline",
        schedule=schedule,
        runnable=find("pipeline").runs,
        microbatch=setting.cost.sequences,
        microbatches=shares,
        stages=stages,
        spares=question.unused(used),
        state_device=placed.scene.run.optimizer.state_device,
        step_s=split.step_s,
        tokens_per_s=tokens / split.step_s,
        churned_tokens_per_s=question.churning(left * tokens / split.step_s),
        split=split,
        memory=_memory(question, placed, schedule),
        traffic=traffic([k.region for k in setting.kinds], setting.links, _sent(placed, shares)),
        price_per_billion_tokens=question.price(used, split.step_s),
        notes=(STAND_IN, *mixing(placed.scene, placed.serving)),
    )


def _split(placed: Placed, schedule: Schedule) -> Split:
    setting, run = placed.scene.setting, placed.scene.run
    who = placed.cast(schedule)
    at_once, free = play(setting, who), play(without_links(setting), who)
    step_s = _played_s(placed, schedule) if run.optimizer.delayed else at_once.step_s
    return parted(placed.busiest_s, free.computing_s, at_once.computing_s, step_s or placed.roughly_s(schedule))


def _played_s(placed: Placed, schedule: Schedule) -> float:
    """Seconds of a played step."""
    setting, delayed = placed.scene.setting, placed.scene.run.optimizer.delayed
    step_s = play(setting, placed.cast(schedule), delayed=delayed).step_s
    return step_s if step_s > 0 else placed.roughly_s(schedule)  # steps so short that several end at once


def _expected_s(question: Question, placed: Placed, schedule: Schedule) -> float:
    """Seconds of a played step, with losses from churn."""
    left = churn.kept(question, placed.scene, placed.serving)
    return _played_s(placed, schedule) / left if left else math.inf


def _sent(placed: Placed, shares: Sequence[int]) -> Bytes:
    cost, sent = placed.scene.setting.cost, Bytes()
    for s in range(len(placed.assignment)):
        for p, share in enumerate(shares):
            if s:
                a, b = placed.kind(s - 1, p), placed.kind(s, p)
                sent[a, b, "activations"] += share * cost.forward_bytes[s]
                sent[b, a, "gradients"] += share * cost.backward_bytes[s]
    sent.ending(cost, placed.serving)
    return sent


def uneven(question: Question, predictions: Iterable[Prediction]) -> list[Cut]:
    """List the predictions' uneven cuts, and their mirror images."""
    return _both_ways(question, _cuts_of(predictions))


def _cuts_of(predictions: Iterable[Prediction]) -> list[Cut]:
    return [tuple(stage.layers for stage in p.stages) for p in predictions if not p.problem]


def _both_ways(question: Question, cuts: Iterable[Cut]) -> list[Cut]:
    """List the uneven ones of ``cuts``, and their mirror images: newcomers fill the first stages first."""
    layers = question.spec.layers
    both = [c for cut in cuts for c in (cut, tuple((layers - end, layers - first) for first, end in reversed(cut)))]
    return [cut for cut in dict.fromkeys(both) if cut != question.spec.cut(len(cut))]


def cuts(question: Question, time_limit_s: float) -> list[Cut]:
    """Uneven cuts that suit the machines' memory and speed, for any strategy."""
    counts = question.stage_counts()
    every = [
        placed
        for stages in counts
        for placed in unequal(question, stages, question.microbatches()[0], 0, time_limit_s / len(counts))
    ]
    found = dict.fromkeys(placed.scene.setting.cut for placed in every)
    return [cut for cut in found if cut != question.spec.cut(len(cut))]


def membership(question: Question, scene: Scene, chosen: Prediction) -> Planned:
    """The membership for a play in the virtual world: as in ``chosen``, with spares seated as in a live run."""
    schedule = chosen.schedule
    assert schedule
    placed = as_told(question, scene, chosen)
    stages = {name: s for s, stage in enumerate(chosen.stages) for name in stage.machines}
    spares = placed.everyone[len(stages) :]
    stages.update({name: s for (_, name), (s, _) in zip(placed.spares, spares, strict=True)})
    strategy = Pipeline(tuple(stage.machines for stage in chosen.stages), chosen.microbatches, schedule)
    kind_of = dict(zip(placed.names, placed.kinds, strict=True))
    return Planned(strategy, {name: kind_of[name] for name in stages}, stages)


def as_told(question: Question, scene: Scene, chosen: Prediction) -> Placed:
    """The layout described by ``chosen``, on ``scene``. Raises CapacityError if a machine lacks room there."""
    kinds = scene.setting.kinds
    every = [(k, name) for k, kind in enumerate(kinds) for name in question.names[kind.name]]
    index = {name: d for d, (_, name) in enumerate(every)}
    for s, stage in enumerate(chosen.stages):
        for name in stage.machines:
            if name not in index or s not in kinds[every[index[name]][0]].fits:
                raise CapacityError(f"'{name}' has no room for stage {s}; plan more stages")
    assignment = tuple(tuple(index[name] for name in stage.machines) for stage in chosen.stages)
    return Placed.of(scene, every, assignment)
