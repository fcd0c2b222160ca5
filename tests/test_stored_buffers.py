"""Buffers that a model's files hold are loaded, stay as they are, travel with its weights, and are exported."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.schema import OptimizerConfig, Precision
from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.hf import export_hf
from muletrain.model.make import load_model
from muletrain.model.traced.export import trace
from muletrain.model.traced.folder import import_traced, load_traced
from tests.traced_models import write_folder, write_text

from .traced_models import CONTEXT, VOCAB, new_model, off

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.model.traced.chain import TracedModel

torch.set_num_threads(1)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
ROUTED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size": VOCAB,
}
TOKENS = torch.randint(3, VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))


def setup(precision: Precision = Precision.FP32) -> StageSetup:
    return StageSetup(OptimizerConfig(lr=1e-9), 10, 0, 2, precision=precision)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder of DeepSeek-V3 whose router has a correction of its own, and the model."""
    folder = tmp_path_factory.mktemp("source")
    model = new_model("deepseek_v3", **ROUTED)
    with torch.no_grad():
        model.get_buffer(BIAS).copy_(torch.tensor([3.0001, 3.0002, 3.0003, -1.0]))  # equal in 16 bits
    model.save_pretrained(folder)
    return folder, model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


async def _train(spec: TracedModel, folder: Path, stages: int) -> dict[str, torch.Tensor]:
    load, cut = load_traced(folder, spec), spec.cut(stages)
    made = [TorchCompute(spec, cut, s, setup(), load) for s in range(stages)]
    for step in range(3):
        mb, x = Microbatch(step, 0), TOKENS[:, :-1]
        for stage in made[:-1]:
            x = await (await stage.forward(mb, x))
        _, gradient = await made[-1].loss_backward(mb, x, TOKENS[:, 1:], accumulate=True)
        for stage in reversed(made[:-1]):
            assert gradient is not None
            gradient = await stage.backward(mb, await gradient, accumulate=True)
        for stage in made:
            await stage.apply((await stage.gradient(step)).clone(), Update(step, 1.0, skip=False))
    found: dict[str, torch.Tensor] = {}
    for stage in made:
        found |= {n.removeprefix("model/"): t for n, t in (await stage.state()).items() if n.startswith("model/")}
        stage.close()
    return found


def test_what_is_stored_comes_in_stays_and_goes_out(source: tuple[Path, Any], tmp_path: Path) -> None:
    """DeepSeek-V3's correction of its router, in two stages, trained for three steps."""
    folder, model = source
    spec = import_traced(folder, context=CONTEXT)
    assert spec.frozen == {BIAS: "float32"}
    state = asyncio.run(_train(spec, folder, 2))
    assert torch.equal(state[BIAS], model.get_buffer(BIAS))
    export_hf(state, spec, None, tmp_path, source=folder)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[BIAS], model.get_buffer(BIAS))
    expected = logits(model)
    assert off(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval()), expected) < 1e-5
    assert off(load_model(spec, state)(TOKENS), expected) < 1e-5
    with torch.no_grad():
        model.get_buffer(BIAS).zero_()
        assert off(logits(model), expected) > 1e-2, "the correction matters"
        model.get_buffer(BIAS).copy_(state[BIAS])


