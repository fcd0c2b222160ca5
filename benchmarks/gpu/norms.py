"""RMSNorm forward and backward: ours, torch's fused one in fp32 without weights (the same numbers in 16 bits, too), and
torch's own as it is. ``python -m benchmarks.gpu.norms --size large``."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import SIZES, Found, parser, tell
from benchmarks.swap.gpu import Case
from muletrain.model.stage import RMSNorm

REPEATS = 50


def unit(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def whole(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def measured(case: Case, dtype: torch.dtype) -> Found:
    """Seconds of each, and the largest difference from ours, relative to the largest number."""
    width, eps = case.spec.width, case.spec.norm_eps
    ours = RMSNorm(width, eps).to(case.device, dtype)
    weight = torch.nn.init.uniform_(ours.weight, 0.5, 1.5)
    x = torch.randn(case.row.sequences, case.spec.context, width, device=case.device, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: ours(x),
        "unit": lambda: unit(x, weight, eps),
        "whole": lambda: whole(x, weight, eps),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    outputs = {}
    for _ in range(REPEATS):
        for name, way in ways.items():
            case.sync()
            begin = time.perf_counter()
            output = way()
            outputs[name] = [output, *torch.autograd.grad(output, (x, weight), grad)]
            case.sync()
            took[name].append(time.perf_counter() - begin)
    apart = {
        name: max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, outputs["ours"], strict=True))
        for name, found in outputs.items()
    }
    return {"dtype": str(dtype).removeprefix("torch."), "s": {n: median(t) for n, t in took.items()}, "apart": apart}


def main() -> None:
    given = parser(__doc__).parse_args()
    case = Case(SIZES[given.size], torch.device(given.device))
    tell(case, {"norms": [measured(case, dtype) for dtype in (torch.float32, torch.bfloat16)]})


if __name__ == "__main__":
    main()
