"""What do strategies hub and swarm do of a step where many machines disconnect? See README.md. ``python run.py [--draws
3]``."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from muletrain.events import StepDone
from muletrain.sim.world.play import play
from muletrain.sim.world.scenario import Fault, Scenario

HERE = Path(__file__).parent
RELIABLE, UNRELIABLE, STEPS, MICROBATCHES, SEQUENCES = 2, 6, 8, 24, 8
DELAY_S = 0.05
RATES = (0.0, 0.3, 0.6, 0.9)


def disconnects(names: list[str], rate: float, step_s: float, rng: random.Random) -> tuple[Fault, ...]:
    """Each of ``names`` is cut off once in a step with probability ``rate``, and is back in the next one."""
    return tuple(
        Fault(step_s * (step + rng.uniform(0.1, 0.9)), "cut", (name,), step_s)
        for step in range(STEPS + 4)
        for name in names
        if rng.random() < rate
    )


def played(strategy: str, rate: float, draw: int, step_s: float) -> float:
    """Returns the seconds of a step, the first left out. Raises RuntimeError if a promise was broken."""
    rng = random.Random(f"{strategy}/{rate}/{draw}")
    letters = "abcdefghijkl"
    if strategy == "hub":
        names = [f"client-{s}{letters[k]}" for s in (0, 1) for k in range(UNRELIABLE)]
        stages, clients = (RELIABLE, RELIABLE), tuple(names)
    else:
        names = [f"peer-{s}{letters[RELIABLE + k]}" for s in (0, 1) for k in range(UNRELIABLE)]
        stages, clients = (RELIABLE + UNRELIABLE,) * 2, ()
    scenario = Scenario(
        draw,
        stages,
        RELIABLE,
        STEPS,
        MICROBATCHES,
        DELAY_S,
        disconnects(names, rate, step_s, rng),
        clients=clients,
        sequences=SEQUENCES,
        capacity=24,
        trace=True,
    )
    outcome = play(scenario)
    if broken := [v for v in outcome.violations if "weights" in v or "norm" in v]:
        raise RuntimeError(f"{strategy}, {rate:.0%}, draw {draw}: {broken}")
    ends = sorted(e.t for e in outcome.events if isinstance(e, StepDone))
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=3)
    draws = parser.parse_args().draws
    step_s = {strategy: played(strategy, 0.0, 0, 1.0) for strategy in ("hub", "swarm")}
    rows = []
    for rate in RATES:
        of = {s: [played(s, rate, draw, step_s[s]) for draw in range(draws)] for s in ("hub", "swarm")}
        medians = {s: statistics.median(found) for s, found in of.items()}
        rows.append({"rate": rate, **medians, "ratio": medians["swarm"] / medians["hub"]})
        print(json.dumps(rows[-1]), flush=True)
    (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    table = Table("disconnections a step", "hub [s]", "swarm [s]", "swarm / hub")
    for row in rows:
        table.add_row(f"{row['rate']:.0%}", f"{row['hub']:.2f}", f"{row['swarm']:.2f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
