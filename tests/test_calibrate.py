"""``simulate calibrate``: constants that events were made with come back from them, and what cannot be used is
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest

from muletrain.cli.actions.fit_costs import calibrate
from muletrain.cli.actions.opening import save_config
from muletrain.cli.actions.simulate_fleet import what_if
from muletrain.config.costs import Costs, DeviceSpeed, explained, load_costs
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.errors import MuletrainError
from muletrain.events import Event, EventLog, PeerJoined, StepApplied, StepDone
from muletrain.model.spec import ModelSpec
from muletrain.planning.cost import service_s
from muletrain.runtime.core.plan import Plan
from muletrain.sim.fleet.calibration import calibrated, fit, observe
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.protocol import Actors
from muletrain.sim.setting import run_cost, setting

TINY = (
    "model.width=64",
    "model.heads=2",
    "model.layers=4",
    "model.context=32",
    "model.vocab=512",
    "train.microbatch=1",
    "train.batch=32",
    "checkpoint.every=0",
    "fleet.rebalance=off",
    "fleet.stages=2",
)
FLEET = (
    '[[machines]]\nname = "a"\ncount = 3\n[[machines]]\nname = "b"\nspeed = 0.7\n'
    "[pacing]\nforward_ms = 100\nbackward_ms = 200\n[defaults]\nlocal_rtt_ms = 10\n"
)


class Recorded(Actors):
    """The simulator's peers, whose events go into a run folder as those of processes do."""

    folder: Path

    @cached_property
    def plan(self) -> Plan:
        return replace(super().plan, trace=True)

    def note(self, name: str, event: Event) -> None:
        super().note(name, event)
        write(self.folder, self.process(name), [event], now=self.clock.now())

    def process(self, name: str) -> str:
        """Named as the profile numbers them: kind by kind."""
        return f"peer-{sorted(self._kind_of, key=self._kind_of.__getitem__).index(name)}"


def write(folder: Path, peer: str, events: list[Event], now: float = 0.0) -> None:
    with EventLog(folder / f"{peer}.jsonl", peer, now=lambda: now) as log:
        for event in events:
            log.emit(event)


def joined(name: str, stage: int, chip: str = "cpu") -> PeerJoined:
    return PeerJoined(
        peer_id=name,
        name=name,
        stage=stage,
        device="cpu",
        precision="fp32",
        trainer=False,
        params=1000,
        threads=1,
        chip=chip,
    )


