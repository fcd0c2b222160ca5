"""The step record: the unit of agreement of the whole run (CONTRIBUTING, "How a step goes", 4).

``R_t`` holds each stage's round entry, and hash(R_{t-1}). A peer applies step t only with the whole record. The clip
scale, and whether a non-finite step is skipped, are pure functions of the record, so every peer decides the same
without asking.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack

from muletrain.runtime.core.branches import branch_of, hashed

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.runtime.members.row import StageEntry


def round_id(
    lineage: bytes,
    stage: int,
    step: int,
    attempt: int,
    sealed: dict[str, frozenset[int]],
    chosen: tuple[str, ...],
    stop: bool,
    leaves: tuple[str, ...] = (),
    expelled: tuple[str, ...] = (),
) -> bytes:
    """Identity of one attempt at reducing one stage. Members that disagree on anything get different identities."""
    sets = [(m, sorted(sealed[m])) for m in sorted(sealed)]
    return hashlib.sha256(
        msgpack.packb(["round", lineage, stage, step, attempt, sets, list(chosen), stop, list(leaves), list(expelled)])
    ).digest()


@dataclass(frozen=True)
class StepRecord:
    """The record ``R_t``; ``stages`` are in pipeline order."""

    step: int
    lineage: bytes
    """hash(R_{t-1})"""
    stages: tuple[StageEntry, ...]
    product: float = 0.0
    """Inner product of two stages' gradients for the parameters that the stages share (``optim.tied``)."""

    @property
    def hash(self) -> bytes:
        """The lineage of step t + 1."""
        content = [
            [
                e.round,
                [e.size, e.content, e.square_norm, e.finite],
                e.stop,
                list(e.leaves),
                list(e.expelled),
                e.tied,
            ]
            for e in self.stages
        ]
        return hashed(
            branch_of(self.lineage), msgpack.packb(["record", self.step, self.lineage, content, self.product])
        )

    @property
    def gradient_norm(self) -> float:
        """Euclidean norm of the whole model's mean gradient, as a single process would compute it; NaN if not
        finite."""
        if not all(e.finite for e in self.stages):
            return math.nan
        return math.sqrt(max(0.0, math.fsum([*(e.square_norm for e in self.stages), 2 * self.product])))

    @property
    def skip(self) -> bool:
        """Must the update be skipped, because the gradient is not finite?"""
        return not math.isfinite(self.gradient_norm)

    @property
    def stop(self) -> bool:
        """Did a member ask for an orderly end? Every peer stops after applying such a record."""
        return any(e.stop for e in self.stages)

    def leavers(self, trains: Callable[[str], bool]) -> tuple[str, ...]:
        """The peers that leave after this step, by the same rule for all peers: at most one of a stage, if another
        stays, and at most one trainer (``trains``). The rest stays, and asks again."""
        chosen: list[str] = []
        for entry in self.stages:
            free = [p for p in entry.leaves if not (trains(p) and any(map(trains, chosen)))]
            chosen += free[:1] if entry.size > 1 else []
        return tuple(chosen)

    def clip_scale(self, clip: float | None) -> float:
        """min(1, clip / norm), as in ``torch.nn.utils.clip_grad_norm_``."""
        return 1.0 if clip is None else min(1.0, clip / (self.gradient_norm + 1e-6))
