"""Checks of tensors from other peers, made before any computation. Each one raises ProtocolError."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from muletrain.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

    from muletrain.model.chain import Model, TensorType


def check_sample_shape(name: str, x: Tensor, declared: TensorType, spec: Model, sequences: int) -> None:
    """Inputs or targets must be as ``declared``: tokens int64 [B, T], else [B, ...] of exactly that shape, with 1 <= B <=
    ``sequences`` and 1 <= T <= context."""
    shape, most = tuple(x.shape), declared.batch(sequences, spec.context)
    exact = declared.shape is None or shape[1:] == declared.shape
    fits = len(shape) == len(most) and exact and all(1 <= n <= limit for n, limit in zip(shape, most, strict=True))
    if str(x.dtype) != f"torch.{declared.dtype}" or not fits:
        raise ProtocolError(f"{name}: {x.dtype} {shape}, expected {declared.dtype} of at most {most}")


def check_targets(targets: Tensor, inputs: Tensor, spec: Model, sequences: int) -> None:
    """Targets must be as the model declares, and as many as ``inputs``."""
    check_sample_shape("targets", targets, spec.targets, spec, sequences)
    shared = 2 if spec.targets.shape is None else 1
    if targets.shape[:shared] != inputs.shape[:shared]:
        raise ProtocolError(f"targets: {tuple(targets.shape)} for inputs {tuple(inputs.shape)}")


def check_target_values(targets: Tensor, declared: TensorType, vocab: int, *, heldout: bool) -> None:
    """Targets must be below ``vocab``, or ``vocab`` where they do not count, in held-out microbatches and where
    ``declared`` says so, and ``vocab + 1`` where it says that they may be ``apart``."""
    if declared.column:
        check_sample_values("targets", targets[:, :-1], vocab + 1 + declared.apart)
    else:
        check_sample_values("targets", targets, vocab + heldout)


def weighed(
    targets: Tensor, declared: TensorType, tokens: int, vocab: int, microbatches: int
) -> tuple[Tensor, float | None]:
    """Targets [B, T], and by what the mean loss of those that count is multiplied, so that the mean over all
    ``microbatches`` of the batch (or the sum over parts) is that over all targets that count in the batch; None: all
    count.

    ``targets``: int64 [B, T] for T ``tokens``, or [B, T + 1] where some are ``vocab`` or more and do not count, and the last column
    holds how many do in the batch; all count of targets that are not ``declared`` as tokens. Raises ProtocolError for a
    column that cannot be."""
    if declared.shape is not None or targets.dim() != 2 or targets.shape[1] != tokens + 1:
        return targets, None
    targets, column = targets[:, :-1].contiguous(), targets[:, -1]
    here, (least, most) = int((targets < vocab).sum()), (int(bound) for bound in torch.aminmax(column))
    if least != most or not max(1, here) <= most:
        raise ProtocolError(f"targets: {here} count here, and {least} to {most} in the batch")
    return targets, here * microbatches / most


def check_positions(positions: Tensor | None, inputs: Tensor) -> None:
    """Positions, if any, must be int64 [B, T], each below T, for ``inputs`` of these tokens."""
    if positions is None:
        return
    if positions.dtype != torch.int64 or positions.shape != inputs.shape[:2]:
        raise ProtocolError(f"positions: {positions.dtype} {tuple(positions.shape)} for inputs {tuple(inputs.shape)}")
    check_sample_values("positions", positions, positions.shape[1])


def check_activation_shape(x: Tensor, spec: Model, sequences: int) -> None:
    """Activations must be fp32 [B, T, D] with 1 <= B <= ``sequences`` and 1 <= T <= context."""
    shape = tuple(x.shape)
    if x.dtype != torch.float32 or not _batch_fits(shape, 3, spec, sequences) or shape[2] != spec.passed:
        limits = (sequences, spec.context, spec.passed)
        raise ProtocolError(f"activations: {x.dtype} {shape}, expected float32 of at most {limits}")


def check_gradient_shape(grad: Tensor, expected: tuple[int, ...]) -> None:
    """A gradient must be fp32 in exactly the output's shape. Non-finite values pass: all stages skip such a step."""
    if grad.dtype != torch.float32 or tuple(grad.shape) != expected:
        raise ProtocolError(f"gradient: {grad.dtype} {tuple(grad.shape)}, expected float32 {expected}")


def check_sample_values(name: str, ids: Tensor, vocab: int) -> None:
    """Integers must be in the vocabulary, floating-point numbers finite."""
    if ids.is_floating_point():
        if not is_finite(ids):
            raise ProtocolError(f"{name}: not finite")
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= vocab:
        raise ProtocolError(f"{name}: token ids {lowest}..{highest}, expected 0..{vocab - 1}")


def is_finite(x: Tensor) -> bool:
    """Are all fp32 numbers finite? The float64 sum, which cannot overflow, is finite exactly then: one pass, no
    temporaries."""
    return math.isfinite(float(x.sum(dtype=torch.float64)))


def _batch_fits(shape: tuple[int, ...], dims: int, spec: Model, sequences: int) -> bool:
    return len(shape) == dims and 1 <= shape[0] <= sequences and 1 <= shape[1] <= spec.context
