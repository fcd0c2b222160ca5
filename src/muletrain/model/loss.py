"""The loss in chunks of tokens: the logits of a whole microbatch, [B, T, vocabulary] in fp32, never exist at once.

The gradients of a chunk are computed right after its loss, so nothing is computed twice, and only sums remain (as in
Liger, Hsu et al. 2024, sec. 3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def positions_in(targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The position of each token in its conversation, and the targets of the loss, both int64 [B, T]. ``targets``: int64
    [B, T], of which ``vocab`` does not count, and ``vocab + 1`` does not count and begins a conversation."""
    places = torch.arange(targets.shape[1], device=targets.device)
    begun = F.pad(targets[:, :-1] > vocab, (1, 0))
    return places - torch.where(begun, places, 0).cummax(1).values, targets.clamp(max=vocab)


class Head(NamedTuple):
    """The part after the last block, which computes each token by itself."""

    logits: Callable[[Sequence[Tensor]], Tensor]
    """From values, each [1, N, ...], to [1, N, vocabulary]."""
    values: Sequence[Tensor]
    """The values of a microbatch, each [B, T, ...]."""
    parameters: Sequence[Tensor]
    """The trained parameters of ``logits``."""


def chunked_loss(head: Head, targets: Tensor, ignored: int, tokens: int, scale: float) -> Tensor:
    """The mean cross-entropy [nats/token], a scalar in fp32, in chunks of ``tokens``. ``targets``: int64 [B, T]; ``ignored``
    targets do not count. ``scale``: about the gradient of the loss, in which fp16 gradients are computed."""
    flat = [value.reshape(1, targets.numel(), *value.shape[2:]) for value in head.values]
    targets = targets.to(flat[0].device).flatten()
    plan = head.logits, targets, ignored, tokens, scale, len(flat)
    parameters = head.parameters if torch.is_grad_enabled() else ()  # which is off inside of the function
    loss: Tensor = _Chunked.apply(*plan, *flat, *parameters)  # type: ignore[no-untyped-call]
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Callable[[Sequence[Tensor]], Tensor],
        targets: Tensor,
        ignored: int,
        tokens: int,
        scale: float,
        inputs: int,
        *given: Tensor,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[-len(given) :]
        parameters = [p for p, w in zip(given[inputs:], wanted[inputs:], strict=True) if w]
        passed = [torch.empty_like(v) if w else None for v, w in zip(given[:inputs], wanted, strict=False)]
        sums: list[Tensor] = []
        counted, total = (targets != ignored).sum().clamp(min=1), torch.zeros((), device=targets.device)
        for begin in range(0, len(targets), tokens):
            chunk = slice(begin, begin + tokens)
            pieces = [v[:, chunk].detach().requires_grad_(g is not None) for v, g in zip(given, passed, strict=False)]
            leaves = [p for p in pieces if p.requires_grad] + parameters
            with torch.set_grad_enabled(bool(leaves)):
                # the logits have no name: they go before the backward
                summed = F.cross_entropy(
                    logits(pieces).float().flatten(0, 1), targets[chunk], ignore_index=ignored, reduction="sum"
                )
                loss = summed / counted
            total += loss.detach()
            if not leaves:
                continue
            gradients = torch.autograd.grad(loss, leaves, torch.full_like(loss, scale))
            own = iter(gradients)
            for gradient in passed:
                if gradient is not None:
                    gradient[:, chunk] = next(own)
            if sums:
                torch._foreach_add_(sums, [*own])
            else:
                sums = [*own]
        ctx.scale = scale
        ctx.gradients = [*passed, *(sums.pop(0) if w else None for w in wanted[inputs:])]
        return total

    @staticmethod
    def backward(ctx: Any, seed: Tensor) -> Any:
        return (None,) * 6 + tuple(None if g is None else g.mul_(seed / ctx.scale) for g in ctx.gradients)
