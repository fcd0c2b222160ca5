"""The table of README.md from the JSON beside it."""

from typing import Any

Results = dict[str, Any]
HEAD = "fleet|measured|protocol|off by|flow|off by|flow, uncalibrated"
CALIBRATION = ("plain", "slow-links")


def fleets(results: Results) -> list[list[str]]:
    rows = []
    for name, of in results["rows"].items():
        mark, title = ("", f"{name} (calibration)") if name in CALIBRATION else ("**", name)
        uncalibrated = of["flow_uncalibrated"] / of["measured"] - 1
        off = f"{mark}{of['protocol_error']:+.1%}{mark}"
        found = f"{of['measured']:.2f}", f"{of['protocol']:.2f}", off, f"{of['flow']:.2f}", f"{of['flow_error']:+.1%}"
        rows.append([title, *found, f"{uncalibrated:+.1%}"])
    return rows


def worst(results: Results) -> float:
    """Largest error of the fleets that are predicted."""
    return max(abs(of["protocol_error"]) for name, of in results["rows"].items() if name not in CALIBRATION)
