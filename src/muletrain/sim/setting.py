"""A fleet file's machines for the simulator: each kind's times for each stage of a model, and the stages that fit.

Impossible input is refused with its line in the file: a machine of unknown speed, a model larger than all memory, a
stage that fits no machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from muletrain.compute.swap import fit
from muletrain.config.fleet_sections import QUEUE_S
from muletrain.config.schema import Codec
from muletrain.errors import CapacityError
from muletrain.planning.cost import RunCost, StageCost
from muletrain.policy.assignment import NOWHERE, Load, View
from muletrain.sim.machine import backing_rate, flops_of, offer_of, precision_of, resident_service_s, swapped_service_s
from muletrain.strategies import strategy_of
from muletrain.strategies.swarm import SWARM
from muletrain.units import format_memory
from muletrain.wire.codec import IDS16, IDS32, encoded_size
from muletrain.wire.encoded import flat_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from muletrain.compute.estimate import StageMemory
    from muletrain.config.fleet_file import Fleet, FleetPeer, Link
    from muletrain.config.fleet_sections import Machine
    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.planning.partition import Cut


@dataclass(frozen=True)
class Kind:
    """Equal machines: one entry of the file. By stage: ``forward_s`` and ``backward_s`` of a microbatch, and the
    stage's need in ``quarters`` of the memory."""

    name: str
    region: str
    device: str
    count: int
    reliable: bool
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    fits: frozenset[int]
    quarters: tuple[int, ...]
    up_bytes_per_s: float
    down_bytes_per_s: float
    assumed: str
    """The value that an estimate replaces; empty: none."""
    leaves: bool = True
    """Churn may take the kind: it is unreliable, or all machines of the file are reliable."""
    declared: bool = False
    """The file declares the kind's times."""
    queue_s: float = QUEUE_S
    """Longest queue of each direction of the machine's link [s]."""
    swaps: frozenset[int] = frozenset()
    """The stages of ``fits`` that fit only by swapping."""
    update_s: float = 0.0
    """Seconds of the update of a swapped parameter."""

    def service_s(self, stage: int) -> float:
        return self.forward_s[stage] + self.backward_s[stage]

    @property
    def whole_per_s(self) -> float:
        """Microbatches/s of one machine that computes all stages alone."""
        return 1 / sum(self.forward_s + self.backward_s)


@dataclass(frozen=True)
class Setting:
    """A fleet and a run there. ``links[a][b]``: from a machine of kind a to a machine of kind b."""

    kinds: tuple[Kind, ...]
    links: tuple[tuple[Link, ...], ...]
    cost: RunCost
    cut: Cut
    left_out: tuple[str, ...]
    """Machines that hold no stage."""
    exposed: float = 1.0
    """The part of the file's machines exposed to churn that is in this setting."""

    def ending_s(self, stage: int, kinds: Iterable[int]) -> float:
        """``StageCost.ending_s``, and the update of the slowest of the ``kinds`` that swap the stage."""
        cost = self.cost.stages[stage]
        each_s = [kind.update_s for kind in map(self.kinds.__getitem__, kinds) if stage in kind.swaps]
        return cost.ending_s + max(each_s, default=0.0) * cost.state_bytes / 12


UPDATE_S = 5e-9
"""Seconds per parameter of an update on the CPU (AdamW in fp32 on two vCPUs of an EPYC); updates on a GPU are not
counted."""
UPDATED_BYTES = 28
"""Bytes that the update of a swapped parameter reads and writes: weight, both moments, gradient."""
MEMORY_BYTES_PER_S = 50e9
"""Bytes/s at which the update passes through the memory beside a GPU: two channels of DDR5. The host of an H200 (16
cores) had 100e9 (benchmarks/swap)."""
STATE_BYTES_PER_S = 240e6
"""Bytes/s at which a newcomer checks and loads a state that comes over the fastest link (benchmarks/state_transfer)."""


