"""Bugs to plant in what lasts longer than a step: checkpoints, memory, devices, disks, tokens (``planted``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from muletrain.compute.arithmetic import StageArithmetic
from muletrain.runtime.checkpoint.checkpointing import Checkpointing, Parts
from muletrain.runtime.checkpoint.store import CheckpointStore
from muletrain.runtime.members.watchdog import Watchdog
from muletrain.runtime.step.gradient_log import GradientLog
from muletrain.runtime.transfer.tokens import Sharing
from proofs import reference

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

    from muletrain.runtime.checkpoint.store import Key


def writes_the_weights_of_before(patch: pytest.MonkeyPatch) -> None:
    right, before = Checkpointing.write, {}

    async def write(self: Checkpointing, key: Any, state: dict[str, Any]) -> None:
        own = id(self)
        stale, before[own] = before.get(own, state), {k: v.clone() for k, v in state.items()}
        await right(self, key, stale)

    patch.setattr(Checkpointing, "write", write)


def damages_what_it_writes(patch: pytest.MonkeyPatch) -> None:
    right = CheckpointStore.write_part

    def write_part(self: CheckpointStore, key: Any, stage: int, buffers: Any) -> None:
        damaged = bytearray(b"".join(buffers))
        damaged[-1] ^= 1
        right(self, key, stage, [memoryview(damaged)])

    patch.setattr(CheckpointStore, "write_part", write_part)


def removes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointStore, "prune", lambda self, newest: None)


def forgets_moments(patch: pytest.MonkeyPatch) -> None:
    right = StageArithmetic.load_state

    def load(self: StageArithmetic, state: dict[str, Any]) -> None:
        right(self, {k: torch.zeros_like(v) if k.startswith("moment") else v for k, v in state.items()})

    patch.setattr(StageArithmetic, "load_state", load)


def keeps_all_gradients(patch: pytest.MonkeyPatch) -> None:
    right = GradientLog.__init__
    patch.setattr(GradientLog, "__init__", lambda self, ctx, limit: right(self, ctx, 1 << 60))


def forgets_no_part(patch: pytest.MonkeyPatch) -> None:
    """Writers begin a part while their last one is under way."""
    patch.setattr(Checkpointing, "busy", lambda self: None)


def without_moments(patch: pytest.MonkeyPatch) -> None:
    right = Parts.base

    async def base(self: Parts, key: Key, digest: bytes) -> dict[str, Tensor]:
        state = await right(self, key, digest)
        return {n: t if n.startswith("model/") else torch.zeros_like(t) for n, t in state.items()}

    patch.setattr(Parts, "base", base)


def the_beginning_is_near_enough(patch: pytest.MonkeyPatch) -> None:
    """Peers begin with the first weights, at the checkpoint's step."""

    async def base(self: Parts, key: Key, digest: bytes) -> dict[str, Tensor]:
        return await self._ctx.compute.state()

    patch.setattr(Parts, "base", base)


def room_for_one_more(patch: pytest.MonkeyPatch) -> None:
    right = reference.facts_of

    def facts_of(scenario: Any) -> reference.Facts:
        facts = right(scenario)
        return replace(facts, plan=replace(facts.plan, capacity=scenario.capacity + 1))

    patch.setattr(reference, "facts_of", facts_of)


def a_device_is_never_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watchdog, "look", lambda self, seconds: None)


def a_disk_that_is_full_ends_its_peer(patch: pytest.MonkeyPatch) -> None:
    right = CheckpointStore.write_part

    def write_part(self: CheckpointStore, key: Any, stage: int, buffers: Any) -> None:
        try:
            right(self, key, stage, buffers)
        except OSError as e:
            raise ValueError("nobody expected this") from e

    patch.setattr(CheckpointStore, "write_part", write_part)


def shared_tokens_are_read_from_the_end(patch: pytest.MonkeyPatch) -> None:
    right = Sharing.__init__

    def init(self: Sharing, shared: Any, data: Any, tokenizer: Any, vocab: int, source_of: Any, **more: Any) -> None:
        right(self, shared, data, tokenizer, vocab, lambda tokens: source_of(tokens[::-1]), **more)

    patch.setattr(Sharing, "__init__", init)
