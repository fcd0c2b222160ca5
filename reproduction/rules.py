"""Rules that move peers between stages, side by side."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from typing import TYPE_CHECKING

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.tables import new_table
from muletrain.sim.fleet.trace import TRACE_A, read_trace
from reproduction.churn import Throughput, courses

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from reproduction.churn import Rule


def compare_rules(
    trace: Path | None,
    rules: Sequence[Rule],
    *,
    peers: int,
    stages: int,
    period_s: float,
    downtime_s: float,
    runs: int,
    seed: int,
    json: bool,
) -> None:
    """Play the trace (None: SWARM's) under each rule and print the shares. Raises ConfigError for a bad trace."""
    changes = read_trace(trace or TRACE_A)
    console, results = make_console(), {}
    with doing("simulating") as tell:
        for done, rule in enumerate(rules):
            tell(done / len(rules), f"simulating {rule}")
            played = courses(
                changes,
                peers=peers,
                stages=stages,
                rule=rule,
                period_s=period_s,
                downtime_s=downtime_s,
                runs=runs,
                seed=seed,
            )
            results[rule] = Throughput.mean(played)
    if json:
        for name, result in results.items():
            print(jsonlib.dumps({"policy": name, **dataclasses.asdict(result)}))
        return
    title = f"share of the optimum ({peers} peers, {stages} stages, {runs} runs)"
    table = new_table(title, ["policy"], ["32 hours", "first hour", "last hour", "moves per hour"])
    for name, r in results.items():
        shares = (f"{share:.1f} %" for share in (r.overall, r.first_hour, r.last_hour))
        table.add_row(name, *shares, f"{r.moves_per_hour:.1f}")
    console.print(table)
