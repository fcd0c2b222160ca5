"""The last steps' records and gradients, for those that are on their way (DESIGN "Joining, moving, leaving").

A newcomer copies the state before one step, and that may take as long as many steps: what was agreed on meanwhile it takes from here, and
applies it in order. The step applied last is always kept; those before it as long as a replica that may need them is heard of.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.errors import ProtocolError
from muletrain.swarm.holding import PIECE, Holding

if TYPE_CHECKING:
    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context
    from muletrain.swarm.messages import RoundEntry
    from muletrain.swarm.record import RecordBuilder

KEPT_S = 60.0
"""After the last that was heard of a follower, nothing is kept for it."""
MAX_STEPS = 512


@dataclass
class _Past:
    """A step that was applied. ``packed``: its gradient as it travels, piece by piece, once it lies here for longer."""

    builder: RecordBuilder
    entry: RoundEntry
    holding: Holding | None
    packed: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.packed)) if self.holding is None else self.holding.gradient.nbytes


class Trail:
    """One peer's. ``limit``: bytes of the gradients that are kept beside the last."""

    def __init__(self, ctx: Context, limit: int) -> None:
        self._ctx, self._limit = ctx, limit
        self._past: deque[_Past] = deque()
        self._followers: dict[PeerId, tuple[int, float]] = {}
        """What they need is from that step on; when they were heard of."""

    def follow(self, peer: PeerId, step: int) -> None:
        """``peer`` gets the state before ``step``, and will need what follows."""
        self._followers[peer] = step, self._ctx.clock.now()

    def arrived(self, peer: PeerId) -> None:
        """``peer`` takes part again."""
        self._followers.pop(peer, None)

    def add(self, builder: RecordBuilder, holding: Holding) -> None:
        """This step was applied."""
        past = self._past
        if past and past[-1].builder.step + 1 != builder.step:  # a gap: what lies before it leads nowhere
            past.clear()
        past.append(_Past(builder, holding.entry, holding))
        now = self._ctx.clock.now()
        self._followers = {p: f for p, f in self._followers.items() if now - f[1] < KEPT_S}
        needed = min((step for step, _ in self._followers.values()), default=builder.step)
        while len(past) > 1 and (past[0].builder.step < needed or len(past) > MAX_STEPS or self._excess()):
            past.popleft()
        if len(past) > 1:
            self._ctx.spawn(self._pack(past[-2]), "pack")

    def _excess(self) -> bool:
        return sum(p.nbytes for p in list(self._past)[:-1]) > self._limit

    async def _pack(self, past: _Past) -> None:
        """A half or a quarter of the memory."""
        if (holding := past.holding) is not None:
            codec = self._ctx.plan.gradients
            offsets = range(0, len(holding.gradient), PIECE)
            past.packed = tuple([await self._ctx.compute.offload(holding.piece, k, codec) for k in offsets])
            past.holding = None

    def entries(self, peer: PeerId, step: int, lineage: bytes) -> tuple[RoundEntry, ...]:
        """Of a step that is kept; none for any other."""
        for past in self._past:
            if (past.builder.step, past.builder.lineage) == (step, lineage):
                self._heard(peer, step)
                return past.builder.entries()
        return ()

    def piece(self, peer: PeerId, round_: bytes, offset: int) -> bytes:
        """Raises ProtocolError for a round that is not kept."""
        for past in self._past:
            if past.entry.round == round_:
                self._heard(peer, past.builder.step)
                if past.holding is not None:
                    return past.holding.piece(offset, self._ctx.plan.gradients)
                if offset % PIECE == 0 and offset // PIECE < len(past.packed):
                    return past.packed[offset // PIECE]
        raise ProtocolError("the gradient of this round is not held here (not yet, or not any more)")

    def _heard(self, peer: PeerId, step: int) -> None:
        if peer in self._followers:
            self.follow(peer, step)
