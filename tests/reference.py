"""Plain single-process PyTorch training of the same model on the same microbatches: what a fleet must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from muletrain.model.dropout import Masks
from muletrain.model.stage import Stage, build_full
from muletrain.optim.flat import FlatLayout
from muletrain.optim.rules import Lamb
from muletrain.optim.schedule import learning_rate

if TYPE_CHECKING:
    from muletrain.config.schema import OptimizerConfig
    from muletrain.data.microbatch import MicrobatchSource
    from muletrain.runs.assemble import RunFacts


def _optimizer(model: Stage, config: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def train_plainly(facts: RunFacts, source: MicrobatchSource) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights by name, and the loss of each step [nats/token]."""
    config, microbatches = facts.config, facts.config.microbatches
    model = build_full(facts.spec, config.train.seed, facts.cut)
    parameters = dict(model.named_parameters())
    adamw = _optimizer(model, config.optimizer) if config.optimizer.name == "adamw" else None
    layout = FlatLayout.of({n: tuple(p.shape) for n, p in parameters.items()})
    lamb = Lamb(config.optimizer, config.train.steps, layout, torch.device("cpu"))
    losses = []
    for step in range(config.train.steps):
        model.zero_grad()
        total = 0.0
        for index in range(microbatches):
            inputs, targets = (torch.from_numpy(a) for a in source.microbatch(step, index))
            logits = model(inputs, Masks(config.train.seed, step, index))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / microbatches).backward()
            total += float(loss.detach())
        losses.append(total / microbatches)
        if config.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        if adamw is not None:
            for group in adamw.param_groups:
                group["lr"] = learning_rate(config.optimizer, step, config.train.steps)
            adamw.step()
            continue
        weights, gradient = torch.empty(layout.size), torch.empty(layout.size)
        for name, view in layout.views(weights).items():
            view.copy_(parameters[name].detach())
        for name, view in layout.views(gradient).items():
            grad = parameters[name].grad
            assert grad is not None
            view.copy_(grad)
        lamb.step(weights, gradient, step)
        with torch.no_grad():
            for name, view in layout.views(weights).items():
                parameters[name].copy_(view)
    return {name: p.detach().clone() for name, p in parameters.items()}, losses
