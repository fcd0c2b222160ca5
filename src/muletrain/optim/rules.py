"""AdamW and LAMB on flat fp32 buffers, in place.

Both take the number of the update from the run's step and have no counter of their own, so weights and moments are all
that a replica needs to go on exactly as the others do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from muletrain.optim.norms import norm
from muletrain.optim.schedule import learning_rate

if TYPE_CHECKING:
    from muletrain.config.schema import OptimizerConfig
    from muletrain.optim.flat import FlatLayout


class Rule(Protocol):
    """One optimizer of one stage. ``weights`` and ``gradient`` are flat fp32 [P]; moments live beside the weights."""

    moment1: Tensor
    moment2: Tensor

    def step(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        """Change ``weights`` and the moments by the update number ``step`` (from 0). May overwrite ``gradient``."""
        ...


def make_rule(config: OptimizerConfig, total_steps: int, layout: FlatLayout, device: torch.device) -> Rule:
    """The rule that ``config.name`` asks for, with zero moments on ``device``."""
    rule = AdamW if config.name == "adamw" else Lamb
    return rule(config, total_steps, layout, device)


class _Moments:
    """The moments of both rules."""

    def __init__(self, config: OptimizerConfig, total_steps: int, layout: FlatLayout, device: torch.device) -> None:
        self._config = config
        self._total_steps = total_steps
        self._layout = layout
        self.moment1 = torch.zeros(layout.size, device=device)
        self.moment2 = torch.zeros(layout.size, device=device)


class AdamW(_Moments):
    """Equal to ``torch.optim.AdamW`` (Loshchilov & Hutter 2019): torch's fused kernel, once over each run of the
    buffer.
    """

    def step(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        config, end = self._config, self._layout.decayed
        number = torch.tensor(float(step + 1), device=weights.device)
        for run, decay in ((slice(0, end), config.weight_decay), (slice(end, None), 0.0)):
            if weights[run].numel() == 0:
                continue
            torch._fused_adamw_(
                [weights[run]],
                [gradient[run]],
                [self.moment1[run]],
                [self.moment2[run]],
                [],
                [number],
                lr=learning_rate(config, step, self._total_steps),
                beta1=config.betas[0],
                beta2=config.betas[1],
                weight_decay=decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
            )


class Lamb(_Moments):
    """You et al. 2020, algorithm 2, with bias correction: Adam's direction, rescaled per tensor to the length of the
    weights.

    Norms (1-D) get neither weight decay nor the rescaling, as in the authors' code (``exclude_from_layer_adaptation``).
    Tensor by tensor: the temporaries are as large as the largest of them, and the result does not depend on the cut.
    """

    def step(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        buffers = (weights, gradient, self.moment1, self.moment2)
        views = [self._layout.views(buffer) for buffer in buffers]
        lr = learning_rate(self._config, step, self._total_steps)
        for name in self._layout.names:
            weight, grad, moment1, moment2 = (view[name] for view in views)
            direction = self._direction(grad, moment1, moment2, step + 1)
            if weight.dim() >= 2:
                direction.add_(weight, alpha=self._config.weight_decay)
                direction.mul_(_trust(weight, direction))
            weight.sub_(direction, alpha=lr)

    def _direction(self, grad: Tensor, moment1: Tensor, moment2: Tensor, number: int) -> Tensor:
        """Update both moments; m / (1 - beta1^n) / (sqrt(v / (1 - beta2^n)) + eps)."""
        beta1, beta2 = self._config.betas
        moment1.lerp_(grad, 1 - beta1)
        moment2.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = moment2.sqrt().div_((1 - beta2**number) ** 0.5).add_(self._config.eps)
        return torch.div(moment1, denominator.mul_(1 - beta1**number))


def _trust(weight: Tensor, direction: Tensor) -> Tensor:
    """|weight| / |direction|, or 1 if either is zero; a tensor, so that the CPU does not wait for an accelerator."""
    length, other = norm(weight), norm(direction)
    return torch.where((length > 0) & (other > 0), length / other, torch.ones_like(length))
