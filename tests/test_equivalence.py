"""The headline: a fleet of real processes computes what one process computes, and replicas agree after each step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from muletrain.config.load import load_config
from muletrain.data.microbatch import heldout_batches
from muletrain.data.tokens import TokenCache
from muletrain.events import Event, PeerDown, PeerJoined, StepApplied, StepDone
from muletrain.model.generate import evaluate
from muletrain.model.make import load_model
from muletrain.runs.assemble import RunFacts
from muletrain.runs.fleet import LocalFleet

from .fleet_run import checkpoint_weights, run_fleet
from .reference import train_plainly

EXACT = [
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "compute.precision=fp32",
    "model.width=64",
    "model.heads=2",
    "model.context=32",
    "model.vocab=512",
    "train.steps=20",
    "train.batch=16",
    "train.microbatch=2",
    "optimizer.warmup=5",
    "optimizer.clip=0.5",
]


def facts_of(tmp_path: Path, *overrides: str) -> tuple[RunFacts, TokenCache]:
    facts = RunFacts.of(load_config(None, [*EXACT, f"data.cache={tmp_path / 'cache'}", *overrides]))
    return facts, TokenCache.build(facts.config.data, facts.spec.vocab)


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in a)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
def test_fleet_equals_single_process(tmp_path: Path, optimizer: str) -> None:
    """fp32, no compression, 2 stages x 2 peers, 2 trainers, 20 steps, dropout and clipping on: every tensor within
    1e-5."""
    facts, cache = facts_of(tmp_path, f"optimizer.name={optimizer}")
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))
    events = run_fleet(facts.config, tmp_path / "run")
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    done = [e for e in events if isinstance(e, StepDone)]
    assert [e.loss for e in done] == pytest.approx(losses, abs=1e-4)
    assert max(e.grad_norm for e in done) > 0.5, "clipping acted"
    assert sum(e.trainer for e in events if isinstance(e, PeerJoined)) == 2
    check_every_microbatch_once(events, facts)


@pytest.mark.slow  # a minute; the fuzzer draws delayed updates in 3 of 10 worlds
def test_delayed_updates_equal_a_single_process_that_makes_them_a_step_late(tmp_path: Path) -> None:
    """Also with a replica killed while one step is agreed on and the next is computed."""
    facts, cache = facts_of(tmp_path, "optimizer.delayed=true", "train.steps=12")
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))
    at_once, _ = train_plainly(facts_of(tmp_path, "train.steps=12")[0], facts.source(cache))
    assert relative_difference(at_once, expected) > 1e-2, "the delay is seen in the weights"
    killed = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 5 and not killed:
            os.killpg(fleet.pid("peer-3"), signal.SIGKILL)
            killed.append(event)

    events = run_fleet(facts.config, tmp_path / "whole")
    assert relative_difference(checkpoint_weights(tmp_path / "whole"), expected) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    check_every_microbatch_once(events, facts)
    run_fleet(facts.config, tmp_path / "killed", watch=watch, lost=frozenset({"peer-3"}))
    assert killed
    assert relative_difference(checkpoint_weights(tmp_path / "killed"), expected) <= 1e-5


@pytest.mark.slow
def test_four_trainers_and_a_growing_sequence_under_lamb(tmp_path: Path) -> None:
    """A trainer in every peer; sequence length from 8 to 32 tokens (SWARM app. G); LAMB as the paper has it."""
    growing = ["train.sequence_start=8", "train.sequence_warmup=6", "train.steps=8", "optimizer.warmup=none"]
    facts, cache = facts_of(tmp_path, "optimizer.name=lamb", "fleet.trainers=4", *growing)
    torch.set_num_threads(1)
    expected, losses = train_plainly(facts, facts.source(cache))
    events = run_fleet(facts.config, tmp_path / "run")
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    assert [e.tokens // 16 for e in events if isinstance(e, StepDone)] == [8, 8, 16, 16, 24, 24, 32, 32]
    assert sum(e.trainer for e in events if isinstance(e, PeerJoined)) == 4
    check_every_microbatch_once(events, facts)


def check_every_microbatch_once(events: list[Event], facts: RunFacts) -> None:
    """As the peers counted: M microbatches per step and stage, and one lineage."""
    for step in range(1, facts.config.train.steps + 1):
        applied = [e for e in events if isinstance(e, StepApplied) and e.step == step]
        assert len({e.lineage for e in applied}) == 1
        for stage in range(facts.config.fleet.stages):
            counted = sum(e.microbatches for e in applied if e.stage == stage)
            assert counted == facts.config.microbatches, f"step {step}, stage {stage}"


@pytest.mark.slow  # of these, 'test_survival.py' has one that is not
@pytest.mark.parametrize("victim", ["peer-1", "peer-2", "peer-3"])
def test_a_killed_peer_costs_no_number(tmp_path: Path, victim: str) -> None:
    """SIGKILL of one replica in the middle (whatever its stage, trainer or not): the same weights as if nothing had
    happened."""
    facts, cache = facts_of(tmp_path)
    torch.set_num_threads(1)
    expected, _ = train_plainly(facts, facts.source(cache))
    killed = []

    def watch(fleet: LocalFleet, event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 7 and not killed:
            os.killpg(fleet.pid(victim), signal.SIGKILL)
            killed.append(victim)

    events = run_fleet(facts.config, tmp_path / "run", watch=watch, lost=frozenset({victim}))
    assert killed
    assert any(isinstance(e, PeerDown) for e in events)
    assert relative_difference(checkpoint_weights(tmp_path / "run"), expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_8_bit_activations_cost_no_quality(tmp_path: Path) -> None:
    """The final validation loss with 8-bit activations (and fp16 averaging, as by default) lies within the spread of
    three uncompressed seeds: for the seed in the middle between the two others', for each no further from its own than
    those are from each other."""
    smaller = [
        "model.width=96",
        "model.heads=3",
        "model.context=64",
        "train.steps=120",
        "train.batch=16",
        "train.microbatch=4",
    ]

    def final_loss(name: str, *overrides: str) -> float:
        facts, cache = facts_of(tmp_path, *smaller, *overrides)
        run_fleet(facts.config, tmp_path / name)
        model = load_model(facts.spec, checkpoint_weights(tmp_path / name))
        batches = heldout_batches(cache.heldout, facts.spec.context, 16)
        return evaluate(model, ((torch.from_numpy(a), torch.from_numpy(b)) for a, b in batches))

    exact = [final_loss(f"seed-{seed}", f"train.seed={seed}") for seed in range(3)]
    compressed = [
        final_loss(f"int8-{seed}", f"train.seed={seed}", "wire.activations=int8", "wire.gradients=fp16")
        for seed in range(3)
    ]
    print(f"validation loss, uncompressed {exact}, 8-bit {compressed}")
    lowest, middle, highest = sorted(exact)
    assert lowest <= compressed[exact.index(middle)] <= highest
    assert all(abs(a - b) <= highest - lowest for a, b in zip(compressed, exact, strict=True))
