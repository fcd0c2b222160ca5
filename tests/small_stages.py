"""A small decoder in stages of ``TorchCompute``, and the same trained by a plain loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Microbatch, Update
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.model_sections import ModelConfig
from muletrain.config.schema import OptimizerConfig
from muletrain.model.dropout import Masks
from muletrain.model.spec import ModelSpec
from muletrain.optim.schedule import learning_rate
from tests.whole_model import build_full

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


SPEC = ModelSpec.from_config(
    ModelConfig(layers=4, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=16, dropout=0.2)
)
OPTIMIZER = OptimizerConfig(lr=0.01, warmup=2, clip=None)
STEPS, MICROBATCHES, SEQUENCES = 6, 3, 2
SETUP = StageSetup(OPTIMIZER, STEPS, seed=9, sequences=SEQUENCES)
MB = Microbatch(0, 0)


class Fleet:
    """The stages of a model in one process, closed at the end of the test."""

    def __init__(self) -> None:
        self.opened: list[TorchCompute] = []

    def __call__(
        self, stages: int = 2, spec: ModelSpec = SPEC, source: Any = None, **changes: Any
    ) -> list[TorchCompute]:
        setup = replace(SETUP, **changes)
        built = [TorchCompute(spec, spec.cut(stages), index, setup, source) for index in range(stages)]
        self.opened += built
        return built


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    opened = Fleet()
    yield opened
    for compute in opened.opened:
        compute.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def data(mb: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1000 * mb.step + mb.index)
    ids = torch.randint(0, SPEC.vocab, (SEQUENCES, SPEC.context + 1), generator=draws)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


async def through(stages: list[Any], mb: Microbatch, *, accumulate: bool = True) -> float:
    """One microbatch forward and backward through all stages."""
    x, targets = data(mb)
    for stage in stages[:-1]:
        x = await (await stage.forward(mb, x))
    loss, grad = await stages[-1].loss_backward(mb, x, targets, accumulate=accumulate)
    for stage in reversed(stages[:-1]):
        assert grad is not None
        grad = await stage.backward(mb, await grad, accumulate=accumulate)
    assert grad is None
    return float(loss)


async def train(stages: list[Any], steps: int = STEPS) -> list[float]:
    losses = []
    for step in range(steps):
        losses += [await through(stages, Microbatch(step, index)) for index in range(MICROBATCHES)]
        for stage in stages:
            await stage.apply(await stage.gradient(step) / MICROBATCHES, Update(step, 0.5, skip=False))
    return losses


async def weights(stages: list[Any]) -> dict[str, torch.Tensor]:
    states = [await stage.state() for stage in stages]
    return {n.removeprefix("model/"): t for state in states for n, t in state.items() if n.startswith("model/")}


def reference(spec: ModelSpec = SPEC, stages: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training as a plain torch loop; all gradients are halved, as the updates above ask for."""
    model = build_full(spec, 9, spec.cut(stages))
    norms = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step, STEPS)
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            ids, targets = data(Microbatch(step, index))
            loss = F.cross_entropy(model(ids, Masks(9, step, index)).flatten(0, 1), targets.flatten())
            losses.append(float(loss.detach()))
            torch.autograd.backward(loss * 0.5 / MICROBATCHES)
        optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


IDS = torch.zeros(SEQUENCES, SPEC.context, dtype=torch.int64)
X = torch.zeros(SEQUENCES, SPEC.context, SPEC.width)
