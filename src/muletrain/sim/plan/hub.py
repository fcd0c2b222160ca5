"""Strategy ``hub`` on a fleet (HYBRID): reliable machines serve stages as parameter servers, unreliable ones are their
clients. Servers are found by the search that unequal pipelines have (``planning.groups``), and clients go where they help
most, as in a run; ``hub_step`` says how long a step takes. HYBRID's own allocation is in ``reproduction``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from muletrain.compute.estimate import client_memory
from muletrain.config.plan_file import Prediction, Stage
from muletrain.errors import CapacityError, ConfigError
from muletrain.planning.groups import Work, search
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.planned import Planned
from muletrain.sim.fleet.rates import TRAINERS
from muletrain.sim.machine import precision_of
from muletrain.sim.plan import churn
from muletrain.sim.plan.hub_step import HubStep, StageMachines, sent
from muletrain.sim.plan.question import fullest, mixing, traffic, with_haste
from muletrain.sim.setting import takes_s
from muletrain.strategies import find
from muletrain.strategies.hub import Hub, stage_to_help

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muletrain.config.plan_file import Memory
    from muletrain.planning.groups import Serving
    from muletrain.planning.partition import Cut
    from muletrain.sim.plan.question import Question, Scene

NOTE = (
    "clients count for the part of the time that they are there; the parts of microbatches that they lose do not count: 'muletrain "
    "simulate fleet --strategy hub' plays them"
)

NO_CLIENTS = (
    "without clients, since moving weights and gradients takes longer than they save: that is 'swarm' on fewer machines, so it is not "
    "recommended"
)
PLAYED = 8
"""Hubs that are played at most: of each number of stages those that are fastest if microbatches wait for nothing."""


@dataclass(frozen=True)
class Allocated:
    """A hub on a ``scene``. ``stages``: names of the servers and the clients of each."""

    question: Question
    scene: Scene
    stages: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    @cached_property
    def step(self) -> HubStep:
        """A step of it."""
        kind_of = self.kinds()
        stages = (StageMachines(*(tuple(kind_of[name] for name in names) for names in both)) for both in self.stages)
        run = self.scene.run
        return HubStep(self.scene.setting, tuple(stages), run.fleet.trainers or TRAINERS, run.optimizer.delayed)

    @property
    def roughly_per_s(self) -> float:
        """Tokens/s under churn."""
        cost = self.scene.setting.cost
        return self.kept * cost.microbatches * cost.tokens / self.step.roughly_s

    @cached_property
    def kept(self) -> float:
        """The part of its tokens/s that is left under churn: of what clients add, the part of the time that they are
        there."""
        clients = sum(len(names) for _, names in self.stages)
        if not clients or self.question.weather == Weather():
            return 1.0
        there = churn.present(self.question.weather.on(self.scene.setting.exposed), clients)
        servers = replace(self.step, stages=tuple(stage._replace(clients=()) for stage in self.step.stages))
        return there + (1 - there) * min(1.0, self.step.roughly_s / servers.roughly_s)

    def with_clients(self) -> Iterator[Allocated]:
        """The same servers with one client, two, four, ... and all, the fastest first, each at the stage that it helps
        most."""
        setting, kind_of = self.scene.setting, self.kinds()
        each_s = {n: [setting.kinds[k].service_s(s) for s in range(len(self.stages))] for n, k in kind_of.items()}
        leaving = [n for n, k in kind_of.items() if not setting.kinds[k].reliable]
        rates = [sum(1 / each_s[n][s] for n in names) for s, (names, _) in enumerate(self.stages)]
        hub = self
        for count, name in enumerate(sorted(leaving, key=lambda n: sum(each_s[n])), 1):
            stage = stage_to_help([1.0] * len(rates), rates, setting.kinds[kind_of[name]].fits)
            if stage is not None:
                rates[stage] += 1 / each_s[name][stage]
                servers, clients = hub.stages[stage]
                hub = replace(hub, stages=(*hub.stages[:stage], (servers, (*clients, name)), *hub.stages[stage + 1 :]))
            if count & (count - 1) == 0 or count == len(leaving):
                yield hub

    def unmixed(self) -> Allocated:
        """The same with weights that the CPU updates, if the servers of a stage differ. Raises CapacityError."""
        setting, other = self.scene.setting, self.question.once_mixed(self.scene.setting, self.serving())
        if other is self.question:
            return self
        return Allocated(other, other.scene(len(setting.cut), setting.cost.sequences, setting.cut), self.stages)

    def kinds(self) -> dict[str, int]:
        """The kind of each machine by name."""
        kinds = enumerate(self.scene.setting.kinds)
        return {name: k for k, kind in kinds for name in self.question.names[kind.name]}

    def serving(self) -> list[list[int]]:
        """Servers by stage and kind."""
        kind_of, found = self.kinds(), [[0] * len(self.scene.setting.kinds) for _ in self.stages]
        for s, (servers, _) in enumerate(self.stages):
            for name in servers:
                found[s][kind_of[name]] += 1
        return found


def predict(
    question: Question,
    seed: int,
    time_limit_s: float,
    watch: Callable[[float], None] = lambda share: None,
    least: float = 0.0,
) -> Prediction:
    """Predict the hub with the best number of stages and microbatch, or why none is possible. ``least``: tokens/s of
    interest: what cannot do as many is not played."""
    if question.paced:
        paced = next(p.name for p in question.firsts if p.forward_s)
        return _problem(f"'{paced}' is paced (forward_ms): its speed is not known; give device or tflops instead")
    asked, reliable = question.asking(find("hub")), sum(peer.reliable for peer in question.fleet.peers())
    counts = [n for n in question.stage_counts() if n <= max(1, reliable)] or [question.stages or 1]
    hubs, hurried, problem = list[Allocated](), False, ""
    for n, stages in enumerate(counts):
        try:
            found, complete = allocated(asked, stages, seed, time_limit_s / len(counts))
            hubs, hurried = hubs + found, hurried or not complete
        except (CapacityError, ConfigError) as e:
            problem = f"{e}{_servers(question)}"
        watch((n + 1) / len(counts))
    played = list[Prediction]()
    for hub in sorted(hubs, key=lambda hub: -hub.roughly_per_s)[:PLAYED]:
        if hub.roughly_per_s < least:
            problem = "others are faster by estimate"
            break
        try:
            played.append(told(hub))
        except CapacityError as e:
            problem = str(e)
    if not played:
        return _problem(problem)
    return with_haste(max(played, key=lambda p: p.expected_per_s), hurried=hurried)


def _servers(question: Question) -> str:
    """What bounds the stages of a hub, for those that are told to take more of them."""
    peers = question.fleet.peers()
    return f" (of a hub, each stage needs a reliable machine, and {sum(p.reliable for p in peers)} of {len(peers)} are)"


def _problem(why: str) -> Prediction:
    return Prediction(strategy="hub", runnable=find("hub").runs, problem=why)


def allocated(question: Question, stages: int, seed: int, time_limit_s: float) -> tuple[list[Allocated], bool]:
    """The hubs of so many stages that are fastest by estimate, without clients and with them, and whether the search for
    their servers ended by itself. Raises CapacityError and ConfigError."""
    fleet, sizes = question.fleet, question.microbatches()
    takes = takes_s(fleet, question.with_microbatch(sizes[0]), question.spec, stages)
    work = Work(takes, tuple(m.count * m.reliable for m in fleet.machines))

    @cache
    def served(size: int, serving: Serving, cut: Cut) -> Allocated | None:
        """None: no room."""
        try:
            scene = question.scene(stages, size, cut)
        except CapacityError:
            return None
        left = [iter(question.names[m.name]) for m in fleet.machines]
        names = [tuple(next(left[k]) for k, n in enumerate(row) for _ in range(n)) for row in serving]
        hub, kinds = Allocated(question, scene, tuple((own, ()) for own in names)), scene.setting.kinds
        kind_of = hub.kinds()
        held = all(
            n in kind_of and s in kinds[kind_of[n]].fits - kinds[kind_of[n]].swaps
            for s, own in enumerate(names)
            for n in own
        )
        return hub if held else None

    def cost_s(serving: Serving, cut: Cut, slowest_s: float) -> float:
        hub = served(sizes[0], serving, cut)
        return math.inf if hub is None else hub.step.roughly_s

    choices, complete = search(work, cost_s, seed=seed, time_limit_s=time_limit_s)
    alone = [hub for c in choices for size in sizes if (hub := served(size, c.serving, c.cut)) is not None]
    if not alone:
        question.scene(stages, sizes[0])  # says why
        raise CapacityError(f"the reliable machines have no room for {stages} stages")
    helped = [hub for a in alone for hub in a.with_clients()]
    return [max(hubs, key=lambda hub: hub.roughly_per_s).unmixed() for hubs in (alone, helped) if hubs], complete


def told(a: Allocated) -> Prediction:
    """Raises CapacityError if a machine lacks room."""
    question, scene, setting = a.question, a.scene, a.scene.setting
    memory = _memory(a)
    for row in memory:
        if row.device_needs > (row.device_has or math.inf) or row.host_needs > (row.host_has or math.inf):
            raise CapacityError(
                f"'{row.machine}' has no room for stage {row.stage} and what lies beside it: more stages, or another strategy"
            )
    step = a.step
    stages = tuple(
        Stage(layers=layers, machines=(*servers, *clients), clients=clients)
        for layers, (servers, clients) in zip(setting.cut, a.stages, strict=True)
    )
    used = [name for stage in stages for name in stage.machines]
    tokens, split, helped = (
        setting.cost.microbatches * setting.cost.tokens,
        step.split,
        any(clients for _, clients in a.stages),
    )
    return Prediction(
        strategy="hub",
        runnable=helped and find("hub").runs,
        microbatch=setting.cost.sequences,
        microbatches=(setting.cost.microbatches,),
        stages=stages,
        spares=question.unused(used),
        state_device=scene.run.optimizer.state_device,
        step_s=split.step_s,
        tokens_per_s=tokens / split.step_s,
        churned_tokens_per_s=question.churning(a.kept * tokens / split.step_s),
        split=split,
        memory=memory,
        traffic=traffic([k.region for k in setting.kinds], setting.links, sent(step)),
        price_per_billion_tokens=question.price(used, split.step_s),
        notes=(NOTE if helped else NO_CLIENTS, *mixing(scene, a.serving())),
    )


def _memory(a: Allocated) -> tuple[Memory, ...]:
    entry_of = {name: entry for entry, names in a.question.names.items() for name in names}
    run, spec, cut = a.scene.run, a.question.spec, a.scene.setting.cut
    needs, tokens = a.question.needs(a.scene), run.train.microbatch * spec.context
    rows: list[Memory] = []
    for s, (servers, clients) in enumerate(a.stages):
        of_client = client_memory(spec, cut, s, tokens=tokens, precision=precision_of(run))
        for names, need in ((servers, needs[s]), (clients, of_client)):
            rows += [a.question.memory(entry, s, need) for entry in dict.fromkeys(entry_of[name] for name in names)]
    return fullest(rows)


def as_told(question: Question, scene: Scene, chosen: Prediction) -> Allocated:
    """The hub that ``chosen`` tells of, on ``scene``."""
    names = tuple((tuple(m for m in s.machines if m not in s.clients), s.clients) for s in chosen.stages)
    return Allocated(question, scene, names)


def membership(question: Question, scene: Scene, chosen: Prediction) -> Planned:
    """The membership that the virtual world plays."""
    told = as_told(question, scene, chosen)
    servers = {name: s for s, (names, _) in enumerate(told.stages) for name in names}
    clients = {name: s for s, (_, names) in enumerate(told.stages) for name in names}
    kind_of = told.kinds()
    strategy = Hub(tuple(names for names, _ in told.stages))
    return Planned(strategy, {n: kind_of[n] for n in (*servers, *clients)}, servers, clients)
