"""Tables of README.md from the JSON beside it."""

from statistics import median
from typing import Any

from benchmarks.figures import span

Results = dict[str, Any]
HEAD = "fault|stage|faults|to the next microbatch, median (worst)|service time|target"
DYING = "a death every|of undisturbed fleets|of declared service times|steps|to the stage's next microbatch"


def faults(results: Results) -> list[list[Any]]:
    rows = []
    for name, found in results.items():
        kind, _, stage = name.partition("-stage")
        if stage:
            service, tail = (median(row[key] for row in found["rows"]) for key in ("service_s", "service_p95_s"))
            served = f"{service:.2f} s" + (f", 95th percentile {tail:.2f} s" if kind == "SIGSTOP" else "")
            next_s = f"{found['median_s']:.2f} s ({found['worst_s']:.2f} s)"
            rows.append([kind, stage, len(found["rows"]), next_s, served, f"{found['target_s']:.2f} s"])
    return rows


def dying(results: Results) -> list[list[str]]:
    rows = []
    for name in ("busy-30", "busy-13"):
        runs = results[name]["runs"]
        of, nominal = (", ".join(f"{run[key]:.3f}" for run in runs) for key in ("of_undisturbed", "of_nominal"))
        next_s = span((row["next_s"] for run in runs for row in run["rows"]), ".2f")
        steps = span(len(run["step_s"]) for run in runs)
        rows.append([f"{name.removeprefix('busy-')} s", f"**{of}**", nominal, steps, f"{next_s} s"])
    return rows


def undisturbed(results: Results) -> str:
    return ", ".join(f"{s:.2f} s ({fleet.replace('+', ' + ')})" for fleet, s in results["undisturbed_s"].items())
