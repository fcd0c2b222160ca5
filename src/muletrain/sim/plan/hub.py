"""Strategy ``hub`` on a fleet (HYBRID): reliable machines serve stages as parameter servers, unreliable ones are their
clients; allocated by ``planning.allocate``, timed by the paper's eq. 1 and 2 (``planning.hub_task``).

Averaging runs beside the next step (delayed updates, sec. 3.3.1), so it counts where it takes longer than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from muletrain.compute.estimate import stage_memory, stash_bytes
from muletrain.config.plan_file import Prediction, Split, Stage
from muletrain.config.schema import Precision
from muletrain.errors import CapacityError, ConfigError
from muletrain.planning.allocate import allocate
from muletrain.planning.hub_task import HubTask
from muletrain.planning.splits import ENDING_DELAYS
from muletrain.sim.plan.question import Bytes, fullest, matrices, traffic, with_haste
from muletrain.sim.setting import flops_of, offer_of, run_cost
from muletrain.wire.codec import encoded_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.compute.estimate import StageMemory
    from muletrain.config.fleet_file import Link
    from muletrain.config.plan_file import Memory
    from muletrain.config.schema import RunConfig
    from muletrain.planning.allocate import Allocation
    from muletrain.planning.hub_task import HubStage
    from muletrain.planning.partition import Chain, Cut
    from muletrain.sim.plan.question import Question

NOTES = (
    "filling and draining are not counted (HYBRID eq. 2)",
    "delayed updates hide averaging behind the next step; a hub runs today, but without them",
)
"""So predictions are not of what runs, and none is recommended."""


@dataclass(frozen=True)
class Allocated:
    """An allocation, with machines by index in ``Fleet.peers()``."""

    question: Question
    run: RunConfig
    task: HubTask
    found: Allocation

    @property
    def cut(self) -> Cut:
        return tuple(stage.layers for stage in self.found.stages)

    @cached_property
    def gradient_bytes(self) -> list[int]:
        """Encoded gradient bytes by stage."""
        return [stage.averaged_bytes for stage in run_cost(self.run, self.question.spec, self.cut).stages]

    def link(self, a: int, b: int) -> Link:
        return self.question.fleet.link(a, b)

    def averaging_s(self) -> float:
        """Seconds of averaging in the slowest stage: each machine sends every server its shard and gets the mean."""
        peers, longest_s = self.question.fleet.peers(), 0.0
        for stage, nbytes in zip(self.found.stages, self.gradient_bytes, strict=True):
            servers, devices = stage.servers, stage.devices
            if len(devices) < 2:
                continue
            shard = nbytes / len(servers)
            for d in devices:
                given = shard * (len(servers) - (d in servers))
                taken = shard * (len(devices) - 1) if d in servers else 0.0
                links = [self.link(d, s) for s in servers if s != d]
                path_s = max((shard / link.bandwidth_bytes_per_s for link in links), default=0.0)
                up_s, down_s = (given + taken) / peers[d].up_bytes_per_s, (given + taken) / peers[d].down_bytes_per_s
                delay_s = max((link.delay_s for link in links), default=0.0)
                longest_s = max(longest_s, max(up_s, down_s, 2 * path_s) + ENDING_DELAYS * delay_s)
        return longest_s

    def split(self) -> Split:
        slowest = max(self.found.cost.stages, key=lambda stage: stage.total_s)
        microbatches = self.task.microbatches
        step_s = microbatches * slowest.total_s
        return Split(
            compute_s=microbatches * slowest.compute_s,
            pipeline_s=microbatches * (slowest.total_s - slowest.compute_s),
            data_parallel_s=max(0.0, self.averaging_s() - step_s),
            bubble_s=0.0,
        )


def predict(
    question: Question, seed: int, time_limit_s: float, watch: Callable[[float], None] = lambda share: None
) -> Prediction:
    """Predict the hub with the best microbatch, or why none is possible."""
    if question.paced:
        paced = next(p.name for p in question.firsts if p.forward_s)
        return _problem(f"'{paced}' is paced (forward_ms): its speed is not known; give device or tflops instead")
    best: Prediction | None = None
    problem, hurried = "", False
    sizes = question.microbatches()
    for n, microbatch in enumerate(sizes):
        train = question.run.train.model_copy(update={"microbatch": microbatch})
        run = question.run.model_copy(update={"train": train})
        try:
            task = task_of(question, run)
            found = allocate(task, seed=seed, stages=question.stages, time_limit_s=time_limit_s / len(sizes))
            told = _told(Allocated(question, run, task, found))
            hurried |= not found.complete
        except (CapacityError, ConfigError) as e:
            problem = problem or f"{e}{_servers(question) if isinstance(e, CapacityError) else ''}"
            break  # larger ones do not fit either
        if best is None or told.tokens_per_s > best.tokens_per_s:
            best = told
        watch((n + 1) / len(sizes))
    return with_haste(best, hurried=hurried) if best else _problem(problem)


def _servers(question: Question) -> str:
    """What bounds the stages of a hub, for those that are told to take more of them."""
    peers = question.fleet.peers()
    return f" (of a hub, each stage needs a reliable machine, and {sum(p.reliable for p in peers)} of {len(peers)} are)"


def _problem(why: str) -> Prediction:
    return Prediction(strategy="hub", runnable=False, problem=why)


def task_of(question: Question, run: RunConfig) -> HubTask:
    fleet, spec = question.fleet, question.spec
    peers, entries = fleet.peers(), [n for n, m in enumerate(fleet.machines) for _ in range(m.count)]
    flops = [flops_of(n, peer)[0] for n, peer in enumerate(question.firsts)]
    links = [[fleet.between_kinds(a.index, b.index) for b in question.firsts] for a in question.firsts]
    delay_ms, gbps = matrices(links, entries)
    whole = _need(question, run, spec.cut(1), 0)
    memory = [_room(offer.device, offer.host is None, whole) for offer in map(offer_of, question.firsts)]
    sequences, tokens = run.train.microbatch, spec.context
    return HubTask(
        delay_ms,
        gbps,
        tuple(flops[n] for n in entries),
        tuple(peer.reliable for peer in peers),
        _chain(question, run, whole),
        encoded_size(run.wire.activations, (sequences, tokens, spec.width)),
        run.microbatches,
        tuple(memory[n] for n in entries),
    )


def _room(device: int, alone: bool, whole: StageMemory) -> float:
    """Memory for data that must be on a device; of one shared memory, a part."""
    return device * (whole.on_device / whole.total if alone else 1.0)


def _need(question: Question, run: RunConfig, cut: Cut, stage: int) -> StageMemory:
    precision = Precision.BF16 if run.compute.precision is Precision.AUTO else run.compute.precision
    tokens = run.train.microbatch * question.spec.context
    return stage_memory(question.spec, cut, stage, tokens=tokens, precision=precision, delayed=True)


def _chain(question: Question, run: RunConfig, whole: StageMemory) -> Chain:
    """The model's layers; what a device holds by parameter and token follows from the estimate for the whole model."""
    spec, tokens = question.spec, run.train.microbatch * question.spec.context
    precision = Precision.BF16 if run.compute.precision is Precision.AUTO else run.compute.precision
    of_layer = stash_bytes(spec, ((0, 1), (1, 2)), 0, tokens, precision)
    of_head = stash_bytes(spec, ((0, 1), (1, 1)), 1, tokens, precision)
    params = spec.stage_params(spec.cut(1), 0)
    chain = spec.chain(
        run.train.microbatch,
        spec.context,
        parameter_bytes=(whole.on_device - whole.activations) / params,
        token_bytes=of_layer / tokens,
    )
    *before, last = chain.activation_bytes
    return replace(chain, activation_bytes=(*before, last + of_head))


