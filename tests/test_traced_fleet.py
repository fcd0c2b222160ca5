"""A run of real processes that starts from a model of ``transformers``: as a plain loop trains it, and out again."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from muletrain.config.load import load_config
from muletrain.data.tokens import TokenCache
from muletrain.events import StepDone
from muletrain.model.generate import evaluate
from muletrain.model.hf import export_hf
from muletrain.runs.assemble import RunFacts, resolve_start
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.result import quality, write
from tests.fleet_run import checkpoint_weights, run_fleet, run_losing_a_replica
from tests.traced_models import ARCHITECTURES, STRETCHED, train_by_loop, write_folder, write_text

if TYPE_CHECKING:
    from pathlib import Path


SETTINGS = [
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "compute.precision=fp32",
    "model.context=32",
    "train.batch=8",
    "train.microbatch=2",
    "optimizer.warmup=2",
    "optimizer.lr=3e-3",
    "optimizer.clip=0.5",
    # a bias of keys changes no attention: its gradient is rounding error, which Adam would turn into whole steps
    "optimizer.eps=1e-5",
    "fleet.stages=2",
    "checkpoint.every=0",
]


def start(tmp_path: Path, name: str, steps: int, **changes: Any) -> tuple[Any, RunFacts, TokenCache]:
    """A model's folder, and a run that starts from it."""
    text = write_text(tmp_path / "mine.txt")
    model = write_folder(tmp_path / "hf", text, name, **changes)
    paths = [f"model.from={tmp_path / 'hf'}", f"data.path={text}", f"data.cache={tmp_path / 'cache'}"]
    facts = RunFacts.of(resolve_start(load_config(None, [*SETTINGS, *paths, f"train.steps={steps}"])))
    return model, facts, TokenCache.build(facts.config.data, facts.spec.vocab)


def check_equal(model: Any, weights: dict[str, torch.Tensor]) -> None:
    wanted = dict(model.named_parameters())
    assert weights.keys() == wanted.keys()
    for name, found in weights.items():
        theirs = wanted[name].detach()
        assert float((found - theirs).norm()) <= 1e-5 * float(theirs.norm()), name


def test_a_fleet_trains_gpt2_as_a_loop_does_and_gives_it_back(tmp_path: Path) -> None:
    """2 stages x 2 peers, fp32, with the dropout of GPT-2's configuration, attention's included, and its embedding in
    both stages, as the output matrix, too; then 'export', 'generate' and 'eval'."""
    model, facts, cache = start(tmp_path, "gpt2", steps=4, tie_word_embeddings=True)
    assert facts.plan().tied is not None
    assert facts.spec.layers == 3
    losses = list(train_by_loop(model, facts, facts.source(cache)))
    events = run_fleet(facts.config, tmp_path / "run")
    check_equal(model, checkpoint_weights(tmp_path / "run"))
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    check_export(tmp_path, model)
    check_without_the_folder(tmp_path)


def check_without_the_folder(tmp_path: Path) -> None:
    """The folder that a run started from is not needed to write text, nor to measure."""
    before = Checkpoint.open(tmp_path / "run")
    text = write(before, before.computed(), "Mule", max_tokens=8, temperature=0)
    shutil.rmtree(tmp_path / "hf")
    checkpoint = Checkpoint.open(tmp_path / "run")
    assert write(checkpoint, checkpoint.computed(), "Mule", max_tokens=8, temperature=0) == text
    assert checkpoint.stops == {2, 17}, "2 is the tokenizer's; only the generation settings say 17"
    loss, again = (quality(c, c.computed(), c.corpus(), tokens=100).loss for c in (checkpoint, before))
    assert loss == again


def check_export(tmp_path: Path, model: Any) -> None:
    """The same class with the same logits, special tokens, generation settings and declared context as the source."""
    checkpoint = Checkpoint.open(tmp_path / "run")
    source = checkpoint.source(None)
    export_hf(
        checkpoint.weights(),
        checkpoint.spec,
        checkpoint.tokenizer_json,
        tmp_path / "out",
        end_of_text="</s>",
        source=source,
    )
    again, before = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "hf"))
    assert type(again) is type(before)
    tokens = torch.randint(0, 300, (2, 32))  # as long as in training: rotary frequencies may depend on it
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert torch.allclose(again(input_ids=tokens).logits, expected, atol=1e-4)
        assert torch.allclose(checkpoint.model()(tokens), expected, atol=1e-4)
    assert not torch.allclose(before(input_ids=tokens).logits, expected, atol=1e-3), "it was trained"
    assert again.generation_config.to_dict() == before.generation_config.to_dict()
    old, new = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out"))
    ignored = ("torch_dtype", "dtype")
    assert {k: v for k, v in new.items() if k not in ignored} == {k: v for k, v in old.items() if k not in ignored}
    theirs, ours = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "out"))
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours("Mule 7")["input_ids"] == theirs("Mule 7")["input_ids"]
    whole = checkpoint.computed()
    found = quality(checkpoint, whole, checkpoint.corpus(), tokens=500)
    assert found.loss == pytest.approx(evaluate(whole, _heldout(checkpoint)), rel=0.2)
    assert checkpoint.stops == {2, 17}, "where the source's generation settings stop, too"
    assert write(checkpoint, whole, "Mule", max_tokens=8, temperature=0).startswith("Mule")


def _heldout(checkpoint: Checkpoint) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.from_numpy(checkpoint.corpus().heldout[:321].astype("int64"))
    return [(tokens[:-1].view(10, 32), tokens[1:].view(10, 32))]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *STRETCHED])
def test_a_fleet_that_loses_a_replica_trains_every_architecture_as_a_loop_does(
    tmp_path: Path, name: str, tied: bool
) -> None:
    model, facts, cache = start(tmp_path, name, steps=20, tie_word_embeddings=tied)
    losses = list(train_by_loop(model, facts, facts.source(cache)))
    events = run_losing_a_replica(facts.config, tmp_path / "run")
    check_equal(model, checkpoint_weights(tmp_path / "run"))
    assert [e.loss for e in events if isinstance(e, StepDone)] == pytest.approx(losses, abs=1e-4)
    check_export(tmp_path, model)
