"""Play a scenario in a virtual world to its end, and judge the result."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.runtime.checkpoint.store import Folder
from muletrain.sim.loop import Hang, run_virtually
from muletrain.sim.world import reference
from muletrain.sim.world.injection import Injection
from muletrain.sim.world.short_memory import short_memory
from muletrain.sim.world.verdict import Outcome, judge
from muletrain.sim.world.witness import Witness
from muletrain.sim.world.world import Start, World

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.sim.world.scenario import Scenario

LIMIT_S = 6000.0
"""Virtual seconds after which a run counts as hung: several of the protocol's longest waits in a row."""
IN_MEMORY = Path("/dev/shm")
"""A folder in memory, on Linux."""


def play(scenario: Scenario) -> Outcome:
    """Run the scenario to its end and check the invariants."""
    outcome = Outcome(scenario)
    history = reference.history(scenario)
    fast = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="mule-fuzz-", dir=fast) as folder,
        short_memory(short=scenario.short),
    ):
        try:
            states = run_virtually(_run(outcome, Path(folder), history), LIMIT_S, outcome.violations)
        except Hang as e:
            outcome.violations.append(f"hang: {e}")
            return outcome
    judge(outcome, states, history)
    return outcome


async def _run(outcome: Outcome, folder: Path, history: reference.History) -> dict[str, dict[str, Tensor]]:
    """Play once, or until the power fails and again from the written state."""
    scenario = outcome.scenario
    world = World(scenario, outcome, folder, Witness(scenario, history, outcome.violations.append))
    states = await world.run(Injection(world).inject)
    if scenario.resume_s is None or states:
        return states
    outcome.ends.clear()
    resumed = replace(scenario, faults=(), resume_s=None)
    written = Folder(folder / "run", keep=1, name="run")
    base = max(written.complete(), key=lambda key: key.step, default=None)
    start = Start(written, base)
    outcome.scenario = resumed
    world = World(resumed, outcome, folder, Witness(resumed, history, outcome.violations.append), start)
    return await world.run(Injection(world).inject)
