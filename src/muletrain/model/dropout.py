"""Dropout with a deterministic mask: a pure function of (seed, step, microbatch, site, element), the same on every
device.

A peer that recomputes a microbatch after a failure must draw the same masks as the first peer (CONTRIBUTING, "How a
step goes", 1), and torch's generators differ between devices. One 32-bit hash of a counter makes four 8-bit uniforms,
so the drop probability is a multiple of 1/256; the scaling uses that exact probability, so the expectation is exact.
Only int32 tensor operations are used: integers wrap alike on CPUs and accelerators (and 8-bit views are little endian
on all devices).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B9
_MUL_1, _MUL_2 = 0x7FEB352D, 0x846CA68B  # "lowbias32": C. Wellons, hash prospector, 2018


@dataclass(frozen=True)
class Masks:
    """Identity of one microbatch's masks."""

    seed: int
    step: int
    index: int
    first: int = 0
    """The microbatch's sequence with which this part begins."""

    def keep(self, site: int, count: int, probability: float, device: torch.device, skip: int = 0) -> Tensor:
        return keep_mask(self, site, count, probability, device, skip)


def keep_mask(masks: Masks, site: int, count: int, probability: float, device: torch.device, skip: int = 0) -> Tensor:
    """uint8 [count]: 1 keeps, 0 drops the element. ``site`` numbers the places of the model where dropout is applied.
    ``skip``: preceding elements of the microbatch.
    """
    key_1, key_2 = _keys(masks, site)
    whole, rest = divmod(skip, 4)
    words = _counters(-(-(skip + count) // 4), device)[whole:] + key_1
    words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF)).mul_(
        _MUL_1
    )  # ">>" of int32 drags the sign along: cut it off
    words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF)).add_(key_2).mul_(_signed(_MUL_2))
    words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))
    return (words.view(torch.uint8)[rest : rest + count] >= drop_threshold(probability)).view(torch.uint8)


def drop_threshold(probability: float) -> int:
    """The threshold, below which bytes are dropped: the probability in 256ths, never all."""
    return min(255, round(probability * 256))


def dropout(
    x: Tensor, masks: Masks | None, site: int, probability: float, sequence_numbers: int | None = None
) -> Tensor:
    """``x`` with some elements zeroed and the rest scaled to the same expectation; ``x`` itself without ``masks``.
    ``sequence_numbers``: numbers of one sequence in ``x``; default: the first axis counts sequences."""
    threshold = drop_threshold(probability)
    if masks is None or threshold == 0:
        return x
    dropped: Tensor = _Dropout.apply(  # type: ignore[no-untyped-call]
        x, kept(x, masks, site, probability, sequence_numbers), scale_of(probability)
    )
    return dropped


def kept(x: Tensor, masks: Masks, site: int, probability: float, sequence_numbers: int | None = None) -> Tensor:
    """The mask of ``dropout``, uint8 in the shape of ``x``."""
    before = masks.first * (x[0].numel() if sequence_numbers is None else sequence_numbers)
    return masks.keep(site, x.numel(), probability, x.device, before).view(x.shape)


def scale_of(probability: float) -> float:
    """The factor of kept elements."""
    return 256 / (256 - drop_threshold(probability))


class _Dropout(torch.autograd.Function):
    """x * keep * scale, saving the byte mask only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grad * keep).mul_(ctx.scale), None, None


@lru_cache(maxsize=8)
def _counters(words: int, device: torch.device) -> Tensor:
    """int32 [words]: the element counters, spread over 32 bits."""
    return torch.arange(words, dtype=torch.int32, device=device).mul_(_signed(_GOLDEN))


def _keys(masks: Masks, site: int) -> tuple[int, int]:
    """Two 32-bit keys, as signed numbers, that any change of an argument changes."""
    state = 0
    for value in (masks.seed, masks.step, masks.index, site):
        state = _splitmix64(state ^ value)
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def _splitmix64(value: int) -> int:
    """Steele et al. 2014: a bijection of 64-bit words."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - (1 << 32) if value >= 1 << 31 else value
