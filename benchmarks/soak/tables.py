"""The table of README.md from the JSON beside it."""

from collections.abc import Iterable
from typing import Any

from benchmarks.figures import span

Process = dict[str, dict[str, float]]


def growth(results: dict[str, Any]) -> list[list[str]]:
    found: dict[str, Process] = results["processes"]
    founders = [p for name, p in found.items() if name.startswith("peer") and "/" not in name]
    daemons = [p for name, p in found.items() if "/" in name]
    every, limit = list(found.values()), results["limits"]["rss_mib"]
    rows = []
    for name, of in (("the command", [found["cli"]]), ("the founders", founders), ("their daemons", daemons)):
        allowed = span((max(limit["least"], limit["share"] * p["rss_mib"]["median"]) for p in of), ".1f")
        rows.append([f"memory of {name}", f"{_of(of, 'rss_mib', 'median', '.0f')} MiB"])
        rows[-1].append(f"{_of(of, 'rss_mib', 'growth_per_h', '+.1f')} MiB (limit {allowed})")
    peers = [*founders, *daemons]
    return [
        *rows,
        *([kind, _of(peers, kind, "median", ".0f"), _of(every, kind, "growth_per_h", "+.1f")] for kind in KINDS),
    ]


KINDS = "files", "sockets", "threads"


def _of(processes: Iterable[Process], kind: str, what: str, spec: str) -> str:
    return span((process[kind][what] for process in processes), spec)


def faults(results: dict[str, Any]) -> str:
    of = results["faults"]
    named = {"join": "newcomers", "kill": "killed", "freeze": "freezes", "move": "moves", "partition": "partitions"}
    return (
        ", ".join(f"{of[kind]} {name}" for kind, name in named.items())
        + f", {of['corrupt']} frames or gradients spoiled"
    )
