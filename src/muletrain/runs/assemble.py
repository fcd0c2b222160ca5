"""From a configuration to the pieces of a run: the plan every peer shares, and one peer's compute."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.config.load import digest
from muletrain.config.schema import RunConfig
from muletrain.data.microbatch import MicrobatchSource, sequence_length
from muletrain.model.spec import ModelSpec
from muletrain.optim.schedule import learning_rate
from muletrain.policy.partition import partition
from muletrain.swarm.context import Plan

if TYPE_CHECKING:
    from muletrain.data.tokens import TokenCache

CAPACITY = 8
"""Requests a peer holds at once: enough to cover a round trip of several service times."""


@dataclass(frozen=True)
class RunFacts:
    """What follows from the configuration alone."""

    config: RunConfig
    spec: ModelSpec
    cut: tuple[tuple[int, int], ...]
    """(first layer, end) of each stage."""

    @classmethod
    def of(cls, config: RunConfig) -> RunFacts:
        """Raises ConfigError when the model cannot be cut as asked."""
        spec = ModelSpec.from_config(config.model)
        return cls(config, spec, stage_cut(spec, config.fleet.stages, config.train.microbatch))

    @property
    def config_digest(self) -> bytes:
        return bytes.fromhex(digest(self.config))

    def plan(self) -> Plan:
        c, t = self.config, self.config.train
        return Plan(
            stages=c.fleet.stages, steps=t.steps, microbatches=c.microbatches, sequences=t.microbatch,
            width=self.spec.width, vocab=self.spec.vocab,
            sequence_length=functools.partial(
                sequence_length, context=self.spec.context, start=t.sequence_start, warmup=t.sequence_warmup
            ),
            activations=c.wire.activations, gradients=c.wire.gradients, clip=c.optimizer.clip,
            lr=functools.partial(learning_rate, c.optimizer, t.steps),
            checkpoint_every=c.checkpoint.every, capacity=CAPACITY,
        )  # fmt: skip

    def source(self, cache: TokenCache) -> MicrobatchSource:
        t = self.config.train
        return MicrobatchSource(
            cache.train, t.seed, t.batch, t.microbatch, self.spec.context, t.sequence_start, t.sequence_warmup
        )

    def manifest(self, run_id: str) -> dict[str, object]:
        """What a checkpoint says about itself, beside its parts."""
        return {
            "format": 1, "run_id": run_id, "config": json.loads(self.config.model_dump_json(by_alias=True)),
            "spec": json.loads(self.spec.to_json()), "cut": [list(c) for c in self.cut],
        }  # fmt: skip


def stage_cut(spec: ModelSpec, stages: int, sequences: int) -> tuple[tuple[int, int], ...]:
    """Layers of each stage, so that the costliest stage costs least; the head counts for the last."""
    raise NotImplementedError
