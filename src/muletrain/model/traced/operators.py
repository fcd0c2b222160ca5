"""Functions in place of a traced graph's random operators, with deterministic masks (``model.dropout``).

``aten.dropout`` draws from torch's generator, and so does the dropout inside ``aten.scaled_dot_product_attention``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from muletrain.model.dropout import drop_threshold
from muletrain.model.dropout import dropout as hashed_dropout

if TYPE_CHECKING:
    from muletrain.model.dropout import Masks


class Causal:
    """Stands for a mask that lets each token see itself and all earlier tokens: attention then needs no table."""


def dropout(x: Tensor, probability: float, masks: Masks | None, site: int, sequences: int) -> Tensor:
    """``x`` with elements dropped by the counter hash at ``site``; ``x`` itself without ``masks``. In ``x``, the
    ``sequences`` lie one after another, in order."""
    return hashed_dropout(x.contiguous(), masks, site, probability, x.numel() // sequences)


def histogram(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """``torch.histc``, on every device: CPUs count no integers."""
    return torch.histc(x.float(), bins, low, high)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Causal | None,
    probability: float = 0.0,
    masks: Masks | None = None,
    site: int = 0,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention [B, H, T, E] with dropout on the weights. Without dropout, torch's own function."""
    if isinstance(mask, Causal):
        mask, is_causal = None, True
    if masks is None or drop_threshold(probability) == 0:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    return hashed_dropout(weights, masks, site, probability) @ v
