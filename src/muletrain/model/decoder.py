"""The decoder's parts: RMSNorm, rotary causal attention, gated feed-forward, pre-norm block.

SWARM app. G (rotary embeddings, GeGLU) in the shape of Hugging Face's ``LlamaForCausalLM``: no biases, the same names,
the same arithmetic. Shapes: B sequences, T tokens, D width, H heads, K key/value heads, E features of a head, F
feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muletrain.model.dropout import Masks, dropout

if TYPE_CHECKING:
    from muletrain.model.spec import ModelSpec

Rope = tuple[Tensor, Tensor]
"""cos and sin, each [T, E]."""


@dataclass
class KeyValues:
    """One layer's keys and values of the tokens seen so far, each [B, K, seen, E]; filled by generation only."""

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def seen(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class Linear(nn.Linear):
    """Its weights are given to it (``Stage.bind``): none are drawn, which on the meta device takes milliseconds
    each."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Causal attention with rotary embeddings (Su et al. 2021) and grouped key/value heads (Ainslie et al. 2023)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._head_width = spec.head_width
        self._grouped = spec.kv_heads < spec.heads
        self.q_proj = Linear(spec.width, spec.width, bias=False)
        self.k_proj = Linear(spec.width, spec.kv_width, bias=False)
        self.v_proj = Linear(spec.width, spec.kv_width, bias=False)
        self.o_proj = Linear(spec.width, spec.width, bias=False)

    def forward(self, x: Tensor, rope: Rope, cache: KeyValues | None = None) -> Tensor:
        """x [B, T, D] -> [B, T, D]. With a cache, x continues what it has seen: one token then, or the first tokens."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, rope), rotate(k, rope)
        causal = cache is None or cache.seen == 0
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self._grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, n * E] -> [B, n, T, E]"""
        return x.view(*x.shape[:2], -1, self._head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """Gated: down(act(gate(x)) * up(x)); GeGLU with gelu, SwiGLU with silu (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._activation = F.gelu if spec.activation == "gelu" else F.silu
        self.gate_proj = Linear(spec.width, spec.ffn, bias=False)
        self.up_proj = Linear(spec.width, spec.ffn, bias=False)
        self.down_proj = Linear(spec.ffn, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); dropout on what is added."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._dropout = spec.dropout
        self.input_layernorm = RMSNorm(spec.width, spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.width, spec.norm_eps)
        self.mlp = FeedForward(spec)

    def forward(self, x: Tensor, layer: int, rope: Rope, masks: Masks | None, cache: KeyValues | None) -> Tensor:
        """``layer`` is the global number: it names the dropout sites 1 + 2 layer and 2 + 2 layer (0 is the
        embedding's).
        """
        attended = self.self_attn(self.input_layernorm(x), rope, cache)
        x = x + dropout(attended, masks, 1 + 2 * layer, self._dropout)
        fed = self.mlp(self.post_attention_layernorm(x))
        return x + dropout(fed, masks, 2 + 2 * layer, self._dropout)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate feature pairs (e, e + E/2) of x [B, n, T, E] by the angles of their position; Llama's pairing."""
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@lru_cache(maxsize=8)
def rope_table(tokens: int, head_width: int, theta: float, device: torch.device, dtype: torch.dtype) -> Rope:
    """cos and sin [tokens, head_width] of position x theta^(-2 i / head_width), computed in fp32."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width
    positions = torch.arange(tokens, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
