"""One pipeline stage of the decoder: only the stage's layers, with the parameter names of the whole model.

Parameter names follow ``LlamaForCausalLM`` with global layer numbers, so that the union of all stages' states *is* a
Hugging Face state. Initial weights are a pure function of (seed, name): any cut of the model starts from identical
weights.

The blocks (RMSNorm, rotary causal attention, gated feed-forward) follow SWARM app. G in the shape of
``LlamaForCausalLM``: no biases, the same arithmetic. Shapes: B sequences, T tokens, D width, H heads, K key/value
heads, E features of a head, F feed-forward width.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muletrain.model.compression import PREFIX, Borders
from muletrain.model.dropout import Masks, drop_threshold, dropout, kept, scale_of
from muletrain.model.loss import Head
from muletrain.model.module import StageModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from muletrain.model.chain import Model
    from muletrain.model.spec import ModelSpec
    from muletrain.planning.partition import Cut


class Seen(NamedTuple):
    """What attention needs beside its inputs. ``cos``, ``sin``: of positions, each [T, E], or [B, 1, T, E] where these
    begin anew inside of a row; ``mask``: then, to be added, [B, 1, T, T]: -inf for tokens of other conversations, and
    for later ones."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None


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
    """A linear layer that draws no weights (``Stage.bind`` sets weights): on the meta device, drawing takes
    milliseconds for each layer."""

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

    def __init__(self, spec: ModelSpec, kv_heads: int | None = None) -> None:
        """``kv_heads``: of the heads, only so many groups, whose outputs are a part of the sum; None: all."""
        super().__init__()
        self._head_width = spec.head_width
        self._grouped = spec.kv_heads < spec.heads
        keys = spec.head_width * (kv_heads or spec.kv_heads)
        queries = keys * (spec.heads // spec.kv_heads)
        self.q_proj = Linear(spec.width, queries, bias=False)
        self.k_proj = Linear(spec.width, keys, bias=False)
        self.v_proj = Linear(spec.width, keys, bias=False)
        self.o_proj = Linear(queries, spec.width, bias=False)

    def forward(self, x: Tensor, rope: Seen, cache: KeyValues | None = None) -> Tensor:
        """x [B, T, D] -> [B, T, D]. With a cache, x is the first tokens, or one token that continues the cached
        tokens."""
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, rope), rotate(k, rope)
        causal = rope.mask is None and (cache is None or cache.seen == 0)
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=rope.mask, is_causal=causal, enable_gqa=self._grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, n * E] -> [B, n, T, E]"""
        return x.view(*x.shape[:2], -1, self._head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """Gated: down(act(gate(x)) * up(x)); GeGLU with gelu, SwiGLU with silu (Shazeer 2020)."""

    def __init__(self, spec: ModelSpec, ffn: int | None = None) -> None:
        """``ffn``: of the hidden features, only so many, whose outputs are a part of the sum; None: all."""
        super().__init__()
        self._activation, hidden = F.gelu if spec.activation == "gelu" else F.silu, ffn or spec.ffn
        self.gate_proj = Linear(spec.width, hidden, bias=False)
        self.up_proj = Linear(spec.width, hidden, bias=False)
        self.down_proj = Linear(hidden, spec.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)); dropout on both sums' second terms."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._dropout = spec.dropout
        self.input_layernorm = RMSNorm(spec.width, spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.width, spec.norm_eps)
        self.mlp = FeedForward(spec)

    def forward(self, x: Tensor, layer: int, rope: Seen, masks: Masks | None, cache: KeyValues | None) -> Tensor:
        """``layer`` is the global number, for the dropout sites 1 + 2 layer and 2 + 2 layer (0 is the embedding's)."""
        attended = self.self_attn(self.input_layernorm(x), rope, cache)
        x = x + dropout(attended, masks, 1 + 2 * layer, self._dropout)
        fed = self.mlp(self.post_attention_layernorm(x))
        return x + dropout(fed, masks, 2 + 2 * layer, self._dropout)

    def keeps(self, x: Tensor, layer: int, masks: Masks | None) -> tuple[Tensor, Tensor] | None:
        """The two masks of ``forward`` for inputs like ``x``; None: no dropout."""
        if masks is None or drop_threshold(self._dropout) == 0:
            return None
        first, second = (kept(x, masks, site + 2 * layer, self._dropout) for site in (1, 2))
        return first, second

    def masked(self, x: Tensor, rope: Seen, keeps: tuple[Tensor, Tensor] | None) -> Tensor:
        """``forward`` in training, as a function of tensors alone: a compiler sees neither layer nor microbatch."""
        scale = scale_of(self._dropout)
        attended = self.self_attn(self.input_layernorm(x), rope)
        x = x + (attended if keeps is None else attended * keeps[0] * scale)
        fed = self.mlp(self.post_attention_layernorm(x))
        out: Tensor = x + (fed if keeps is None else fed * keeps[1] * scale)
        return out


def rotate(x: Tensor, rope: Seen) -> Tensor:
    """Rotate feature pairs (e, e + E/2) of x [B, n, T, E] by the angles of the position; Llama's pairing."""
    cos, sin, _ = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@lru_cache(maxsize=8)
def rope_table(tokens: int, head_width: int, theta: float, device: torch.device, dtype: torch.dtype) -> Seen:
    """cos and sin [tokens, head_width] of position x theta^(-2 i / head_width), computed in fp32."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width
    positions = torch.arange(tokens, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return Seen(angles.cos().to(dtype), angles.sin().to(dtype))


def seen_by(spec: ModelSpec, x: Tensor, positions: Tensor | None, before: int = 0) -> Seen:
    """For tokens x [B, T, D] at ``positions`` (``StageModule.forward``), or after ``before`` others of one text."""
    table = spec.context, spec.head_width, spec.rope_theta, x.device, x.dtype
    if positions is not None:
        return _seen_apart(positions, *table)
    cos, sin, _ = rope_table(*table)
    return Seen(cos[before : before + x.shape[1]], sin[before : before + x.shape[1]])


SHARED = 4
"""Microbatches whose masks are kept, which all blocks of a process share."""


@lru_cache(maxsize=SHARED)  # a tensor is equal to itself alone
@torch.no_grad()
def _seen_apart(
    positions: Tensor, tokens: int, head_width: int, theta: float, device: torch.device, dtype: torch.dtype
) -> Seen:
    cos, sin, _ = rope_table(tokens, head_width, theta, device, dtype)
    positions = positions.to(device)
    places = torch.arange(positions.shape[1], device=device)
    begun = places - positions  # the place of each conversation's first token tells it from others
    sees = (begun[:, :, None] == begun[:, None, :]) & (places[:, None] >= places)
    mask = torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill_(~sees, -math.inf)
    return Seen(cos[positions][:, None], sin[positions][:, None], mask[:, None])


INIT_STD = 0.02
_RESIDUAL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class _Body(nn.Module):
    """The part named ``model`` in Hugging Face's parameter names."""

    def __init__(self, spec: ModelSpec, layers: list[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): Block(spec) for layer in layers})
        if first or (last and spec.tie):
            # not initialised: on the meta device that would import torch._dynamo, 1.4 s of CPU
            self.embed_tokens = nn.Embedding(spec.vocab, spec.width, _weight=torch.empty(spec.vocab, spec.width))
        if last:
            self.norm = RMSNorm(spec.width, spec.norm_eps)


