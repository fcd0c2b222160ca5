"""What is trained in a virtual world, and the single process that every world is compared with."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from muletrain.compute.arithmetic import StageSetup
from muletrain.compute.base import Update
from muletrain.compute.estimate import Offer
from muletrain.compute.swap.fit import swap_memory
from muletrain.compute.swap.swapped import Swap, SwappedCompute
from muletrain.compute.torch_compute import TorchCompute
from muletrain.config.load import load_config
from muletrain.config.schema import Precision
from muletrain.data.microbatch import HeldoutSource, MicrobatchSource, sequence_length
from muletrain.model.dropout import Masks, keep_mask
from muletrain.model.make import make_model, make_stage, tied_between
from muletrain.optim.schedule import learning_rate
from muletrain.runtime.core.plan import Plan, Validation
from muletrain.strategies import strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from muletrain.config.schema import OptimizerConfig, RunConfig
    from muletrain.model.chain import Model
    from muletrain.model.module import StageModule
    from muletrain.planning.partition import Cut
    from proofs.scenario import Scenario


CORPUS = 20_000
"""Tokens."""


@dataclass(frozen=True)
class Facts:
    """Of one scenario."""

    config: RunConfig
    spec: Model
    cut: Cut
    plan: Plan
    given: Callable[[str], Tensor] | None = None
    """The first weights; None: they are drawn."""


class Tokens:
    """Microbatches as pure functions of (seed, step, index)."""

    def __init__(self, facts: Facts) -> None:
        self._sequences, self._length = facts.config.train.microbatch, facts.plan.sequence_length
        self._seed, self._vocab = facts.config.train.seed, facts.spec.vocab
        self._kinds = facts.spec.inputs, facts.spec.targets

    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        draws = np.random.default_rng((self._seed, step, index))
        shapes = [kind.batch(self._sequences, self._length(step)) for kind in self._kinds]
        inputs, targets = (
            draws.integers(0, self._vocab, shape)
            if kind.dtype == "int64"
            else draws.standard_normal(shape, dtype=np.float32)
            for kind, shape in zip(self._kinds, shapes, strict=True)
        )
        return inputs, targets

    def batch(self, step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        """All inputs and all targets of a step, of tokens int64 [microbatches * B, T]."""
        inputs, targets = zip(*(self.microbatch(step, index) for index in range(microbatches)), strict=True)
        return torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))


def corpus(facts: Facts) -> npt.NDArray[np.uint16]:
    """What the data owner of a world has."""
    drawn = np.random.default_rng(facts.config.train.seed).integers(0, facts.spec.vocab, CORPUS)
    return drawn.astype("<u2")


class Corpus(Tokens):
    """Microbatches of a corpus, as in production."""

    def __init__(self, facts: Facts, tokens: npt.NDArray[np.integer]) -> None:
        super().__init__(facts)
        train = facts.config.train
        self._source = MicrobatchSource(
            tokens,
            train.seed,
            train.batch,
            train.microbatch,
            facts.spec.context,
            train.sequence_start,
            train.sequence_warmup,
            train.data_offset,
        )

    def microbatch(self, step: int, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self._source.microbatch(step, index)


def heldout(facts: Facts) -> HeldoutSource | None:
    """What the data owner measures the held-out loss on; None: it is not measured."""
    train = facts.config.train
    if facts.plan.validation is None:
        return None
    return HeldoutSource(
        corpus(facts)[: train.validate_tokens + 1], facts.spec.context, train.microbatch, facts.spec.vocab
    )


def tokens_of(scenario: Scenario, facts: Facts) -> Tokens:
    """Where its microbatches come from."""
    return Corpus(facts, corpus(facts)) if scenario.share else Tokens(facts)


EXACT = (
    "optimizer.warmup=1",
    "optimizer.eps=1e-5",
    "optimizer.clip=0.5",
    "wire.activations=fp32",
    "wire.gradients=fp32",
    "compute.precision=fp32",
    "checkpoint.every=0",
)
"""Settings of all worlds, unless they draw others."""


def facts_of(scenario: Scenario) -> Facts:
    """A tiny decoder, a layer a stage, and the plan for it."""
    config = load_config(
        None,
        [
            "model.width=16",
            "model.heads=2",
            f"model.layers={len(scenario.stages)}",
            "model.context=4",
            "model.vocab=640",
            "model.dropout=0.1",
            f"train.microbatch={scenario.sequences}",
            f"train.batch={scenario.microbatches * scenario.sequences}",
            f"train.steps={scenario.steps}",
            f"train.seed={scenario.seed}",
            f"fleet.stages={len(scenario.stages)}",
            f"fleet.peers={sum(scenario.stages)}",
            *EXACT,
            *([f"hub.clients={len(scenario.clients)}"] if scenario.clients else []),
            *scenario.overrides,
        ],
    )
    spec = make_model(config.model)
    cut = spec.cut(len(scenario.stages))
    spec = spec.placed(cut)
    plan = Plan(
        stages=len(scenario.stages),
        steps=scenario.steps,
        microbatches=scenario.microbatches,
        sequences=scenario.sequences,
        width=spec.passed,
        vocab=spec.vocab,
        inputs=spec.inputs,
        targets=spec.targets,
        sequence_length=functools.partial(
            sequence_length,
            context=spec.context,
            start=config.train.sequence_start,
            warmup=config.train.sequence_warmup,
        ),
        activations=config.wire.activations,
        gradients=config.wire.gradients,
        clip=config.optimizer.clip,
        lr=lambda step: learning_rate(config.optimizer, step, scenario.steps),
        checkpoint_every=scenario.checkpoint_every,
        max_skipped=config.train.max_skipped,
        adopt_after_s=scenario.adopt_after_s,
        from_seed=not scenario.given_weights,
        capacity=scenario.capacity,
        rebalance=scenario.rebalance,
        rebalance_s=scenario.rebalance_s,
        trace=scenario.trace,
        work=(1.0,) * len(scenario.stages),
        state_bytes=(0,) * len(scenario.stages),
        delayed=config.optimizer.delayed,
        verify=config.hub.verify if scenario.clients else 0.0,
        strategy=strategy_of(config),
        tied=tied_between(spec, cut),
        alone=scenario.alone,
        validation=Validation.of(config.train, spec),
    )
    facts = Facts(config, spec, cut, plan)
    return replace(facts, given=_given(facts)) if scenario.given_weights else facts


@functools.lru_cache(maxsize=1 << 14)
def _keep_mask(masks: Masks, site: int, count: int, probability: float, device: torch.device, skip: int) -> Tensor:
    return keep_mask(masks, site, count, probability, device, skip)


class _KnownMasks(Masks):
    """Drawn once: the single process, forward passes and those that are repeated want the same."""

    def keep(self, site: int, count: int, probability: float, device: torch.device, skip: int = 0) -> Tensor:
        return _keep_mask(self, site, count, probability, device, skip)


class _MasksOfAll(Masks):
    """Of the microbatches up to ``index``, one after the other."""

    def keep(self, site: int, count: int, probability: float, device: torch.device, skip: int = 0) -> Tensor:
        each = [_KnownMasks(self.seed, self.step, index) for index in range(self.index)]
        return torch.cat([masks.keep(site, count // len(each), probability, device) for masks in each])


class VirtualCompute(TorchCompute):
    """What trains in production, without threads, and open to a look from outside between two events."""

    def weights(self) -> dict[str, Tensor]:
        return {f"model/{name}": view for name, view in self.layout.views(self.arithmetic.masters).items()}

    def weights_digest(self) -> bytes:
        return self.arithmetic.digest()


class VirtualSwapped(SwappedCompute):
    """A stage that is swapped, block by block, with its state in memory."""

    def weights(self) -> dict[str, Tensor]:
        state = self.state_
        return {f"model/{name}": view for name, view in state.layout.views(state.model.values).items()}

    def weights_digest(self) -> bytes:
        return self.state_.digest()


class SingleProcess(VirtualCompute):
    """The whole model, whose layers are shared, if they are, as in the run's stages. It takes the microbatches of a
    step together."""

    def __init__(self, facts: Facts, setup: StageSetup) -> None:
        self._runs, self._each = facts.cut, facts.plan.sequences
        super().__init__(facts.spec, facts.spec.cut(1), 0, replace(setup, checkpointing="always"), facts.given)

    def _empty(self, spec: Model, cut: Cut) -> StageModule:
        return make_stage(spec, None, self._runs)

    def mean_gradient(self, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        """Of the microbatches, flat fp32 [P], and their mean loss [nats/token]; ``inputs`` and ``targets``: tokens
        [microbatches * B, T]."""
        setup, microbatches = self.arithmetic.setup, len(inputs) // self._each
        if setup.precision is not Precision.FP16:
            gradient, loss = self._sums(step, inputs, targets, _MasksOfAll(setup.seed, step, microbatches))
        else:  # a sum of fp16 numbers overflows where each of them does not
            masks = (_KnownMasks(setup.seed, step, index) for index in range(microbatches))
            each = (slice(a, a + self._each) for a in range(0, len(inputs), self._each))
            parts = [self._sums(step, inputs[rows], targets[rows], m) for rows, m in zip(each, masks, strict=True)]
            gradient, loss = torch.stack([g for g, _ in parts]).sum(dim=0), sum(part for _, part in parts)
        return gradient / (self.arithmetic.scale.of(step) * len(inputs)), loss / len(inputs)

    def _sums(self, step: int, inputs: Tensor, targets: Tensor, masks: Masks) -> tuple[Tensor, float]:
        """Over microbatches: of scaled gradients, and of losses."""
        own = self.arithmetic
        with torch.enable_grad():
            losses = own.module(step).loss(inputs, targets, masks) * len(inputs)
            gradients = torch.autograd.grad(losses * own.scale.of(step), own.parameters(step))
        return torch.cat([g.flatten().float() for g in gradients]), float(losses.detach())

    def update(self, gradient: Tensor, update: Update) -> None:
        self.arithmetic.apply(gradient, update)


def stage_compute(facts: Facts, stage: int, *, joins: bool = False) -> VirtualCompute:
    """What trains ``stage``. Who ``joins`` takes others' weights anyway."""
    given = None if joins else facts.given
    return VirtualCompute(facts.spec, facts.cut, stage, _setup(facts, facts.config.optimizer), given)