def _told(a: Allocated) -> Prediction:
    question, peers = a.question, a.question.fleet.peers()
    memory = _memory(a)
    for row in memory:
        if row.device_needs > (row.device_has or math.inf) or row.host_needs > (row.host_has or math.inf):
            raise CapacityError(
                f"'{row.machine}' has no room for stage {row.stage} and what lies beside it: more stages, or another strategy"
            )
    split = a.split()
    stages = tuple(Stage(layers=s.layers, machines=tuple(peers[d].name for d in s.devices)) for s in a.found.stages)
    used = [name for stage in stages for name in stage.machines]
    firsts = question.firsts
    links = [[question.fleet.between_kinds(x.index, y.index) for y in firsts] for x in firsts]
    return Prediction(
        strategy="hub",
        runnable=False,
        microbatch=a.run.train.microbatch,
        microbatches=(a.task.microbatches,),
        stages=stages,
        spares=question.unused(used),
        step_s=split.step_s,
        tokens_per_s=a.run.train.batch * question.spec.context / split.step_s,
        split=split,
        memory=memory,
        traffic=traffic([p.region for p in firsts], links, _sent(a)),
        price_per_billion_tokens=question.price(used, split.step_s),
        notes=NOTES,
    )


def _memory(a: Allocated) -> tuple[Memory, ...]:
    entry_of = {name: entry for entry, names in a.question.names.items() for name in names}
    peers = a.question.fleet.peers()
    rows: list[Memory] = []
    for s, stage in enumerate(a.found.stages):
        need = _need(a.question, a.run, a.cut, s)
        rows += [
            a.question.memory(entry, s, need) for entry in dict.fromkeys(entry_of[peers[d].name] for d in stage.devices)
        ]
    return fullest(rows)


