"""How many stages are best, and what do more devices bring, where most of them come and go (HYBRID sec. 4.3 and 4.4)?
See README.md. ``python devices.py [--stages 2 3 4] [--devices 16 48] [--draws 1] [--rates 0.7]`` adds to devices.json."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from figure2 import STEP_S
from plays import EVEN, LAST, MODEL, Draw, compared, cut, keep

UNRELIABLE = 0.6
"""Share of the devices that come and go."""
EACH = 32
"""Sequences of a step for each device."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--devices", type=int, nargs="*", default=[16, 48])
    parser.add_argument("--first", type=int, default=0, help="draw to begin with")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.7], help="times that each leaves in 400 s")
    parser.add_argument("--steps", type=float, default=6.0)
    parser.add_argument("--cut", choices=(LAST, EVEN), default=LAST, help="of hub and swarm; 1F1B has its plan's")
    arguments = parser.parse_args()
    for devices in arguments.devices:
        for stages in arguments.stages:
            run = [*MODEL, f"train.batch={EACH * devices}", "train.microbatch=8", *cut(arguments.cut, stages)]
            for rate in arguments.rates:
                for seed in range(arguments.first, arguments.draws):
                    draw = Draw(devices, 0, round(UNRELIABLE * devices), (100, 300), (50, 150), seed)
                    for row in compared(draw, run, rate, STEP_S, arguments.steps, ("hub",)):
                        cell = {"cut": arguments.cut, "stages": stages, "devices": devices}
                        keep("devices.json", cell | row, *cell, "rate")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