def seat(
    setting: Setting, kinds: Iterable[int], serving: Sequence[Sequence[int]], promised: Sequence[int] = ()
) -> list[int]:
    """Choose the stages of newcomers of these ``kinds``, one after another (``runs.join.seating``). ``serving``: peers
    by stage and kind; ``promised``: newcomers on the way, by stage."""
    there = {
        f"{s}/{k}": _replicas(s, n, setting.kinds[k].device)
        for s, counts in enumerate(serving)
        for k, n in enumerate(counts)
        if n
    }
    coming = {f"{s}/coming": Load(s, alike=n) for s, n in enumerate(promised) if n}
    new = [Load(NOWHERE, targets=kind.fits, device=kind.device, quarters=kind.quarters) for kind in setting.kinds]
    work = [s.forward_flops for s in setting.cost.stages]
    view = View({**there, **coming, **{f"new/{n}": new[k] for n, k in enumerate(kinds)}}, work)
    return [move.target for move in SWARM.assign(view)] if view.newcomers else []


@lru_cache(maxsize=1 << 16)
def _replicas(stage: int, alike: int, device: str) -> Load:
    """Large fleets seat ten thousands of newcomers, each beside the same few hundred loads."""
    return Load(stage, alike=alike, device=device)


def seated(setting: Setting) -> list[tuple[int, ...]]:
    """Seat all machines in the order of the file, by stage and kind. Raises CapacityError if a stage gets none."""
    serving = [[0] * len(setting.kinds) for _ in setting.cut]
    everyone = [k for k, kind in enumerate(setting.kinds) for _ in range(kind.count)]
    for k, stage in zip(everyone, seat(setting, everyone, serving), strict=True):
        serving[stage][k] += 1
    if not all(map(any, serving)):
        stage = [any(counts) for counts in serving].index(False)
        raise CapacityError(
            f"machines[0].count: stage {stage} gets no machine, for those with room for it are needed elsewhere; add one that holds it"
        )
    return list(map(tuple, serving))


def fetch_s(setting: Setting, kind: int, stage: int, donors: Sequence[int]) -> float:
    """Seconds in which a machine of ``kind`` copies a stage's state from all replicas at once."""
    sent = sum(
        n * min(setting.kinds[k].up_bytes_per_s, setting.links[k][kind].bandwidth_bytes_per_s)
        for k, n in enumerate(donors)
        if n
    )
    rate = min(STATE_BYTES_PER_S, setting.kinds[kind].down_bytes_per_s, sent or math.inf)
    return setting.cost.stages[stage].state_bytes / rate


def mixed(setting: Setting, serving: Sequence[Sequence[int]]) -> list[str]:
    """Devices of the first stage that mixes devices, in order; empty: no stage does. ``serving``: by stage and kind."""
    for here in serving:
        if len(devices := {setting.kinds[k].device for k, n in enumerate(here) if n}) > 1:
            return sorted(devices)
    return []


def once_mixed(setting: Setting, config: RunConfig, serving: Sequence[Sequence[int]]) -> RunConfig:
    """Update weights on the CPU if a stage mixes devices, unless the run states ``state_device``."""
    if "state_device" in config.optimizer.model_fields_set or not mixed(setting, serving):
        return config
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"state_device": "cpu"})})


def mortal(setting: Setting) -> list[int]:
    """Kinds whose machines may leave."""
    return [k for k, kind in enumerate(setting.kinds) if kind.leaves]


def run_cost(config: RunConfig, spec: Model, cut: Cut) -> RunCost:
    """Costs of a microbatch and a step, for sequences of full length."""
    sequences, tokens = config.train.microbatch, spec.context
    ids = IDS16 if spec.vocab <= 1 << 16 else IDS32
    inputs, targets = (
        encoded_size(ids if kind.dtype == "int64" else Codec.FP32, kind.batch(sequences, tokens))
        for kind in (spec.inputs, spec.targets)
    )
    boundary = encoded_size(config.wire.activations, (sequences, tokens, spec.passed))
    stages = len(cut)
    costs = []
    for s in range(stages):
        params = spec.stage_params(cut, s)
        state = (16 if config.optimizer.delayed else 12) * params
        flops = spec.stage_flops(cut, s) * sequences * tokens
        ending_s = UPDATE_S * params if config.optimizer.state_device == "cpu" else 0.0
        exchanged = spec.trained_params(cut, s), spec.shared_params(cut, s)
        averaged, tied = (flat_size(config.wire.gradients, n) for n in exchanged)
        frozen = sum(map(spec.frozen_flops, spec.parts_of(cut, s))) * sequences * tokens
        costs.append(StageCost(flops, s < stages - 1, state, averaged, tied, frozen, ending_s))
    return RunCost(
        stages=tuple(costs),
        forward_bytes=(inputs + targets, *(boundary + targets for _ in range(stages - 1))),
        backward_bytes=(0, *(boundary for _ in range(stages - 1))),
        microbatches=config.microbatches,
        sequences=sequences,
        tokens=sequences * tokens,
    )


