"""The table of README.md from the JSON beside it."""

from typing import Any

HEAD = "factor|doubted|asked twice|doubted, first 5 steps|asked twice, first 5 steps"


def factors(results: dict[str, Any]) -> list[list[str]]:
    rows = []
    for factor, of in results["all"].items():
        mark = "**" * (factor == "10.0")
        both = [of, results["first 5 steps"][factor]]
        shares = [part[key] for part in both for key in ("doubted", "asked twice")]
        rows.append([f"{mark}{float(factor):.0f}{mark}", *(f"{share:.1%}" if share else "0" for share in shares)])
    return rows
