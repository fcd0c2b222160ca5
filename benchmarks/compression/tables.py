"""The tables of README.md from the JSON beside it."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import mean
from typing import Any

EVERY = 20
"""Steps from one measurement to the next (``run.py``)."""
TRAININGS = "between stages|stages|factor|perplexity (seeds)|over none|steps to the perplexity of none|table 8|over none|table 7, steps"
PUBLISHED = {
    ("none", 1, 1): (19.7, 1.0),
    ("dynamic8", 2, 2): (19.6, 0.97),
    ("dynamic8", 4, 2): (19.7, None),
    ("bottleneck", 2, 2): (19.5, 1.26),
    ("maxout", 2, 2): (19.6, 1.28),
    ("bottleneck", 2, 4): (21.6, None),
    ("maxout", 2, 4): (20.5, None),
    ("bottleneck", 4, 2): (21.7, None),
    ("maxout", 4, 2): (21.4, None),
    ("bottleneck", 4, 4): (28.9, None),
    ("maxout", 4, 4): (21.3, None),
}
"""SWARM: perplexity on OpenWebText (table 8), and steps to a perplexity of 22 on WikiText-103 (table 7)."""
Key = tuple[str, int, int]


def cases(rows: list[dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    """Trainings of each case, by seed."""
    found = defaultdict(list)
    for row in rows:
        found[row["way"], row["stages"], row["factor"]].append(row)
    return {key: sorted(rows, key=lambda row: row["seed"]) for key, rows in found.items()}


def perplexities(rows: list[dict[str, Any]]) -> list[float]:
    """After the steps that all trainings take."""
    return [math.exp(row["curve"][row["steps"] // EVERY - 1]) for row in rows]


def longer(rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> list[float | None]:
    """Times as many steps as without compression to the same loss, between measurements on a straight line; None: the
    training ended before."""
    return [_crossed(row, base["curve"][base["steps"] // EVERY - 1]) for row, base in zip(rows, plain, strict=False)]


def _crossed(row: dict[str, Any], target: float) -> float | None:
    curve = row["curve"]
    for n, loss in enumerate(curve):
        if loss <= target:
            before = curve[n - 1] if n else loss
            part = (before - target) / (before - loss) if before > loss else 1.0
            return float((n + part) * EVERY / row["steps"])
    return None


def times(rows: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    found = longer(rows, plain)
    known = [x for x in found if x is not None]
    if len(known) < len(found):
        most = max(len(row["curve"]) * EVERY / row["steps"] for row in rows)
        return f"more than {most:.2f}" + (f" ({len(known)} of {len(found)}: {mean(known):.2f})" if known else "")
    return f"{mean(known):.2f} ({min(known):.2f} to {max(known):.2f})"


def trainings(rows: list[dict[str, Any]]) -> list[list[str]]:
    found, cells = cases(rows), []
    plain = found["none", 1, 1]
    base = mean(perplexities(plain))
    for key, own in found.items():
        values, (published, steps) = perplexities(own), PUBLISHED.get(key, (None, None))
        cells.append(
            [
                key[0],
                "any" if key[0] == "none" else str(key[1]),
                "1" if key[0] == "none" else f"{key[2]}",
                f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})",
                f"{mean(values) / base:.3f}",
                "1" if key[0] == "none" else times(own, plain),
                "" if published is None else f"{published}",
                "" if published is None else f"{published / 19.7:.3f}",
                "" if steps is None else f"{steps:g}",
            ]
        )
    return cells


def seeds(rows: list[dict[str, Any]]) -> str:
    """How many seeds the cases have."""
    counts = sorted({len(own) for own in cases(rows).values()})
    return " or ".join(map(str, counts))


def order(rows: list[dict[str, Any]]) -> float:
    """Rank correlation (Kendall) of our perplexities with table 8, over the cases that both have."""
    found = {key: mean(perplexities(own)) for key, own in cases(rows).items() if key in PUBLISHED}
    keys, agree, pairs = list(found), 0, 0
    for n, a in enumerate(keys):
        for b in keys[n + 1 :]:
            published = PUBLISHED[a][0] - PUBLISHED[b][0]  # type: ignore[operator]
            if published:
                pairs += 1
                agree += 1 if (found[a] - found[b]) * published > 0 else -1
    return agree / pairs


LINKS = (
    "between stages|factor|sent as|MB a step by the kernel's count|activations and gradients, MB|step [s] on 10, 50, 500 Mb/s|"
    "time to the loss, over int8"
)


def links(rows: list[dict[str, Any]], trained: list[dict[str, Any]]) -> list[list[str]]:
    """Of two stages. Time to the loss: seconds a step times the steps that a kind takes."""
    found, by = cases(trained), defaultdict(dict)
    for row in rows:
        by[row["way"], row["factor"], row["codec"]][row["mbps"]] = row
    int8, cells = by["int8", 2, "int8"], []
    for (way, factor, codec), own in by.items():
        steps = (
            [x for x in longer(found[way, 2, factor], found["none", 1, 1]) if x] if (way, 2, factor) in found else [1.0]
        )
        times_ = mean(steps) if steps and way in ("bottleneck", "maxout") else 1.0
        first = own[min(own)]
        passed = (first["bytes"].get("activation", 0) + first["bytes"].get("gradient", 0)) / 1e6
        over = [times_ * own[m]["step_s"] / int8[m]["step_s"] for m in sorted(own)]
        known = "?" if not steps else ", ".join(f"{x:.2f}" for x in over)
        seconds = ", ".join(f"{own[m]['step_s']:.2f}" for m in sorted(own))
        name = "none" if way == codec else way
        cells.append(
            [
                name,
                str(factor if name != "none" else 1),
                codec,
                f"{first['kernel_bytes'] / 1e6:.2f}",
                f"{passed:.2f}",
                seconds,
                known,
            ]
        )
    return cells
