"""What is trained in a virtual world, and the single process that every world is compared with."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from muletrain.compute.base import Microbatch, Update
from muletrain.compute.torch_compute import StageSetup, TorchCompute
from muletrain.config.load import load_config
from muletrain.data.microbatch import sequence_length
from muletrain.model.spec import ModelSpec
from muletrain.optim.schedule import learning_rate
from muletrain.sim.loop import run_virtually
from muletrain.swarm.context import Plan

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from muletrain.config.schema import OptimizerConfig, RunConfig
    from muletrain.policy.partition import Cut
    from muletrain.sim.scenario import Scenario


@dataclass(frozen=True)
class Facts:
    """Of one scenario."""

    config: RunConfig
    spec: ModelSpec
    cut: Cut
    plan: Plan


class Tokens:
    """Microbatches as pure functions of (seed, step, index)."""

    def __init__(self, facts: Facts) -> None:
        self._sequences, self._length = facts.config.train.microbatch, facts.plan.sequence_length
        self._seed, self._vocab = facts.config.train.seed, facts.spec.vocab

    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        shape = (2, self._sequences, self._length(step))
        drawn = np.random.default_rng((self._seed, step, index)).integers(0, self._vocab, shape)
        return drawn[0], drawn[1]


def facts_of(scenario: Scenario) -> Facts:
    """A tiny decoder, a layer a stage, and the plan for it."""
    config = load_config(
        None,
            [
                "model.width=16", "model.heads=2", f"model.layers={len(scenario.stages)}", "model.context=4", "model.vocab=640",
                "model.dropout=0.1", "train.microbatch=1", f"train.batch={scenario.microbatches}", f"train.steps={scenario.steps}",
                f"train.seed={scenario.seed}", f"fleet.stages={len(scenario.stages)}", f"fleet.peers={sum(scenario.stages)}",
                "optimizer.warmup=1", "optimizer.eps=1e-5", "optimizer.clip=0.5",
                "wire.activations=fp32", "wire.gradients=fp32", "compute.precision=fp32", "checkpoint.every=0",
                *scenario.overrides,
            ],
    )  # fmt: skip
    spec = ModelSpec.from_config(config.model)
    plan = Plan(
        stages=len(scenario.stages), steps=scenario.steps, microbatches=scenario.microbatches, sequences=1, width=spec.width,
        vocab=spec.vocab,
        sequence_length=functools.partial(
            sequence_length, context=spec.context, start=config.train.sequence_start, warmup=config.train.sequence_warmup
        ),
        activations=config.wire.activations,
        gradients=config.wire.gradients, clip=config.optimizer.clip,
        lr=lambda step: learning_rate(config.optimizer, step, scenario.steps),
        checkpoint_every=scenario.checkpoint_every, adopt_after_s=scenario.adopt_after_s, from_seed=True, capacity=scenario.capacity,
        rebalance=scenario.rebalance, rebalance_s=scenario.rebalance_s, trace=scenario.trace, work=(1.0,) * len(scenario.stages),
        state_bytes=(0,) * len(scenario.stages), delayed=config.optimizer.delayed,
    )  # fmt: skip
    return Facts(config, spec, spec.cut(len(scenario.stages)), plan)


class VirtualCompute(TorchCompute):
    """What trains in production, without threads, and open to a look from outside between two events."""

    def weights(self) -> dict[str, Tensor]:
        return {f"model/{name}": view for name, view in self._weights.layout.views(self._weights.masters).items()}

    def weights_digest(self) -> bytes:
        return self._weights.digest()


def stage_compute(facts: Facts, stage: int) -> VirtualCompute:
    """What trains ``stage``."""
    return _compute(facts, facts.cut, stage, facts.config.optimizer)


def _compute(facts: Facts, cut: Cut, stage: int, optimizer: OptimizerConfig) -> VirtualCompute:
    config = facts.config
    setup = StageSetup(
        optimizer=optimizer, total_steps=config.train.steps, seed=config.train.seed,
        sequences=config.train.microbatch, precision=config.compute.precision, inline=True,
    )  # fmt: skip
    return VirtualCompute(facts.spec, cut, stage, setup)


def history(scenario: Scenario) -> list[dict[str, Tensor]]:
    """The state of a single process after each step: the whole model, no network, no protocol, no faults. Delayed updates are those of a
    plain optimizer, each made once the step after it was computed."""

    async def train() -> list[dict[str, Tensor]]:
        facts = facts_of(scenario)
        at_once = facts.config.optimizer.model_copy(update={"delayed": False})
        tokens, compute = Tokens(facts), _compute(facts, facts.spec.cut(1), 0, at_once)
        states: list[dict[str, Tensor]] = []
        late: list[tuple[Tensor, Update]] = []
        for step in range(scenario.steps):
            for index in range(scenario.microbatches):
                inputs, targets = (torch.from_numpy(a) for a in tokens.microbatch(step, index))
                await compute.loss_backward(Microbatch(step, index), inputs, targets, accumulate=True)
            mean = compute.gradient(step).clone() / scenario.microbatches
            compute.clear(step)
            norm = float(mean.double().norm())
            clip = facts.config.optimizer.clip
            scale = min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0
            late.append((mean, Update(step, scale, skip=not math.isfinite(norm))))
            while late and (step + 1 == scenario.steps or len(late) > facts.plan.delayed):
                await compute.apply(*late.pop(0))
                states.append(await compute.state())
        return states

    problems: list[str] = []
    return run_virtually(train(), math.inf, problems)
