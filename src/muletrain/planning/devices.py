"""What training gets out of the devices of the field: sustained FLOP/s in mixed precision, and memory.

Rates count every operation that is carried out, recomputed forwards included, of large matrix products in training;
small models and short microbatches get less. What no source states is an estimate, and marked as one: 40 % of the dense
peak of tensor cores, 60 % of fp32 where there are none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One device. ``accelerator``: it has its own memory, and optimizer copies stay in the machine's."""

    name: str
    flops: float
    memory_bytes: int
    source: str
    estimate: bool = False
    accelerator: bool = True


_SWARM_SAMPLE = "(4 x 5.5e13 FLOP a sample: 48 layers of 16 x 4096^2 parameters, 2048 tokens, head, recomputed forward)"
DEVICES: tuple[Device, ...] = (
    Device("T4", 10.6e12, 15 * GIB, f"SWARM table 3: at best 19.2 samples/s on 400 {_SWARM_SAMPLE}"),
    Device("V100", 39e12, 16 * GIB, "Megatron-LM (Shoeybi et al. 2019), abstract: sustained on one GPU"),
    Device("A100", 101e12, 40 * GIB, f"SWARM table 3: at best 25.5 samples/s on 56 {_SWARM_SAMPLE}"),
    Device("H100", 400e12, 80 * GIB, "Llama 3 (Grattafiori et al. 2024), table 4: 380 to 430 a GPU"),
    Device("H200", 400e12, 131 * GIB, "as H100, whose chip it has with more memory", estimate=True),
    Device("RTX 2080", 25e12, 8 * GIB, "HYBRID sec. 4: takes 1.55 times as long as a V100"),
    Device("RTX 3080", 24e12, 10 * GIB, "40 % of 59.5 TFLOP/s", estimate=True),
    Device("RTX 3090", 28e12, 24 * GIB, "40 % of 71 TFLOP/s", estimate=True),
    Device("RTX 4090", 66e12, 24 * GIB, "40 % of 165 TFLOP/s", estimate=True),
    Device("GTX 1080", 5.3e12, 8 * GIB, "60 % of 8.9 TFLOP/s in fp32", estimate=True),
    Device("GTX 1080 Ti", 6.8e12, 11 * GIB, "60 % of 11.3 TFLOP/s in fp32", estimate=True),
    Device("CPU", 0.3e12, 16 * GIB, "eight cores of 40 GFLOP/s in fp32", estimate=True, accelerator=False),
)
_BRANDS = re.compile(r"nvidia|geforce|tesla|rtx|gtx|pcie|sxm\d?|[\s_-]+")
_MEMORY = re.compile(r"(\d+)\s*(?:gib|gb|g)\b")


def find_device(name: str) -> Device | None:
    """'NVIDIA A100 80GB', 'a100', 'GeForce RTX 3080' -> the device, with the memory that the name states. None: not in
    the catalogue."""
    text = name.lower()
    stated = _MEMORY.search(text)
    key = _key(_MEMORY.sub("", text))
    device = next((d for d in DEVICES if _key(d.name) == key), None)
    return replace(device, memory_bytes=int(stated[1]) * GIB) if device and stated else device


def _key(name: str) -> str:
    return _BRANDS.sub("", name.lower())
