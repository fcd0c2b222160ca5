"""Finds numbers that a type cannot hold: NaN, infinities, and numbers out of range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from muletrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of weights by user-visible names."""


def unfit(tensor: Tensor, dtype: torch.dtype = torch.float32) -> str | None:
    """The number of values of ``tensor`` without a finite value in ``dtype``, in words; None: no such value, or
    integers."""
    if not tensor.numel() or not tensor.is_floating_point():
        return None
    most = torch.finfo(dtype).max
    low, high = (float(end) for end in torch.aminmax(tensor.detach()))
    if -most <= low and high <= most:  # false for NaN
        return None
    if broken := int((~tensor.isfinite()).sum()):
        return f"{broken:,} of {tensor.numel():,} values are NaN or infinite"
    beyond, name = int((tensor.abs() > most).sum()), next(name for name, known in NAMES.items() if known == dtype)
    return f"{beyond:,} of {tensor.numel():,} values are beyond {most:g}, the largest of {name} (up to {max(-low, high):g})"


OTHER_WEIGHTS = "begin with other weights"
"""The remedy for weights that are not finite."""


def finite(
    load: Callable[[str], Tensor], where: str, dtype: torch.dtype = torch.float32, *, remedy: str = OTHER_WEIGHTS
) -> Callable[[str], Tensor]:
    """``load``, which raises CheckpointError for weights that ``dtype`` cannot hold. ``where`` and ``remedy``: the
    place of the weights, and the advice for weights that are not finite, for the error."""

    def checked(name: str) -> Tensor:
        tensor = load(name)
        if (why := unfit(tensor, dtype)) is not None:
            what = "set compute.precision = bf16 or fp32" if unfit(tensor) is None else remedy
            raise CheckpointError(f"{where}: {name}: {why}; {what}")
        return tensor

    return checked
