"""Fleets of benchmarks/sim_grid: large tensors, several replicas and narrow links, and no fault."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from muletrain.sim.setting import Setting, seated

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "sim_grid"
PACED = '[[machines]]\nname = "a"\ncount = 4\nforward_ms = 200\nbackward_ms = 400\n'
RUN = (
    "model.width=256",
    "model.heads=4",
    "model.layers=4",
    "model.context=512",
    "model.vocab=512",
    "train.microbatch=1",
    "train.batch=64",
    "fleet.stages=2",
)


@pytest.fixture(scope="module", name="run")
def _run() -> ModuleType:
    return _module("run")


@pytest.fixture(scope="module", name="draw")
def _draw(run: ModuleType) -> ModuleType:
    return sys.modules["draw"]  # which ``run`` imports


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"grid_{name}", BENCHMARK / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "seed", [pytest.param(5, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow), 29]
)
def test_a_drawn_fleet_does_what_rates_and_plan_say(run: ModuleType, seed: int) -> None:
    """And nothing twice: ten machines with 2.7 B parameters in four stages; 16 with 1.3 B in six; and seven that have
    all, with delayed updates over 69 ms."""
    row = run.compared(seed)
    told = json.dumps(row)
    assert not row["failed"], told
    assert row["steps"] >= run.LEAST_STEPS, told
    assert not row["suspected"], told
    assert not row["repeated"], told
    assert not row["rerouted"], told
    for name in ("rates", "plan"):
        assert abs(run.off(row, name)) <= run.NEAR, told
    assert row["protocol"] <= row["bound"], told


def test_all_seeds_that_were_committed_can_be_played(draw: ModuleType) -> None:
    """And are where the issue wants them: 4 to 60 machines, 1 to 8 stages, 64 to 1,024 microbatches."""
    scenes = [draw.drawn(seed).setting() for seed in range(40)]
    machines = [sum(kind.count for kind in scene.kinds) for scene, _ in scenes]
    assert (min(machines), max(machines)) == (4, 59)
    assert {len(scene.cut) for scene, _ in scenes} == set(range(1, 9))
    assert {config.model.preset for _, config in scenes} == set(draw.PRESETS)
    assert all(64 <= config.microbatches <= 1024 for _, config in scenes)
    assert {kind.device for scene, _ in scenes for kind in scene.kinds} == {"T4", "A100", "RTX 4090", "CPU"}
    assert not any(scene.left_out for scene, _ in scenes)


def test_the_same_seed_draws_the_same_fleet(draw: ModuleType) -> None:
    assert draw.draw(17) == draw.draw(17)
    assert draw.draw(17) != draw.draw(18)


def _bound_s(draw: ModuleType, fleet: str, *run: str) -> tuple[float, Setting]:
    scene, config = draw.Drawn(fleet, (*RUN, *run)).setting()
    return draw.bound_s(scene, seated(scene), delayed=config.optimizer.delayed), scene


def test_the_bound_counts_flop(draw: ModuleType) -> None:
    """The second stage waits for a forward of 0.2 s, does 32 microbatches of 0.6 s apiece, and the last of them goes
    back in 0.4 s."""
    assert _bound_s(draw, PACED)[0] == pytest.approx(0.2 + 32 * 0.6 + 0.4)
    assert _bound_s(draw, PACED, "train.batch=65")[0] == pytest.approx(0.2 + 33 * 0.6 + 0.4)
    assert _bound_s(draw, PACED, "train.batch=65", "optimizer.delayed=true")[0] == pytest.approx(32.5 * 0.6)


def test_the_bound_counts_bytes(draw: ModuleType) -> None:
    """A stage's two machines send half of the gradient to each other, twice; with delayed updates beside the
    activations."""
    narrow = PACED + "up_mbps = 1\n"
    found_s, scene = _bound_s(draw, narrow)
    cost = scene.cost
    there_s, back_s = (64 * sent[1] / 250e3 for sent in (cost.forward_bytes, cost.backward_bytes))
    averages_s = [stage.averaged_bytes / 125e3 for stage in cost.stages]
    assert found_s == pytest.approx(
        max(there_s + averages_s[0], 0.2 + back_s + max(averages_s[1], 0.4 + averages_s[0]))
    )
    assert _bound_s(draw, narrow, "optimizer.delayed=true")[0] == pytest.approx(
        max(there_s + averages_s[0], back_s + averages_s[1])
    )


def test_pieces_of_work_are_whole(draw: ModuleType) -> None:
    """A fast machine does three in the 3 s in which a slow one does one."""
    assert draw.whole_s(4, [(1, 1.0), (1, 3.0)]) == pytest.approx(3.0)
    assert draw.whole_s(5, [(1, 1.0), (1, 3.0)]) == pytest.approx(4.0)
    assert draw.whole_s(7, [(3, 2.0)]) == pytest.approx(6.0)
