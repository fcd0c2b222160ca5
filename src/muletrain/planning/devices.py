"""A catalogue of devices: sustained FLOP/s in mixed-precision training, and memory.

Rates count every operation that is carried out, recomputed forwards included, of large matrix products in training;
small models and short microbatches get less. Values without a source are marked as estimates: 40 % of the dense peak of
tensor cores with 16-bit inputs and fp32 sums, or 60 % of the fp32 peak without tensor cores. Peaks are from the named
documents of the vendors. Memory is what torch reports: ECC takes a part of what a card is sold with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One device. ``accelerator``: has separate memory, and optimizer copies stay in the machine's memory."""

    name: str
    flops: float
    memory_bytes: int
    source: str
    estimate: bool = False
    accelerator: bool = True
    aliases: tuple[str, ...] = ()


TENSOR, PLAIN = 0.4, 0.6
"""Part of a peak that training sustains: the H100s of Llama 3 sustained 40 %."""
_SWARM_SAMPLE = "(4 x 5.5e13 FLOP a sample: 48 layers of 16 x 4096^2 parameters, 2048 tokens, head, recomputed forward)"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper"
_SPECIFIED = "2 x the fp32 peak of NVIDIA's specifications"


def _rounded(tflops: float) -> float:
    """Rounded to two digits, the accuracy of an estimate [FLOP/s]."""
    return float(f"{1e12 * tflops:.2g}")


def _peak(name: str, tflops: float, gib: int, document: str, *aliases: str) -> Device:
    """A device of which only the peak of the tensor cores is known."""
    return Device(
        name, _rounded(TENSOR * tflops), gib * GIB, f"40 % of {tflops:g} TFLOP/s ({document})", True, True, aliases
    )


def _apple(name: str, tflops: float, gib: int, ghz: float) -> Device:
    """An Apple chip. ``ghz``: its GPU's clock."""
    return _plain(
        name,
        tflops,
        gib,
        f"cores that Apple states x 128 lanes x 2 x about {ghz} GHz; one memory, so give memory_gib; muletrain does not train on it yet",
        accelerator=False,
    )


def _plain(name: str, tflops: float, gib: int, document: str, *, accelerator: bool = True) -> Device:
    """A device without tensor cores. ``tflops``: peak in fp32."""
    return Device(
        name, _rounded(PLAIN * tflops), gib * GIB, f"60 % of {tflops:g} TFLOP/s in fp32 ({document})", True, accelerator
    )


DEVICES: tuple[Device, ...] = (
    Device("T4", 10.6e12, 15 * GIB, f"SWARM table 3: at best 19.2 samples/s on 400 {_SWARM_SAMPLE}"),
    Device("V100", 39e12, 16 * GIB, "Megatron-LM (Shoeybi et al. 2019), abstract: sustained on one GPU"),
    Device("A100", 101e12, 40 * GIB, f"SWARM table 3: at best 25.5 samples/s on 56 {_SWARM_SAMPLE}"),
    Device("H100", 400e12, 80 * GIB, "Llama 3 (Grattafiori et al. 2024), table 4: 380 to 430 a GPU (SXM)"),
    _peak("H100 PCIe", 756, 80, "NVIDIA H100 Tensor Core GPU datasheet"),
    _peak("H100 NVL", 835, 94, "NVIDIA H100 Tensor Core GPU datasheet"),
    Device("H200", 400e12, 139 * GIB, "as H100, whose chip it has with more memory", True),
    Device(
        "GH200",
        400e12,
        94 * GIB,
        "as H100, whose chip it has; 480 GB is its CPU's memory",
        True,
        True,
        ("GH200 480GB",),
    ),
    _peak("H200 NVL", 835, 139, "NVIDIA H200 Tensor Core GPU datasheet"),
    _peak("B200", 2250, 178, "NVIDIA DGX B200 datasheet"),
    _peak("A30", 165, 24, "NVIDIA A30 Tensor Core GPU datasheet"),
    _peak("A10", 125, 22, "NVIDIA A10 Tensor Core GPU datasheet"),
    _peak("A10G", 70, 22, "NVIDIA A10G Tensor Core GPU datasheet, Amazon EC2 G5"),
    _peak("A40", 150, 44, "NVIDIA A40 datasheet"),
    _peak("L4", 121, 22, "NVIDIA L4 Tensor Core GPU datasheet"),
    _peak("L40", 181, 44, "NVIDIA L40 datasheet"),
    _peak("L40S", 362, 44, "NVIDIA L40S datasheet"),
    _peak("RTX A6000", 155, 48, "NVIDIA RTX A6000 datasheet"),
    _peak("RTX 6000 Ada", 364, 48, f"{_ADA}, professional edition", "RTX 6000 Ada Generation"),
    Device("RTX 2080", 25e12, 8 * GIB, "HYBRID sec. 4: takes 1.55 times as long as a V100"),
    _peak("RTX 2080 Ti", 54, 11, "NVIDIA Turing GPU Architecture whitepaper, reference card"),
    _peak("RTX 3060", 25.5, 12, _SPECIFIED),
    _peak("RTX 3060 Ti", 32.4, 8, _SPECIFIED),
    _peak("RTX 3070", 40.6, 8, _GA102),
    _peak("RTX 3070 Ti", 43.5, 8, _SPECIFIED),
    _peak("RTX 3080", 59.5, 10, _GA102),
    _peak("RTX 3080 Ti", 68.2, 12, _SPECIFIED),
    _peak("RTX 3090", 71, 24, _GA102),
    _peak("RTX 3090 Ti", 80, 24, _SPECIFIED),
    _peak("RTX 4060", 30.2, 8, _SPECIFIED),
    _peak("RTX 4060 Ti", 44.1, 8, _SPECIFIED),
    _peak("RTX 4070", 58.3, 12, _ADA),
    _peak("RTX 4070 SUPER", 70.9, 12, _SPECIFIED),
    _peak("RTX 4070 Ti", 80.2, 12, _ADA),
    _peak("RTX 4070 Ti SUPER", 88.2, 16, _SPECIFIED),
    _peak("RTX 4080", 97.5, 16, _ADA),
    _peak("RTX 4080 SUPER", 104.4, 16, _SPECIFIED),
    _peak("RTX 4090", 165, 24, _ADA),
    _peak("RTX 5060", 38.4, 8, _SPECIFIED),
    _peak("RTX 5060 Ti", 47.4, 16, _SPECIFIED),
    _peak("RTX 5070", 61.7, 12, _BLACKWELL),
    _peak("RTX 5070 Ti", 87.9, 16, _BLACKWELL),
    _peak("RTX 5080", 112.6, 16, _BLACKWELL),
    _peak("RTX 5090", 209.5, 31, _BLACKWELL),
    _plain("GTX 1080", 8.9, 8, "NVIDIA GeForce GTX 1080 whitepaper"),
    _plain("GTX 1080 Ti", 11.3, 11, "NVIDIA GeForce GTX 1080 Ti specifications"),
    _plain("P100", 9.3, 16, "NVIDIA Tesla P100 PCIe datasheet"),
    _peak("MI210", 181, 64, "AMD Instinct MI210 data sheet"),
    _peak("MI250X", 191.5, 64, "AMD Instinct MI250X data sheet; one of its two dies, each of them a device"),
    _peak("MI300X", 1307, 192, "AMD Instinct MI300X data sheet"),
    _apple("M1", 2.6, 8, 1.28),
    _apple("M1 Pro", 5.2, 16, 1.28),
    _apple("M1 Max", 10.4, 32, 1.28),
    _apple("M1 Ultra", 21, 64, 1.28),
    _apple("M2", 3.6, 8, 1.4),
    _apple("M2 Pro", 6.8, 16, 1.4),
    _apple("M2 Max", 13.6, 32, 1.4),
    _apple("M2 Ultra", 27.2, 64, 1.4),
    _apple("M3", 3.6, 8, 1.4),
    _apple("M3 Pro", 6.5, 18, 1.4),
    _apple("M3 Max", 14.3, 36, 1.4),
    _apple("M3 Ultra", 28.7, 96, 1.4),
    _apple("M4", 4.0, 16, 1.58),
    _apple("M4 Pro", 8.1, 24, 1.58),
    _apple("M4 Max", 17.2, 36, 1.68),
    Device("CPU", 0.3e12, 16 * GIB, "eight cores of 40 GFLOP/s in fp32", True, accelerator=False),
)
_BRANDS = re.compile(r"nvidia|geforce|tesla|quadro|\bamd\b|instinct|\bapple\b|rtx|gtx|[\s_-]+")
_FORMS = re.compile(r"pcie|sxm\d?|hbm\d?e?|nvl")
_MEMORY = re.compile(r"(\d+)\s*(?:gib|gb|g)\b")


