"""A user's own module, made by a factory: cut and trained as a loop trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch

from muletrain.compute.arithmetic import StageArithmetic, StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.config.load import load_config
from muletrain.config.schema import OptimizerConfig
from muletrain.config.trusted import imported
from muletrain.data.samples import HeldoutSamples, SampleData, SampleSource
from muletrain.errors import ConfigError, DataError
from muletrain.events import StepDone, Validated
from muletrain.model.chain import TensorType
from muletrain.model.dropout import Masks
from muletrain.model.generate import generate_ids
from muletrain.model.make import make_model, make_stage, model_from_json, tied_between
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.factory import Writes, first_weights
from muletrain.model.traced.making import made
from muletrain.runs.assemble import RunFacts, resolve_start
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.result import quality
from proofs.play import play
from proofs.scenario import Fault, Scenario
from tests import own_models
from tests.fleet_run import checkpoint_weights, run_fleet, run_losing_a_replica
from tests.test_traced_fleet import check_equal
from tests.traced_models import HashedDropout, train_by_loop, write_text

KINDS = {
    "regression": ("regression", "images_with_numbers", 3),
    "frozen": ("partly_frozen", "images_with_numbers", 3),
    "vit": ("vit", "images_with_classes", own_models.CLASSES),
}
EXACT = [
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "compute.precision=fp32",
    "train.batch=8",
    "train.microbatch=2",
    "optimizer.warmup=2",
    "optimizer.clip=0.5",
    # a bias of keys changes no attention: its gradient is rounding error, which Adam would turn into whole steps
    "optimizer.eps=1e-5",
    "fleet.stages=2",
    "checkpoint.every=0",
]


def named(model: str, data: str | None = None, *settings: str) -> RunFacts:
    """The facts of a run with factories of ``own_models``."""
    own = [f"model.factory=tests.own_models:{model}"]
    own += [] if data is None else [f"data.factory=tests.own_models:{data}"]
    return RunFacts.of(resolve_start(load_config(None, [*EXACT, *own, *settings])))


def of(kind: str, *settings: str) -> RunFacts:
    model, data, vocab = KINDS[kind]
    return named(model, data, f"model.vocab={vocab}", *settings)


def loop_model(facts: RunFacts) -> Any:
    """The module as a plain loop has it."""
    with torch.random.fork_rng():
        torch.manual_seed(facts.config.train.seed)
        make = imported("model.factory", facts.config.model.factory or "")
        return make(**facts.config.model.arguments)


# The chain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["regression", "frozen", "vit", "words"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_compute_the_modules_loss(kind: str, stages: int) -> None:
    """Loss and gradients, with dropout, at sizes of microbatches that were not traced."""
    facts = named("words", None, "model.vocab=300", "model.context=16") if kind == "words" else of(kind)
    spec, model, dropout = facts.spec, loop_model(facts), HashedDropout()
    cut, weights = (
        spec.cut(stages),
        first_weights(json.loads((spec.to_json() and facts.config.model.architecture) or ""), 0),
    )
    made = [make_stage(spec, s, cut) for s in range(stages)]
    for stage in made:
        stage.bind({name: weights[name] for name in stage.shapes()})
    for size in (1, 2, 5):
        if kind == "words":
            inputs, targets = torch.randint(0, 300, (2, size, 7))
        else:
            data = facts.data()
            assert isinstance(data, SampleData)
            inputs, targets = map(torch.from_numpy, data.batch(data.train, np.arange(size), spec.vocab))
        masks = Masks(0, 3, size)
        x = inputs
        for stage in made[:-1]:
            x = stage(x, masks)
            assert x.shape == (size, inputs.shape[1] if kind == "words" else 1, spec.width)
        ours = made[-1].loss(x, targets, masks)
        dropout.begin(0, 3, size)
        with dropout.patched():
            theirs = model(inputs, targets)
        assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-6)
        own = {name: p for stage in made for name, p in stage.named_parameters()}
        wanted = dict(model.named_parameters())
        assert {name: p.requires_grad for name, p in own.items()} == {n: p.requires_grad for n, p in wanted.items()}
        trained = {name: p for name, p in own.items() if p.requires_grad}
        assert (len(trained) < len(own)) == (kind == "frozen")
        found = torch.autograd.grad(ours, list(trained.values()))
        theirs.backward()
        for name, a in zip(trained, found, strict=True):
            b, wanted[name].grad = wanted[name].grad, None
            assert b is not None
            assert float((a - b).norm()) <= 1e-5 * float(b.norm()) + 1e-7, name


def test_a_chain_of_a_factory_states_what_it_takes_and_costs() -> None:
    spec = of("vit").spec
    assert (str(spec.inputs), str(spec.targets), spec.context, spec.layers) == ("float32[3, 8, 8]", "int64[]", 1, 3)
    assert spec.params == sum(p.numel() for p in own_models.vit().parameters())
    assert model_from_json(spec.to_json()) == spec
    dense = 5 * 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert spec.flops_of(1) == pytest.approx(dense + 2 * 2 * 5 * 5 * 32), "five tokens a sample"
    regression = of("regression").spec
    assert regression.flops_of(0) == 2 * 64 * 8 * 8 * 9
    assert regression.width == 3 * 8 * 64, "two values go from block to block; before the head, the last sum is open"


@pytest.mark.parametrize("window", [9, 16])
def test_a_mask_that_is_stored_is_looked_at_whole(window: int) -> None:
    """The code of the module has no number that tells what the buffer holds, so planning looks at the whole buffer."""
    facts = named("windowed", None, "model.vocab=300", "model.context=16", f"model.arguments={{window = {window}}}")
    assert isinstance(facts.spec, TracedModel)
    tables = made(facts.spec, "float32").tables
    assert tables.chain.masks
    assert tables.causal(16) == (tables.chain.masks if window == 16 else set())


def test_first_weights_are_the_factorys_own() -> None:
    facts = of("regression", "train.seed=7")
    wanted = dict(loop_model(facts).named_parameters())
    found = first_weights(json.loads(facts.config.model.architecture or ""), 7)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], p) for name, p in wanted.items())


def test_a_buffer_with_another_value_makes_another_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(**arguments: Any) -> torch.nn.Module:
        model = own_models.Regression(8, 4, 0.1)
        model.mean += 0.01
        return model

    before = of("regression").config.model
    monkeypatch.setattr(own_models, "shifted", shifted, raising=False)
    after = named("shifted", "images_with_numbers", "model.vocab=3").config.model
    assert before.chain != after.chain
    theirs = before.model_copy(update={"architecture": after.architecture})
    with pytest.raises(ConfigError, match=rf"blocks are {before.chain and before.chain[:16]} .*this machine makes"):
        make_model(theirs)


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # virtual worlds give the same numbers below, and the docs' example is a fleet of processes
@pytest.mark.parametrize("kind", ["regression", "frozen", "vit"])
def test_a_fleet_that_loses_a_replica_trains_it_as_a_loop_does(tmp_path: Path, kind: str) -> None:
    """2 stages x 2 peers, fp32, 20 steps; then 'eval' and 'export'."""
    facts = of(kind, "train.steps=20", "train.validate_every=5")
    model, source = loop_model(facts), facts.source(facts.data())
    _, heldout = imported("data.factory", facts.config.data.factory or "")()
    held = [torch.stack(list(x)) for x in zip(*(heldout[k] for k in range(len(heldout))), strict=True)]

    def measured(model: Any) -> float:
        with torch.no_grad():
            loss = float(model.eval()(*held))
        model.train()
        return loss

    losses, wanted = list[float](), {0: measured(model)}
    for loss in train_by_loop(model, facts, source, lambda m, inputs, targets: m(inputs, targets)):
        losses.append(loss)
        wanted[len(losses)] = measured(model)
    events = run_losing_a_replica(facts.config, tmp_path / "run")
    check_equal(model, checkpoint_weights(tmp_path / "run"))
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    checkpoint = Checkpoint.open(tmp_path / "run")
    state = safetensors.torch.load_file(checkpoint.export_module(tmp_path / "out"))
    fresh = loop_model(facts)
    fresh.load_state_dict(state)
    found = quality(checkpoint, checkpoint.computed(), checkpoint.corpus())
    assert found.loss == pytest.approx(measured(fresh), rel=1e-5)
    during = {e.step: e.loss for e in events if isinstance(e, Validated)}
    assert during == pytest.approx({step: wanted[step] for step in (0, 5, 10, 15)}, rel=1e-4)
    with pytest.raises(ConfigError, match=r"takes float32.3, 8, 8., not text, so it writes none"):
        checkpoint.writer()


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
def test_a_frozen_parameter_stays_as_it_is(rule: Literal["adamw", "lamb"]) -> None:
    facts = of("frozen")
    spec, model = facts.spec, loop_model(facts)
    before = first_weights(json.loads(facts.config.model.architecture or ""), facts.config.train.seed)
    optimizer = OptimizerConfig(name=rule, weight_decay=0.1, lr=0.01, warmup=0)
    setup = StageSetup(optimizer, 10, 0, 4)
    stage = StageArithmetic(0, [make_stage(spec, None, spec.cut(1))], setup, before.__getitem__)
    trained = stage.layout.trained
    assert trained == sum(p.numel() for p in model.parameters() if p.requires_grad), "nothing else is averaged"
    for step in range(2):
        mb = Microbatch(step, 0)
        _, gradients, _ = stage.loss_backward(mb, torch.rand(4, 3, 8, 8), torch.rand(4, 2), accumulate=True)
        stage.accumulate(gradients, step)
        assert len(stage.accumulator(step)) == trained
        stage.apply(stage.accumulator(step).clone(), Update(step, 1.0, skip=False))
    state = stage.state()
    moments = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.removeprefix("moment1/") for name in state if name.startswith("moment1/")} == moments
    for name, parameter in model.named_parameters():
        assert torch.equal(state[f"model/{name}"], before[name]) != parameter.requires_grad, name


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_is_not_tied(frozen: bool) -> None:
    """Both copies stay as they are, and have no gradient to add."""
    facts = named(
        "tied_words", None, "model.vocab=300", "model.context=16", f"model.arguments={{frozen={str(frozen).lower()}}}"
    )
    cut, size = facts.spec.cut(2), 300 * 16
    tied = tied_between(facts.spec, cut)
    assert (tied is None) == frozen
    layouts = [make_stage(facts.spec, stage, cut).layout() for stage in range(2)]
    assert [layout.size - layout.trained for layout in layouts] == [size * frozen] * 2
    for stage, layout in enumerate(layouts):  # as plans count them
        assert facts.spec.trained_params(cut, stage) == layout.trained
        assert facts.spec.shared_params(cut, stage) == size * (not frozen)


WORLDS: dict[str, dict[str, Any]] = {
    "killed and joined": {
        "faults": (
            Fault(0.5, "kill", ("peer-1b",)),
            Fault(0.7, "join", ("peer-1j0",)),
            Fault(0.8, "kill", ("peer-0b",)),
        ),
        "steps": 8,
        "given_weights": True,
    },
    "resumed": {"stages": (2, 1), "resume_s": 1.5, "checkpoint_every": 1, "steps": 8, "given_weights": True},
    "stage lost": {
        "stages": (2, 1),
        "faults": (Fault(1.5, "kill", ("peer-1a",)),),
        "checkpoint_every": 1,
        "adopt_after_s": 3.0,
        "steps": 8,
        "given_weights": True,
    },
    "swapped": {"swapped": ("peer-1a",)},
    "frozen, killed and swapped": {"faults": (Fault(0.5, "kill", ("peer-1b",)),), "swapped": ("peer-1a",)},
    "frozen stage, killed and joined": {
        "stages": (2, 2, 1, 2),
        "faults": (
            Fault(0.5, "kill", ("peer-0b",)),
            Fault(0.7, "join", ("peer-0j0",)),
            Fault(0.8, "kill", ("peer-3b",)),
        ),
        "steps": 6,
    },
    "frozen hub": {"stages": (1, 1), "clients": ("client-0a", "client-0b", "client-1a"), "sequences": 3},
    "hub": {"stages": (1, 1), "clients": ("client-0a", "client-0b", "client-1a"), "sequences": 3},
}


@pytest.mark.parametrize(
    "name",
    [name if name == "killed and joined" else pytest.param(name, marks=pytest.mark.slow) for name in WORLDS],
)
def test_virtual_worlds_train_samples_as_a_single_process_does(name: str) -> None:
    """Images and numbers in frames, with every promise checked; clients of a hub compute parts of microbatches."""
    kind = "frozen" if "frozen" in name else "regression"
    own = (f"model.architecture={of(kind).config.model.architecture}", "model.context=1")
    base: dict[str, Any] = {"stages": (2, 2), "sequences": 2, "steps": 4, "faults": (), "overrides": own}
    world = Scenario(seed=5, trainers=2, microbatches=4, delay_s=0.02, **{**base, **WORLDS[name]})
    assert play(world).violations == []


@pytest.mark.slow
def test_a_module_of_text_trains_on_a_corpus(tmp_path: Path) -> None:
    text = write_text(tmp_path / "mine.txt")
    settings = [f"data.path={text}", f"data.cache={tmp_path / 'cache'}", "model.vocab=300", "model.context=16"]
    facts = named("words", None, *settings, "train.steps=6", "train.validate_every=3", "train.validate_tokens=100")
    model = loop_model(facts)
    held = facts.heldout(facts.data())
    assert held is not None
    parts = [[torch.from_numpy(x) for x in held.microbatch(k)[:2]] for k in range(len(held))]
    assert held.targets == 32 * len(parts) > 0, "whole microbatches of two sequences of 16"
    with torch.no_grad():
        before = sum(float(model.eval()(*part)) for part in parts) / len(parts)
    losses = list(train_by_loop(model, facts, facts.source(facts.data()), lambda m, x, y: m(x, y)))
    events = run_fleet(facts.config, tmp_path / "run")
    check_equal(model, checkpoint_weights(tmp_path / "run"))
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    during = {e.step: e.loss for e in events if isinstance(e, Validated)}
    assert during == {0: pytest.approx(before, rel=1e-5), 3: during[3]}


def test_a_module_goes_on_with_a_text_if_it_gives_logits() -> None:
    facts = named("words", None, "model.vocab=300", "model.context=16")
    model, about = loop_model(facts).eval(), json.loads(facts.config.model.architecture or "")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = generate_ids(Writes(facts.spec, about, weights), [3, 4], max_tokens=4, temperature=0, top_k=0, seed=0)
    text = [3, 4]
    for token in found:
        assert token == int(model(torch.tensor([text]))[0, -1].argmax())
        text.append(token)
    assert len(text) == 6
    facts = named("windowed", None, "model.vocab=300", "model.context=16")
    silent = Writes(
        facts.spec, json.loads(facts.config.model.architecture or ""), dict(loop_model(facts).named_parameters())
    )
    with pytest.raises(
        ConfigError, match=r"to write text, .*raises TypeError.*give 'targets' the default None, and return"
    ):
        silent(torch.tensor([[3]]))


# Samples --------------------------------------------------------------------------------------------------------------


def test_samples_are_dealt_out_once_an_epoch_by_seed_step_and_index() -> None:
    data = of("vit").data()
    assert isinstance(data, SampleData)
    sources = [SampleSource(data, seed, 10, 5, vocab=5) for seed in (0, 0, 1)]
    epochs = [[s.microbatch(step, index)[0] for step in range(5) for index in range(2)] for s in sources]
    assert all(np.array_equal(a, b) for a, b in zip(epochs[0], epochs[1], strict=True))
    assert not np.array_equal(epochs[0][0], epochs[2][0])
    seen = {image.tobytes() for batch in epochs[0] for image in batch}
    assert len(seen) == len(data.train) == 50
    again = sources[0].microbatch(5, 0)[0]
    assert not np.array_equal(again, epochs[0][0]), "another order in the next epoch"


def test_whole_microbatches_of_held_out_samples_are_measured() -> None:
    """The module's own loss would count padding."""
    data = of("regression").data()
    assert isinstance(data, SampleData)
    source = HeldoutSamples(data, most=11, samples=4, vocab=3)
    assert (len(source), source.targets) == (2, 8)
    which = [0, 1, 3, 4, 6, 7, 9, 11]
    for index in range(2):
        inputs, targets, counted = source.microbatch(index)
        wanted = data.batch(data.heldout, np.array(which[4 * index : 4 * index + 4]), 3)
        assert counted == 4
        assert np.array_equal(inputs, wanted[0])
        assert np.array_equal(targets, wanted[1])
    with pytest.raises(DataError, match=r"12 held-out samples .* are no microbatch of 13; let .* hold out more"):
        HeldoutSamples(data, most=100, samples=13, vocab=3)


@pytest.mark.parametrize(
    ("text", "shape"), [("float32[3, 8, 8]", (3, 8, 8)), ("int64[]", ()), ("int64[T]", None), ("float32[7]", (7,))]
)
def test_types_of_samples_are_written_and_read(text: str, shape: tuple[int, ...] | None) -> None:
    assert TensorType.parse(text).shape == shape
    assert str(TensorType.parse(text)) == text


@pytest.mark.parametrize("text", ["float32[T]", "float16[3]", "int64[-1]", "int64[0]", "float32[9999999999]", "x", ""])
def test_other_types_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TensorType.parse(text)