class Stage(StageModule):
    """Layers ``cut[index]`` of the model, with the embedding in the first stage and norm and head in the last.

    ``index`` None is the whole model. With ``spec.share_layers``, one block is repeated inside each stage of ``cut``,
    named by the stage's first layer (SWARM sec. 4.3, after ALBERT).
    """

    def __init__(self, spec: ModelSpec, index: int | None, cut: Cut) -> None:
        runs = cut if index is None else (cut[index],)
        super().__init__(spec, runs[0][0], first=index in (None, 0), last=index in (None, len(cut) - 1))
        self.spec: ModelSpec = spec
        self._owners = {
            layer: first if spec.share_layers else layer for first, end in runs for layer in range(first, end)
        }
        with torch.device("meta"):
            self.model = _Body(spec, sorted(set(self._owners.values())), first=self.is_first, last=self.is_last)
            if self.is_last and not spec.tie:
                self.lm_head = Linear(spec.width, spec.vocab, bias=False)
            self.compression = Borders(spec, runs[0][0], runs[-1][1])

    def caches(self) -> dict[int, KeyValues]:
        """Keys and values, by layer."""
        return {layer: KeyValues() for layer in self._owners}

    def forward(
        self,
        inputs: Tensor,
        masks: Masks | None = None,
        caches: Mapping[int, KeyValues] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        x = self._layers(inputs, masks, caches, positions)
        return self._logits([x]) if self.is_last else x

    def before_head(self, inputs: Tensor, masks: Masks | None, positions: Tensor | None = None) -> Head:
        wanted = [self.model.norm.weight, self._output]
        return Head(self._logits, [self._layers(inputs, masks, None, positions)], wanted)

    @property
    def _output(self) -> Tensor:
        """The output matrix."""
        return (self.model.embed_tokens if self.spec.tie else self.lm_head).weight

    def _logits(self, values: Sequence[Tensor]) -> Tensor:
        (x,) = values
        return F.linear(self.model.norm(x), self._output)

    def _layers(
        self, inputs: Tensor, masks: Masks | None, caches: Mapping[int, KeyValues] | None, positions: Tensor | None
    ) -> Tensor:
        x = self._enter(inputs, masks)
        seen = next(iter(caches.values())).seen if caches else 0
        rope = seen_by(self.spec, x, positions, seen)
        for layer, owner in self._owners.items():
            block, x = self._block_of(owner), self.compression.enter(x, layer)
            if caches is None and (positions is not None) == self.spec.apart and self._is_fast(x, masks):
                assert self.fast is not None
                x = self._block(self.fast.compute, block, x, rope, block.keeps(x, layer, masks))
            else:
                x = self._block(block, x, layer, rope, masks, caches[layer] if caches else None)
            x = self.compression.leave(x, layer)
        return x

    def _block_of(self, owner: int) -> Block:
        """The block that is named by this layer."""
        block = self.model.layers[str(owner)]
        assert isinstance(block, Block)
        return block

    def _is_fast(self, x: Tensor, masks: Masks | None) -> bool:
        """Is there a compiled block for this? It was compiled with dropout if the model has that."""
        in_training = masks is not None or drop_threshold(self.spec.dropout) == 0
        return self.fast is not None and in_training and tuple(x.shape) == self.fast.shape

    def sample_block(self, sequences: int, device: torch.device) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        spec, block = self.spec, self._block_of(next(iter(self._owners.values())))
        dtype = block.self_attn.q_proj.weight.dtype
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(sequences, spec.context, spec.width, generator=draws).to(device, dtype)
        places = torch.arange(spec.context).expand(sequences, -1) if spec.apart else None
        rope = seen_by(spec, x, places)
        return Block.masked, (block, x, rope, block.keeps(x, 0, Masks(0, 0, 0)))

    def _enter(self, inputs: Tensor, masks: Masks | None) -> Tensor:
        """[B, T, D] in the weights' dtype."""
        if self.is_first:
            return dropout(self.model.embed_tokens(inputs), masks, 0, self.spec.dropout)
        return inputs.to(next(self.parameters()).dtype)


def initial_weight(spec: Model, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """fp32: ones for norms, else N(0, 0.02), projections onto the residual stream divided by sqrt(2 layers) (GPT-2).

    Drawn by numpy's Philox keyed by (seed, name): unlike with torch's CPU generator, the bits do not depend on vector
    instructions. The way back from a compressed border begins as the transpose of the way there, so that the features
    keep what they mean: with a random one, four stages of ``maxout`` end 240 steps at a perplexity of 68, not 56
    (benchmarks/compression).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    if name.startswith(f"{PREFIX}.") and name.endswith(".up.matrix"):
        return _transposed(spec, name, shape, seed)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    std = INIT_STD / math.sqrt(2 * spec.layers) if name.endswith(_RESIDUAL) else INIT_STD
    draws = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(draws).mul_(std)


def _transposed(spec: Model, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """[D, C]: numbers of about unit size from numbers of unit size."""
    assert spec.compression is not None
    (features, passed), factor = shape, spec.compression.factor
    if spec.compression.kind == "bottleneck":
        down = initial_weight(spec, name.replace(".up.", ".down."), (passed, features), seed)
        return down.t().contiguous().div_(INIT_STD * math.sqrt(passed))
    found, rows = torch.zeros(shape), torch.arange(features)
    found[rows, rows // factor] = 1.0
    return found