def test_in_16_bits_it_is_not_rounded(source: tuple[Path, Any]) -> None:
    """Its three largest entries are one number in bf16, and would choose other experts."""
    folder, model = source
    spec = import_traced(folder, context=CONTEXT)
    stage = TorchCompute(spec, spec.cut(1), 0, setup(Precision.BF16), load_traced(folder, spec))
    bound = dict(stage.arithmetic._versions[0].named_parameters())
    assert bound["lm_head.weight"].dtype == torch.bfloat16
    assert torch.equal(bound[BIAS].detach(), model.get_buffer(BIAS))
    asyncio.run(stage.load_weights(asyncio.run(stage.copied_weights()) + 1))
    assert torch.equal(bound[BIAS].detach(), model.get_buffer(BIAS) + 1)
    stage.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_exported_in_16_bits_it_is_not_rounded_either_nor_is_what_transformers_keeps_in_fp32(
    source: tuple[Path, Any], tmp_path: Path, dtype: str
) -> None:
    """DeepSeek-V3's class keeps the router's weights in fp32, too."""
    folder, model = source
    spec, gate = import_traced(folder, context=CONTEXT), BIAS.replace("e_score_correction_bias", "weight")
    load = load_traced(folder, spec)
    remark = export_hf({name: load(name) for name in spec.shapes}, spec, None, tmp_path, source=folder, dtype=dtype)
    assert f"2 tensors stayed in fp32 (such as {gate})" in str(remark)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found[BIAS], model.get_buffer(BIAS))
    assert torch.equal(found[gate], model.get_parameter(gate))
    assert found["lm_head.weight"].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=found["lm_head.weight"].dtype)
    assert torch.equal(loaded.get_buffer(BIAS), model.get_buffer(BIAS))
    assert torch.equal(loaded.get_parameter(gate), model.get_parameter(gate))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.unknown.weight", "model.layers.1.mlp.gate.other_bias"])
def test_tensors_that_the_model_does_not_take_are_refused(source: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    changed(source[0], tmp_path, {name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=rf"{name} has no place in the model .* \(1 such tensor\)"):
        import_traced(tmp_path, context=CONTEXT)


def test_what_transformers_ignores_is_ignored(source: tuple[Path, Any], tmp_path: Path) -> None:
    """Layer 61 of DeepSeek-V3 predicts a second token, and older versions stored the frequencies of each layer."""
    more = {"model.layers.61.embed_tokens.weight": torch.ones(3)}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    changed(source[0], tmp_path, more)
    assert BIAS in import_traced(tmp_path, context=CONTEXT).frozen


def test_files_with_the_models_own_names_are_held_to_them(tmp_path: Path) -> None:
    """DeepSeek's experts are stacked as they are read; GPT-2's tensors are read as they lie there."""
    write_folder(tmp_path / "hf", write_text(tmp_path / "mine.txt"), "gpt2")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    mask = {"transformer.h.0.attn.bias": torch.ones(3)}  # older versions of transformers stored it
    changed(tmp_path / "hf", tmp_path / "old", mask)
    import_traced(tmp_path / "old", context=CONTEXT)
    changed(tmp_path / "hf", tmp_path / "new", mask | {"transformer.h.0.mlp.gate": torch.ones(3)})
    with pytest.raises(
        CheckpointError, match=r"transformer.h.0.mlp.gate has no place in the model .* \(1 such tensor\)"
    ):
        import_traced(tmp_path / "new", context=CONTEXT)


def test_a_missing_buffer_is_refused(source: tuple[Path, Any], tmp_path: Path) -> None:
    changed(source[0], tmp_path, {}, without=BIAS)
    with pytest.raises(CheckpointError, match=BIAS):
        import_traced(tmp_path, context=CONTEXT)


def changed(source: Path, out: Path, more: dict[str, torch.Tensor], without: str = "") -> None:
    tensors = load_file(source / "model.safetensors") | more
    tensors.pop(without, None)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((source / "config.json").read_text())


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.seen = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](tokens[..., None].float().expand(-1, -1, 4))
        with torch.no_grad():
            self.seen[:2].add_(x.detach().mean((0, 1))[:2])
        return x + self.seen


def test_a_model_that_changes_what_it_stores_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"changes p_seen .* while it computes"):
        trace(Counting().to("meta"), CONTEXT)


def test_a_configuration_says_which_are_stored(source: tuple[Path, Any]) -> None:
    config = json.loads((source[0] / "config.json").read_text())
    assert "e_score_correction_bias" not in json.dumps(config), "the architecture decides, so a joiner needs no file"
