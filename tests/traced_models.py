"""Tiny models of ``transformers``: their folders, and plain training of them by a loop that knows nothing of ours."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from muletrain.model.dropout import Masks, keep_mask
from muletrain.model.make import make_stage
from muletrain.model.traced.chain import TracedModel
from muletrain.optim.schedule import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from muletrain.runs.assemble import RunFacts
    from muletrain.runtime.microbatch.trainer import Source

VOCAB, CONTEXT = 300, 32
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCAB}
_SIZES: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {**_ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {**_ROPE, "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
_GPT2 = {**_TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "tie_word_embeddings": False}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 16}),
    "gemma3": ("gemma3_text", {**_GROUPED, "head_dim": 8, "sliding_window": 6}),
    "qwen2": ("qwen2", _GROUPED),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": 6}),
    "phi": ("phi", {**_SIZES, "partial_rotary_factor": 0.5}),
    "olmo2": ("olmo2", _GROUPED),
    "llama3": ("llama", {**_GROUPED, "rope_parameters": _LLAMA3}),
    "llama-linear": ("llama", {**_GROUPED, "rope_parameters": {**_ROPE, "rope_type": "linear"}}),
    "llama-yarn": ("llama", {**_GROUPED, "rope_parameters": {**_ROPE, "rope_type": "yarn"}}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4}),
    "qwen3-moe": (
        "qwen3_moe",
        {**_GROUPED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
STRETCHED = {
    "llama-dynamic": (
        "llama",
        {**_GROUPED, "max_position_embeddings": 16, "rope_parameters": {**_ROPE, "rope_type": "dynamic"}},
    ),
    "phi3-longrope": ("phi3", {**_GROUPED, "original_max_position_embeddings": 16, "rope_parameters": _LONG}),
}
"""Their rotary frequencies depend on the length of the text, beyond 16 tokens."""


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """What ``config.json`` of a folder says."""
    kind, sizes = (ARCHITECTURES | STRETCHED)[name]
    return {"model_type": kind, **sizes, **changes}


QUICK = ("gpt2", "gemma3", "mixtral")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def new_model(name: str, **changes: Any) -> Any:
    """A model with random weights, some of them large, so that a wrong operator is seen."""
    kind, sizes = (ARCHITECTURES | STRETCHED).get(name, (name, _SIZES))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes | changes))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def chain_of(model: Any, context: int = CONTEXT) -> TracedModel:
    return TracedModel(json.dumps(model.config.to_dict(), sort_keys=True, default=str), context)


def write_text(path: Path) -> Path:
    paragraphs = [f"Mule {k} carries {k * k} bags over pass {k % 7}, and rests at hut {k % 5}." for k in range(400)]
    path.write_text("\n\n".join(paragraphs))
    return path


def write_folder(folder: Path, text: Path, name: str, **changes: Any) -> Any:
    """Write a Hugging Face folder: weights, a tokenizer with special tokens, generation settings. Returns the model."""
    model = new_model(name, **changes)
    model.generation_config = GenerationConfig(eos_token_id=[2, 17], bos_token_id=1, do_sample=True, temperature=0.6)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", pad_token="<pad>")
    whole.save_pretrained(folder)
    return model


class HashedDropout:
    """Replaces torch's dropout, attention's too, by masks from (seed, step, index, number of the site)."""

    def __init__(self) -> None:
        self.masks = Masks(0, 0, 0)
        self._site = 0

    def begin(self, seed: int, step: int, index: int) -> None:
        self.masks, self._site = Masks(seed, step, index), 0

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if p == 0 or not training:
            return x
        threshold = round(p * 256)
        keep = keep_mask(self.masks, self._site, x.numel(), p, x.device).view(x.shape)
        self._site += 1
        return x * keep * (256 / (256 - threshold))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **given: Any
    ) -> Tensor:
        if given.get("enable_gqa"):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) * (given.get("scale") or 1 / math.sqrt(q.shape[-1]))
        if attn_mask is None and given.get("is_causal"):
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        return self.drop(scores.softmax(-1), dropout_p) @ v

    def patched(self) -> Any:
        return patch.multiple(F, dropout=self.drop, scaled_dot_product_attention=self.attend)


def of_next_token(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_by_loop(
    model: Any, facts: RunFacts, source: Source, loss_of: Callable[[Any, Tensor, Tensor], Tensor] = of_next_token
) -> Iterator[float]:
    """Train ``model`` as the run's settings say. Yields the loss of each step."""
    config, o = facts.config, facts.config.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)
    dropout = HashedDropout()
    model.train()
    for step in range(config.train.steps):
        optimizer.zero_grad()
        total = 0.0
        for index in range(config.microbatches):
            inputs, targets = (torch.from_numpy(a) for a in source.microbatch(step, index))
            dropout.begin(config.train.seed, step, index)
            with dropout.patched():
                loss = loss_of(model, inputs, targets)
            (loss / config.microbatches).backward()
            total += float(loss.detach())
        assert o.clip is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step, config.train.steps)
        optimizer.step()
        yield total / config.microbatches


def bound(chain: TracedModel, model: Any, stages: int) -> list[Any]:
    """The stages, with the model's weights."""
    state = dict(model.named_parameters())
    cut_ = chain.cut(stages)
    made = [make_stage(chain, s, cut_) for s in range(stages)]
    return [m.bind({n: state[n].detach().clone() for n in m.shapes()}) for m in made]


def off(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float(((a - b).norm() / b.norm()).detach())
