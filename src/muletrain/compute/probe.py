"""Finds out this machine's device, memory and fastest precision."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from muletrain.cgroups import memory_left
from muletrain.config.schema import Precision
from muletrain.errors import ConfigError
from muletrain.planning.devices import Device, estimated

BUDGET_S = 0.2
"""Seconds of each of the two measurements."""
MARGIN = 1.2
"""Factor by which 16 bits must be faster before fp32's accuracy is given up."""
_SIZE = 256  # of the matrices: at the 0.4 GFLOP/s of an emulated bf16 one product takes 0.1 s


def pick_device(name: str) -> torch.device:
    """The device ``compute.device`` names; 'auto' prefers CUDA, then MPS, then the CPU. Raises ConfigError for a
    missing device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"compute.device: no {name} here (torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices); "
            "'auto' takes what is here"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("compute.device: no mps here; use 'auto'")
    return device


def precision_dtype(precision: Precision) -> torch.dtype:
    """The working dtype of a chosen precision (not 'auto')."""
    return {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}[precision]


def choose_precision(device: torch.device) -> Precision:
    """The fastest arithmetic that trains well, in at most a second.

    CUDA has bf16 or fp16 in hardware. Elsewhere a measurement decides: a CPU without AMX or AVX512-bf16 emulates bf16,
    up to a hundred times slower than fp32.
    """
    if device.type == "cuda":
        return Precision.BF16 if torch.cuda.get_device_capability(device) >= (8, 0) else Precision.FP16
    fp32, bf16 = (product_seconds(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    return Precision.BF16 if bf16 * MARGIN < fp32 else Precision.FP32


def chip(device: torch.device) -> str:
    """Name of the chip: 'NVIDIA H200', 'cpu'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def reported(device: torch.device) -> Device:
    """Speed of a CUDA or ROCm device, estimated from the reported properties."""
    has = torch.cuda.get_device_properties(device)
    clock_hz = 1e3 * float(getattr(has, "clock_rate", 0.0))  # not every version of torch tells
    capability = (0, 0) if torch.version.hip else (has.major, has.minor)  # AMD counts its generations otherwise
    return estimated(has.name, has.multi_processor_count, clock_hz, has.total_memory, capability)


def device_here(name: str) -> Device | None:
    """The device of this machine with this reported name; None: not found."""
    own = (torch.device("cuda", k) for k in range(device_count()))
    return next((reported(device) for device in own if chip(device).lower() == name.lower()), None)


def device_count() -> int:
    """How many CUDA devices this machine has; opens none."""
    return torch.cuda.device_count()


def device_memory(device: torch.device) -> int:
    """All the memory an accelerator has [bytes]."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_memory(device: torch.device) -> int:
    """Memory that may still be taken on ``device`` [bytes]; on the CPU the limits of this process' control groups count too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    available, limit = _system_memory(), memory_left()
    return available if limit is None else min(available, limit)


def used_memory(device: torch.device) -> int:
    """Memory that this process has taken of ``device``; on the CPU resident pages, also those of files that it shares
    [bytes]. 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _system_memory() -> int:
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:  # macOS: only the installed memory is cheap to find out
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of the matrix products that fit the budget [s]."""
    matrix = torch.ones(_SIZE, _SIZE, device=device, dtype=dtype)
    deadline = time.perf_counter() + BUDGET_S
    best = float("inf")
    while True:
        begin = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # reading a number waits for the device
        now = time.perf_counter()
        best = min(best, now - begin)
        if now > deadline:
            return best
