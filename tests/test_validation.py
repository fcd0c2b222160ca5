"""Held-out loss during training: it is that of the weights, whatever happens to peers, and it changes nothing."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from rich.console import Console

from muletrain.cli.show.console import RunView, final_report, plain_line
from muletrain.cli.show.status import Announced, status_of
from muletrain.data.microbatch import IGNORE, HeldoutSource, heldout_batches
from muletrain.errors import DataError, Malformed
from muletrain.events import Validated, ValidationLeftOut
from muletrain.model.generate import evaluate
from muletrain.model.make import make_stage
from muletrain.model.stage import initial_weight
from muletrain.runs.measure.quality import Quality
from muletrain.runs.tensorboard import TensorBoardSink
from muletrain.runtime.core.times import PATIENCE_S
from muletrain.runtime.microbatch.messages import Forward
from muletrain.runtime.microbatch.stage_server import StageServer
from muletrain.runtime.microbatch.trainer import Trainer
from muletrain.runtime.microbatch.validator import STALL, Validator
from muletrain.wire.codec import encode_ids
from proofs import reference
from proofs.play import play
from proofs.scenario import FORWARD_S, Fault, Scenario, planned
from proofs.verdict import Outcome, readable
from tests.traced_models import write_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)
STEPS, EVERY, TOKENS = 4, 2, 90
MEASURED = ("train.validate_every=2", f"train.validate_tokens={TOKENS}")


def scenario(*faults: Fault, stages: tuple[int, ...] = (2, 2), trainers: int = 2, **more: Any) -> Scenario:
    overrides = (*MEASURED, *more.pop("overrides", ()))
    return Scenario(21, stages, trainers, STEPS, 8, 0.01, faults, trace=True, overrides=overrides, sequences=2, **more)


def whole(outcome: Outcome) -> Outcome:
    assert outcome.violations == [], "\n".join(readable(outcome))
    return outcome


def measured(outcome: Outcome) -> dict[int, float]:
    return {e.step: e.loss for e in outcome.events if isinstance(e, Validated)}


def left_out(outcome: Outcome) -> list[str]:
    return [e.reason for e in outcome.events if isinstance(e, ValidationLeftOut)]


def expected(played: Scenario) -> dict[int, float]:
    """What ``evaluate``, which ``muletrain eval`` calls, finds for the weights of a single process, by updates."""
    facts = reference.facts_of(played)
    shapes = make_stage(facts.spec, None, facts.cut).shapes()
    first = {f"model/{n}": initial_weight(facts.spec, n, s, facts.config.train.seed) for n, s in shapes.items()}
    weights = [first, *reference.history(played)]
    heldout = reference.corpus(facts)[: TOKENS + 1]
    return {step: _loss(facts, weights[step], heldout) for step in range(0, STEPS, EVERY)}


def _loss(facts: reference.Facts, weights: dict[str, torch.Tensor], heldout: np.ndarray) -> float:
    model = make_stage(facts.spec, None, facts.cut)
    model.bind({name.removeprefix("model/"): value for name, value in weights.items()})

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for inputs, targets in heldout_batches(heldout, facts.spec.context, 3):
            yield torch.from_numpy(inputs), torch.from_numpy(targets)

    return evaluate(model, batches())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stages": (1, 1), "trainers": 1},
        {"overrides": planned((2, 2), "gpipe")},
        {"overrides": planned((2, 2), "1f1b")},
        {"swapped": ("peer-0a", "peer-0b", "peer-1a", "peer-1b")},
        {"clients": ("client-0a", "client-1a")},
        {"overrides": ("optimizer.delayed=true",)},
        {"overrides": ("train.sequence_start=2", "train.sequence_warmup=3")},
        {"overrides": ("wire.activations=int8",), "tolerance": 1.0},
    ],
    ids=["swarm", "alone", "gpipe", "1f1b", "swap", "hub", "delayed", "sequence warm-up", "rounded activations"],
)
def test_every_strategy_measures_what_eval_finds_for_the_same_weights(more: dict[str, Any]) -> None:
    """And the weights at the end are those of a single process that measures nothing."""
    asked = scenario(**more)
    outcome = whole(play(asked))
    assert left_out(outcome) == []
    if "tolerance" in more:  # gradients are rounded on the way, so only the first weights are known
        assert measured(outcome)[0] == pytest.approx(expected(asked)[0], rel=1e-6)
    else:
        assert measured(outcome) == pytest.approx(expected(asked), rel=1e-6)


@pytest.mark.parametrize("stages", [(2, 2), (1, 3)])
def test_a_step_waits_for_a_measurement_that_takes_many_times_as_long(stages: tuple[int, ...]) -> None:
    """Other trainers see that it is worked on, and do not take microbatch 0 meanwhile."""
    outcome = whole(play(scenario(stages=stages, overrides=("train.validate_tokens=2400",))))
    assert left_out(outcome) == []
    assert set(measured(outcome)) == {0, 2}
    assert outcome.virtual_s > 300 * FORWARD_S, "many times what the steps themselves take"


@pytest.mark.parametrize("who", ["peer-0a", "peer-0b", "peer-1a", "peer-1b"])
@pytest.mark.parametrize("nth", [1, 5, 20, 40])
def test_a_peer_that_dies_in_the_middle_costs_at_most_the_measurement(who: str, nth: int) -> None:
    """It dies instead of sending its nth request or answer; peer-0a is the one that measures."""
    kind = {"peer-0a": "forward", "peer-0b": "forward", "peer-1a": "done", "peer-1b": "done"}[who]
    asked = scenario(Fault(0.0, "kill", (who,), on=kind, nth=nth))
    outcome, right = whole(play(asked)), expected(asked)
    found = measured(outcome)
    assert found == pytest.approx({step: right[step] for step in found}, rel=1e-6)
    assert len(found) + len(left_out(outcome)) >= len(right) - (who == "peer-0a")
    assert set(found) if who != "peer-0a" else True


def test_a_frozen_stage_delays_the_run_no_longer_than_without_measuring() -> None:
    """All replicas of stage 1 freeze during the first measurement."""
    fault = Fault(0.05, "freeze", ("peer-1a", "peer-1b"), for_s=20.0)
    outcome = whole(play(scenario(fault)))
    plain = whole(play(dataclasses.replace(scenario(fault), overrides=())))
    assert outcome.virtual_s < plain.virtual_s + 30


def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out microbatches get no answer."""

    async def never(self: Validator, k: int, source: HeldoutSource) -> float:
        await self._ctx.clock.sleep(1e6)
        raise AssertionError

    monkeypatch.setattr(Validator, "_through", never)


