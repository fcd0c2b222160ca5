"""Decides whether conversations that share a row can be kept apart in an architecture of ``transformers``: a small copy
of the model must give each the logits that it has alone. Models that mix tokens otherwise than by attention, or ignore
``position_ids``, do not.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

from pydantic import Field

from muletrain.config.cache import keep, kept
from muletrain.config.section import Section
from muletrain.errors import ConfigError
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.outline import ADAPTER, APART, about

if TYPE_CHECKING:
    from collections.abc import Sequence

KIND = "apart"
"""The cache's folder."""
SMALL = 1 << 24
"""Models of so many parameters are tried as they are."""
CLOSE = 1e-4
"""Norm of the difference over the norm, up to which logits count as equal."""
LENGTHS = (7, 10, 7)
"""Of the conversations in the row [tokens]."""
_LAYERS, _ROWS = 8, 64
_WIDTH, _DEPTH, _HEADS = ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head")
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim")


class Verdict(Section):
    """The outcome of the comparison."""

    why: str = Field(description="why conversations are not apart; empty: they are")


def mixed_by(model: TracedModel) -> str:
    """Why conversations of one row cannot be kept apart in ``model``; empty: they can."""
    plain = {name: value for name, value in model.config.items() if name not in (ADAPTER, APART)}
    size = sum(map(math.prod, model.shapes.values()))
    config = json.dumps(plain if size <= SMALL else _shrunk(plain), sort_keys=True)
    if (known := kept(KIND, about(config, sum(LENGTHS)), Verdict)) is None:
        known = Verdict(why=_compared(config))
        keep(KIND, about(config, sum(LENGTHS)), known)
    return known.why


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with few layers, few heads of the same width, and small matrices."""
    sizes: dict[str, Any] = {name: _ROWS for name in (*_INNER, "vocab_size") if isinstance(config.get(name), int)}
    sizes |= {name: 0 for name in config if name.endswith("_token_id") and config[name] is not None}
    width, depth, heads = (_first(names, config) for names in (_WIDTH, _DEPTH, _HEADS))
    if width and heads:
        group = config[heads] // (config.get("num_key_value_heads") or config[heads])
        few = 2 if group <= 8 else 1
        sizes |= {heads: few * group, width: config[width] // config[heads] * few * group}
        sizes |= {"num_key_value_heads": few} if config.get("num_key_value_heads") else {}
    if depth and config[depth] > _LAYERS:
        for name, value in config.items():
            if isinstance(value, list) and len(value) == config[depth] and _kinds(value) == _kinds(value[:_LAYERS]):
                sizes[name] = value[:_LAYERS]
        sizes[depth] = _LAYERS
    return {**config, **sizes}


def _first(names: Sequence[str], config: dict[str, Any]) -> str | None:
    return next((name for name in names if isinstance(config.get(name), int)), None)


def _kinds(values: list[Any]) -> set[str]:
    return {*map(str, values)}


def _compared(config: str) -> str:
    import torch

    draws, ends = torch.Generator().manual_seed(0), [*itertools.accumulate(LENGTHS)]
    try:
        spec = TracedModel(config, ends[-1]).with_apart()
        stage = spec.stage(None, ((0, spec.layers),))
    except ConfigError as e:
        return str(e)
    weights = {name: torch.randn(s, generator=draws) * 0.2 + (len(s) == 1) for name, s in stage.shapes().items()}
    stage.bind(weights)
    tokens = torch.randint(1, min(_ROWS, spec.vocab), (1, ends[-1]), generator=draws)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        together = stage(tokens, positions=positions)
        alone = torch.cat([stage(tokens[:, end - n : end]) for n, end in zip(LENGTHS, ends, strict=True)], dim=1)
    apart = float((together - alone).norm() / alone.norm())
    return "" if apart <= CLOSE else f"its logits differ by {apart:.0e} from those of each alone"
