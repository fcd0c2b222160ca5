"""What the peers of one machine may use: its GPUs dealt out, its memory shared."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.compute.estimate import Offer
from muletrain.compute.probe import chip, choose_precision, device_count, device_memory, free_memory, pick_device
from muletrain.config.schema import Precision
from muletrain.errors import CapacityError
from muletrain.planning.devices import find_device
from muletrain.units import format_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from muletrain.compute.estimate import StageMemory

ADVICE = (
    "use more fleet.stages, a smaller train.microbatch, compute.checkpointing = 'auto', or, where a GPU's memory is what is "
    "short, optimizer.state_device = 'cpu'"
)


def devices(asked: str, gpus: int) -> list[str]:
    """What to compute on where ``gpus`` are there: each of them under 'auto' and 'cuda', else what was asked for."""
    return [f"cuda:{k}" for k in range(gpus)] if asked in ("auto", "cuda") and gpus else [asked]


def dealt(devices: Sequence[str], peers: int) -> list[str]:
    """The device of each of ``peers``, in turn."""
    return [devices[k % len(devices)] for k in range(peers)]


def own_devices(asked: str) -> list[str]:
    """``devices`` of this machine."""
    return devices(asked, device_count() if asked in ("auto", "cuda") else 0)


@dataclass(frozen=True)
class Machine:
    """What one peer process may use. ``flops``: what the catalogue says of the device [FLOP/s], 0 if it is not
    there."""

    device: torch.device
    precision: Precision
    offer: Offer
    flops: int = 0

    @classmethod
    def probe(
        cls, device: str, precision: Precision, memory_gib: float | None, sharing: int = 1, host: int | None = None
    ) -> Machine:
        """Measures for at most a second. ``sharing`` peers use the device; ``host``: this peer's share of the machine's
        memory [bytes] (measured before the first of them took any), default: all that is free. Raises ConfigError for a
        device that is not there.
        """
        chosen = pick_device(device)
        measured = choose_precision(chosen) if precision is Precision.AUTO else precision
        offer = memory_of(chosen, memory_gib, sharing, host)
        if chosen.type != "cpu" and memory_gib is None:
            offer = Offer(min(offer.device, free_memory(chosen)), offer.host)
        known = find_device("CPU" if chosen.type == "cpu" else chip(chosen))
        return cls(chosen, measured, offer, int(known.flops) // sharing if known else 0)

    @property
    def kind(self) -> str:
        """Devices of one kind compute the same bits."""
        return f"cpu ({platform.machine()})" if self.device.type == "cpu" else self.device.type


def memory_of(device: torch.device, memory_gib: float | None, sharing: int, host: int | None) -> Offer:
    """One peer's share of what is there, without opening a GPU: an accelerator's memory counts as free, the machine's
    is measured."""
    beside = free_memory_of_machine(sharing) if host is None else host
    if device.type == "cpu":
        return Offer(beside if memory_gib is None else int(memory_gib * 2**30))
    own = device_memory(device) // sharing if memory_gib is None else int(memory_gib * 2**30)
    return Offer(own, beside if device.type == "cuda" else None)


def free_memory_of_machine(peers: int) -> int:
    """What each of ``peers`` on it may take [bytes]."""
    import torch

    return free_memory(torch.device("cpu")) // peers


def check_local(needs: Sequence[StageMemory], dealt: Sequence[str], memory_gib: float | None, host: int) -> None:
    """Nobody but the peers of this machine can serve the stages. Raises CapacityError with the numbers where they
    cannot."""
    offers = [memory_of(pick_device(d), memory_gib, dealt.count(d), host) for d in dealt]
    for stage, need in enumerate(needs):
        if any(need.fits(o) for o in offers):
            continue
        largest = max(offers, key=lambda o: o.device)
        shared = f" ({len(dealt)} peers share this machine)" if len(dealt) > 1 and memory_gib is None else ""
        raise CapacityError(
            f"stage {stage} of {len(needs)} needs {need.need(largest)}, a peer here may use {largest}{shared}: {need}. Nothing was "
            f"started; {ADVICE}. compute.memory says how much a peer may use where {format_memory(largest.device)} is not the truth"
        )