def test_a_trainer_that_is_stuck_measuring_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatch 0, which waits for the measurement, falls to another trainer, and the measurement is left out."""
    stuck(monkeypatch)
    outcome = whole(play(scenario()))
    assert outcome.virtual_s < 300
    assert len(left_out(outcome)) == 2
    assert "the step ended before it was measured" in left_out(outcome)


def test_the_only_trainer_does_not_measure_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck(monkeypatch)
    outcome = whole(play(scenario(trainers=1)))
    assert 2 * STALL * PATIENCE_S < outcome.virtual_s < 2 * STALL * PATIENCE_S + 120
    assert len(left_out(outcome)) == 2
    assert all("a held-out microbatch" in reason for reason in left_out(outcome))


def test_without_held_out_text_the_run_says_so_and_goes_on() -> None:
    """A newcomer replaces the only trainer, and has no held-out text."""
    asked = scenario(trainers=2)
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "heldout", lambda facts: None)
        outcome = whole(play(asked))
    found = left_out(outcome)
    assert found == ["the trainer that would measure it has no held-out text"] * 2


def test_microbatch_0_of_such_a_step_is_the_measuring_trainers() -> None:
    """Otherwise the step may end before a measurement that nothing waits for."""
    seen: set[tuple[int, str]] = set()
    right = Trainer.see_through

    async def watched(self: Trainer, index: int, accumulate: tuple[int, ...], *, retry: bool = False) -> float:
        if index == 0:
            seen.add((self._step, self._ctx.net.peer_id))
        return await right(self, index, accumulate, retry=retry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "see_through", watched)
        whole(play(scenario(stages=(3, 3), trainers=3)))
    assert {(0, "peer-0a"), (2, "peer-0a")} <= seen
    assert len(seen) == STEPS


def test_held_out_microbatches_are_the_windows_of_eval_and_padding() -> None:
    tokens = np.arange(100, 131, dtype=np.uint16)
    source = HeldoutSource(tokens, context=4, sequences=3, vocab=200)
    assert (len(source), source.targets) == (3, 30)
    inputs, targets, counted = zip(*(source.microbatch(k) for k in range(3)), strict=True)
    assert {i.shape for i in (*inputs, *targets)} == {(3, 4)}
    assert counted == (12, 12, 6)
    plain = [batch for batch in heldout_batches(tokens, 4, 3)]
    assert np.concatenate(targets)[np.concatenate(targets) != 200].tolist() == tokens[1:].tolist()
    for k, (whole_inputs, whole_targets) in enumerate(plain):
        rows = len(whole_inputs)
        assert (inputs[k][:rows] == whole_inputs).all()
        assert ((targets[k][:rows] == whole_targets) | (whole_targets == IGNORE)).all()
    with pytest.raises(DataError, match="nothing to predict"):
        HeldoutSource(tokens[:1], 4, 3, 200)


def test_nothing_is_measured_unless_it_is_asked_for() -> None:
    outcome = whole(play(dataclasses.replace(scenario(), overrides=())))
    assert measured(outcome) == {}
    assert left_out(outcome) == []
    assert math.isfinite(outcome.virtual_s)


def test_who_asks_for_gradients_of_held_out_text_is_refused() -> None:
    """Nothing that measures ends in an accumulator, whatever its sender says."""
    asked = scenario()
    facts = reference.facts_of(asked)
    server = StageServer.__new__(StageServer)
    server.ctx = SimpleNamespace(plan=facts.plan, roster=SimpleNamespace(own=SimpleNamespace(stage=0)))  # type: ignore[assignment]
    ids = encode_ids(torch.zeros(2, 4, dtype=torch.int64))

    def expects(index: int, step: int = 0, accumulate: tuple[int, ...] = (), *, gradient: bool = False) -> None:
        about = {"lineage": bytes(32), "step": step, "index": index, "attempt": 0, "trainer": "x", "stage": 0}
        server.expects("x", Forward(**about, accumulate=accumulate, gradient=gradient), [ids, ids])

    last = 8 + -(-TOKENS // 8) - 1
    expects(8)
    expects(last, step=2)
    with pytest.raises(Malformed, match="asks for a gradient"):
        expects(8, accumulate=(0,))
    with pytest.raises(Malformed, match="asks for a gradient"):
        expects(8, gradient=True)
    for index, step in ((last + 1, 0), (8, 1)):
        with pytest.raises(Malformed, match="a step has 8"):
            expects(index, step)


def cli(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "muletrain.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_that_trains_a_model_further_tells_what_that_brought(tmp_path: Path) -> None:
    """Real processes and a traced Qwen3: the loss during training, 'eval' on a checkpoint of that step, and before and
    after, all of the same text."""
    text = write_text(tmp_path / "mine.txt")
    write_folder(tmp_path / "hf", text, "qwen3")
    settings = {
        **{"model.from": tmp_path / "hf", "data.path": text, "data.cache": tmp_path / "cache", "data.heldout": 0.2},
        **{"model.context": 32, "train.batch": 8, "train.microbatch": 2, "train.steps": 6, "optimizer.lr": 3e-3},
        **{"train.validate_every": 3, "checkpoint.every": 3, "checkpoint.keep": 5, "fleet.peers": 2},
        **{"compute.precision": "fp32"},
    }
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    lines = [json.loads(line) for line in cli("run", "--json", *sets, folder=tmp_path).splitlines()]
    found = {e["step"]: e for e in lines if e["kind"] == "validated"}
    (at_end,) = [e for e in lines if e["kind"] == "evaluated"]
    (run,) = (tmp_path / "runs").iterdir()
    assert found.keys() == {0, 3}
    assert found[0]["tokens"] == at_end["tokens"]
    assert found[0]["loss"] == pytest.approx(at_end["before"], abs=1e-4)
    assert at_end["loss"] < found[3]["loss"] < at_end["before"] - 0.1
    checkpoint = run / "checkpoints" / "step-00000003"
    evaluated = json.loads(cli("eval", str(checkpoint), "--json", folder=tmp_path))
    assert evaluated["loss"] == pytest.approx(found[3]["loss"], abs=1e-4)
    part = json.loads(cli("eval", str(checkpoint), "--tokens", "100", "--json", folder=tmp_path))
    assert part["tokens"] <= 100 < evaluated["tokens"]


def test_the_report_and_the_views_show_held_out_losses() -> None:
    view = RunView()
    for step in range(0, 300, 10):
        view.fold(Validated(step, 6.0 - step / 100, 1.0, 512, t=1.0, peer="a"))
    assert "held-out 3.100" in plain_line(view)
    quality = Quality(
        loss=3.0, unigram=None, bigram=None, tokens=512, heldout=512, counted=0, trained=0, before=math.log(100)
    )
    out = io.StringIO()
    Console(file=out, width=100).print(final_report(view, quality, [], {}))
    rows = [line.split() for line in out.getvalue().splitlines()]
    assert ["0", "6.000", "403.4"] in rows
    assert ["290", "3.100", "22.2"] in rows
    assert sum(len(row) == 3 and row[0].isdigit() for row in rows) == 12
    assert ["before", "training", "4.605", "100.0", "better", "by", "1.605", "nats"] in rows
    assert "held-out loss 3.000 (before training 4.605), perplexity 20.1" in out.getvalue()


def test_status_shows_the_last_held_out_loss() -> None:
    about = {"name": "a", "stage": 0, "stages": 1, "trainer": True, "step": 7, "steps": 9}
    old, new = (
        Announced.read(who, json.dumps({**about, "heldout_loss": loss, "heldout_step": step}).encode())
        for who, loss, step in (("a", 5.5, 2), ("b", 4.25, 4))
    )
    assert old is not None
    assert new is not None
    out = io.StringIO()
    Console(file=out, width=100).print(status_of([old, new], []))
    assert "held-out loss 4.250 at step 4" in out.getvalue()


@pytest.mark.filterwarnings("default")
def test_tensorboard_shows_the_loss_during_training(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (0, 5):
        sink(Validated(step, 4.0 - step / 10, 1.0, 512, t=1.0, peer="a"))
    sink.close()
    scalars = EventAccumulator(str(tmp_path)).Reload()
    assert [(s.step, s.value) for s in scalars.Scalars("validation/loss")] == [(0, 4.0), (5, 3.5)]
