"""Memory and speed of one machine of a fleet file, and the time of a microbatch there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from muletrain.compute.estimate import STASH_SHARE, Offer
from muletrain.compute.swap.fit import NOMINAL_BYTES_PER_S, blocks_of, fitted, swapped_s
from muletrain.config.schema import Precision
from muletrain.errors import ConfigError
from muletrain.planning.cost import service_s
from muletrain.planning.devices import DEVICES, find_device
from muletrain.strategies import strategy_of
from muletrain.strategies.base import capacity

if TYPE_CHECKING:
    from muletrain.compute.estimate import StageMemory
    from muletrain.config.fleet_file import FleetPeer
    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.planning.cost import StageCost
    from muletrain.planning.devices import Device
    from muletrain.planning.partition import Cut
    from muletrain.planning.swapping import Layer, Swapping

AMPLE = 1 << 62
"""Bytes that stand for memory of unknown size."""


def precision_of(config: RunConfig) -> Precision:
    """A machine of unknown precision is taken to compute in bf16."""
    return Precision.BF16 if config.compute.precision is Precision.AUTO else config.compute.precision


@lru_cache
def device_of(name: str) -> Device | None:
    """The catalogue's device of this name, or this machine's device by its own report."""
    if (known := find_device(name)) is not None:
        return known
    from muletrain.compute.probe import device_here  # torch takes seconds

    return device_here(name)


def offer_of(peer: FleetPeer) -> Offer:
    """Unstated host memory of an accelerator counts as enough."""
    device = device_of(peer.device) if peer.device else None
    usual = AMPLE if device is None else device.memory_bytes
    beside = AMPLE if peer.host_bytes is None else peer.host_bytes
    host = None if device is not None and not device.accelerator else beside
    return Offer(usual if peer.memory_bytes is None else peer.memory_bytes, host)


def flops_of(n: int, peer: FleetPeer) -> tuple[float, str]:
    """Returns the stated speed or the catalogue's, and the estimate behind it, if any."""
    if peer.flops is not None:
        return peer.flops * peer.speed, ""
    if peer.device is None:
        raise ConfigError(
            f"machines[{n}].tflops: missing, and no device is named; give either (devices with known speed: {_known()})"
        )
    device = device_of(peer.device)
    if device is None:
        raise ConfigError(
            f"machines[{n}].device: the speed of '{peer.device}' is not known; give tflops beside it, plan on the machine that has it "
            f"(muletrain estimates the speed there, from the device's own report), or name a device of known speed: {_known()}; a name may "
            f"state the memory ('A100 80GB')"
        )
    assumed = f"{device.name}: {device.flops / 1e12:g} TFLOP/s ({device.source})" if device.estimate else ""
    return device.flops * peer.speed, assumed


def _known() -> str:
    return ", ".join(d.name for d in DEVICES)


def resident_service_s(
    n: int, peer: FleetPeer, config: RunConfig, stages: int, need: StageMemory, cost: StageCost
) -> tuple[float, float]:
    """Seconds of a microbatch at a stage, forward and backward."""
    if peer.forward_s and peer.backward_s:
        return peer.forward_s, peer.backward_s
    offer = offer_of(peer)
    need = need.on(offer)
    again = _recomputes(config, stages, need, offer)
    return service_s(cost, flops_of(n, peer)[0], recompute=again, by_block=need.by_block)


def _recomputes(config: RunConfig, stages: int, need: StageMemory, offer: Offer) -> bool:
    """Decide as a peer does: keep activations if memory has room for the usual microbatches in flight."""
    if config.compute.checkpointing != "auto":
        return config.compute.checkpointing != "never"
    kept = min(capacity(stages) // 2, config.microbatches) * need.graph
    return kept > stash_room(offer, need)


def stash_room(offer: Offer, need: StageMemory) -> float:
    """Bytes for activations kept until backward."""
    return min(STASH_SHARE * offer.device, offer.device - need.of_device(offer))


def backing_rate(peer: FleetPeer) -> float:
    """Bytes/s from the machine's memory to its device; nominal for a disk, which the fleet file does not describe."""
    return NOMINAL_BYTES_PER_S if offer_of(peer).host is None else peer.load_bytes_per_s


def swapped_service_s(
    n: int, peer: FleetPeer, config: RunConfig, spec: Model, cut: Cut, stage: int, need: StageMemory
) -> tuple[float, float]:
    """Seconds of a microbatch at a swapped stage, forward and backward, in rounds that hide as much loading as a peer's
    microbatches allow."""
    return swapped_s(*_fitted(n, peer, config, spec, cut, stage, need))


def swapping_of(
    n: int, peer: FleetPeer, config: RunConfig, spec: Model, cut: Cut, stage: int, need: StageMemory
) -> Swapping:
    """The swapping of a stage that fits only by swapping."""
    return _fitted(n, peer, config, spec, cut, stage, need)[1]


def _fitted(
    n: int, peer: FleetPeer, config: RunConfig, spec: Model, cut: Cut, stage: int, need: StageMemory
) -> tuple[list[Layer], Swapping]:
    assert need.swapped is not None  # the stage fits by swapping
    tokens, precision = config.train.microbatch * spec.context, precision_of(config)
    most = min(capacity(len(cut)), config.microbatches)
    offer = offer_of(peer)
    swapped = need.swapped.at(offer)
    blocks = blocks_of(spec, cut, stage, tokens, precision, flops_of(n, peer)[0], inside=swapped.inside)
    together = 1 if strategy_of(config).pooled else config.swap.together or most  # a part has a round of its own
    return blocks, _fitted_once(tuple(blocks), swapped, offer, backing_rate(peer), together)


_fitted_once = lru_cache(256)(fitted)
"""The search for a layout asks repeatedly for the same machines and stages."""
