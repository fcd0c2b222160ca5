"""Plan strategy ``swap`` on a fleet (ATOM): every machine with room computes the whole model, whose layers pass
through its GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from muletrain.compute.estimate import stage_memory, stash_bytes
from muletrain.config.plan_file import Memory, Prediction, Stage
from muletrain.config.schema import Precision
from muletrain.errors import CapacityError
from muletrain.planning.splits import Member, Swapper, averaging_s, shared_out, swap_split
from muletrain.planning.swapping import Layer, hidden
from muletrain.sim.machine import flops_of, offer_of, precision_of
from muletrain.sim.plan.question import Bytes, stated, traffic
from muletrain.sim.setting import run_cost
from muletrain.units import format_memory

if TYPE_CHECKING:
    from muletrain.compute.estimate import StageMemory
    from muletrain.config.fleet_file import FleetPeer
    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.sim.plan.question import Question

NOTES = (
    "the optimizer's work in the machine's memory is not counted",
    "gradients go back beside the weights that come",
)


@dataclass(frozen=True)
class Whole:
    """The entry ``n`` of the fleet file computes the whole model."""

    n: int
    swapper: Swapper
    memory: Memory


def predict(question: Question) -> Prediction:
    """Predict swap with the best microbatch, or why no machine can run it."""
    if question.paced:
        paced = next(p.name for p in question.firsts if p.forward_s)
        return _problem(
            f"'{paced}' is paced (forward_ms): what it takes for a whole model is not known; give device or tflops instead"
        )
    best: Prediction | None = None
    problem = ""
    for microbatch in question.microbatches():
        train = question.run.train.model_copy(update={"microbatch": microbatch})
        run = question.run.model_copy(update={"train": train})
        able, problems = [], []
        for n, peer in enumerate(question.firsts):
            try:
                able.append(_whole(n, peer, question.fleet.machines[n].name, run, question.spec))
            except CapacityError as e:
                problems.append(str(e))
        if not able:
            problem = problem or problems[0]
            continue
        found = _told(question, run, able)
        if best is None or found.tokens_per_s > best.tokens_per_s:
            best = found
    return best or _problem(problem)


def _problem(why: str) -> Prediction:
    return Prediction(strategy="swap", runnable=False, problem=why)


def _whole(n: int, peer: FleetPeer, name: str, run: RunConfig, spec: Model) -> Whole:
    """Plan one entry. Raises CapacityError with the entry and the reason."""
    offer, cut = offer_of(peer), spec.cut(1)
    precision = precision_of(run)
    tokens = run.train.microbatch * spec.context
    layers = _layers(spec, tokens, precision, flops_of(n, peer)[0])
    need = stage_memory(spec, cut, 0, tokens=tokens, precision=precision, state_on_cpu=offer.host is not None)
    if offer.host is None:
        if need.total > offer.device:
            raise CapacityError(
                f"machines[{n}].memory_gib: '{name}' needs {format_memory(need.total)} for the whole model and has "
                f"{format_memory(offer.device)}: take a strategy with stages, or a smaller model"
            )
        swapper = Swapper(_kept(layers), ((0, len(layers)),), math.inf, 1)
        return Whole(n, swapper, _row(name, need, need.total, 0, None, offer.device, 0))
    boundaries = 2 * 4 * tokens * spec.width  # what comes into a layer, and what goes on
    try:
        found = hidden(layers, offer.device - boundaries, peer.load_bytes_per_s, run.microbatches)
    except CapacityError as e:
        raise CapacityError(f"machines[{n}].memory_gib: '{name}': {e}") from e
    size = 4 if precision is Precision.FP32 else 2
    on_host = need.on_host + (size + 4) * spec.params  # the working copy, and the accumulator
    if on_host > offer.host:
        raise CapacityError(
            f"machines[{n}].host_gib: '{name}' needs {format_memory(on_host)} beside its GPU for the whole model and has "
            f"{format_memory(offer.host)}: take another strategy, or a smaller model"
        )
    resident = len(found.runs) == 1
    swapper = Swapper(
        _kept(layers) if resident else layers,
        found.runs,
        peer.load_bytes_per_s,
        1 if resident else found.minibatches,
    )
    beside = 0 if resident else int(max(sum(x.load_bytes for x in layers[a:b]) for a, b in found.runs))
    on_device = int(found.device_bytes) + boundaries
    graphs = int(max(sum(x.work_bytes for x in layers[a:b]) for a, b in found.runs))
    return Whole(n, swapper, _row(name, need, on_device, beside, graphs, offer.device, on_host, offer.host))


def _layers(spec: Model, tokens: int, precision: Precision, flops: float) -> tuple[Layer, ...]:
    """Blocks, the first one with the embedding (ATOM sec. III-C), and the head; activations are computed again before a
    backward."""
    size = 4 if precision is Precision.FP32 else 2
    graph = stash_bytes(spec, ((0, 1), (1, 2)), 0, tokens, precision)
    heads_graph = stash_bytes(spec, ((0, 1), (1, 1)), 1, tokens, precision)

    def layer(params: int, forward_flops: float, kept: int) -> Layer:
        forward_s = forward_flops * tokens / flops
        return Layer(forward_s, 3 * forward_s, float(size * params), float(size * params + kept))

    first = layer(spec.layer_params + spec.embedding_params, spec.layer_flops() + spec.embedding_flops, graph)
    block = layer(spec.layer_params, spec.layer_flops(), graph)
    return (first, *(block,) * (spec.layers - 1), layer(spec.head_params, spec.head_flops, heads_graph))


def _kept(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """A model that stays keeps its activations, too."""
    return tuple(replace(layer, backward_s=2 * layer.forward_s) for layer in layers)


def _row(
    name: str,
    need: StageMemory,
    on_device: int,
    loaded: int,
    graphs: int | None,
    device: int,
    on_host: int,
    host: int | None = None,
) -> Memory:
    return Memory(
        machine=name,
        stage=0,
        weights=need.weights,
        optimizer=need.moments,
        gradients=need.gradient,
        activations=need.activations if graphs is None else graphs,
        buffers=need.copies + loaded,
        device_needs=on_device,
        device_has=stated(device),
        host_needs=on_host,
        host_has=None if host is None else stated(host),
    )


def _told(question: Question, run: RunConfig, able: list[Whole]) -> Prediction:
    fleet, spec = question.fleet, question.spec
    counts = {w.n: fleet.machines[w.n].count for w in able}
    swappers = [w.swapper for w in able for _ in range(counts[w.n])]
    links = [[fleet.between_kinds(a.index, b.index) for b in question.firsts] for a in question.firsts]
    paths = [links[a][b] for a in counts for b in counts if a != b or counts[a] > 1]
    members = [Member(p.up_bytes_per_s, p.down_bytes_per_s) for w in able for p in [question.firsts[w.n]] * counts[w.n]]
    cost = run_cost(run, spec, spec.cut(1))
    ending_s = averaging_s(
        cost.stages[0].averaged_bytes,
        members,
        min((p.bandwidth_bytes_per_s for p in paths), default=math.inf),
        max((p.delay_s for p in paths), default=0.0),
    )
    split = swap_split(swappers, run.microbatches, ending_s)
    sent = Bytes()
    sent.ending(cost, [[counts.get(n, 0) for n in range(len(fleet.machines))]])
    used = [name for w in able for name in question.names[fleet.machines[w.n].name]]
    most = max(able, key=lambda w: len(w.swapper.runs))
    return Prediction(
        strategy="swap",
        runnable=False,
        microbatch=run.train.microbatch,
        microbatches=shared_out(run.microbatches, [s.accumulate / s.round_s for s in swappers]),
        accumulate=max(s.accumulate for s in swappers),
        stages=(Stage(layers=(0, spec.layers), machines=tuple(used)),),
        swapped=() if len(most.swapper.runs) == 1 else most.swapper.runs,
        spares=question.unused(used),
        step_s=split.step_s,
        tokens_per_s=run.train.batch * spec.context / split.step_s,
        split=split,
        memory=tuple(w.memory for w in able),
        traffic=traffic([p.region for p in question.firsts], links, sent),
        price_per_billion_tokens=question.price(used, split.step_s),
        notes=NOTES,
    )
