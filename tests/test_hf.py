"""Hugging Face folders: the tokenizer travels along, and broken files are refused by name, never by a stray exception."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from muletrain.config.schema import ModelConfig, RunConfig
from muletrain.errors import CheckpointError
from muletrain.model.hf import export_hf, import_hf
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import build_full
from muletrain.runs.assemble import RunFacts
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.first_weights import write_first_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

END = "<|endoftext|>"
INDEX = "model.safetensors.index.json"


def exported(folder: Path, tokenizer: Tokenizer | None = None, end: str | None = None) -> ModelSpec:
    """A small model's folder."""
    vocab = tokenizer.get_vocab_size() if tokenizer else 61
    spec = ModelSpec.from_config(ModelConfig(layers=2, width=32, heads=4, ffn=48, vocab=vocab, context=32, dropout=0.0))
    state = {name: p.detach() for name, p in build_full(spec, 3).named_parameters()}
    export_hf(state, spec, tokenizer.to_str().encode() if tokenizer else None, folder, end_of_text=end)
    return spec


@pytest.mark.parametrize("end", [None, END])
def test_transformers_reads_the_tokenizer(tmp_path: Path, end: str | None) -> None:
    ours = _bytes_tokenizer()
    exported(tmp_path, ours, end)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "a mule , don't  carry\n\té more ."
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.decode(ours.encode(text).ids) == text
    assert theirs.model_max_length == 32
    assert theirs.eos_token == end
    generation = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert generation.eos_token_id == (None if end is None else ours.token_to_id(END))


def test_without_a_tokenizer_none_is_written(tmp_path: Path) -> None:
    exported(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


def test_export_and_import_keep_the_spec(tmp_path: Path) -> None:
    spec = exported(tmp_path / "hf")
    assert import_hf(tmp_path / "hf")[0] == spec


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"lm_head.weight": 1}}', "[", "[]"])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    exported(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        import_hf(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    exported(tmp_path)
    _, load = import_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight from .*model\.safetensors"):
        load("model.norm.weight")
    with pytest.raises(CheckpointError, match="no tensor nonsense"):
        load("nonsense")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": 3}, "rope"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "describes no model"),
        ({"max_position_embeddings": "x"}, "describes no model"),
        ({"rms_norm_eps": None}, "describes no model"),
    ],
)
def test_broken_settings_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    exported(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        import_hf(tmp_path)


def test_scaled_rope_of_transformers_4_is_refused(tmp_path: Path) -> None:
    exported(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    with pytest.raises(CheckpointError, match="type 'linear'"):
        import_hf(tmp_path)
    file.write_text(json.dumps(config | {"rope_scaling": None, "rope_theta": 7.0}))
    assert import_hf(tmp_path)[0].rope_theta == 7.0


def _bytes_tokenizer() -> Tokenizer:
    """Byte-level, so that every text comes back as it went in."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a mule may carry more , mules carry most ."] * 4, trainer)
    return tokenizer


def test_first_weights_are_handed_out_as_the_checkpoint_of_step_0(tmp_path: Path) -> None:
    model = {"layers": 4, "width": 64, "heads": 2, "vocab": 64, "context": 16}
    facts = RunFacts.of(RunConfig.model_validate({"model": {**model, "from": str(tmp_path / "llama")}}))
    weights = {name: p.detach() for name, p in build_full(facts.spec, seed=3).named_parameters()}
    export_hf(weights, facts.spec, None, tmp_path / "llama", shard_bytes=50_000)

    class Cache:
        tokenizer_json, digest = b"{}", "ab"

    told: list[float] = []
    write_first_checkpoint(facts, Cache, tmp_path / "checkpoints", "run", told.append)  # type: ignore[arg-type]
    checkpoint = Checkpoint.newest_intact(tmp_path, pytest.fail)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.manifest["data"], told) == (0, "ab", [0.5, 1.0])
    found = checkpoint.weights()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be written for the machines that join .* free 0\.0 GB"):
        write_first_checkpoint(facts, Cache, tmp_path / "file", "run", told.append)  # type: ignore[arg-type]
