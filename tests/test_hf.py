"""Hugging Face folders: the tokenizer travels along, and broken files are refused by name, never by a stray
exception."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import RunConfig
from muletrain.data.tokenizer import load_tokenizer
from muletrain.errors import CheckpointError
from muletrain.model.hf import _full_shapes, export_hf, import_hf
from muletrain.model.spec import ModelSpec
from muletrain.runs.assemble import RunFacts
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.parts import write_first_checkpoint
from muletrain.runtime.checkpoint.store import Folder
from muletrain.runtime.core.branches import BRANCH
from muletrain.runtime.core.lifecycle import State
from muletrain.runtime.recovery.messages import StandsAt
from tests.whole_model import build_full

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


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path: Path) -> None:
    exported(tmp_path)
    modes = {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {(tmp_path / "config.json").stat().st_mode & 0o777}


def test_without_a_tokenizer_none_is_written(tmp_path: Path) -> None:
    exported(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]


def test_export_and_import_keep_the_spec(tmp_path: Path) -> None:
    spec = exported(tmp_path / "hf")
    assert import_hf(tmp_path / "hf")[0] == spec


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"lm_head.weight": 1}}',
        '{"weight_map": {"lm_head.weight": "../other.safetensors"}}',
        "[",
        "[]",
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    exported(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        import_hf(tmp_path)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
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


def test_the_base_of_rotary_embeddings_of_transformers_4_is_read(tmp_path: Path) -> None:
    exported(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
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
    ((key, parts),) = Folder(tmp_path / "checkpoints", keep=2).complete().items()
    for stage, part in parts.items():  # as a peer says where it could step back to
        StandsAt(
            branch=bytes(BRANCH), step=0, stage=0, state=State.TRAINING, targets=(), parts=((*key, stage, part.digest),)
        )
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step-00000000 cannot be written .*free 0\.0 GB"):
        write_first_checkpoint(facts, Cache, tmp_path / "file", "run", told.append)  # type: ignore[arg-type]


def _source(folder: Path) -> Tokenizer:
    """A Llama with special tokens, generation settings and a chat template of its own, made for 64 tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["a mule may carry more , mules carry most ."] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=[2, 3], pad_token_id=3, top_p=0.7, do_sample=True
    )
    model.save_pretrained(folder)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    theirs.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    theirs.save_pretrained(folder)
    return tokenizer


def test_training_a_model_of_others_changes_its_weights_only(tmp_path: Path) -> None:
    source, out = tmp_path / "llama", tmp_path / "out"
    _source(source)
    used = load_tokenizer(str(source), 1 << 20)  # as a checkpoint has it
    spec, load = import_hf(source, context=16)
    state = {name: load(name) + 1.0 for name in _full_shapes(spec)}
    export_hf(state, spec, used, out, end_of_text="</s>", source=source)
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(out)
    assert (after.eos_token, after.pad_token, after.bos_token) == ("</s>", "<pad>", "<s>")
    assert (after.chat_template, after.model_max_length) == (before.chat_template, before.model_max_length)
    assert after("a mule")["input_ids"] == before("a mule")["input_ids"]
    old, new = AutoModelForCausalLM.from_pretrained(source), AutoModelForCausalLM.from_pretrained(out)
    assert new.generation_config.to_dict() == old.generation_config.to_dict()
    for field in ("max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "rope_parameters"):
        assert getattr(new.config, field) == getattr(old.config, field)
    assert all(torch.equal(p, state[name]) for name, p in new.named_parameters())


def test_end_tokens_that_only_the_generation_settings_name_are_kept(tmp_path: Path) -> None:
    """As of many models on the Hub; without them the exported model would not stop."""
    source, out = tmp_path / "llama", tmp_path / "out"
    _source(source)
    config = json.loads((source / "config.json").read_text())
    del config["eos_token_id"]
    (source / "config.json").write_text(json.dumps(config))
    spec, load = import_hf(source, context=16)
    state = {name: load(name) for name in _full_shapes(spec)}
    export_hf(state, spec, load_tokenizer(str(source), 1 << 20), out, end_of_text="</s>", source=source)
    old, new = (json.loads((folder / "generation_config.json").read_text()) for folder in (source, out))
    assert new == old
    assert new["eos_token_id"] == [2, 3]


def test_special_tokens_do_not_outlive_their_tokenizer(tmp_path: Path) -> None:
    source, out = tmp_path / "llama", tmp_path / "out"
    _source(source)
    spec, load = import_hf(source)
    state = {name: load(name) for name in _full_shapes(spec)}
    export_hf(state, spec, _bytes_tokenizer().to_str().encode(), out, end_of_text=END, source=source)
    assert AutoTokenizer.from_pretrained(out).eos_token == END
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.eos_token_id, config.max_position_embeddings) == (_bytes_tokenizer().token_to_id(END), 64)
