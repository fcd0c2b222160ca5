"""Tables of README.md from the JSON beside it."""

from statistics import median
from typing import Any

Results = dict[str, Any]
NAMED = "step, shaped|averaging|step / averaging (>= 1.5)|kept of the unshaped throughput (>= 0.9)"
SWEEP = "microbatches a step|step [s]|averaging [s]|averaging's share"
CUBE = "width|service [ms]|transfer [ms]|service / transfer|idle outside averaging"


def named(results: Results) -> list[list[str]]:
    step, averaging = (median(p["shaped"][k] for p in results["pairs"]) for k in ("step_s", "averaging_s"))
    ratio, kept = f"{results['step_over_averaging']:.0f}", f"{results['kept']:.3f}"
    return [[f"{step:.1f} s", f"{averaging:.2f} s", ratio, kept]]


def sweep(results: Results) -> list[list[str]]:
    return [
        [row["microbatches"], f"{row['step_s']:.2f}", f"{row['averaging_s']:.2f}", f"{share(row):.0%}"]
        for row in results["sweep"]
        if row["microbatches"] != results["named"]["microbatches"]
    ]


def share(row: Results) -> float:
    """Of averaging in a step."""
    return row["averaging_s"] / row["step_s"]


def cube(results: Results) -> list[list[str]]:
    return [
        [
            row["width"],
            f"{row['service_ms']:.1f}",
            f"{row['transfer_ms']:.1f}",
            f"{row['service_ms'] / row['transfer_ms']:.0f}",
            f"{row['idle']:.0%}",
        ]
        for row in results["square_cube"]
    ]