def find_device(name: str) -> Device | None:
    """'NVIDIA A100 80GB', 'a100', 'GeForce RTX 3080' -> the device, with the memory that the name states. A name's form
    ('H100 PCIe', 'A100-SXM4') counts where the catalogue tells forms apart. None: not in the catalogue."""
    text = name.lower()
    if (exact := _KEYS.get(_key(text))) is not None:
        return exact
    stated, bare = _MEMORY.search(text), _MEMORY.sub("", text)
    keys = (_key(bare), *_forms_of(bare), _key(_FORMS.sub("", bare)))
    device = next((found for key in keys if (found := _KEYS.get(key)) is not None), None)
    return replace(device, memory_bytes=int(stated[1]) * GIB) if device and stated else device


def _forms_of(text: str) -> tuple[str, ...]:
    """'h100 nvl hbm3' -> 'h100nvl': the name with each form alone."""
    return tuple(_key(_FORMS.sub("", text) + form) for form in _FORMS.findall(text))[::-1]


def _key(name: str) -> str:
    return _BRANDS.sub("", name.lower())


_KEYS = {_key(name): device for device in DEVICES for name in (device.name, *device.aliases)}
_PER_CLOCK = {
    (7, 0): 1024,
    (7, 5): 512,
    (8, 0): 2048,
    (8, 6): 512,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 512,
}
"""Operations that a multiprocessor's tensor cores do at each clock, by CUDA's compute capability: 16-bit inputs, fp32
sums, as on consumer cards (CUDA C++ Programming Guide; the whitepapers above)."""
USUAL_HZ = 1.5e9
"""Clock of a GPU that reports none."""


def estimated(name: str, processors: int, clock_hz: float, memory_bytes: int, capability: tuple[int, int]) -> Device:
    """A device that is not in the catalogue, estimated from the driver's report: multiprocessors, clock [Hz], memory
    [bytes] and CUDA's compute capability (or the nearest earlier known capability; (0, 0): not CUDA). Without tensor
    cores, and for other vendors' chips: 128 lanes in fp32."""
    known = max((c for c in _PER_CLOCK if c <= capability), default=None)
    per_clock, part = (_PER_CLOCK[known], TENSOR) if known else (256, PLAIN)
    clock_hz = clock_hz or USUAL_HZ
    peak = processors * clock_hz * per_clock
    told = f"estimated from {processors} multiprocessors at {clock_hz / 1e9:.2f} GHz: {100 * part:.0f} % of {peak / 1e12:.3g} TFLOP/s"
    return Device(name, part * peak, memory_bytes, told, estimate=True)
