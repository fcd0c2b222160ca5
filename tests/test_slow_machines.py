"""Machines that need minutes for a microbatch: nobody may take them for dead, or have all their work done twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import simulate_fleet
from tests.tiny_fleets import run_of

if TYPE_CHECKING:
    from pathlib import Path

MICROBATCHES, MACHINES = 32, 4


@pytest.mark.parametrize("forward_s", [30, 80])
def test_slowness_neither_ends_a_run_nor_causes_more_work(tmp_path: Path, forward_s: int) -> None:
    text = f'[[machines]]\nname = "a"\ncount = {MACHINES}\nforward_ms = {1000 * forward_s}\nbackward_ms = {2000 * forward_s}\n'
    scene, run = run_of(tmp_path, text, f"train.batch={MICROBATCHES}", "fleet.stages=2")
    of_work_s = 3 * forward_s * 2 * MICROBATCHES / MACHINES
    outcome = simulate_fleet(scene, run, Weather(), hours=2.6 * of_work_s / 3600, seed=0, fidelity="protocol")
    assert not outcome.failure
    assert outcome.steps >= 2
    assert outcome.repeated_microbatches < MICROBATCHES / 2, "of as many at each of two stages"
