"""Tables of README.md from the JSON beside it."""

from typing import Any

Results = dict[str, Any]


def predictions(*results: Results) -> list[list[str]]:
    """A row for each promise, a column for each draw of fleets."""
    of = [found["summary"] for found in results]

    def layouts(name: str) -> list[str]:
        right, all_, error = (f"{name}: {what}" for what in ("within 10 %", "layouts", "largest error"))
        return [f"{s[right]} of {s[all_]} ({s[error]:.1%})" for s in of]

    fastest, behind = "recommended: fastest played, or within 5 %", "recommended: most behind"
    return [
        ["the recommended layout is the fastest one played, or within 5 % of it"]
        + [f"{s[fastest]} of {s['fleets']} ({s[behind]:.1%} behind at most)" for s in of],
        ["its step takes the predicted time, within 10 %", *layouts("recommended")],
        ["the recommended strategy is `pipeline`", *(f"{s['recommended: a pipeline']} of {s['fleets']}" for s in of)],
        ["any layout of `swarm` takes the predicted time, within 10 %", *layouts("all 'swarm'")],
        ["any layout of `pipeline` takes the predicted time, within 10 %", *layouts("all 'pipeline'")],
    ]


def layers(results: Results) -> list[list[int]]:
    """Layers of each stage, for each recommended pipeline."""
    found = (fleet["recommended"] for fleet in results["fleets"] if fleet["recommended"].startswith("pipeline"))
    return [[int(n) for n in text.split(" stages of ")[1].split(" layers")[0].split("+")] for text in found]


def worst(results: Results, strategy: str) -> dict[str, Any]:
    """The layout of ``strategy`` whose prediction is furthest off, with its fleet's seed."""
    layouts = [{**layout, "seed": f["seed"]} for f in results["fleets"] for layout in f["layouts"]]
    return max((x for x in layouts if x["layout"].startswith(strategy)), key=lambda x: abs(x["error"] or 0))


def count(results: Results, *, unequal: bool) -> int:
    """Recommended pipelines with stages of unequal layers, or with one stage."""
    return sum(len(set(of)) > 1 if unequal else len(of) == 1 for of in layers(results))


def apart(results: Results) -> float:
    """`simulate` and `plan` of agree.json, at most."""
    return max(abs(fleet["simulate / plan"] - 1) for fleet in results["fleets"])
