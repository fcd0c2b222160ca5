"""What does a transfer cost those who train? See README.md. ``python beside.py``: donors' narrow uplinks, in virtual time."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from muletrain.sim.scenario import Fault, Scenario
from muletrain.sim.world import play
from muletrain.swarm import transfer
from muletrain.swarm.uplink import Uplink

HERE = Path(__file__).parent
RATES = (30e3, 40e3, 60e3, 80e3, 100e3)
"""Bytes/s that each donor's links carry. The state are 110 kB, a gradient 9 kB as it travels: what counts are the ratios."""
NEWCOMER, COMES_S = "peer-0j0", 4.0
SETTINGS = ("wire.gradients=int8", "optimizer.eps=0.1", "model.vocab=300", "model.dropout=0.0")


def measure(rate: float) -> dict[str, Any]:
    """Two donors and a peer of the next stage train, a newcomer takes the donors' state."""
    donors = (("peer-0a", rate), ("peer-0b", rate))
    joins = (Fault(COMES_S, "join", (NEWCOMER,)),)
    outcome = play(Scenario(1, (2, 1), 1, 18, 4, 0.01, joins, overrides=SETTINGS, narrow=donors, tolerance=5e-3))
    assert outcome.violations == []
    ends = [t for t, text in outcome.timeline if text.startswith("peer-1a step_applied")]
    came = next(t for t, text in outcome.timeline if text.startswith(f"{NEWCOMER} step_applied"))
    steps = [(a, b - a) for a, b in pairwise(ends)]
    before = mean(s for begin, s in steps if begin + s < COMES_S)
    meanwhile = mean(s for begin, s in steps if begin + s > COMES_S and begin < came)
    return {
        "rate": rate,
        "before_s": before,
        "meanwhile_s": meanwhile,
        "share": before / meanwhile,
        "transfer_s": came - COMES_S,
    }


def main() -> None:
    torch.set_num_threads(1)
    transfer.BLOCK = 4096
    results = []
    gaps = Uplink._training
    for name, training in (("in the gaps", gaps), ("as it comes", lambda self: False)):
        Uplink._training = training  # type: ignore[method-assign]
        results += [{"state": name, **measure(rate)} for rate in RATES]
    table = Table("state goes", "uplink [kB/s]", "step before [s]", "meanwhile [s]", "throughput kept", "transfer [s]")
    for r in results:
        numbers = (
            f"{r['rate'] / 1e3:.0f}",
            *(f"{r[k]:.2f}" for k in ("before_s", "meanwhile_s", "share", "transfer_s")),
        )
        table.add_row(r["state"], *numbers)
    Console().print(table)
    (HERE / "beside.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
