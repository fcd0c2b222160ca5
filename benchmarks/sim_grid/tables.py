"""Tables of README.md from the JSON beside it."""

from typing import Any

Row = dict[str, Any]
HEAD = "seed|machines|run|links, queue|bound|rates|plan|protocol [tokens/s]|of the bound|against rates|against plan"
HEAD += "|repeated|sent again|suspected|failed"
BEFORE = "seed|machines|run|links|bound|rates|plan|protocol [tokens/s]|against plan|repeated|sent again|suspected"
TOLD, SPEEDS, FAULTS = (
    ("seed", "machines", "run", "links"),
    ("bound", "rates", "plan"),
    ("repeated", "rerouted", "suspected"),
)


def off(row: Row, against: str) -> float:
    """By how much the protocol misses it."""
    return float(row["protocol"] / row[against] - 1)


def worst_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -max(abs(off(row, "rates")), abs(off(row, "plan"))))


def fleets(rows: list[Row]) -> list[list[Any]]:
    return [
        [
            *(row[name] for name in TOLD),
            *(f"{row[name]:,.0f}" for name in (*SPEEDS, "protocol")),
            f"{row['protocol'] / row['bound']:.0%}",
            *(f"{off(row, name):+.1%}" for name in ("rates", "plan")),
            *(row[name] for name in (*FAULTS, "failed")),
        ]
        for row in worst_first(rows)
    ]


def before(rows: list[Row]) -> list[list[Any]]:
    """Queues had no depth then. A fleet without a step has no speed."""
    ordered = sorted(rows, key=lambda row: (-abs(off(row, "plan")), str(row["seed"])))
    return [
        [
            *(str(row[name]).removesuffix("; 0 s") for name in TOLD),
            *(f"{row[name]:,.0f}" for name in SPEEDS),
            *((f"{row['protocol']:,.0f}", f"{off(row, 'plan'):+.1%}") if row["protocol"] else ("no step ends", "")),
            *(row[name] for name in FAULTS),
        ]
        for row in ordered
    ]


def summary(results: Row) -> str:
    of = results["summary"]
    ended, near = of["came to the end of all steps"], min(of["within 15 % of rates"], of["within 15 % of plan"])
    return (
        f"{ended} of {of['fleets']} come to the end of their steps, **{near} are within 15 %** of rates and of `plan`, "
        f"and {of['peers suspected'] or 'no'} peers are suspected"
    )


def far(rows: list[Row]) -> str:
    """Fleets off by more than 10 % of `plan`."""
    return ", ".join(
        f"{row['seed']} ({off(row, 'plan'):+.0%})" for row in worst_first(rows) if abs(off(row, "plan")) > 0.1
    )


def within(*results: Row) -> str:
    """Fleets within 15 % of rates, of all."""
    near, fleets = (sum(of["summary"][key] for of in results) for key in ("within 15 % of rates", "fleets"))
    return f"{near} of {fleets}"


def farthest(*results: Row) -> float:
    return max(abs(of["summary"]["farthest from rates"]) for of in results)
