"""Which causal language models of the installed ``transformers`` can be traced? Tiny ones, with random weights."""

from __future__ import annotations

import json
import logging
import time
import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from muletrain.errors import MuletrainError
from muletrain.model.make import make_stage
from muletrain.model.traced.chain import TracedModel

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


def difference(kind: str, sizes: dict[str, Any]) -> float:
    """Of the traced model's logits from the model's own: norm of the difference over norm. Raises ConfigError for one that
    cannot be traced."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **sizes})).float().eval()
    spec = TracedModel(json.dumps(model.config.to_dict(), sort_keys=True, default=str), 32)
    stage = make_stage(spec, None, spec.cut(1)).bind({n: p.detach() for n, p in model.named_parameters()})
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 16))
    with torch.no_grad():
        ours, theirs = stage(tokens), model(input_ids=tokens, use_cache=False).logits
    return float((ours - theirs).norm() / theirs.norm())


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for kind, sizes in sorted([*((plain, {}) for plain in PLAIN.split()), *OTHERS.items()]):
        begin = time.perf_counter()
        try:
            found = f"{difference(kind, sizes):.0e}"
        except MuletrainError as e:
            found = f"refused: {e}"
        print(f"{kind:18} {time.perf_counter() - begin:5.1f} s  {found}", flush=True)


if __name__ == "__main__":
    main()
