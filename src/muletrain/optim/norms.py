"""Norms are sums over fixed blocks, so they depend neither on the number of threads nor on the tensor's size (a plain
fp32 sum stops growing after some 10^8 squares)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from muletrain.policy.shards import BLOCK

TINY = 1e-30
"""Mean square below which squares of single numbers may fall out of fp32's range."""


def block_norms(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The Euclidean norm of each ``BLOCK`` numbers of ``values`` (flat, fp32), the last of fewer, summed in ``dtype``."""
    whole = values.numel() // BLOCK * BLOCK
    rows = [values[:whole].view(-1, BLOCK), values[whole:].view(1, -1)]
    return torch.cat([torch.linalg.vector_norm(r, dim=1, dtype=dtype) for r in rows])


def square_norm(values: Tensor) -> float:
    """Squared Euclidean norm: blocks in fp32, the sum over blocks in fp64. Equals fp64 throughout to 1e-8, in a quarter
    of the time. Where squares leave fp32's range, blocks are summed in fp64, too."""
    found = float(block_norms(values).double().square().sum())
    if TINY * values.numel() <= found < math.inf:
        return found
    return float(block_norms(values, torch.float64).square().sum())


def norm(values: Tensor) -> Tensor:
    """Euclidean norm of ``values`` (fp32, contiguous), as norms of norms of blocks. Returns a tensor, so that the CPU
    does not wait for an accelerator."""
    norms = block_norms(values.view(-1))
    while norms.numel() > 1:
        norms = block_norms(norms)
    return norms[0]
