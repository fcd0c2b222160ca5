"""Play a scenario in a virtual world to its end, and judge the result."""

from __future__ import annotations

import math
import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.model import chain
from muletrain.policy import fork_choice, speakers
from muletrain.runtime.checkpoint import checkpointing
from muletrain.runtime.checkpoint.store import Folder
from muletrain.runtime.microbatch import cross_check
from muletrain.runtime.step import gradient_log
from muletrain.sim.loop import Hang, run_virtually
from proofs import reference
from proofs.injection import Injection
from proofs.verdict import POWERLESS, Outcome, judge
from proofs.witness import Witness
from proofs.world import Start, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from proofs.scenario import Scenario

LIMIT_S = 6000.0
"""Virtual seconds after which a run counts as hung, beside its work: several of the protocol's longest waits in a row."""
TIMES = 3
"""Times that a run may take as long as without faults, beside that; by the slowest clock."""
IN_MEMORY = Path("/dev/shm")
"""A folder in memory, on Linux."""
SHORT = {
    (fork_choice, "MEMORY"): 12,
    (gradient_log, "MAX_STEPS"): 6,
    (checkpointing, "REMEMBERED"): 4,
    (cross_check, "REMEMBERED"): 4,
}
"""Limits of memory that only long runs reach, and what a scenario with a short memory has instead: steps, steps,
checkpoints and microbatches."""
PIECES = {(chain, "LOSS_CHUNK"): 3 * 640 * chain.LOSS_BYTES}
"""What a scenario in pieces has instead: the loss of three tokens at once."""
SPOKEN = {(speakers, "DIRECT"): 0}
"""What a scenario with speakers has instead."""


@contextmanager
def _limits(scenario: Scenario) -> Iterator[None]:
    """Set the scenario's limits in this process."""
    given = SHORT if scenario.short else {}
    given = {**given, **(PIECES if "compute.checkpointing=block" in scenario.overrides else {})}
    given |= SPOKEN if scenario.speakers else {}
    before = {key: getattr(*key) for key in given}
    try:
        for (module, name), value in given.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def play(scenario: Scenario) -> Outcome:
    """Run the scenario to its end and check the invariants."""
    outcome = Outcome(scenario)
    history, fp16 = reference.history(scenario), "compute.precision=fp16" in scenario.overrides
    # in fp16 the first gradients overflow, and each stage computes them again
    limit_s = LIMIT_S + TIMES * (scenario.steps + fp16) * scenario.step_s * math.exp(scenario.skew)
    # the world ends when the last machine has woken up
    limit_s += max((f.for_s for f in scenario.faults if f.kind == "freeze"), default=0.0)
    fast = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="mule-fuzz-", dir=fast) as folder,
        _limits(scenario),
    ):
        try:
            states = run_virtually(_run(outcome, Path(folder), history), limit_s, outcome.violations)
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
    if not world.cut_off:
        return states
    written = Folder(folder / "run", keep=1, name="run")
    base = max(written.complete(), key=lambda key: key.step, default=None)
    if base is not None and base.step == scenario.steps:  # nothing to resume: ``cli.actions.opening`` refuses
        outcome.ends |= dict.fromkeys(world.cut_off, POWERLESS)
        return states
    outcome.ends.clear()
    resumed = replace(scenario, faults=(), resume_s=None)
    start = Start(written, base)
    outcome.scenario = resumed
    world = World(resumed, outcome, folder, Witness(resumed, history, outcome.violations.append), start)
    return await world.run(Injection(world).inject)