def run_folder(folder: Path, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    config = load_config(None, [*TINY, *overrides])
    save_config(folder, config)
    return config


def played(folder: Path, costs: Costs, seconds: float = 60.0) -> None:
    """A virtual run in which things take what ``costs`` says."""
    folder.mkdir()
    (folder / "fleet.toml").write_text(FLEET)
    config = run_folder(folder, f"fleet.profile={folder / 'fleet.toml'}")
    scene = calibrated(setting(load_fleet(folder / "fleet.toml"), config, ModelSpec.from_config(config.model)), costs)
    actors = Recorded(scene, config, Weather(), seconds, trainers=2, seed=0)
    actors.folder = folder
    for member in actors.genesis.members:
        process = actors.process(member.name)
        write(folder, process, [joined(process, member.stage)])
    actors.play()


def test_constants_come_back_from_the_events_of_a_run_that_was_made_with_them(tmp_path: Path) -> None:
    made = Costs(call_ms=7.0, hop_ms=12.0, ending_ms=150.0)
    played(tmp_path / "run", made)
    sample = observe(tmp_path / "run")
    found = fit([sample])
    assert found.costs.call_ms == pytest.approx(made.call_ms, abs=0.01)
    assert found.costs.hop_ms == pytest.approx(made.hop_ms, abs=0.5)
    assert found.costs.ending_ms == pytest.approx(made.ending_ms, abs=15)
    assert min(found.counts.values()) > 5
    assert sample.predicted(found.costs) == pytest.approx(sample.throughput, rel=0.05)
    assert sample.predicted(Costs()) > 1.05 * sample.throughput


def test_devices_come_back_with_the_speed_that_they_had(tmp_path: Path) -> None:
    """Stages 1 and 2 of other sizes; what was done twice says nothing."""
    config = run_folder(tmp_path)
    spec = ModelSpec.from_config(config.model)
    cost = run_cost(config, spec, spec.cut(2))
    for stage, chip, flops in ((0, "cpu", 2e9), (1, "NVIDIA T4", 5e12)):
        busy_s = 16 * sum(service_s(cost.stages[stage], flops, recompute=False))
        steps = [applied(step, stage, busy_s, recomputed=step == 3) for step in range(1, 7)]
        write(tmp_path, f"peer-{stage}", [joined(f"peer-{stage}", stage, chip), *steps])
    write(tmp_path, "peer-0", [done(step) for step in range(1, 7)])
    found = fit([observe(tmp_path)])
    assert {d.device: d.tflops for d in found.costs.devices} == pytest.approx({"cpu": 0.002, "NVIDIA T4": 5.0})
    assert found.counts == {"call_ms": 0, "hop_ms": 0, "ending_ms": 10, "cpu": 4, "NVIDIA T4": 4}
    assert found.costs.ending_ms == pytest.approx(300.0)  # averaging and applying: there are no traces


def applied(step: int, stage: int, busy_s: float, *, recomputed: bool) -> StepApplied:
    return StepApplied(
        step=step,
        stage=stage,
        lineage="",
        skipped=False,
        microbatches=16,
        recomputed=8 * recomputed,
        forward_s=busy_s / 3 * (1 + recomputed),
        backward_s=busy_s * 2 / 3,
        averaging_s=0.2,
        apply_s=0.1,
        wait_s=0.0,
        sent={},
    )


def done(step: int) -> StepDone:
    return StepDone(step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, duration_s=2.0, lineage="")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    costs = Costs(runs=("x",), call_ms=50.0, stage_params=1000, devices=(DeviceSpeed(device="Tesla T4", tflops=2.0),))
    (tmp_path / "costs.toml").write_text(explained(costs))
    assert load_costs(tmp_path / "costs.toml") == costs


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        (Costs(call_ms=30.0), FLEET),
        (Costs(hop_ms=100.0), FLEET),
        (Costs(ending_ms=400.0), FLEET),
        (
            Costs(devices=(DeviceSpeed(device="Tesla T4", tflops=2.0),)),
            '[[machines]]\nname = "spot"\ncount = 2\ndevice = "NVIDIA T4"\n',
        ),
    ],
)
def test_each_of_them_takes_time(tmp_path: Path, capsys: pytest.CaptureFixture[str], costs: Costs, text: str) -> None:
    (tmp_path / "costs.toml").write_text(explained(costs))
    (tmp_path / "fleet.toml").write_text(text)
    speeds = []
    for file in (None, tmp_path / "costs.toml"):
        what_if(tmp_path / "fleet.toml", None, None, TINY, hours=0.1, seed=0, plot=(), json=True, costs=file)
        speeds.append(json.loads(capsys.readouterr().out)["throughput"])
    assert speeds[1] < 0.95 * speeds[0]


def test_the_command_writes_costs_and_says_how_far_off_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(tmp_path / "run", Costs(ending_ms=100.0), seconds=45.0)
    calibrate([tmp_path / "run"], tmp_path / "costs.toml", json=False)
    assert "not measured" not in (out := capsys.readouterr().out)
    assert "predicted" in out
    assert load_costs(tmp_path / "costs.toml").ending_ms == pytest.approx(100.0, abs=15)


@pytest.mark.parametrize(
    ("steps", "message"), [(None, "not a run folder"), (0, "0 steps in its events"), (2, "--resume")]
)
def test_a_folder_without_a_run_or_with_too_little_of_one_is_refused(
    tmp_path: Path, steps: int | None, message: str
) -> None:
    if steps is not None:
        run_folder(tmp_path)
        write(tmp_path, "peer-0", [joined("peer-0", 0), *map(done, range(1, steps + 1))])
    with pytest.raises(MuletrainError, match=message):
        calibrate([tmp_path], tmp_path / "costs.toml", json=False)
