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
    """An applied step. ``image`` replaces ``gradient`` once the step is not the last step any more."""

    step: int
    lineage: bytes
    """The lineage that the step's frames carried."""
    record: StepRecord
    entry: RoundEntry
    """Our stage's round in the record."""
    gradient: MeanGradient | None
    other: TiedPart | None
    """Kept for replicas, which need both parts."""
    image: StateImage | None = None

    def copies(self, *, tied: bool) -> list[StateImage]:
        """The finished copies for sending: of the whole gradient, or of the ``tied`` part."""
        whole = {} if self.image is None else {False: self.image}
        made = [image for kind, image in (self.gradient.packed if self.gradient else whole).items() if kind == tied]
        return [*made, self.other.image] if tied and self.other is not None else made

    @property
    def nbytes(self) -> int:
        beside = 0 if self.other is None else self.other.image.size
        if self.gradient is not None:
            return self.gradient.values.nbytes + beside
        return beside + (self.image.size if self.image is not None else 0)


class GradientLog:
    """Owns one peer's past gradients. ``limit``: bytes of all gradients but the last."""

    def __init__(self, ctx: Context, limit: int) -> None:
        self._ctx, self._limit = ctx, limit
        self._past: deque[_Past] = deque()
        self._current: dict[bool, list[StateImage]] = {False: [], True: []}
        """Copies of the current step's gradient, and of its tied part, that peers asked for."""
        self._followers: dict[PeerId, tuple[int, float]] = {}
        """Peers that catch up: the first step that each needs, and its last sign."""
        ctx.blocks.offers("gradients", self._given)

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
        if past and past[-1].step + 1 != builder.step:  # after a gap earlier steps are useless
            past.clear()
        if other is not None:  # only the copy for sending is still needed
            other = replace(other, values=other.values.new_empty(0))
        record = builder.record()
        assert record is not None, "the step is applied"
        past.append(_Past(builder.step, builder.lineage, record, gradient.entry, gradient, other))
        self._current = {False: [], True: []}
        now = self._ctx.clock.now()
        self._followers = {p: f for p, f in self._followers.items() if now - f[1] < GONE_S}
        needed = min((step for step, _ in self._followers.values()), default=builder.step)
        while len(past) > 1 and (past[0].step < needed or len(past) > MAX_STEPS or self._excess()):
            past.popleft()
        if len(past) > 1:
            self._ctx.spawn(self._pack(past[-2]), "pack")

    def reaches(self, step: int) -> bool:
        """Are ``step`` and all later steps kept?"""
        return bool(self._past) and self._past[0].step <= step

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients beside the last."""
        return sum(p.nbytes for p in list(self._past)[:-1])

    def _excess(self) -> bool:
        return self.nbytes > self._limit

    async def _pack(self, past: _Past) -> None:
        """Replace a gradient by its copy, which needs a half or a quarter of the memory."""
        if past.gradient is not None:
            past.image = await past.gradient.image(self._ctx)
            past.image.channel, past.gradient = Channel.BULK, None  # the copy is not urgent any more
            if past.other is not None:
                past.other.image.channel = Channel.BULK

    def applied(self, peer: PeerId, step: int, lineage: bytes) -> tuple[RoundEntry, StepRecord] | None:
        """Our stage's round and the record of a kept step; None for other steps."""
        for past in self._past:
            if (past.step, past.lineage) == (step, lineage):
                self._heard(peer, step)
                return past.entry, past.record
        return None

    async def manifest(self, peer: PeerId, round_: bytes, current: MeanGradient | None) -> bytes:
        """The manifest of the gradient of ``round_``, if kept or ``current``; else empty."""
        if current is not None and current.entry.round == round_:
            return self._handed_out(await current.image(self._ctx), tied=False)
        for past in self._past:
            if past.entry.round == round_:
                self._heard(peer, past.step)
                image = past.image if past.gradient is None else await past.gradient.image(self._ctx)
                return b"" if image is None else image.manifest
        return b""

    async def tied_manifest(
        self, peer: PeerId, round_: bytes, current: MeanGradient | None, other: TiedPart | None
    ) -> bytes:
        """The manifest of the tied part of the gradient of ``round_``, if kept, or ``current`` or ``other``; else
        empty."""
        gradients = [current, *(past.gradient for past in self._past)]
        parts = [other, *(past.other for past in self._past)]
        images = [await g.image(self._ctx, tied=True) for g in gradients if g is not None and g.entry.round == round_]
        images += [part.image for part in parts if part is not None and part.entry.round == round_]
        return self._handed_out(images[0], tied=True) if images else b""

    def _handed_out(self, image: StateImage, *, tied: bool) -> bytes:
        if image not in self._current[tied]:
            self._current[tied].append(image)
        return image.manifest

    async def _given(self, peer: PeerId, digest: bytes) -> StateImage | None:
        """See ``core.blocks.Reader``: the stage of ``peer`` must need the copy."""
        for tied in (False, True):
            found = list(self._current[tied]) if self._needs(peer, tied=tied) else []
            for image in found:
                if image.digest == digest:
                    return image
            for past in self._past if self._needs(peer, tied=tied) else ():
                for image in past.copies(tied=tied):
                    if image.digest == digest:
                        self._heard(peer, past.step)
                        return image
        return None

    def _needs(self, peer: PeerId, *, tied: bool) -> bool:
        roster, plan = self._ctx.roster, self._ctx.plan
        stages = plan.tied.stages if tied and plan.tied is not None else (roster.own.stage,)
        return roster.knows(peer) and roster.member(peer).stage in stages

    def _heard(self, peer: PeerId, step: int) -> None:
        if peer in self._followers:
            self.follow(peer, step)
