"""HYBRID's table 2: minutes a batch of ALBERT-xxlarge on 16 devices in four cases. See README.md. ``python table2.py
[--cases 3 4] [--draws 2]`` writes table2.json."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from plays import MODEL, Draw, compared, means, write

from muletrain.papers.hybrid import PUBLISHED_MIN

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
    parser.add_argument("--steps", type=float, default=5.0)
    parser.add_argument("--microbatch", type=int, default=8)
    arguments = parser.parse_args()
    rows = []
    for case in arguments.cases:
        run = [*MODEL, f"train.microbatch={arguments.microbatch}", "fleet.stages=4"]
        found = []
        for seed in range(arguments.draws):
            found += compared(replace(CASES[case], seed=seed), run, DROP if case == 4 else 0.0, STEP_S, arguments.steps)
        published = {name: PUBLISHED_MIN["xxlarge"][name][case - 1] for name in PUBLISHED_MIN["xxlarge"]}
        rows.append({"case": case, "means": means(found), "played": found, "published_min": published})
        print(json.dumps(rows[-1]["means"]), flush=True)
        write("table2.json", rows)


if __name__ == "__main__":
    main()
