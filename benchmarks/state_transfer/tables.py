"""The table of README.md about training beside a transfer, from the JSON beside it."""

from typing import Any

HEAD = "state|each donor's links|step alone|state yields: steps, transfer|state goes as activations do: steps, transfer"


def beside(plays: list[dict[str, Any]]) -> list[list[str]]:
    found: dict[tuple[float, float, float], dict[str, dict[str, Any]]] = {}
    for play in plays:
        found.setdefault((play["state_mb"], play["rate"], play["compute_s"]), {})[play["state"]] = play
    return [
        [
            f"{mb:.0f} MB",
            f"{rate * 8 / 1e6:.0f} Mb/s",
            f"{of['yields']['before_s']:.1f} s",
            *(_meanwhile(of[state]) for state in ("yields", "as activations do")),
        ]
        for (mb, rate, _), of in found.items()
    ]


def _meanwhile(play: dict[str, Any]) -> str:
    transfer = "not within 40 steps" if play["transfer_s"] is None else f"{play['transfer_s']:.1f} s"
    return f"{play['meanwhile_s'] / play['before_s']:.2f}x, {transfer}"
