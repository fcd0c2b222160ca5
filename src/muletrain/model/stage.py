"""One pipeline stage of the decoder: only its own layers, under the names the whole model has.

Parameter names are those of ``LlamaForCausalLM`` with global layer numbers, so that the stages' states together *are* a
Hugging Face state. Initial weights are a pure function of (seed, name): any cut of the model starts from identical
weights.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muletrain.model.decoder import Block, KeyValues, Linear, RMSNorm, rope_table
from muletrain.model.dropout import Masks, dropout
from muletrain.model.module import StageModule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from muletrain.model.chain import Model
    from muletrain.model.spec import ModelSpec
    from muletrain.planning.partition import Cut

INIT_STD = 0.02
_RESIDUAL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


class _Body(nn.Module):
    """Hugging Face calls this part ``model``, so it gives the parameters their names."""

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

    ``index`` None is the whole model, whose layers are shared as ``cut`` says if ``spec.share_layers``: inside each
    stage one block is repeated, named by the stage's first layer (SWARM sec. 4.3, after ALBERT).
    """

    def __init__(self, spec: ModelSpec, index: int | None, cut: Cut) -> None:
        super().__init__(spec, first=index in (None, 0), last=index in (None, len(cut) - 1))
        self.spec: ModelSpec = spec
        runs = cut if index is None else (cut[index],)
        self._owners = {
            layer: first if spec.share_layers else layer for first, end in runs for layer in range(first, end)
        }
        with torch.device("meta"):
            self.model = _Body(spec, sorted(set(self._owners.values())), first=self.is_first, last=self.is_last)
            if self.is_last and not spec.tie:
                self.lm_head = Linear(spec.width, spec.vocab, bias=False)

    def caches(self) -> dict[int, KeyValues]:
        """Keys and values, by layer."""
        return {layer: KeyValues() for layer in self._owners}

    def forward(
        self, inputs: Tensor, masks: Masks | None = None, caches: Mapping[int, KeyValues] | None = None
    ) -> Tensor:
        x = self._enter(inputs, masks)
        seen = next(iter(caches.values())).seen if caches else 0
        cos, sin = rope_table(self.spec.context, self.spec.head_width, self.spec.rope_theta, x.device, x.dtype)
        rope = (cos[seen : seen + x.shape[1]], sin[seen : seen + x.shape[1]])
        for layer, owner in self._owners.items():
            block = self.model.layers[str(owner)]
            x = block(x, layer, rope, masks, caches[layer] if caches else None)
        if self.is_last:
            head = self.model.embed_tokens if self.spec.tie else self.lm_head
            x = F.linear(self.model.norm(x), head.weight)
        return x

    def _enter(self, inputs: Tensor, masks: Masks | None) -> Tensor:
        """[B, T, D] in the weights' dtype."""
        if self.is_first:
            return dropout(self.model.embed_tokens(inputs), masks, 0, self.spec.dropout)
        return inputs.to(next(self.parameters()).dtype)


def initial_weight(spec: Model, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """fp32: ones for norms, else N(0, 0.02), projections onto the residual stream divided by sqrt(2 layers) (GPT-2).

    Drawn by numpy's Philox keyed by (seed, name): unlike torch's CPU generator, its bits do not depend on vector
    instructions.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    std = INIT_STD / math.sqrt(2 * spec.layers) if name.endswith(_RESIDUAL) else INIT_STD
    draws = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(draws).mul_(std)
