"""Tables of the estimates: bytes a parameter of each role, and measured peaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muletrain.compute.estimate import Offer, client_memory, stage_memory
from muletrain.compute.swap.fit import swap_memory
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import Precision
from muletrain.model.spec import ModelSpec

PRECISIONS = Precision.FP32, Precision.BF16
Bytes = tuple[int, int, int]


def each(precision: Precision = Precision.FP32, *, client: bool = False, copied: bool = False, **how: bool) -> Bytes:
    """Bytes a parameter without activations: where there is one memory, on a GPU, and beside the GPU. ``copied``: a peer
    alone has room for a copy."""
    spec = ModelSpec.from_config(ModelConfig(preset="llama-7b"))
    cut = spec.cut(4)
    need = (client_memory if client else stage_memory)(spec, cut, 1, tokens=0, precision=precision, **how)
    if need.smaller is not None and not copied:
        need = need.smaller
    params = spec.stage_params(cut, 1)
    parts = need.total - need.activations, need.on_device, need.on_host
    return tuple(round(part / params) for part in parts)  # type: ignore[return-value]


def swapped(*, alone: bool = False, client: bool = False) -> Bytes:
    """The same for a stage that is swapped, whose device holds two blocks and whose other memory is never a disk."""
    spec = ModelSpec.from_config(ModelConfig(preset="llama-7b"))
    cut, ample = spec.cut(4), Offer(1 << 50, 1 << 50)
    need = swap_memory(
        spec, cut, 1, 0, Precision.FP32, microbatches=1, lamb=False, disk=False, alone=alone, client=client
    )
    copies = 0 if alone or client else need.copies(ample)
    whole = round((need.state + need.gradients + copies) / spec.stage_params(cut, 1))
    return whole, 0, whole


def roles() -> Iterator[list[str]]:
    """A row for each role: name, and 'CPU', 'GPU + beside' in fp32 and in 16 bits."""
    ways: dict[str, dict[str, bool]] = {
        "stage with replicas": {},
        "the same, delayed updates": {"delayed": True},
        "server of a hub": {"pooled": True},
        "server, delayed updates": {"pooled": True, "delayed": True},
        "alone (`muletrain run` with one peer)": {"alone": True},
        "alone, with room for a copy": {"alone": True, "copied": True},
        "alone, delayed updates": {"alone": True, "delayed": True},
        "client of a hub": {"client": True},
        "client, delayed updates": {"client": True, "delayed": True},
    }
    for name, how in ways.items():
        found = [each(precision, **how) for precision in PRECISIONS]
        yield [name, *(text for one, device, host in found for text in (str(one), f"{device} + {host}"))]
    kinds: dict[str, dict[str, bool]] = {
        "swapped, with replicas": {},
        "swapped, alone": {"alone": True},
        "client of a hub, swapped": {"client": True},
    }
    for name, how in kinds.items():
        one, _, host = swapped(**how)
        yield [name, *2 * [str(one), f"2 blocks + {host}"]]


def peaks(d: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each measured stage: parameters [M], estimate and peak [MB], and their ratio."""
    for name, found in d.items():
        estimate, measured = found["estimate"], found["measured"]
        sizes = f"{found['params'] / 1e6:.1f}", f"{estimate / 1e6:.0f}", f"{measured / 1e6:.0f}"
        yield [name, *sizes, f"{measured / estimate:.3f}"]
