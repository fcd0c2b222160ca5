"""Tables of README.md from the JSON beside it."""

from collections.abc import Callable
from statistics import mean, median
from typing import Any

Fleet = dict[str, Any]
HEAD = "median (least to most)|paper / ours, same number of stages|paper / ours|paper's best level / ours|idle|CPU [s]"
COMPARED = (("paper", "same_stages"), ("paper", "ours"), ("paper_best_level", "ours"))


def ratios(fleets: list[Fleet], a: str, b: str) -> list[float]:
    return [fleet[a]["step_s"] / fleet[b]["step_s"] for fleet in fleets]


def kinds(fleets: list[Fleet]) -> list[list[str]]:
    """A row for each kind of fleet, and one for all."""
    names = [*dict.fromkeys(fleet["kind"] for fleet in fleets), "all"]
    return [_row(name, [fleet for fleet in fleets if name in (fleet["kind"], "all")]) for name in names]


def _row(name: str, fleets: list[Fleet]) -> list[str]:
    found = [ratios(fleets, a, b) for a, b in COMPARED]
    idle = mean(fleet["ours"]["idle"] / (fleet["reliable"] + fleet["unreliable"]) for fleet in fleets)
    return [
        f"{name}, {len(fleets)} fleets",
        *(f"{median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in found),
        f"{idle:.0%}",
        f"{median(fleet['ours']['cpu_s'] for fleet in fleets):.1f}",
    ]


def count(fleets: list[Fleet], holds: Callable[[Fleet], bool]) -> str:
    return f"{sum(map(holds, fleets))} of {len(fleets)}"


def never_slower(fleets: list[Fleet]) -> str:
    return count(fleets, lambda f: all(f[a]["step_s"] >= f[b]["step_s"] for a, b in COMPARED))


def paper_divides_fully(fleets: list[Fleet]) -> str:
    """Fleets in which the paper's rule ends with one reliable machine a stage."""
    return count(fleets, lambda f: f["paper"]["stages"] == f["reliable"])


def missed(fleets: list[Fleet]) -> str:
    """Fleets in which the search over any number of stages ends above the one with the paper's number."""
    return count(fleets, lambda f: f["ours"]["step_s"] > f["same_stages"]["step_s"])


def stages(fleets: list[Fleet], search: str) -> str:
    """Median."""
    return f"{median(fleet[search]['stages'] for fleet in fleets):.0f}"


def behind(fleets: list[Fleet]) -> str:
    """The search over any number of stages above the one with the paper's number, at most."""
    return f"{max(f['ours']['step_s'] / f['same_stages']['step_s'] for f in fleets) - 1:.1%}"


def gap(fleets: list[Fleet]) -> str:
    """The bound below our times, median."""
    return f"{1 - median(f['lower_bound_s'] / f['ours']['step_s'] for f in fleets):.0%}"


def cpu_s(fleets: list[Fleet]) -> str:
    return f"{sum(f[search]['cpu_s'] for f in fleets for search in ('same_stages', 'ours')):.0f} s"