def stages_for(fleet: Fleet, config: RunConfig, spec: Model) -> int:
    """Find the fewest stages that every kind can hold without swapping, or else that each fit some machine without
    swapping. Raises CapacityError."""
    peers = first_of_each(fleet)
    possible = range(1, min(spec.most_stages, len(fleet.peers())) + 1)
    for enough in (all, any):
        for stages in possible:
            needs = stage_needs(config, spec, spec.cut(stages), alone=fleet.alone)
            if all(enough(need.resident(offer_of(peer)) for peer in peers) for need in needs):
                return stages
    return possible[-1]


def setting(
    fleet: Fleet, config: RunConfig, spec: Model, cut: Cut | None = None, whole: Fleet | None = None
) -> Setting:
    """``cut``: default: by the configuration; ``whole``: the fleet file, if ``fleet`` is a subset. Raises ConfigError
    and CapacityError, whose messages begin with a field of the fleet file."""
    cut = cut or spec.cut(config.fleet.stages, config.fleet.layers)
    needs, cost = stage_needs(config, spec, cut, alone=fleet.alone), run_cost(config, spec, cut)
    machines = first_of_each(fleet)
    if not config.swap.whole:
        _check_memory(fleet, spec, needs)
    pooled, every = strategy_of(config).pooled, (whole or fleet).peers()
    leaving = {all(peer.reliable for peer in every)}
    of_client = fit.client_needs(config, spec, cut, precision_of(config)) if pooled else needs
    found = [
        _kind(
            n,
            peer,
            machine,
            config,
            needs if peer.reliable else of_client,
            cost,
            spec,
            cut,
            leaves=peer.reliable in leaving,
        )
        for n, (peer, machine) in enumerate(zip(machines, fleet.machines, strict=True))
    ]
    able = [n for n, kind in enumerate(found) if kind.fits]
    exposed = sum(found[n].count for n in able if found[n].leaves) / sum(p.reliable in leaving for p in every)
    if config.swap.whole and not able:
        problem = needs[0].swapping(offer_of(machines[0])) or f"; it needs {needs[0].need(offer_of(machines[0]))}"
        raise CapacityError(f"machines[0].memory_gib: no machine holds the whole model{problem}")
    if pooled and sum(found[n].count for n in able if found[n].reliable) < len(cut):
        raise CapacityError(
            f"machines[0].reliable: each of {len(cut)} stages of a hub needs a reliable machine with room for it; use fewer stages, or "
            f"strategy swarm"
        )
    if (count := sum(found[n].count for n in able)) < len(cut):
        raise CapacityError(
            f"machines[{able[0]}].count: {count} machines in all have room for a stage, for fleet.stages = {len(cut)}, and each stage "
            f"needs one: raise a count or cut the model into fewer stages"
        )
    links = tuple(tuple(fleet.between_kinds(machines[a].index, machines[b].index) for b in able) for a in able)
    left_out = tuple(kind.name for kind in found if not kind.fits)
    return Setting(tuple(found[n] for n in able), links, cost, cut, left_out, exposed)


def first_of_each(fleet: Fleet) -> list[FleetPeer]:
    firsts, index = [], 0
    for machine in fleet.machines:
        firsts.append(fleet.peers()[index])
        index += machine.count
    return firsts


def stage_needs(config: RunConfig, spec: Model, cut: Cut, *, alone: bool = False) -> list[StageMemory]:
    """See ``compute.swap.fit``. A machine of unknown precision is taken to compute in bf16."""
    return fit.stage_needs(config, spec, cut, precision_of(config), alone=alone)


