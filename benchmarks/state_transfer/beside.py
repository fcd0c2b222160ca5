"""What does a transfer cost those who train? See README.md. ``python beside.py``: donors' narrow uplinks, in virtual
time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from muletrain.network.base import Channel
from muletrain.runtime.core import blocks as transfer
from muletrain.runtime.core.blocks import Block
from proofs import world
from proofs.play import play
from proofs.scenario import Fault, Scenario
from proofs.verdict import Outcome

HERE = Path(__file__).parent
CASES = [(1e3, rate, 0.15) for rate in (30e6, 40e6, 60e6, 80e6, 100e6)]
CASES += [(4.5e3, 6.25e6, compute_s) for compute_s in (0.15, 6.0)]
"""For how many bytes a byte counts, bytes/s that each donor's links carry, and what a microbatch computes [s]. The
state is 110 kB, a gradient 9 kB: so 110 MB and 9 MB, and at last 500 MB and 41 MB over 50 Mb/s, where averaging takes
most of a step, or a third."""
NEWCOMER, COMES_STEPS = "peer-0j0", 4
SETTINGS = ("wire.gradients=int8", "optimizer.eps=0.1", "model.vocab=300", "model.dropout=0.0")


def measure(weight: float, rate: float, compute_s: float) -> dict[str, Any]:
    """Two donors and a peer of the next stage train, a newcomer takes the donors' state."""
    world.FORWARD_S, world.BACKWARD_S = compute_s / 3, 2 * compute_s / 3
    transfer.BLOCK = int((1 << 20) / weight)
    alone = steps_of(scenario(weight, rate, 8, ()))
    comes_s = alone[COMES_STEPS][0]
    outcome = play(scenario(weight, rate, 40, (Fault(comes_s, "join", (NEWCOMER,)),)))
    assert outcome.violations == []
    last = ended(outcome)[-1][0]
    came = next((t for t, text in outcome.timeline if text.startswith(f"{NEWCOMER} step_applied")), math.inf)
    before = mean(s for _, s in alone[1:])
    meanwhile = mean(s for begin, s in ended(outcome) if begin + s > comes_s and begin < min(came, last))
    return {
        "state_mb": 0.11 * weight,
        "rate": rate,
        "compute_s": compute_s,
        "before_s": before,
        "meanwhile_s": meanwhile,
        "share": before / meanwhile,
        "transfer_s": came - comes_s if came < last else None,
    }


def scenario(weight: float, rate: float, steps: int, faults: tuple[Fault, ...]) -> Scenario:
    donors = (("peer-0a", rate), ("peer-0b", rate))
    return Scenario(
        1,
        (2, 1),
        1,
        steps,
        4,
        0.01,
        faults,
        overrides=SETTINGS,
        narrow=donors,
        weight=weight,
        tolerance=5e-3,
    )


def steps_of(of: Scenario) -> list[tuple[float, float]]:
    outcome = play(of)
    assert outcome.violations == []
    return ended(outcome)


def ended(outcome: Outcome) -> list[tuple[float, float]]:
    """(begin, duration) of each step but the first [s]."""
    ends = [t for t, text in outcome.timeline if text.startswith("peer-1a step_applied")]
    return [(a, b - a) for a, b in pairwise(ends)]


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for name, channel in (("yields", Channel.BULK), ("as activations do", Channel.PIPE)):
        Block.CHANNEL = channel
        results += [{"state": name, **measure(*case)} for case in CASES]
    table = Table(
        "state goes",
        "state [MB]",
        "uplink [MB/s]",
        "compute of a microbatch [s]",
        "step before [s]",
        "meanwhile [s]",
        "throughput kept",
        "transfer [s]",
    )
    for r in results:
        times = (
            "not within 40 steps" if r[k] is None else f"{r[k]:.2f}"
            for k in ("before_s", "meanwhile_s", "share", "transfer_s")
        )
        table.add_row(r["state"], f"{r['state_mb']:.0f}", f"{r['rate'] / 1e6:.2f}", str(r["compute_s"]), *times)
    Console().print(table)
    (HERE / "beside.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
