"""HYBRID's figure 2: time of a batch on 6 V100 and 10 RTX 2080, of which a share is unreliable, by how often these
disconnect. See README.md. ``python figure2.py [--shares 0.3 0.6] [--rates 0.1 0.5 0.9]`` writes figure2.json."""

from __future__ import annotations

import argparse

from plays import MODEL, Draw, compared, write

STEP_S = 400.0
"""Time in which an unreliable machine leaves ``rate`` times: about a step without faults."""
DEVICES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.6, 0.3])
    parser.add_argument("--rates", type=float, nargs="*", default=[0.9, 0.5, 0.1])
    parser.add_argument("--steps", type=float, default=3.2)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--microbatch", type=int, default=8)
    arguments = parser.parse_args()
    rows = []
    for share in arguments.shares:
        for rate in arguments.rates:
            draw = Draw(6, 10, round(share * DEVICES), (100, 300), (50, 150))
            run = [*MODEL, f"train.microbatch={arguments.microbatch}", f"fleet.stages={arguments.stages}"]
            rows.append({"share": share, "played": compared(draw, run, rate, STEP_S, arguments.steps)})
            write("figure2.json", rows)


if __name__ == "__main__":
    main()
