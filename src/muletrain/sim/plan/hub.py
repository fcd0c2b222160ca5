"""Strategy ``hub`` on a fleet (HYBRID): reliable machines serve stages as parameter servers, unreliable ones are their
clients. The search that unequal pipelines have (``planning.groups``) places both; ``hub_step`` says how long a step takes.
HYBRID's own allocation is in ``reproduction``."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from muletrain.compute.swap.fit import client_needs
from muletrain.config.plan_file import Prediction, Stage
from muletrain.errors import CapacityError, ConfigError
from muletrain.planning.groups import Search, Work
from muletrain.policy.rebalance import stage_to_help
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.planned import Planned
from muletrain.sim.fleet.rates import TRAINERS
from muletrain.sim.machine import precision_of
from muletrain.sim.plan import churn
from muletrain.sim.plan.hub_step import HubStep, StageMachines, sent
from muletrain.sim.plan.question import fullest, mixing, traffic, with_haste
from muletrain.sim.setting import takes_s
from muletrain.strategies import find
from muletrain.strategies.hub import Hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muletrain.config.plan_file import Memory
    from muletrain.planning.groups import Choice, Serving
    from muletrain.planning.partition import Cut
    from muletrain.sim.plan.question import Question, Scene

NOTE = (
    "clients count for the part of the time that they are there; the parts of microbatches that they lose do not count: 'muletrain "
    "simulate fleet --strategy hub' plays them"
)

NO_CLIENTS = (
    "without clients, since moving weights and gradients takes longer than they save; its machines keep these stages"
)
SEARCHED = 2
"""Sizes of microbatches, the smallest ones, with which machines and layers are searched for."""
CONTINUED = 8
"""Beginnings, the best ones, from which the search goes on."""
PLAYED = 8
"""Hubs that are played at most."""


@dataclass(frozen=True)
class Allocated:
    """A hub on a ``scene``. ``stages``: names of the servers and the clients of each stage."""

    question: Question
    scene: Scene
    stages: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

    @cached_property
    def step(self) -> HubStep:
        """A step of the hub."""
        kind_of = self.kinds()
        stages = (StageMachines(*(tuple(kind_of[name] for name in names) for names in both)) for both in self.stages)
        run = self.scene.run
        return HubStep(self.scene.setting, tuple(stages), run.fleet.trainers or TRAINERS, run.optimizer.delayed)

    @property
    def helped(self) -> bool:
        """Whether the hub has clients."""
        return any(clients for _, clients in self.stages)

    @property
    def roughly_per_s(self) -> float:
        """Tokens/s under churn."""
        cost = self.scene.setting.cost
        return self.kept * cost.microbatches * cost.tokens / self.step.roughly_s

    @cached_property
    def kept(self) -> float:
        """The part of the tokens/s that remains under churn: the clients' contribution counts for the time of their
        presence."""
        clients = sum(len(names) for _, names in self.stages)
        if not clients or self.question.weather == Weather():
            return 1.0
        there = churn.present(self.question.weather.on(self.scene.setting.exposed), clients)
        servers = replace(self.step, stages=tuple(stage._replace(clients=()) for stage in self.step.stages))
        return there + (1 - there) * min(1.0, self.step.roughly_s / servers.roughly_s)

    def unmixed(self) -> Allocated:
        """The same with weights that the CPU updates, if the servers of a stage differ. Raises CapacityError."""
        setting, other = self.scene.setting, self.question.once_mixed(self.scene.setting, self.serving())
        if other is self.question:
            return self
        found = Allocated(other, other.scene(len(setting.cut), setting.cost.sequences, setting.cut), self.stages)
        if not found.fits:
            raise CapacityError("a server has no room in its host memory for the state of a stage whose servers differ")
        return found

    @property
    def fits(self) -> bool:
        """Whether each machine has room for its stage."""
        kinds = {name: kind for kind in self.scene.setting.kinds for name in self.question.names[kind.name]}
        every = ((s, kinds.get(name)) for s, both in enumerate(self.stages) for names in both for name in names)
        return all(kind is not None and s in kind.fits - kind.swaps for s, kind in every)

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
    interest; layouts with a lower estimate are not played."""
    if question.paced:
        paced = next(p.name for p in question.firsts if p.forward_s)
        return _problem(f"'{paced}' is paced (forward_ms): its speed is not known; give device or tflops instead")
    hubs, hurried, problem = _found(question, seed, time_limit_s, watch)
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


def _found(
    question: Question, seed: int, time_limit_s: float, watch: Callable[[float], None]
) -> tuple[list[Allocated], bool, str]:
    """Find the fastest hubs by estimate, for each number of stages one without clients and one with clients. Also
    returned: whether the time was too short, and the reason if there is no hub."""
    asked, reliable = question.asking(find("hub")), sum(peer.reliable for peer in question.fleet.peers())
    counts = [n for n in question.stage_counts() if n <= max(1, reliable)] or [question.stages or 1]
    if question.stages is None and 0 < reliable <= question.spec.most_stages:
        counts = sorted({*counts, reliable})  # stages of unequal length, the shortest that a hub may have
    sizes, deadline, problem = asked.microbatches(), time.monotonic() + time_limit_s, ""
    tries = list(product(counts, sizes[:SEARCHED]))
    found: list[tuple[Choice, _Search]] = []
    for n, (stages, size) in enumerate(tries):
        try:
            search = _Search(asked, stages, size, seed, deadline)
            found += [(choice, search) for choice in search.begun()]
        except (CapacityError, ConfigError) as e:
            problem = f"{e}{_servers(question)}"
        watch(n / len(tries) / 2)
    for n, (choice, search) in enumerate(sorted(found, key=lambda both: both[0].cost_s)[:CONTINUED]):
        found.append((search.descended(choice), search))
        watch((1 + n / CONTINUED) / 2)
    hurried = time.monotonic() > deadline
    best = dict[tuple[int, bool], Allocated]()
    hubs = [hub for c, search in found for size in sizes if (hub := search.hub(size, c.serving, c.cut)) is not None]
    for hub in sorted(hubs, key=lambda hub: -hub.roughly_per_s):
        if (of := (len(hub.stages), hub.helped)) not in best:
            try:
                best[of] = hub.unmixed()
            except CapacityError as e:
                problem = str(e)
    return [*best.values()], hurried, problem


