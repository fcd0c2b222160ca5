"""Checks of tensors from other peers, made before any computation. Each one raises ProtocolError."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from muletrain.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.model.chain import Model


def check_token_shape(name: str, ids: Tensor, spec: Model, sequences: int) -> None:
    """Tokens must be int64 [B, T] with 1 <= B <= ``sequences`` and 1 <= T <= context."""
    shape = tuple(ids.shape)
    if ids.dtype != torch.int64 or not _batch_fits(shape, 2, spec, sequences):
        raise ProtocolError(
            f"{name}: {ids.dtype} {shape}, expected int64 tokens of at most ({sequences}, {spec.context})"
        )


def check_activation_shape(x: Tensor, spec: Model, sequences: int) -> None:
    """Activations must be fp32 [B, T, D] with 1 <= B <= ``sequences`` and 1 <= T <= context."""
    shape = tuple(x.shape)
    if x.dtype != torch.float32 or not _batch_fits(shape, 3, spec, sequences) or shape[2] != spec.width:
        limits = (sequences, spec.context, spec.width)
        raise ProtocolError(f"activations: {x.dtype} {shape}, expected float32 of at most {limits}")


def check_gradient_shape(grad: Tensor, expected: tuple[int, ...]) -> None:
    """A gradient must be fp32 in exactly the output's shape. Non-finite values pass: all stages skip such a step."""
    if grad.dtype != torch.float32 or tuple(grad.shape) != expected:
        raise ProtocolError(f"gradient: {grad.dtype} {tuple(grad.shape)}, expected float32 {expected}")


def check_token_values(name: str, ids: Tensor, vocab: int) -> None:
    """Token ids must be in the vocabulary."""
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= vocab:
        raise ProtocolError(f"{name}: token ids {lowest}..{highest}, expected 0..{vocab - 1}")


def is_finite(x: Tensor) -> bool:
    """Are all fp32 numbers finite? Their float64 sum, which cannot overflow, is finite exactly then: one pass, no
    temporaries."""
    return math.isfinite(float(x.sum(dtype=torch.float64)))


def _batch_fits(shape: tuple[int, ...], dims: int, spec: Model, sequences: int) -> bool:
    return len(shape) == dims and 1 <= shape[0] <= sequences and 1 <= shape[1] <= spec.context