def swapped_compute(facts: Facts, stage: int, *, joins: bool = False) -> VirtualSwapped:
    """What trains ``stage`` on a device that holds two of its blocks."""
    setup, lamb = _setup(facts, facts.config.optimizer), facts.config.optimizer.name == "lamb"
    tokens = setup.sequences * facts.spec.context
    cut, alone = facts.cut, facts.plan.alone
    need = swap_memory(
        facts.spec, cut, stage, tokens, setup.precision, microbatches=4, lamb=lamb, disk=False, alone=alone
    )
    swap = Swap(Offer(need.least, need.on_host), None, most=4, least=1, alone=alone)
    return VirtualSwapped(facts.spec, facts.cut, stage, setup, swap, None if joins else facts.given)


def client_compute(facts: Facts, stage: int) -> VirtualCompute:
    """What computes parts of ``stage``."""
    setup = replace(_setup(facts, facts.config.optimizer), updates=False)
    return VirtualCompute(facts.spec, facts.cut, stage, setup)


def _given(facts: Facts) -> Callable[[str], Tensor]:
    """First weights that are not those of the seed."""
    setup = replace(_setup(facts, facts.config.optimizer), seed=facts.config.train.seed + 1)
    other = SingleProcess(facts, setup).weights()
    return lambda name: other[f"model/{name}"].clone()


