"""How many stages are best, and what do more devices bring, where most of them come and go (HYBRID sec. 4.3 and 4.4)?
See README.md. ``python devices.py [--stages 2 3 4] [--devices 16 48] [--draws 1] [--rate 0.7]`` writes devices.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from figure2 import STEP_S
from plays import HERE, MODEL, Draw, played, write

RATE, UNRELIABLE = 0.7, 0.6
"""Times that an unreliable machine leaves in ``STEP_S``, unless told otherwise: the middle of the paper's range; and their
share."""
EACH = 32
"""Sequences of a step for each device."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--devices", type=int, nargs="*", default=[16, 48])
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--steps", type=float, default=4.0)
    parser.add_argument("--into", default="devices.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = HERE / arguments.into
    rows = json.loads(before.read_text()) if Path(before).exists() else []
    for devices in arguments.devices:
        for stages in arguments.stages:
            for seed in range(arguments.draws):
                draw = Draw(devices, 0, round(UNRELIABLE * devices), (100, 300), (50, 150), seed)
                run = [*MODEL, f"train.batch={EACH * devices}", "train.microbatch=8", f"fleet.stages={stages}"]
                found = played(
                    draw.fleet(),
                    "hub",
                    run,
                    seconds=arguments.steps * STEP_S,
                    leave_per_s=arguments.rate / STEP_S,
                    away_s=STEP_S / 2,
                    seed=seed,
                )
                rows.append({"devices": devices, "stages": stages, "rate": arguments.rate, "seed": seed} | found)
                print(json.dumps(rows[-1]), flush=True)
                write(arguments.into, rows)


if __name__ == "__main__":
    main()
