"""The decoder is Transformers' Llama: its checkpoints come in and go out, and others are refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from muletrain.errors import CheckpointError
from muletrain.model.generate import evaluate, generate_ids
from muletrain.model.hf import export_hf, import_hf
from muletrain.model.make import load_model
from muletrain.model.stage import Stage
from tests.decoders import tiny, tokens, trained
from tests.whole_model import build_full

if TYPE_CHECKING:
    from pathlib import Path


# Hugging Face -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "silu"}, {"kv_heads": 2, "rope_theta": 500.0}, {"share_layers": True}],
    ids=["gelu", "silu", "gqa", "shared"],
)
def test_transformers_gives_the_same_logits(tmp_path: Path, changes: dict[str, object]) -> None:
    spec = tiny(**changes)
    cut = spec.cut(2)
    model = trained(build_full(spec, 3, cut))
    state = {name: p.detach() for name, p in model.named_parameters()}
    export_hf(state, spec, None, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.dtype == torch.float32
    ids = tokens(spec)
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(theirs(ids).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(load_model(spec, state)(ids), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_comes_in(tmp_path: Path, tied: bool) -> None:
    theirs = _llama(tied)
    theirs.save_pretrained(tmp_path)
    spec, load = import_hf(tmp_path, context=16)
    cut = spec.cut(2)
    x = ids = tokens(spec)
    with torch.no_grad():
        for index in range(2):
            stage = Stage(spec, index, cut)
            x = stage.bind({name: load(name) for name in stage.shapes()})(x)
        torch.testing.assert_close(x, theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_sharded_export_reads_the_same(tmp_path: Path) -> None:
    spec = tiny()
    state = {name: p.detach() for name, p in build_full(spec, 3).named_parameters()}
    export_hf(state, spec, None, tmp_path, shard_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 22_000 for file in files)
    imported, load = import_hf(tmp_path)
    assert imported == tiny(dropout=0.0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in state.items():
        assert torch.equal(load(name), value)
        assert torch.equal(theirs[name], value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 5}, "has no tensor model.layers.4"),
        ({"num_hidden_layers": 3}, "model.layers.3.* has no place"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"vocab_size": None}, "describes no model that fits here"),
    ],
)
def test_foreign_checkpoints_are_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    spec = tiny()
    export_hf({name: p.detach() for name, p in build_full(spec, 3).named_parameters()}, spec, None, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        import_hf(tmp_path)


def test_missing_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    spec = tiny()
    state = {name: p.detach() for name, p in build_full(spec, 3).named_parameters()}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        export_hf({n: t for n, t in state.items() if n != "model.norm.weight"}, spec, None, tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(1,\)"):
        export_hf(state | {"model.norm.weight": torch.ones(1)}, spec, None, tmp_path)
    with pytest.raises(CheckpointError, match="name a model on the Hub as OWNER/NAME, or the folder"):
        import_hf(tmp_path / "nothing")


# At work ------------------------------------------------------------------------------------------------------------


def test_generation_reads_what_transformers_generates(tmp_path: Path) -> None:
    theirs = _llama(tied=False)
    theirs.save_pretrained(tmp_path)
    spec, load = import_hf(tmp_path)
    model = load_model(spec, {name: load(name) for name in build_full(spec, 0).shapes()})
    ids = tokens(spec, 1, 6)
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)[0, 6:]
    found = list(generate_ids(model, ids[0].tolist(), max_tokens=10, temperature=0, top_k=0, seed=0))
    assert found == expected.tolist()


def test_evaluate_is_the_mean_over_targets_that_count() -> None:
    spec = tiny()
    model = trained(build_full(spec, 3))
    ids = tokens(spec, 4)
    targets = ids.roll(-1, 1)
    targets[0, 5:] = -100
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())  # its default ignores -100
    found = evaluate(model, [(ids[:1], targets[:1]), (ids[1:], targets[1:])])
    assert found == pytest.approx(float(expected), rel=1e-5)
    with pytest.raises(ValueError, match="no target"):
        evaluate(model, [])


def _llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
