"""The resources of each peer on a machine: device, and share of memory."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.compute.estimate import Offer
from muletrain.compute.probe import (
    chip,
    choose_precision,
    device_count,
    device_memory,
    free_memory,
    pick_device,
    reported,
)
from muletrain.config.schema import Precision
from muletrain.errors import CapacityError
from muletrain.planning.devices import find_device
from muletrain.units import format_memory, plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from muletrain.compute.estimate import StageMemory

ADVICE = (
    "use more fleet.stages, a smaller train.microbatch, compute.checkpointing = 'auto', or, if GPU memory is short, "
    "optimizer.state_device = 'cpu'"
)


def devices(asked: str, gpus: int) -> list[str]:
    """The devices of a machine with ``gpus``: all for 'auto' and 'cuda', otherwise ``asked``."""
    return [f"cuda:{k}" for k in range(gpus)] if asked in ("auto", "cuda") and gpus else [asked]


def dealt(devices: Sequence[str], peers: int) -> list[str]:
    """The device of each of ``peers``, dealt in turn."""
    return [devices[k % len(devices)] for k in range(peers)]


def own_devices(asked: str) -> list[str]:
    """The devices of this machine."""
    return devices(asked, device_count() if asked in ("auto", "cuda") else 0)


@dataclass(frozen=True)
class Machine:
    """The resources of one peer process. ``flops``: speed of the device by the catalogue, or by the driver [FLOP/s]; 0:
    unknown."""

    device: torch.device
    precision: Precision
    offer: Offer
    flops: int = 0

    @classmethod
    def probe(
        cls, device: str, precision: Precision, memory_gib: float | None, sharing: int = 1, host: int | None = None
    ) -> Machine:
        """Measure for at most a second. ``sharing``: number of peers on the device. ``host``: this peer's share of the
        machine's memory, measured before any peer took memory [bytes]; default: all free memory. Raises ConfigError for
        a device that does not exist.
        """
        chosen = pick_device(device)
        measured = choose_precision(chosen) if precision is Precision.AUTO else precision
        offer = memory_of(chosen, memory_gib, sharing, host)
        if chosen.type != "cpu" and memory_gib is None:
            offer = Offer(min(offer.device, free_memory(chosen)), offer.host)
        known = find_device("CPU" if chosen.type == "cpu" else chip(chosen))
        if known is None and chosen.type == "cuda":
            known = reported(chosen)
        return cls(chosen, measured, offer, int(known.flops) // sharing if known else 0)

    @property
    def kind(self) -> str:
        """Kind of the device: devices of one kind compute identical bits."""
        return f"cpu ({platform.machine()})" if self.device.type == "cpu" else self.device.type


def memory_of(device: torch.device, memory_gib: float | None, sharing: int, host: int | None) -> Offer:
    """One peer's share of memory, without opening a GPU: all of an accelerator's memory counts as free; host memory is
    measured."""
    beside = free_memory_of_machine(sharing) if host is None else host
    if device.type == "cpu":
        return Offer(beside if memory_gib is None else int(memory_gib * 2**30))
    own = device_memory(device) // sharing if memory_gib is None else int(memory_gib * 2**30)
    return Offer(own, beside if device.type == "cuda" else None)


def free_memory_of_machine(peers: int) -> int:
    """Each peer's share of the machine's free memory [bytes]."""
    import torch

    return free_memory(torch.device("cpu")) // peers


def on_disk(need: StageMemory, offer: Offer) -> int:
    """Bytes on a disk of a stage that is swapped on a machine with this offer."""
    swapped = need.swapped
    return swapped.at(offer).in_files if swapped is not None and swapped.on_disk(offer) else 0


def check_local(
    needs: Sequence[StageMemory], dealt: Sequence[str], memory_gib: float | None, host: int, folder: Path
) -> None:
    """Check that the peers of this machine can serve all stages. ``folder``: for stages that are swapped to a disk. Raises
    CapacityError with the numbers."""
    free = shutil.disk_usage(folder).free
    offers = [memory_of(pick_device(d), memory_gib, dealt.count(d), host) for d in dealt]
    for stage, need in enumerate(needs):
        if any(need.resident(o) or (need.fits(o) and not on_disk(need, o) > free) for o in offers):
            continue
        largest = max(offers, key=lambda o: o.device)
        full = ""
        if need.fits(largest):
            files = format_memory(on_disk(need, largest))
            full = f"; swapped it needs {files} of disk, and {format_memory(free)} are free in {folder}"
        shared = f" ({plural(len(dealt), 'peer')} share this machine)" if len(dealt) > 1 and memory_gib is None else ""
        raise CapacityError(
            f"stage {stage} of {len(needs)} needs {need.need(largest)}, but a peer here may use {largest}{shared}: {need.on(largest)}"
            f"{full or need.swapping(largest)}. Nothing was started; {ADVICE}. If {format_memory(largest.device)} is wrong, set "
            f"compute.memory. If other machines are to serve, take 'muletrain start' (with --dry-run, too)"
        )