def _servers(question: Question) -> str:
    """Explain the bound on a hub's stages, for users who are advised to take more stages."""
    peers = question.fleet.peers()
    return f" (of a hub, each stage needs a reliable machine, and {sum(p.reliable for p in peers)} of {len(peers)} are)"


def _problem(why: str) -> Prediction:
    return Prediction(strategy="hub", runnable=find("hub").runs, problem=why)


class _Search:
    """The search for the hub of so many stages with microbatches of one size."""

    def __init__(self, question: Question, stages: int, microbatch: int, seed: int, deadline: float) -> None:
        self._question, self._stages, self._microbatch = question, stages, microbatch
        run, machines = question.with_microbatch(microbatch), question.fleet.machines
        self._takes_s = takes_s(question.fleet, run, question.spec, stages)
        self._servers = tuple(m.count * m.reliable for m in machines)
        self._all = tuple(m.count for m in machines)
        work = Work(self._takes_s, self._servers)
        self._search = Search(work, self._cost_s, run.microbatches, seed=seed, deadline=deadline)
        self._scenes: dict[tuple[int, Cut], Scene | None] = {}

    def begun(self) -> list[Choice]:
        """Return a few hubs without clients, and the same with the best number of clients. Raises CapacityError and
        ConfigError if there is none."""
        alone = self._search.begun()
        if not alone:
            self._question.scene(self._stages, self._microbatch)  # says why
            raise CapacityError(f"the reliable machines have no room for {self._stages} stages")
        every = [[c for serving in self._helped(a) if (c := self._search.choice(serving))] for a in alone]
        return alone + [min(helped, key=lambda c: (c.cost_s, c.serving)) for helped in every if helped]

    def descended(self, choice: Choice) -> Choice:
        """Continue the search; a hub without clients gets none."""
        servers = all(n == 0 or has for row in choice.serving for n, has in zip(row, self._servers, strict=True))
        return self._search.descended(choice, self._servers if servers else self._all)

    def _cost_s(self, serving: Serving, cut: Cut, slowest_s: float) -> float:
        hub = self.hub(self._microbatch, serving, cut)
        return math.inf if hub is None else hub.step.roughly_s / hub.kept

    def hub(self, microbatch: int, serving: Serving, cut: Cut) -> Allocated | None:
        """None: no room, or a stage without server."""
        if (scene := self._scene(microbatch, cut)) is None:
            return None
        machines = self._question.fleet.machines
        stages, left = [], {m.name: iter(self._question.names[m.name]) for m in machines}
        for row in serving:
            both: tuple[list[str], list[str]] = [], []
            for machine, count in zip(machines, row, strict=True):
                both[not machine.reliable].extend(next(left[machine.name]) for _ in range(count))
            if not both[0]:
                return None
            stages.append((tuple(both[0]), tuple(both[1])))
        hub = Allocated(self._question, scene, tuple(stages))
        return hub if hub.fits else None

    def _scene(self, microbatch: int, cut: Cut) -> Scene | None:
        if (microbatch, cut) not in self._scenes:
            try:
                self._scenes[microbatch, cut] = self._question.scene(self._stages, microbatch, cut)
            except CapacityError:
                self._scenes[microbatch, cut] = None
        return self._scenes[microbatch, cut]

    def _helped(self, choice: Choice) -> Iterator[Serving]:
        """Add one client, two, four, ... and all, the fastest first, each at the stage that it helps most."""
        takes = [self._takes_s[s, :, end - first] for s, (first, end) in enumerate(choice.cut)]
        rows = [list(row) for row in choice.serving]
        speeds = [float((np.array(row) / each).sum()) for row, each in zip(rows, takes, strict=True)]
        quickest_s = self._takes_s.min((0, 2))
        clients = [
            k
            for k in range(len(self._all))
            for _ in range(self._all[k] - self._servers[k])
            if math.isfinite(quickest_s[k])
        ]
        for count, k in enumerate(sorted(clients, key=lambda k: float(quickest_s[k])), 1):
            stage = stage_to_help(
                [1.0] * len(speeds), speeds, [s for s, each in enumerate(takes) if each[k] < math.inf]
            )
            if stage is not None:
                rows[stage][k] += 1
                speeds[stage] += 1 / float(takes[stage][k])
            if count & (count - 1) == 0 or count == len(clients):
                yield tuple(map(tuple, rows))


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
        runnable=find("hub").runs,
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
    needs, of_client = a.question.needs(a.scene), client_needs(run, spec, cut, precision_of(run))
    rows: list[Memory] = []
    for s, (servers, clients) in enumerate(a.stages):
        for names, need in ((servers, needs[s]), (clients, of_client[s])):
            rows += [a.question.memory(entry, s, need) for entry in dict.fromkeys(entry_of[name] for name in names)]
    return fullest(rows)


def as_told(question: Question, scene: Scene, chosen: Prediction) -> Allocated:
    """The hub described by ``chosen``, on ``scene``."""
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
