"""How often do activations and their gradients cross the network in a hub, and what would a shorter way save? See
README.md. ``python crossings.py [--rates 0.1 0.9] [--draws 2]`` writes crossings.json."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from counting import counted
from figure2 import DEVICES, STEP_S
from plays import MODEL, Draw, played, write

from muletrain.sim.fleet.links import FleetLinks

if TYPE_CHECKING:
    from muletrain.wire.frame import Frame

WAYS = {
    "from server to server": ("forward", "backward"),
    "to clients": ("hub.inputs", "hub.gradient", "hub.both"),
    "from clients": ("hub.output",),
    "weights": ("hub.weights",),
    "accumulators": ("hub.accumulator",),
    "averaging": ("shard", "reduced"),
}
"""Kinds of frames."""


def measured(draw: Draw, rate: float, steps: float, microbatch: int, *, straight: bool) -> dict[str, Any]:
    """One play. ``straight``: what goes from server to server costs no bandwidth, as if clients sent it to the next
    stage in place of their own server."""
    run, weight = [*MODEL, f"train.microbatch={microbatch}", "fleet.stages=3"], FleetLinks.weight

    def lighter(links: FleetLinks, sender: str, frame: Frame) -> int:
        return 64 if frame.kind in WAYS["from server to server"] else weight(links, sender, frame)

    if straight:
        FleetLinks.weight = lighter  # type: ignore[method-assign]
    try:
        with counted() as counts:
            row = played(draw.fleet(), "hub", run, seconds=steps * STEP_S, leave_per_s=rate / STEP_S, away_s=STEP_S / 2)
    finally:
        FleetLinks.weight = weight  # type: ignore[method-assign]
    nbytes = {way: sum(counts.nbytes[kind] for kind in kinds) for way, kinds in WAYS.items()}
    return row | {"gbytes_a_step": {way: round(n / max(row["steps"], 1.0) / 1e9, 2) for way, n in nbytes.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.9, 0.1])
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--steps", type=float, default=5.0)
    parser.add_argument("--microbatch", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in range(arguments.draws):
        for rate in arguments.rates:
            draw = Draw(6, 10, round(arguments.share * DEVICES), (100, 300), (50, 150), seed)
            for straight in (False, True):
                found = measured(draw, rate, arguments.steps, arguments.microbatch, straight=straight)
                rows.append({"seed": seed, "rate": rate, "straight": straight} | found)
                print(json.dumps(rows[-1]), flush=True)
                write("crossings.json", rows)


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
