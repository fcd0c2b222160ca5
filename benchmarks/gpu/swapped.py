"""The large model through 8 GiB of the card, as benchmarks/swap/gpu.py measures it, in short: one round of each length,
one step, no trace. ``python -m benchmarks.gpu.swapped``; ``--size tiny-large --device cpu`` swaps through a file."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from benchmarks.gpu.cases import parser, tell
from benchmarks.swap.gpu import ROWS, Case


def main() -> None:
    given = parser(__doc__).parse_args()
    tiny = given.size.startswith("tiny")
    row = replace(ROWS["tiny" if tiny else "1.3B"], repeats=1, traced=False)
    case = Case(row, torch.device(given.device))
    swapped = case.swapped()
    gc.collect()
    if case.gpu:
        torch.cuda.empty_cache()
    resident = case.resident(swapped["runs"])  # type: ignore[arg-type]
    step = swapped["step"]
    assert isinstance(step, dict)
    found = {
        "tokens_per_s": row.step / step["s"],
        "step_s": step["s"],
        "resident_s": resident[str(row.step)],
        "of_resident": resident[str(row.step)] / step["s"],
        "parts": len(swapped["runs"]),  # type: ignore[arg-type]
        "peak_bytes": swapped.get("device_bytes"),
        "estimate_bytes": swapped["budget_bytes"],
    }
    tell(case, found)


if __name__ == "__main__":
    main()
