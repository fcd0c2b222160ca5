"""A Llama takes the native decoder if a shrunken copy of it gives the logits of ``transformers``; its ties are kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from muletrain.config.schema import RunConfig
from muletrain.errors import CheckpointError
from muletrain.model.hf import export_hf, import_hf
from muletrain.model.make import load_model, make_stage, tied_between
from muletrain.model.native import is_native
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.folder import import_traced
from muletrain.runs.assemble import resolve_start

from .traced_models import new_model, off

if TYPE_CHECKING:
    from pathlib import Path

torch.set_num_threads(1)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 80,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(3, 80, (2, 20), generator=torch.Generator().manual_seed(1))
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("change", "native"),
    [
        ({}, True),
        ({"num_key_value_heads": 8, "rope_theta": 5e5}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, True),
        ({"hidden_act": "gelu", "tie_word_embeddings": True, "pad_token_id": 7}, True),
        ({"some_later_setting": 3}, True),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, False),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}}, False),
        ({"rope_parameters": DYNAMIC}, False),
        ({"hidden_act": "swish"}, False),
        ({"hidden_act": "relu"}, False),
        ({"attention_bias": True}, False),
        ({"mlp_bias": True}, False),
        ({"attention_dropout": 0.1}, False),
        ({"head_dim": 16}, False),
        ({"hidden_size": "many"}, False),
        ({"model_type": "qwen2"}, False),
    ],
    ids=str,
)
def test_logits_decide_who_computes_a_llama(tmp_path: Path, change: dict[str, Any], native: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **change}))
    assert is_native(tmp_path) is native


def llama(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | config))
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def resolved(folder: Path, *, notes: list[str] | None = None, **model: Any) -> RunConfig:
    config = RunConfig.model_validate({"model": {"from": str(folder), **model}, "data": {"tokenizer": "none.json"}})
    return resolve_start(config, note=[].append if notes is None else notes.append)


@pytest.mark.parametrize("act", ["swish", "gelu_pytorch_tanh"])
def test_other_activations_are_traced(tmp_path: Path, act: str) -> None:
    model = llama(tmp_path, hidden_act=act)
    spec = import_traced(tmp_path, context=32)
    assert off(load_model(spec, dict(model.named_parameters()))(TOKENS), logits(model)) < 1e-6
    assert resolved(tmp_path).model.architecture is not None


def test_a_scaling_beside_other_rotary_settings_counts_as_in_transformers(tmp_path: Path) -> None:
    """People add it to ``config.json`` by hand, as model cards tell."""
    llama(tmp_path)
    rewrite(tmp_path, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    config = resolved(tmp_path, context=32).model
    spec = TracedModel.from_config(config)
    state = dict(theirs.named_parameters())
    stage = make_stage(spec, None, spec.cut(1))
    found = stage.bind({name: state[name].detach() for name in stage.shapes()})(TOKENS)
    assert off(found, logits(theirs)) < 1e-6


@pytest.mark.parametrize("untie", [False, True])
def test_a_tied_llama_stays_tied_unless_asked_otherwise(tmp_path: Path, untie: bool) -> None:
    model = llama(tmp_path / "in", tie_word_embeddings=True)
    config = resolved(tmp_path / "in", untie=untie).model
    assert config.tie is not untie
    spec, load = import_hf(tmp_path / "in", untie=untie)
    cut = spec.cut(2)
    assert (tied_between(spec, cut) is None) is untie
    assert spec.params == sum(p.numel() for p in model.parameters()) + 80 * 64 * untie
    x, state = TOKENS, {}
    for stage in range(2):
        made = make_stage(spec, stage, cut)
        assert sum(map(torch.Size.numel, map(torch.Size, made.shapes().values()))) == spec.stage_params(cut, stage)
        state |= {name: load(name) for name in made.shapes()}
        x = made.bind({name: state[name] for name in made.shapes()})(x)
    assert off(x, logits(model)) < 1e-6
    export_hf(state, spec, None, tmp_path / "out", source=tmp_path / "in")
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert out.config.tie_word_embeddings is not untie
    assert sum(p.numel() for p in out.parameters()) == spec.params
    assert off(logits(out), logits(model)) < 1e-6


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_head_that_differs_from_the_embedding_is_kept(tmp_path: Path, kind: str) -> None:
    """As ``transformers`` does, whatever ``config.json`` says of ties."""
    if kind == "llama":
        llama(tmp_path)
    else:
        new_model("qwen2", **SIZES).save_pretrained(tmp_path)
    rewrite(tmp_path, {"tie_word_embeddings": True}, {})
    theirs, notes = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), list[str]()
    config = resolved(tmp_path, context=32, notes=notes).model
    assert len(notes) == 1
    assert "both are kept" in notes[0]
    if kind == "llama":
        assert not config.tie
        spec, load = import_hf(tmp_path)
        found = load_model(spec, {n: load(n) for n in make_stage(spec, None, spec.cut(1)).shapes()})(TOKENS)
    else:
        traced = TracedModel.from_config(config)
        found = load_model(traced, dict(theirs.named_parameters()))(TOKENS)
        assert "lm_head.weight" in traced.shapes
    assert off(found, logits(theirs)) < 1e-6


def test_an_equal_copy_of_the_embedding_is_no_other_head(tmp_path: Path) -> None:
    model, notes = llama(tmp_path, tie_word_embeddings=True), list[str]()
    rewrite(tmp_path, {}, {"lm_head.weight": model.lm_head.weight.detach().clone()})
    assert resolved(tmp_path, notes=notes).model.tie
    assert notes == []


def test_tensors_that_a_native_llama_does_not_take_are_refused(tmp_path: Path) -> None:
    llama(tmp_path)
    rewrite(tmp_path, {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    import_hf(tmp_path)
    rewrite(tmp_path, {}, {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"q_norm.weight has no place in the model .*1 such tensor"):
        import_hf(tmp_path)
