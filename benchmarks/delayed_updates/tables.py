"""The table of README.md from the JSON beside it."""

from statistics import median
from typing import Any

HEAD = "microbatches a step|at once [s]|of it averaging [s]|delayed [s]|faster by|single pairs"


def delays(results: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for case in results:
        at_once, delayed = ([pair[kind] for pair in case["pairs"]] for kind in ("at once", "delayed"))
        single = [a["step_s"] / b["step_s"] for a, b in zip(at_once, delayed, strict=True)]
        times = (
            median(x[k] for x in of) for of, k in ((at_once, "step_s"), (at_once, "averaging_s"), (delayed, "step_s"))
        )
        cells = [*(f"{t:.2f}" for t in times), f"{case['ratio']:.2f}", f"{min(single):.2f} to {max(single):.2f}"]
        rows.append([case["microbatches"], *cells])
    return rows


def loads(results: list[dict[str, Any]]) -> list[float]:
    return [of["load"] for case in results for pair in case["pairs"] for of in pair.values()]
