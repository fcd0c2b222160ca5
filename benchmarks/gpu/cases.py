"""The two models of this benchmark, with their data and first weights. The plain loop and the peers share all of it."""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable

import torch

from benchmarks.swap.gpu import ROWS, Case, Row
from muletrain.compute.probe import chip
from muletrain.config.model_sections import ModelConfig

Found = dict[str, object]
"""What a part prints, as JSON."""

SIZES = {
    "small": Row(
        ModelConfig(layers=24, width=1024, heads=16, vocab=32000, context=2048, dropout=0.0), 8, 0, (), 1 << 18, ""
    ),
    "large": Row(ROWS["1.3B"].model, 4, 8, (), 1 << 18, ""),
    "tiny-small": Row(ModelConfig(layers=3, width=64, heads=4, vocab=512, context=64, dropout=0.0), 2, 0, (), 1024, ""),
    "tiny-large": Row(
        ModelConfig(layers=4, width=128, heads=4, vocab=512, context=64, dropout=0.0), 2, 0, (), 1024, ""
    ),
}
"""'small' has 0.37 B parameters, 'large' 1.35 B; the other two are for ``--tiny``."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that all parts have."""
    found = argparse.ArgumentParser(description=about)
    found.add_argument("--size", choices=list(SIZES), default="tiny-small")
    found.add_argument("--device", default="cuda")
    found.add_argument("--seconds", type=float, default=6.0, help="time steps for so long, two steps at least")
    return found


def weights(case: Case) -> Callable[[str, tuple[int, ...]], torch.Tensor]:
    """First weights by name and shape, fp32 on the host, drawn where that is fastest; a name decides the numbers."""

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        draws = torch.Generator(case.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, device=case.device, generator=draws).mul_(0.02).cpu()

    return draw


def timed(case: Case, step: Callable[[int, int], float], seconds: float) -> Found:
    """Time whole steps, after a step of two microbatches. ``step`` computes the step of a number with so many
    microbatches, and returns the mean loss."""
    count = case.row.step // case.tokens
    begin = time.perf_counter()
    first = step(0, 2)
    case.sync()
    warm_s = time.perf_counter() - begin
    begin, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - begin < seconds:
        steps += 1
        step(steps, count)
        case.sync()
    step_s = (time.perf_counter() - begin) / steps
    return {
        "tokens_per_s": case.row.step / step_s,
        "step_s": step_s,
        "steps": steps,
        "warm_s": warm_s,
        "first_loss": first,
    }


def peak(device: torch.device) -> int | None:
    """Most bytes that this process' tensors had on the device; None: a CPU does not count them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def tell(case: Case, found: Found) -> None:
    """Print ``found`` as the last line."""
    about = {"device": chip(case.device), "torch": torch.__version__, "params": case.spec.params}
    about |= {"tokens": case.row.step, "microbatch": case.tokens, "precision": case.setup.precision.value}
    print(json.dumps(about | found), flush=True)