def _setup(facts: Facts, optimizer: OptimizerConfig) -> StageSetup:
    config = facts.config
    return StageSetup(
        optimizer=optimizer,
        total_steps=config.train.steps,
        seed=config.train.seed,
        sequences=config.train.microbatch,
        precision=config.compute.precision,
        checkpointing=config.compute.checkpointing,
        inline=True,
        masks=_KnownMasks,
    )


class History(list[dict[str, "Tensor"]]):
    """States after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        """Of each step [nats/token]."""
        self.norms: list[float] = []
        """Of each step's mean gradient."""


def history(scenario: Scenario) -> History:
    """The weights of a single process after each step: the whole model, no network, no protocol, no faults. Delayed
    updates are those of a plain optimizer, each made once the step after it was computed."""
    facts = facts_of(scenario)
    at_once = facts.config.optimizer.model_copy(update={"delayed": False})
    tokens, compute = tokens_of(scenario, facts), SingleProcess(facts, _setup(facts, at_once))
    states = History()
    late: list[tuple[Tensor, Update]] = []
    for step in range(scenario.steps):
        mean, loss = compute.mean_gradient(step, *tokens.batch(step, scenario.microbatches))
        norm = float(mean.double().norm())
        states.losses.append(loss)
        states.norms.append(norm)
        clip = facts.config.optimizer.clip
        scale = min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0
        late.append((mean, Update(step, scale, skip=not math.isfinite(norm))))
        while late and (step + 1 == scenario.steps or len(late) > facts.plan.delayed):
            compute.update(*late.pop(0))
            states.append({name: value.clone() for name, value in compute.weights().items()})
    return states