def _sent(a: Allocated) -> Bytes:
    """Bytes of a step by entry of the fleet file."""
    entries = [n for n, m in enumerate(a.question.fleet.machines) for _ in range(m.count)]
    sent, nbytes = Bytes(), a.task.activation_bytes * a.task.microbatches

    def pass_on(sender: int, receiver: int, share: float) -> None:
        if sender != receiver:
            sent[entries[sender], entries[receiver], "activations"] += share * nbytes
            sent[entries[receiver], entries[sender], "gradients"] += share * nbytes

    for here, there in pairwise(a.found.stages):
        for sender, receiver, share in segments(here.backward, there.frontal):
            pass_on(sender, receiver, share)
    for stage, gradient in zip(a.found.stages, a.gradient_bytes, strict=True):
        for giver, worker, taker, share in _inside(a, stage):
            pass_on(giver, worker, share)
            pass_on(worker, taker, share)
        shard = gradient / len(stage.servers)
        for d in stage.devices:
            for server in stage.servers:
                if d != server:
                    sent[entries[d], entries[server], "averaging"] += shard
                    sent[entries[server], entries[d], "averaging"] += shard
    return sent


def segments(senders: Sequence[int], receivers: Sequence[int]) -> list[tuple[int, int, float]]:
    """List (sender, receiver, share) if both sides cut a microbatch into equal segments (HYBRID sec. 3.2.1)."""
    found = []
    for i, sender in enumerate(senders):
        for j, receiver in enumerate(receivers):
            first, end = (
                max(i * len(receivers), j * len(senders)),
                min((i + 1) * len(receivers), (j + 1) * len(senders)),
            )
            if end > first:
                found.append((sender, receiver, (end - first) / (len(senders) * len(receivers))))
    return found


def _inside(a: Allocated, stage: HubStage) -> list[tuple[int, int, int, float]]:
    """List (frontal server, computing machine, backward server, share of a microbatch), with the nearest servers."""
    speed = sum(a.task.flops[d] for d in stage.devices)

    def nearest(d: int, among: Sequence[int]) -> int:
        if d in among:
            return d
        return min(among, key=lambda s: (1 / a.link(d, s).bandwidth_bytes_per_s, a.link(d, s).delay_s))

    return [(nearest(d, stage.frontal), d, nearest(d, stage.backward), a.task.flops[d] / speed) for d in stage.devices]
