"""Small decoders and tokens for them."""

from __future__ import annotations

import torch

from muletrain.config.model_sections import ModelConfig
from muletrain.model.spec import ModelSpec
from muletrain.model.stage import Stage


def tiny(**changes: object) -> ModelSpec:
    sizes = {"layers": 4, "width": 32, "heads": 4, "ffn": 48, "vocab": 61, "context": 24, "dropout": 0.25}
    return ModelSpec.from_config(ModelConfig.model_validate(sizes | changes))


def tokens(spec: ModelSpec, batch: int = 3, length: int | None = None) -> torch.Tensor:
    draws = torch.Generator().manual_seed(5)
    return torch.randint(0, spec.vocab, (batch, length or spec.context), generator=draws)


def trained(stage: Stage) -> Stage:
    """Weights far from the start, so that logits are of order one and norms are not all ones."""
    draws = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.2)
    return stage
