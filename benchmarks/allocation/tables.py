"""Tables of README.md from the JSON beside it."""

from statistics import mean, median
from typing import Any

Fleet = dict[str, Any]
HEAD = "median (least to most)|paper / ours|paper's best level / ours|ours is slower|idle|CPU [s]"
COMPARED = (("paper", "ours"), ("paper_best_level", "ours"))


def ratios(fleets: list[Fleet], a: str, b: str) -> list[float]:
    return [fleet[a]["step_s"] / fleet[b]["step_s"] for fleet in fleets if fleet[a] and fleet[b]]


def kinds(fleets: list[Fleet]) -> list[list[str]]:
    """A row for each kind of fleet, and one for all."""
    names = [*dict.fromkeys(fleet["kind"] for fleet in fleets), "all"]
    return [_row(name, [fleet for fleet in fleets if name in (fleet["kind"], "all")]) for name in names]


def _row(name: str, fleets: list[Fleet]) -> list[str]:
    found = [ratios(fleets, a, b) for a, b in COMPARED]
    idle = [fleet["ours"]["idle"] / fleet["machines"] for fleet in fleets if fleet["ours"]]
    return [
        f"{name}, {len(fleets)} fleets",
        *(f"{median(r):.2f} ({min(r):.2f} to {max(r):.2f})" if r else "" for r in found),
        f"{sum(ratio < 1 for ratio in found[-1])} of {len(found[-1])}",
        f"{mean(idle):.0%}" if idle else "",
        f"{median(fleet['cpu_s'] for fleet in fleets):.1f}",
    ]


def alone(fleets: list[Fleet]) -> str:
    """Fleets in which the paper's allocation has a machine without room for its stage."""
    return f"{sum(bool(f['ours'] and not f['paper']) for f in fleets)} of {len(fleets)}"


def neither(fleets: list[Fleet]) -> str:
    """Fleets in which no hub has room."""
    return str(sum(not f["ours"] and not f["paper"] for f in fleets))


def stages(fleets: list[Fleet], search: str) -> str:
    """Median."""
    return f"{median(fleet[search]['stages'] for fleet in fleets if fleet[search]):.0f}"
