"""Traces of peers that come and go: a CSV file of changes over time."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from muletrain.errors import DataError

TRACE_A = Path(__file__).parent / "traces" / "a.csv"
"""A trace fitted to SWARM's table 5."""


@dataclass(frozen=True)
class Change:
    """At ``time_s``, ``peers`` come (> 0) or go (< 0)."""

    time_s: float
    peers: int


def read_trace(path: Path) -> tuple[Change, ...]:
    """Read a CSV file with the columns ``time_s`` [s since the start] and ``change`` [peers], sorted by time. Raises
    DataError with the line."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if rows.fieldnames is None or not {"time_s", "change"} <= set(rows.fieldnames):
                raise DataError(
                    f"{path}: line 1: a churn trace has the columns time_s,change; here are {rows.fieldnames}"
                )
            changes = [_change(row, f"{path}: line {rows.line_num}") for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise DataError(f"{path}: cannot be read as a churn trace: {e}") from None
    return tuple(sorted(changes, key=lambda c: c.time_s))


def _change(row: dict[str, str | None], where: str) -> Change:
    try:
        time_s, peers = float(row["time_s"] or ""), int(row["change"] or "")
    except ValueError:
        raise DataError(
            f"{where}: expected seconds and a whole number of peers, got {row['time_s']!r}, {row['change']!r}"
        ) from None
    if not (math.isfinite(time_s) and time_s >= 0):
        raise DataError(f"{where}: the time is {time_s} s; it counts from the start of the run, 0 or later")
    return Change(time_s, peers)
