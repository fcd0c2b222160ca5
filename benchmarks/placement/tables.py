"""Tables of README.md from the JSON beside it."""

from typing import Any

Results = dict[str, Any]
OURS, ANNEALER = "muletrain, 60 s", "plain annealer, 20 s"
HEAD = f"network that nothing was tuned on|{OURS}, seed 0|its CPU seconds"
HEAD += "|plain annealer, 20 CPU seconds each, seeds 0 to 2|bound"
CASES = [f"case {k}" for k in range(1, 6)]


def untuned(results: Results) -> list[list[str]]:
    rows = []
    for name, of in sorted((name, of) for name, of in results["untuned"].items() if name != "machine"):
        ours, plain = of[OURS], ", ".join(f"{cost:.2f}" for cost in annealer(of))
        found = f"**{ours['cost_s']:.2f} s**", f"{ours['cpu_s']:.0f}", f"{plain} s", f"{ours['lower_bound_s']:.1f} s"
        rows.append([name, *found])
    return rows


def annealer(of: Results) -> list[float]:
    return [run["cost_s"] for name, run in sorted(of.items()) if name.startswith(ANNEALER)]


def ahead(results: Results) -> list[float]:
    """How far ours ends below the best of the annealer's runs."""
    found = [of for name, of in results["untuned"].items() if name != "machine"]
    return [1 - of[OURS]["cost_s"] / min(annealer(of)) for of in found]


def live(results: Results) -> tuple[Results, list[Results]]:
    """The planned layout, and random ones."""
    found = results["live"]["two regions, live"]
    return found["planned"], [of for name, of in found.items() if name.startswith("random")]


def large(results: Results, stages: int) -> tuple[float, float]:
    """[s] with limits of 50 and 200 s."""
    of = results["large"][f"512 devices, {stages} stages x {512 // stages} pipelines"]
    return of["muletrain, 50 s"]["cost_s"], of["muletrain, 200 s"]["cost_s"]


def runs(results: Results) -> list[list[Results]]:
    """Ten seeds on each of DT-FM's networks."""
    return [list(results["cases"][case].values()) for case in CASES]


def optimal(results: Results) -> str:
    """Runs that end at the least cost of their network."""
    found = [r["cost_s"] < min(x["cost_s"] for x in of) * (1 + 1e-9) for of in runs(results) for r in of]
    return f"{sum(found)} of {len(found)}"


def published(results: Results, what: str, spec: str = ".2f") -> str:
    """Costs on cases 1 to 5 of one search or of random placements."""
    *first, last = (format(results["published"][case][what]["cost_s"], spec) for case in CASES)
    return f"{', '.join(first)} and {last}"


def ends(results: Results, case: int) -> str:
    """Where Kernighan-Lin's seeds end, and how many."""
    of = [r["cost_s"] for name, r in results["published"][f"case {case}"].items() if "in vain" in name]
    counts = sorted({f"{cost:.2f}": 0 for cost in of}, reverse=True)
    found = ", ".join(f"{sum(f'{cost:.2f}' == text for cost in of)} end at {text} s" for text in counts)
    return f"case {case}, {len(of)} seeds: {found}"


def other(results: Results, what: str) -> float:
    """[s] of another way to place 512 devices as 16 stages."""
    return float(results["large"]["512 devices, 16 stages x 32 pipelines"][what]["cost_s"])
