"""AdamW and LAMB on flat fp32 buffers, in place.

Both take the number of the update from the run's step and have no counter, so weights and moments are all that a
replica needs to continue exactly as the rest.
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
    """One optimizer of one stage. ``weights`` and ``gradient`` are flat fp32 [G], of trained parameters; moments live
    beside the weights."""

    moment1: Tensor
    moment2: Tensor
    by_tensor: bool
    """``update`` needs whole tensors; otherwise any range is allowed."""

    def step(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        """Change ``weights`` and the moments by the update number ``step`` (from 0). May overwrite ``gradient``."""
        ...

    def update(
        self, weights: Tensor, gradient: Tensor, moment1: Tensor, moment2: Tensor, step: int, *, decayed: bool
    ) -> None:
        """``step`` for a range of the stage, flat, with moments. ``decayed``: the range is in matrices, to which weight
        decay applies."""
        ...


def make_rule(
    config: OptimizerConfig, total_steps: int, layout: FlatLayout, device: torch.device, *, moments: bool = True
) -> Rule:
    """The rule that ``config.name`` asks for, with zero moments on ``device``. Without ``moments``, only ``update``
    works."""
    rule = AdamW if config.name == "adamw" else Lamb
    return rule(config, total_steps, layout, device, layout.trained if moments else 0)


class _Moments:
    """The moments of both rules."""

    def __init__(
        self, config: OptimizerConfig, total_steps: int, layout: FlatLayout, device: torch.device, size: int
    ) -> None:
        self._config = config
        self._total_steps = total_steps
        self._layout = layout.trainable()
        self.moment1 = torch.zeros(size, device=device)
        self.moment2 = torch.zeros(size, device=device)


class AdamW(_Moments):
    """Equal to ``torch.optim.AdamW`` (Loshchilov & Hutter 2019): torch's fused kernel, once over each run of the
    buffer.
    """

    by_tensor = False

    def step(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        end = self._layout.decayed
        for run, decayed in ((slice(0, end), True), (slice(end, None), False)):
            buffers = (weights[run], gradient[run], self.moment1[run], self.moment2[run])
            self.update(*buffers, step, decayed=decayed)

    def update(
        self, weights: Tensor, gradient: Tensor, moment1: Tensor, moment2: Tensor, step: int, *, decayed: bool
    ) -> None:
        config = self._config
        if weights.numel() == 0:
            return
        torch._fused_adamw_(
            [weights],
            [gradient],
            [moment1],
            [moment2],
            [],
            [torch.full((), float(step + 1), device=weights.device)],  # made there: a copy would wait for the device
            lr=learning_rate(config, step, self._total_steps),
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=config.weight_decay if decayed else 0.0,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
        )


class Lamb(_Moments):
    """You et al. 2020, algorithm 2, with bias correction: Adam's direction, rescaled per tensor to the length of the
    weights.

    Norms (1-D) get neither weight decay nor the rescaling, as in the authors' code (``exclude_from_layer_adaptation``).
    Tensor by tensor: the temporaries are as large as the largest tensor, and the result does not depend on the cut.
    """

    by_tensor = True

    def step(self, weights: Tensor, gradient: Tensor, step: int) -> None:
        for a, b in self._layout.ranges():
            buffers = (weights[a:b], gradient[a:b], self.moment1[a:b], self.moment2[a:b])
            self.update(*buffers, step, decayed=b <= self._layout.decayed)

    def update(
        self, weights: Tensor, gradient: Tensor, moment1: Tensor, moment2: Tensor, step: int, *, decayed: bool
    ) -> None:
        direction = self._direction(gradient, moment1, moment2, step + 1)
        if decayed:
            direction.add_(weights, alpha=self._config.weight_decay)
            direction.mul_(_trust(weights, direction))
        weights.sub_(direction, alpha=learning_rate(self._config, step, self._total_steps))

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
