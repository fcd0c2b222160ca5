"""Replicas keep the mean gradients of the last steps for peers that missed steps (CONTRIBUTING, "How a step goes", 5).

Copying a state may take a newcomer many steps; the newcomer then applies the missed gradients from here in order. The
last step's gradient is always kept. Earlier gradients are kept while a replica that may need them is heard of, and
yield to the traffic of the step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from muletrain.network.base import Channel
from muletrain.runtime.core.times import GONE_S

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.runtime.averaging.mean_gradient import MeanGradient, TiedPart
    from muletrain.runtime.core.blocks import StateImage
    from muletrain.runtime.members.context import Context
    from muletrain.runtime.members.row import RoundEntry
    from muletrain.runtime.step.record import RecordBuilder, StepRecord

MAX_STEPS = 512
"""Most steps to keep."""


@dataclass
class _Past:
    """An applied step."""

    record: StepRecord
    gradient: MeanGradient
    """Of our stage's round in the record; once the step is not the last step any more, only the copy for sending."""
    other: TiedPart | None
    """Kept for replicas, which need both parts."""


class GradientLog:
    """Owns one peer's past gradients. ``limit``: bytes of all gradients but the last."""

    def __init__(self, ctx: Context, limit: int) -> None:
        self._ctx, self._limit = ctx, limit
        self._past: deque[_Past] = deque()
        self._followers: dict[PeerId, tuple[int, float]] = {}
        """Peers that catch up: the first step that each needs, and its last sign."""

    def follow(self, peer: PeerId, step: int) -> None:
        """``peer`` takes the state before ``step``, and will need the gradients from ``step`` on."""
        self._followers[peer] = step, self._ctx.clock.now()

    def arrived(self, peer: PeerId) -> None:
        """``peer`` takes part again, and needs no past gradients."""
        self._followers.pop(peer, None)

    def add(self, builder: RecordBuilder, gradient: MeanGradient, other: TiedPart | None = None) -> None:
        """Add an applied step, and drop steps that no peer needs."""
        if self._ctx.plan.alone:
            return
        past = self._past
        if past and past[-1].gradient.step + 1 != builder.step:  # after a gap earlier steps are useless
            past.clear()
        if other is not None:  # only the copy for sending is still needed
            other = replace(other, values=other.values.new_empty(0))
        record = builder.record()
        assert record is not None, "the step is applied"
        past.append(_Past(record, gradient, other))
        now = self._ctx.clock.now()
        self._followers = {p: f for p, f in self._followers.items() if now - f[1] < GONE_S}
        needed = min((step for step, _ in self._followers.values()), default=builder.step)
        while len(past) > 1 and (past[0].gradient.step < needed or len(past) > MAX_STEPS or self.nbytes > self._limit):
            past.popleft()
        if len(past) > 1:
            self._ctx.spawn(self._pack(past[-2]), "pack")

    def reaches(self, step: int) -> bool:
        """Are ``step`` and all later steps kept?"""
        return bool(self._past) and self._past[0].gradient.step <= step

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients beside the last."""
        past = list(self._past)[:-1]
        return sum(p.gradient.nbytes + (0 if p.other is None else p.other.packed.size) for p in past)

    async def _pack(self, past: _Past) -> None:
        """Keep only a gradient's copy, which needs a half or a quarter of the memory, and is not urgent any more."""
        await past.gradient.pack(self._ctx)
        if past.other is not None:
            past.other.packed.channel = Channel.BULK

    def applied(self, peer: PeerId, step: int, lineage: bytes) -> tuple[RoundEntry, StepRecord] | None:
        """Our stage's round and the record of a kept step; None for other steps."""
        for past in self._past:
            entry = past.gradient.entry
            if (entry.step, entry.lineage) == (step, lineage):
                self._heard(peer, step)
                return entry, past.record
        return None

    async def image(
        self, peer: PeerId, name: bytes, current: MeanGradient | None, other: TiedPart | None, *, tied: bool
    ) -> StateImage | None:
        """The copy with this ``name`` of a whole gradient (``tied``: of a tied part) that is kept, or is ``current`` or
        ``other``; None: no such copy is here."""
        for held in (current, other, *(held for past in self._past for held in (past.gradient, past.other))):
            if held is not None and held.has(name, tied=tied):
                self._heard(peer, held.step)
                return await held.image(self._ctx, tied=tied)
        return None

    def _heard(self, peer: PeerId, step: int) -> None:
        if peer in self._followers:
            self.follow(peer, step)
