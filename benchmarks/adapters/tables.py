"""The tables of README.md and docs/models.md from the JSON beside it."""

from __future__ import annotations

from typing import Any

TRAINED = 10e6
"""Tokens of the training whose hours are given."""
NAMES = {
    "two-4090": "two RTX 4090 in one home, 1 Gb/s between them",
    "six-3090": "six RTX 3090 in three homes, 20 Mb/s up",
    "ten-t4": "ten T4, spot machines of one region",
    "one-3060": "one RTX 3060 of 12 GB and 64 GiB beside it",
}


def plans(found: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each fleet."""
    rows = []
    for plan in found:
        machines = len({name for stage in plan["stages"] for name in stage["machines"]}) if plan["stages"] else 0
        moved = {kind: sum(t[kind] for t in plan["traffic"]) for kind in ("activations", "gradients", "averaging")}
        between, averaged = (moved["activations"] + moved["gradients"]) / 1e6, moved["averaging"] / 1e6
        fullest = max(plan["memory"], key=lambda m: m["device_needs"])
        kind = plan["strategy"] + (f", {plan['schedule']}" if plan["schedule"] else "")
        rows.append(
            [
                NAMES[plan["fleet"]],
                kind,
                str(len(plan["stages"])),
                f"{fullest['device_needs'] / 2**30:.1f} of {fullest['device_has'] / 2**30:.0f}",
                f"{between:,.0f}",
                f"{averaged:,.0f}",
                f"{plan['tokens_per_s']:,.0f}",
                f"{TRAINED / plan['tokens_per_s'] / 3600:.1f}",
            ]
        )
        assert machines or plan["strategy"] == "swap"
    return rows


def moved(results: dict[str, Any]) -> list[list[str]]:
    """A row for each way of training."""
    stage, found = results["stage 1"], results["bytes"]
    stated = {
        "adapter": (2 * stage["adapter"], 12 * stage["adapter"] + stage["base"]),
        "adapter, newcomers have the model": (2 * stage["adapter"], 12 * stage["adapter"]),
        "all weights": (2 * results["all"], 12 * results["all"]),
    }
    return [
        [
            name,
            *(
                f"{value / 1e6:.2f}"
                for pair in zip((own["averaged"], own["newcomer"]), stated[name], strict=True)
                for value in pair
            ),
        ]
        for name, own in found.items()
    ]
