"""HYBRID's table 2: minutes a batch of ALBERT-xxlarge on 16 devices in four cases. See README.md. ``python table2.py
[--cases 3 4] [--draws 2] [--strategies hub swarm pipeline]`` adds to table2.json."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from plays import EVEN, LAST, MODEL, STRATEGIES, Draw, compared, cut, keep

CASES = {
    1: Draw(16, 0, 0, (100_000, 100_000), (0.05, 0.05)),
    2: Draw(16, 0, 0, (8000, 24000), (10, 100)),
    3: Draw(8, 8, 8, (50, 300), (100, 150)),
    4: Draw(8, 8, 8, (50, 300), (100, 150)),
}
"""One data centre; several; slower devices at home; these come and go. In cases 1 and 2 a hub has no clients."""
DROP = 0.9
STEP_S = 400.0
"""Time in which an unreliable machine leaves ``DROP`` times in case 4: about a step of case 3."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, nargs="*", default=[3, 4, 1, 2])
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--strategies", nargs="*", default=[*STRATEGIES])
    parser.add_argument("--steps", type=float, default=5.0)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--cut", choices=(LAST, EVEN), default=LAST, help="of hub and swarm; 1F1B has its plan's")
    arguments = parser.parse_args()
    run = [*MODEL, f"train.microbatch={arguments.microbatch}", *cut(arguments.cut, 4)]
    for case in arguments.cases:
        rate = DROP if case == 4 else 0.0
        for seed in range(arguments.draws):
            draw = replace(CASES[case], seed=seed)
            for row in compared(draw, run, rate, STEP_S, arguments.steps, tuple(arguments.strategies)):
                keep("table2.json", {"cut": arguments.cut, "case": case} | row, "cut", "case")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
