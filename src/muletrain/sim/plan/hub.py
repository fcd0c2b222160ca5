"""Strategy ``hub`` on a fleet (HYBRID): reliable machines serve stages as parameter servers, with unreliable machines
as clients. ``planning.allocate`` allocates both by the paper's eq. 1 and 2; ``hub_step`` predicts the time of a step of
our servers and clients, and chooses the number of stages and the microbatch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from muletrain.compute.estimate import client_memory, stash_bytes
from muletrain.config.plan_file import Prediction, Stage
from muletrain.errors import CapacityError, ConfigError
from muletrain.planning.allocate import allocate
from muletrain.planning.hub_task import Aggregated, HubTask
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.planned import Planned
from muletrain.sim.fleet.rates import TRAINERS
from muletrain.sim.machine import flops_of, offer_of, precision_of
from muletrain.sim.plan import churn
from muletrain.sim.plan.hub_step import HubStep, StageMachines, sent
from muletrain.sim.plan.question import fullest, matrices, mixing, traffic, with_haste
from muletrain.sim.setting import run_cost, stage_needs
from muletrain.strategies import find
from muletrain.strategies.hub import Hub
from muletrain.wire.codec import encoded_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.config.plan_file import Memory
    from muletrain.config.schema import RunConfig
    from muletrain.planning.allocate import Allocation
    from muletrain.planning.partition import Chain
    from muletrain.sim.plan.question import Question, Scene

NOTE = (
    "clients count for the part of the time that they are there; the parts of microbatches that they lose do not count: 'muletrain "
    "simulate fleet --strategy hub' plays them"
)

NO_CLIENTS = (
    "without clients, since moving weights and gradients takes longer than they save: that is 'swarm' on fewer machines, so it is not "
    "recommended"
)
PLAYED = 5
"""Number of allocations to play: the fastest by an estimate without queueing."""


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
    reliable = sum(peer.reliable for peer in question.fleet.peers())
    ways = [
        (stages, size)
        for stages in question.stage_counts()
        if stages <= max(1, reliable)
        for size in question.microbatches()
    ] or [(question.stages or 1, question.run.train.microbatch)]
    placed: list[Allocated] = []
    problem, hurried = "", False
    for n, (stages, size) in enumerate(ways):
        try:
            with_clients = question.asking(find("hub"))
            task = task_of(with_clients, with_clients.with_microbatch(size))
            allocation = allocate(task, seed=seed, stages=stages, time_limit_s=time_limit_s / len(ways))
            placed.append(_placed(with_clients, size, allocation))
            hurried |= not allocation.complete
        except (CapacityError, ConfigError) as e:
            problem = f"{e}{_servers(question) if isinstance(e, CapacityError) else ''}"
        watch((n + 1) / len(ways))
    found = []
    for a in sorted(placed, key=lambda a: -a.roughly_per_s):
        if a.roughly_per_s < least:
            problem = "others are faster by estimate"
            break
        try:
            found.append(told(a))
        except CapacityError as e:
            problem = str(e)
        if len(found) == PLAYED:
            break
    if not found:
        return _problem(problem)
    return with_haste(max(found, key=lambda p: p.expected_per_s), hurried=hurried)


def _servers(question: Question) -> str:
    """Explain the bound on a hub's stages, for users who are advised to take more stages."""
    peers = question.fleet.peers()
    return f" (of a hub, each stage needs a reliable machine, and {sum(p.reliable for p in peers)} of {len(peers)} are)"


def _problem(why: str) -> Prediction:
    return Prediction(strategy="hub", runnable=find("hub").runs, problem=why)


def _placed(question: Question, microbatch: int, allocation: Allocation) -> Allocated:
    """Place ``allocation`` on its scene; if servers of a stage differ, the CPU updates the weights. Raises
    CapacityError."""
    peers = question.fleet.peers()
    names = tuple(
        (tuple(peers[d].name for d in stage.servers), tuple(peers[d].name for d in stage.clients))
        for stage in allocation.stages
    )
    cut = tuple(stage.layers for stage in allocation.stages)
    first = Allocated(question, question.scene(len(cut), microbatch, cut), names)
    if small := [name for servers, clients in names for name in (*servers, *clients) if name not in first.kinds()]:
        raise CapacityError(f"'{small[0]}' has no room for a stage of {len(cut)}: more stages, or another strategy")
    other = question.once_mixed(first.scene.setting, first.serving())
    return first if other is question else Allocated(other, other.scene(len(cut), microbatch, cut), names)


def task_of(question: Question, run: RunConfig) -> HubTask:
    """The task of the search. Raises ConfigError for a machine of unknown speed."""
    fleet, spec = question.fleet, question.spec
    peers, entries = fleet.peers(), [n for n, m in enumerate(fleet.machines) for _ in range(m.count)]
    flops = [flops_of(n, peer)[0] for n, peer in enumerate(question.firsts)]
    links = [[fleet.between_kinds(a.index, b.index) for b in question.firsts] for a in question.firsts]
    delay_ms, gbps = matrices(links, entries)
    sequences, tokens = run.train.microbatch, spec.context
    (whole,), (whole_cost,) = stage_needs(run, spec, spec.cut(1)), run_cost(run, spec, spec.cut(1)).stages
    client = client_memory(spec, spec.cut(1), 0, tokens=sequences * tokens, precision=precision_of(run))
    memory = []
    for peer in question.firsts:
        offer = offer_of(peer)
        room = offer.device * (whole.on_device / whole.total if offer.host is None else 1.0)  # part of shared memory
        memory.append(room if peer.reliable else room * whole.on_device / client.on_device)
    return HubTask(
        delay_ms,
        gbps,
        tuple(flops[n] for n in entries),
        tuple(peer.reliable for peer in peers),
        _chain(question, run, (whole.on_device - whole.activations) / spec.stage_params(spec.cut(1), 0)),
        encoded_size(run.wire.activations, (sequences, tokens, spec.width)),
        run.microbatches,
        tuple(memory[n] for n in entries),
        Aggregated(whole_cost.weight_bytes, whole_cost.averaged_bytes),
    )


def _chain(question: Question, run: RunConfig, parameter_bytes: float) -> Chain:
    """The model's layers. ``parameter_bytes``: a server's bytes per parameter."""
    spec, tokens, precision = question.spec, run.train.microbatch * question.spec.context, precision_of(run)
    of_layer = stash_bytes(spec, ((0, 1), (1, 2)), 0, tokens, precision)
    of_head = stash_bytes(spec, ((0, 1), (1, 1)), 1, tokens, precision)
    chain = spec.chain(
        run.train.microbatch, spec.context, parameter_bytes=parameter_bytes, token_bytes=of_layer / tokens
    )
    *before, last = chain.activation_bytes
    return replace(chain, activation_bytes=(*before, last + of_head))


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
