"""A run that learns nothing is no success: skipped updates are counted, named, and end the run."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from muletrain.cli.show.console import plain_line
from muletrain.compute.scaling import LossScale
from muletrain.events import StepApplied, StepDone, SteppedBack
from muletrain.optim.flat import FlatLayout
from muletrain.runs.view import RunView, SkipsView
from muletrain.runtime.members.row import StageEntry
from muletrain.runtime.step.record import StepRecord
from proofs.play import play
from proofs.scenario import Fault, Scenario
from tests.test_cli import SMALL, TWO
from tests.test_unusable_samples import trained

if TYPE_CHECKING:
    from pathlib import Path

HUGE = ("optimizer.lr=1e30", "optimizer.warmup=0", "train.max_skipped=3")
"""The first update leaves weights that no forward pass survives."""


def done(step: int, grad_norm: float) -> StepDone:
    return StepDone(step, 2.0, grad_norm, 0.5, 8, 1.0, f"{step}")


def applied(step: int, stage: int, tensor: str) -> StepApplied:
    return StepApplied(step, stage, f"{step}", True, 1, 0, 0.0, 0.0, 0.0, 0.0, 0.0, {}, tensor)


def test_the_gradient_norm_of_a_skipped_step_is_no_number() -> None:
    def record(*finite: bool) -> StepRecord:
        stages = (
            StageEntry(stage=stage, round=bytes(32), size=1, content=bytes(32), square_norm=4.0 if f else 0.0, finite=f)
            for stage, f in enumerate(finite)
        )
        return StepRecord(3, bytes(32), tuple(stages))

    assert record(True, True).gradient_norm == pytest.approx(math.sqrt(8))
    assert not record(True, True).skip
    assert math.isnan(record(True, False).gradient_norm)
    assert record(True, False).skip


def test_the_first_tensor_that_is_not_finite_has_a_name() -> None:
    layout = FlatLayout.of({"a.weight": (2, 3), "a.norm": (3,), "b.weight": (4, 1)}, frozen=["b.weight"])
    gradient = torch.zeros(layout.trained)
    assert layout.first_not_finite(gradient) == ""
    gradient[7] = math.inf
    assert layout.first_not_finite(gradient) == "a.norm"
    gradient[2] = math.nan
    assert layout.first_not_finite(gradient) == "a.weight"


def test_the_count_of_skips_is_in_the_state() -> None:
    """So a newcomer that takes a replica's state ends the run at the same step as the others."""
    one, other = LossScale(fp16=False), LossScale(fp16=False)
    assert one.state() == {}, "as before there was a count"
    for step in range(3):
        one.update(step, skipped=True)
    other.load_state(one.state(), 3)
    assert one.skipped == other.skipped == 3
    other.update(3, skipped=False)
    other.load_state({}, 4)
    assert other.skipped == 0


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Fault(1.0, "freeze", ("peer-1b",), 1.5),),
        (Fault(1.6, "kill", ("peer-0b",)), Fault(0.9, "join", ("peer-1j0",))),
    ],
    ids=str,
)
def test_all_peers_end_the_run_at_the_same_step(faults: tuple[Fault, ...]) -> None:
    outcome = play(Scenario(4, (2, 2), 2, 12, 4, 0.01, faults, overrides=HUGE))
    killed = {who for f in faults if f.kind == "kill" for who in f.who}
    assert {end for peer, end in outcome.ends.items() if peer not in killed} == {"finished"}
    last = {e.peer: e.step for e in outcome.of(StepApplied)}
    skipped = sorted({e.step for e in outcome.of(StepApplied, skipped=True)})
    assert skipped == list(range(skipped[0], skipped[0] + 3)), "the third in a row was the last"
    assert {step for peer, step in last.items() if peer not in killed} == {skipped[-1]}
    assert skipped[-1] < 12


def test_skips_are_counted_and_the_first_tensor_is_named() -> None:
    view = RunView()
    for event in (done(1, 1.0), applied(2, 1, "head.weight"), applied(2, 0, "embed.weight"), done(2, math.nan)):
        view.fold(event)
    view.fold(done(3, math.nan))
    assert plain_line(view).count("2 updates skipped") == 1
    why = view.skips.why()
    assert "the last 2 updates (steps 2 to 3) were skipped" in why
    assert "'embed.weight' in stage 0 at step 2, where the loss was 2 and the learning rate 0.5" in why
    assert "optimizer.lr" in why
    assert "train.max_skipped" in why


def test_steps_that_are_taken_again_count_once() -> None:
    view = SkipsView()
    for event in (done(1, math.nan), done(2, math.nan), SteppedBack(2, 1, [0], [], "")):
        view.fold(event)
    assert len(view) == 1, "before step 2 is done again, too"
    view.fold(done(2, 1.0))
    assert len(view) == 1


def test_a_run_that_learns_nothing_ends_with_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "muletrain", "run", *SMALL, *TWO, "--json"]
    for setting in ("train.steps=40", "optimizer.lr=1e6", "optimizer.warmup=0", "train.max_skipped=4"):
        command += ["--set", setting]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert re.search(r"the last 4 updates \(steps 2 to 5\) were skipped", ended.stderr), ended.stderr
    assert re.search(r"the first was that of '\S+' in stage 0 at step 2", ended.stderr)
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [e["grad_norm"] for e in events if e["kind"] == "step_done"][1:] == ["NaN"] * 4
    finished = [(e["skipped"], e["reason"]) for e in events if e["kind"] == "run_finished"]
    assert finished == [(4, "4 updates in a row skipped")] * 2
    assert [e["step"] for e in events if e["kind"] == "checkpoint_written"] == [5]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_shorter_than_max_skipped_whose_every_update_is_skipped_is_no_success(tmp_path: Path, steps: int) -> None:
    model, data = "model.factory=tests.own_models:overflowing", "data.factory=tests.own_models:images_with_numbers"
    code, events, said = trained(tmp_path, model, data, f"train.steps={steps}")
    assert code == 2, said
    assert [e["step"] for e in events if e["kind"] == "step_done"] == list(range(1, steps + 1))
    (finished,) = [e for e in events if e["kind"] == "run_finished"]
    assert finished["skipped"] == steps
    assert re.search(rf"the last {steps} updates? \(steps 1 to {steps}\) w\w+ skipped", said), said
    assert re.search(r"the first was that of '\S+' in stage 0 at step 1", said)
    assert "optimizer.lr" in said
