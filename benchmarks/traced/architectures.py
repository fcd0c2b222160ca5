"""Which causal language models of the installed ``transformers`` come in and go out as they are? Tiny ones, with noise in
every parameter and every buffer that their files hold."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.schema import OptimizerConfig
from muletrain.errors import MuletrainError
from muletrain.model.hf import export_hf
from muletrain.model.make import make_stage
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.folder import import_traced, load_traced

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
PLAIN = """apertus arcee bitnet biogpt cohere2 ernie4_5 exaone4 gemma gemma2 gemma4_text glm glm4 gpt_neox granite helium
hunyuan_v1_dense jetmoe lfm2 ministral nemotron olmo olmo3 persimmon recurrent_gemma seed_oss smollm3 stablelm
starcoder2 vaultgemma"""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= {"shared_expert_intermediate_size": 16}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_LATENT = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
_LATENT |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LATENT |= {"num_key_value_heads": 4}
_N = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 3, "n_head": 4},
    "codegen": _N,
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_group": 1, "topk_group": 1},
    "glm4_moe": {**_LATENT, "n_group": 1, "topk_group": 1},
    "gpt_neo": {"num_layers": 3, "num_heads": 4, "attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": _N,
    "granitemoe": {"num_local_experts": 4},
    "llama4_text": {"num_local_experts": 4},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "state_size": 4, "n_groups": 1},
    "minimax": {"num_local_experts": 4},
    "mpt": {"d_model": 32, "n_layers": 3, "n_heads": 4},
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": _EXPERTS,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": {**_EXPERTS, **_LINEAR},
    "rwkv": {"attention_hidden_size": 32},
    "xglm": {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 64},
}


KINDS = sorted([*PLAIN.split(), *OTHERS])
CONTEXT, STEPS, RATE = 32, 3, 1e-9
HERE = Path(__file__).parent


def architecture(kind: str, **changes: Any) -> str:
    """The configuration of a tiny model."""
    config = CONFIG_MAPPING[kind](**{**SIZES, **OTHERS.get(kind, {}), **changes})
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def noisy(kind: str) -> Any:
    """A tiny model. Every parameter and every stored buffer holds noise instead of its first value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **OTHERS.get(kind, {})})).float().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


async def trained(spec: TracedModel, folder: Path, tokens: Tensor) -> dict[str, Tensor]:
    """The weights after steps so small that nothing but their way in and out shows."""
    setup = StageSetup(OptimizerConfig(lr=RATE), 10, 0, len(tokens))
    stage = TorchCompute(spec, spec.cut(1), 0, setup, load_traced(folder, spec))
    for step in range(STEPS):
        await stage.loss_backward(Microbatch(step, 0), tokens[:, :-1], tokens[:, 1:], accumulate=True)
        await stage.apply((await stage.gradient(step)).clone(), Update(step, 1.0, skip=False))
    state = await stage.state()
    stage.close()
    return {name.removeprefix("model/"): t for name, t in state.items() if name.startswith("model/")}


def result(kind: str) -> dict[str, Any]:
    """Differences from the logits of the model's own class, norm over norm: of the traced model that read the model's folder,
    and of the class that reads what is exported after three steps. Or why it is refused."""
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        source, out = Path(name) / "in", Path(name) / "out"
        model = noisy(kind)
        model.save_pretrained(source)
        try:
            spec = import_traced(source, context=CONTEXT)
            load = load_traced(source, spec)
            stage = make_stage(spec, None, spec.cut(1)).bind({name: load(name) for name in spec.shapes})
            expected = model(input_ids=tokens, use_cache=False).logits
            came_in = stage(tokens)
            with torch.enable_grad():
                state = asyncio.run(trained(spec, source, tokens))
            export_hf(state, spec, None, out, source=source)
        except MuletrainError as e:
            return {"refused": str(e)}
        again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        went_out = again(input_ids=tokens, use_cache=False).logits
        stored = sum(name in model.state_dict() for name, _ in model.named_buffers())
    return {"in": off(came_in, expected), "out": off(went_out, expected), "stored_buffers": stored}


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    """Measure the named architectures, or all, and write the results."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    file = HERE / "architectures.json"
    found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    for kind in sys.argv[1:] or KINDS:
        begin = time.perf_counter()
        found[kind] = result(kind)
        print(f"{kind:18} {time.perf_counter() - begin:5.1f} s  {found[kind]}", flush=True)
        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
    subprocess.run([sys.executable, "-m", "benchmarks.figures"], cwd=Path(__file__).parents[2], check=True)