def _kind(
    n: int,
    peer: FleetPeer,
    machine: Machine,
    config: RunConfig,
    needs: list[StageMemory],
    cost: RunCost,
    spec: Model,
    cut: Cut,
    *,
    leaves: bool,
) -> Kind:
    offer = offer_of(peer)
    assumed = "" if peer.forward_s else flops_of(n, peer)[1]
    swaps = frozenset(s for s, need in enumerate(needs) if need.fits(offer) and not need.resident(offer))
    services = [
        swapped_service_s(n, peer, config, spec, cut, s, need)
        if s in swaps and not peer.forward_s
        else resident_service_s(n, peer, config, len(needs), need, stage)
        for s, (stage, need) in enumerate(zip(cost.stages, needs, strict=True))
    ]
    return Kind(
        name=machine.name,
        region=peer.region,
        device=peer.device or machine.name,
        count=machine.count,
        reliable=peer.reliable,
        forward_s=tuple(f for f, _ in services),
        backward_s=tuple(b for _, b in services),
        fits=frozenset(s for s, need in enumerate(needs) if need.fits(offer)),
        quarters=tuple(4 * need.of_device(offer) // max(1, offer.device) for need in needs),
        up_bytes_per_s=peer.up_bytes_per_s,
        down_bytes_per_s=peer.down_bytes_per_s,
        assumed=assumed,
        leaves=leaves,
        declared=peer.forward_s is not None,
        queue_s=peer.queue_s,
        swaps=swaps,
        update_s=UPDATED_BYTES / (backing_rate(peer) if offer.host is None else MEMORY_BYTES_PER_S),
    )


def takes_s(fleet: Fleet, config: RunConfig, spec: Model, stages: int) -> NDArray[np.float64]:
    """Seconds of a microbatch, forward and backward, by stage, entry of the file and number of layers, (S, K, L + 1);
    inf where the stage would have to be swapped. All layers cost the same, so besides their number only the embedding
    and the head matter. Unreliable machines are clients if the strategy has any."""
    machines, longest, pooled = first_of_each(fleet), spec.layers - stages + 1, strategy_of(config).pooled
    offers = [offer_of(peer) for peer in machines]
    found = np.full((stages, len(machines), spec.layers + 1), np.inf)
    ends = {(s == 0, s == stages - 1): s for s in range(stages)}
    for (begins, closes), s in ends.items():
        alike = [t for t in range(stages) if (t == 0, t == stages - 1) == (begins, closes)]
        for layers in range(spec.layers if begins and closes else 1, longest + 1):
            sizes = [layers if t == s else 1 for t in range(stages)]
            sizes[0 if s else -1] += spec.layers - sum(sizes)
            cut = spec.cut(stages, sizes)
            own, cost = stage_needs(config, spec, cut, alone=fleet.alone)[s], run_cost(config, spec, cut).stages[s]
            of_client = fit.client_needs(config, spec, cut, precision_of(config))[s] if pooled else own
            for n, (peer, offer) in enumerate(zip(machines, offers, strict=True)):
                need = own if peer.reliable else of_client
                if need.resident(offer):
                    found[alike, n, layers] = sum(resident_service_s(n, peer, config, stages, need, cost))
    return found


def _check_memory(fleet: Fleet, spec: Model, needs: list[StageMemory]) -> None:
    offers = [offer_of(p) for p in first_of_each(fleet)]
    total = sum(offer.device * m.count for offer, m in zip(offers, fleet.machines, strict=True))
    largest = max(range(len(offers)), key=lambda n: offers[n].device)
    needed = sum(need.of_device(offers[largest]) for need in needs)
    if needed > total:
        more = math.ceil((needed - total) / offers[largest].device)
        raise CapacityError(
            f"machines[{largest}].count: a model of {spec.params / 1e9:.3g} B parameters needs {format_memory(needed)} in {len(needs)} "
            f"stages, all machines together have {format_memory(total)}; add {more} machines like '{fleet.machines[largest].name}', or "
            f"take a smaller model"
        )
    for stage, need in enumerate(needs):
        if not any(need.resident(offer) for offer in offers):
            beside = "more stages (--set fleet.stages=N)" if len(needs) < spec.layers else "a machine with more memory"
            most = offers[largest]
            raise CapacityError(
                f"machines[{largest}].memory_gib: stage {stage} of {len(needs)} needs {need.need(most)} ({need.on(most)}), the largest "
                f"machine '{fleet.machines[largest].name}' has {format_memory(offers[largest].device)}; take {beside}"
            )
