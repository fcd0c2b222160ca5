"""Plain single-process PyTorch training of the same model on the same microbatches: what a fleet must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from muletrain.model.dropout import Masks
from muletrain.optim.schedule import learning_rate
from tests.whole_model import build_full

if TYPE_CHECKING:
    from torch import nn

    from muletrain.config.schema import OptimizerConfig
    from muletrain.data.microbatch import MicrobatchSource
    from muletrain.runs.assemble import RunFacts


def _optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
    norms = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    kind = torch.optim.AdamW if config.name == "adamw" else Lamb
    return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, on top of torch's own Adam: its step from zero is the direction, and the weights go
    in it by their own length. 1-D parameters (norms) take Adam's step."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr})
        self._adam = torch.optim.Adam([p for g in groups for p in g["params"]], lr=1.0, betas=betas, eps=eps)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        for p in before:
            p.zero_()
        self._adam.step()
        for group in self.param_groups:
            for p in group["params"]:
                direction = group["weight_decay"] * before[p] - p
                length = before[p].norm() / direction.norm() if p.dim() >= 2 else 1.0
                p.copy_(before[p] - group["lr"] * length * direction)


def train_plainly(
    facts: RunFacts, source: MicrobatchSource, model: nn.Module | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights by name, and the loss of each step [nats/token], the mean over all targets of the batch that count. Under
    delayed updates the optimizer takes the gradient of a step once that of the next one was computed. ``model``: takes inputs and masks,
    and returns logits; default: the native decoder with its first weights."""
    config, microbatches = facts.config, facts.config.microbatches
    model = model or build_full(facts.spec, config.train.seed, facts.cut)
    optimizer = _optimizer(model, config.optimizer)
    losses: list[float] = []
    late: list[list[torch.Tensor]] = []
    for step in range(config.train.steps):
        model.zero_grad()
        total = 0.0
        batch = [[torch.from_numpy(a) for a in source.microbatch(step, index)] for index in range(microbatches)]
        batch = [(inputs, targets[:, : inputs.shape[1]]) for inputs, targets in batch]  # without the number that count
        counts = [int((targets < facts.spec.vocab).sum()) for _, targets in batch]
        for index, (inputs, targets) in enumerate(batch):
            if not counts[index]:
                continue
            logits = model(inputs, Masks(config.train.seed, step, index)).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=facts.spec.vocab)
            loss = loss * (counts[index] / sum(counts))
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        late.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        while late and (step + 1 == config.train.steps or len(late) > config.optimizer.delayed):
            for parameter, gradient in zip(
                (p for p in model.parameters() if p.requires_grad), late.pop(0), strict=True
            ):
                parameter.grad = gradient
            if config.optimizer.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optimizer, step - len(late), config.train.steps)
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses
