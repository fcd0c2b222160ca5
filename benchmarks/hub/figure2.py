"""HYBRID's figure 2: time of a batch on 6 V100 and 10 RTX 2080, of which a share is unreliable, by how often these
disconnect, on fleets drawn at random. See README.md. ``python figure2.py [--shares 0.3 0.6] [--rates 0.1 0.5 0.9]
[--draws 3] [--strategies hub swarm pipeline dedloc]`` adds to figure2.json."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from plays import DEDLOC, EVEN, LAST, MODEL, STRATEGIES, Draw, compared, cut, keep

STEP_S = 400.0
"""Time in which an unreliable machine leaves ``rate`` times: about a step without faults."""
DEVICES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.6, 0.3])
    parser.add_argument("--rates", type=float, nargs="*", default=[0.9, 0.5, 0.1])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="draw to begin with")
    parser.add_argument("--strategies", nargs="*", default=[*STRATEGIES, DEDLOC])
    parser.add_argument("--steps", type=float, default=5.0)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--cut", choices=(LAST, EVEN), default=LAST, help="of hub and swarm; 1F1B has its plan's")
    arguments = parser.parse_args()
    run = [*MODEL, f"train.microbatch={arguments.microbatch}", *cut(arguments.cut, arguments.stages)]
    for share in arguments.shares:
        for rate in arguments.rates:
            for seed in range(arguments.first, arguments.draws):
                draw = Draw(6, 10, round(share * DEVICES), (100, 300), (50, 150), seed)
                for row in compared(draw, run, rate, STEP_S, arguments.steps, tuple(arguments.strategies)):
                    keep("figure2.json", {"cut": arguments.cut, "share": share} | row, "cut", "share", "rate")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
