"""Strategy ``pipeline`` on a fleet: membership as planned (DT-FM), the schedules GPipe and 1F1B.

For each number of stages the placement search finds where stages and pipelines go (``policy.place``), once; schedules are played on what
it found with every microbatch that fits, and the fastest is kept, one of each schedule.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from muletrain.config.plan import Prediction, Stage
from muletrain.errors import CapacityError, ConfigError
from muletrain.policy.place import place
from muletrain.policy.placement import Task
from muletrain.policy.schedules import Station, in_flight
from muletrain.policy.seats import Seats
from muletrain.policy.strategies import (
    Member,
    averaging_s,
    pipeline_shares,
    pipeline_split,
    roughly_s,
)
from muletrain.sim.machines import seat, stash_room
from muletrain.sim.question import Bytes, fullest, matrices, traffic
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.config.fleet import Link
    from muletrain.config.plan import Memory
    from muletrain.policy.placement import Assignment
    from muletrain.policy.schedules import Schedule
    from muletrain.sim.actors import Planned
    from muletrain.sim.machines import Kind
    from muletrain.sim.question import Question, Scene

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")


@dataclass(frozen=True)
class Placed:
    """Machines by stage and pipeline; ``kinds``: of each machine (``Setting.kinds``), by its index."""

    scene: Scene
    kinds: tuple[int, ...]
    names: tuple[str, ...]
    assignment: Assignment
    spares: tuple[tuple[int, str], ...]
    """(kind, name) of those that hold some stage and have no place."""

    @cached_property
    def serving(self) -> list[list[int]]:
        """By stage and kind, spares where a live run seats them: they average along."""
        serving = [[0] * len(self.scene.setting.kinds) for _ in self.assignment]
        for here, devices in zip(serving, self.assignment, strict=True):
            for d in devices:
                here[self.kinds[d]] += 1
        for k, _ in self.spares:
            serving[seat(self.scene.setting, k, serving, [0] * len(serving))][k] += 1
        return serving

    def kind(self, stage: int, pipeline: int) -> int:
        return self.kinds[self.assignment[stage][pipeline]]

    def link(self, a: int, b: int) -> Link:
        """Between two machines."""
        return self.scene.setting.links[self.kinds[a]][self.kinds[b]]

    def fits(self, scene: Scene, able: Sequence[int]) -> bool:
        """Another microbatch leaves everyone in place: kinds are the same, and those that serve hold any stage."""
        same = [k.name for k in scene.setting.kinds] == [k.name for k in self.scene.setting.kinds]
        return same and {self.kinds[d] for stage in self.assignment for d in stage} <= set(able)

    @property
    def pipelines(self) -> list[tuple[Station, ...]]:
        stages, pipelines = range(len(self.assignment)), range(len(self.assignment[0]))
        return [tuple(self._station(s, p) for s in stages) for p in pipelines]

    def _station(self, s: int, p: int) -> Station:
        cost, kind = self.scene.setting.cost, self.scene.setting.kinds[self.kind(s, p)]
        own, found = self.assignment[s][p], Station(kind.forward_s[s], kind.backward_s[s])
        if s + 1 < len(self.assignment):
            link, there = self.link(own, self.assignment[s + 1][p]), self.scene.setting.kinds[self.kind(s + 1, p)]
            nbytes = cost.forward_bytes[s + 1]
            found = replace(
                found, on_s=nbytes / link.bandwidth_bytes_per_s, on_delay_s=link.delay_s, on_up_s=nbytes / kind.up_bytes_per_s,
                on_down_s=nbytes / there.down_bytes_per_s,
            )  # fmt: skip
        if s:
            link, there = self.link(own, self.assignment[s - 1][p]), self.scene.setting.kinds[self.kind(s - 1, p)]
            nbytes = cost.backward_bytes[s]
            found = replace(
                found, back_s=nbytes / link.bandwidth_bytes_per_s, back_delay_s=link.delay_s, back_up_s=nbytes / kind.up_bytes_per_s,
                back_down_s=nbytes / there.down_bytes_per_s,
            )  # fmt: skip
        return found

    def ending_s(self) -> float:
        """Averaging, in the stage where it takes longest."""
        cost, kinds, links = self.scene.setting.cost, self.scene.setting.kinds, self.scene.setting.links
        longest_s = 0.0
        for stage, counts in zip(cost.stages, self.serving, strict=True):
            here = Counter({k: n for k, n in enumerate(counts) if n})
            paths = [links[a][b] for a in here for b in here if a != b or here[a] > 1]
            if paths:
                members = [Member(kinds[k].up_bytes_per_s, kinds[k].down_bytes_per_s) for k in here.elements()]
                narrowest = min(path.bandwidth_bytes_per_s for path in paths)
                takes_s = averaging_s(stage.averaged_bytes, members, narrowest, max(path.delay_s for path in paths))
                longest_s = max(longest_s, takes_s + stage.ending_s)
        return longest_s


def predict(
    question: Question, seed: int, time_limit_s: float, watch: Callable[[float], None] = lambda share: None
) -> list[Prediction]:
    """One for each schedule."""
    counts = question.stage_counts()
    best: dict[Schedule, tuple[float, Placed]] = {}
    problem = ""
    too_full: dict[Schedule, str] = {}
    for n, stages in enumerate(counts):
        try:
            for schedule, found in _fastest(question, stages, seed, time_limit_s / len(counts)).items():
                if isinstance(found, str):
                    too_full[schedule] = found
                    continue
                step_s, placed = found
                if schedule not in best or step_s < best[schedule][0]:
                    best[schedule] = step_s, placed
        except (CapacityError, ConfigError) as e:
            problem = str(e)
        watch((n + 1) / len(counts))
    return [
        told(question, best[schedule][1], schedule)
        if schedule in best
        else Prediction(strategy="pipeline", schedule=schedule, runnable=True, problem=too_full.get(schedule, problem))
        for schedule in SCHEDULES
    ]  # fmt: skip


def _fastest(
    question: Question, stages: int, seed: int, time_limit_s: float
) -> dict[Schedule, tuple[float, Placed] | str]:
    """By schedule: an estimate of a step, and where everything goes; or which machine lacks room. Raises CapacityError and ConfigError."""
    best: dict[Schedule, tuple[float, Placed] | str] = {}
    first: Placed | None = None
    for microbatch in question.microbatches():
        try:
            scene = question.scene(stages, microbatch)
        except CapacityError:
            if first is None:
                raise
            break  # larger ones do not fit either
        if first is None:
            first = found(question, scene, seed, time_limit_s)
        elif not first.fits(scene, _able(scene)):
            break
        for schedule in SCHEDULES:
            placed = replace(first, scene=scheduled(question, scene, schedule, len(first.assignment[0])))
            pipelines = placed.pipelines
            shares = pipeline_shares(pipelines, scene.setting.cost.microbatches)
            known = best.get(schedule, "")
            if full := [row for row in _memory(question, placed, schedule, shares) if not _fits(row)]:
                best[schedule] = known or _too_full(full[0], schedule)
                continue
            given = [(stations, share) for stations, share in zip(pipelines, shares, strict=True) if share]
            stations, share = max(given, key=lambda p: roughly_s(*p))
            step_s = pipeline_split([stations], [share], schedule, placed.ending_s()).step_s
            if isinstance(known, str) or step_s < known[0]:
                best[schedule] = step_s, placed
    return best


def scheduled(question: Question, scene: Scene, schedule: Schedule, pipelines: int) -> Scene:
    """GPipe keeps the activations of a whole step: machines that have no room for them compute forward again before each backward (but in
    the last stage, which does both at once)."""
    if schedule != "gpipe" or question.run.compute.checkpointing != "auto":
        return scene
    needs, setting = question.needs(scene), scene.setting
    kept = math.ceil(setting.cost.microbatches / pipelines)

    def backward_s(kind: Kind, stage: int) -> float:
        if (
            kind.declared
            or stage == len(needs) - 1
            or kept * needs[stage].activations <= stash_room(question.offer(kind.name), needs[stage])
        ):
            return kind.backward_s[stage]
        return max(kind.backward_s[stage], 3 * kind.forward_s[stage])

    kinds = (replace(kind, backward_s=tuple(backward_s(kind, s) for s in range(len(needs)))) for kind in setting.kinds)
    return replace(scene, setting=replace(setting, kinds=tuple(kinds)))


def _able(scene: Scene) -> list[int]:
    """Kinds that hold any stage."""
    return [k for k, kind in enumerate(scene.setting.kinds) if len(kind.fits) == len(scene.setting.cut)]


def found(question: Question, scene: Scene, seed: int, time_limit_s: float) -> Placed:
    """By the placement search. Raises CapacityError."""
    setting = scene.setting
    every = [(k, name) for k in _able(scene) for name in question.names[setting.kinds[k].name]]
    stages = len(setting.cut)
    pipelines = min(len(every) // stages, setting.cost.microbatches)
    if not pipelines:
        short = next((k.name for k in setting.kinds if len(k.fits) < stages), None)
        room = f"; '{short}' has no room for the largest" if short is not None else ""
        raise CapacityError(
            f"{len(every)} machines hold any stage, and {stages} stages need one each{room}: plan other stages"
        )
    kinds, names = tuple(k for k, _ in every), tuple(name for _, name in every)
    delay_ms, gbps = matrices(setting.links, kinds)
    each = setting.cost.microbatches / pipelines
    times_s = [each * max(map(setting.kinds[k].service_s, range(stages))) for k in kinds]
    task = Task(
        delay_ms, gbps, (pipelines,) * stages, each * max(setting.cost.backward_bytes), max(s.averaged_bytes for s in setting.cost.stages),
        compute_s=tuple(times_s),
    )  # fmt: skip
    assignment = place(task, seed=seed, time_limit_s=time_limit_s).assignment
    placed = {names[d] for stage in assignment for d in stage}
    spares = [
        (k, name) for k, kind in enumerate(setting.kinds) for name in question.names[kind.name] if name not in placed
    ]
    return Placed(scene, kinds, names, assignment, tuple(spares))


def _memory(question: Question, placed: Placed, schedule: Schedule, shares: Sequence[int]) -> tuple[Memory, ...]:
    setting, stages = placed.scene.setting, len(placed.assignment)
    needs, rows = question.needs(placed.scene), {}
    boundary = 4.0 * setting.cost.tokens * question.spec.width
    for s in range(stages):
        for p, share in enumerate(shares):
            kind = setting.kinds[placed.kind(s, p)].name
            owed = in_flight(schedule, stages, s, share) if s else 0  # of the first stage the inputs are tokens
            if (kind, s, owed) not in rows:
                rows[kind, s, owed] = question.memory(kind, s, needs[s], inputs=owed * boundary)
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
    """What ``placed`` is predicted to do."""
    setting = placed.scene.setting
    pipelines = placed.pipelines
    shares = pipeline_shares(pipelines, setting.cost.microbatches)
    split = pipeline_split(pipelines, shares, schedule, placed.ending_s())
    stages = tuple(
        Stage(layers=layers, machines=tuple(placed.names[d] for d in devices))
        for layers, devices in zip(setting.cut, placed.assignment, strict=True)
    )
    used = [name for stage in stages for name in stage.machines]
    tokens = question.run.train.batch * question.spec.context
    return Prediction(
        strategy="pipeline", schedule=schedule, runnable=True, microbatch=setting.cost.sequences, microbatches=shares, stages=stages,
        spares=question.unused(used), step_s=split.step_s, tokens_per_s=tokens / split.step_s, split=split,
        memory=_memory(question, placed, schedule, shares),
        traffic=traffic([k.region for k in setting.kinds], setting.links, _sent(placed, shares)),
        price_per_billion_tokens=question.price(used, split.step_s),
        notes=_notes(placed),
    )  # fmt: skip


def _notes(placed: Placed) -> tuple[str, ...]:
    kinds = placed.scene.setting.kinds
    notes = ["nobody leaves: where a machine is lost, a spare or the others of its stage stand in"]
    mixed = next(
        (devices for here in placed.serving if len(devices := {kinds[k].device for k, n in enumerate(here) if n}) > 1),
        None,
    )
    if mixed is not None:
        notes.append(
            f"stages mix devices ({', '.join(sorted(mixed))}): where their arithmetic differs in the last bit, one of them leaves the run, "
            f"unless optimizer.state_device = 'cpu'"
        )
    return tuple(notes)


def _sent(placed: Placed, shares: Sequence[int]) -> Bytes:
    cost, sent = placed.scene.setting.cost, Bytes()
    for s in range(len(placed.assignment)):
        for p, share in enumerate(shares):
            if s:
                a, b = placed.kind(s - 1, p), placed.kind(s, p)
                sent[a, b, "activations"] += share * cost.forward_bytes[s]
                sent[b, a, "gradients"] += share * cost.backward_bytes[s]
        sent.averaging(placed.serving[s], cost.stages[s].averaged_bytes)
    return sent


def membership(question: Question, scene: Scene, chosen: Prediction) -> Planned:
    """What the virtual world plays: everyone where ``chosen`` has them, and spares where a live run seats them."""
    from muletrain.sim.actors import Planned  # torch takes seconds to load

    setting, schedule = scene.setting, chosen.schedule
    assert schedule
    kind_of = {name: k for k, kind in enumerate(setting.kinds) for name in question.names[kind.name]}
    stages = {name: s for s, stage in enumerate(chosen.stages) for name in stage.machines}
    serving = [[0] * len(setting.kinds) for _ in chosen.stages]
    for name, s in stages.items():
        serving[s][kind_of[name]] += 1
    for name in (n for n in kind_of if n not in stages):
        stages[name] = seat(setting, kind_of[name], serving, [0] * len(serving))
        serving[stages[name]][kind_of[name]] += 1
    seats = Seats(tuple(stage.machines for stage in chosen.stages), chosen.microbatches, schedule)
    return Planned(seats, {name: kind_of[name] for name in stages}, stages)
