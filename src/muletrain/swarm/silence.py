"""Silence of peers that owe answers: first a question, then doubt, and only much later the belief that the peer is dead.

Three deadlines, each from measured times. A peer that owes answers gives one every so often; when it is silent for longer, it is
asked whether it is there (that costs nothing). When the answer takes longer than such answers do, the peer is *doubted*: what it owes
is computed by another one, too, and nothing new goes to it. That changes routing alone, so it may be wrong. To be believed dead it must
miss the question's own, patient deadline (``Context.probe``), since then what it accumulated is run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.policy.deadline import Usual

if TYPE_CHECKING:
    from collections.abc import Callable

    from muletrain.network.base import PeerId
    from muletrain.swarm.context import Context
    from muletrain.swarm.messages import Request

FLOOR_S = 0.3
"""Silences are asked about from here on."""


class Silence:
    """Listens to the peers of one stage that owe us answers."""

    def __init__(self, ctx: Context, stage: int, owed: Callable[[PeerId], Request | None]) -> None:
        """``owed``: one of the requests that a peer has not answered."""
        self._ctx, self._stage, self._owed = ctx, stage, owed
        self._usual = Usual(unmeasured_s=10.0, floor_s=FLOOR_S, times=2.0)
        """Between two answers of a peer that owes us some; to ask once too often is better than to wait."""
        self._heard: dict[PeerId, float] = {}
        self._listening: set[PeerId] = set()

    def expect(self, peer: PeerId) -> None:
        """``peer`` is about to owe us an answer."""
        if self._owed(peer) is None:
            self._heard[peer] = self._ctx.clock.now()
        if peer not in self._listening:
            self._listening.add(peer)
            self._ctx.spawn(self._listen(peer), f"listen to {peer[-6:]}")

    def heard(self, peer: PeerId) -> None:
        """``peer`` answered."""
        now = self._ctx.clock.now()
        self._usual.measured(now - self._heard[peer])
        self._heard[peer] = now
        self._ctx.doubted.discard(peer)

    async def _listen(self, peer: PeerId) -> None:
        """Until it owes nothing. The deadline of a request, which may wait in a queue, would find out much later that a peer froze."""
        ctx, attempt, asked = self._ctx, 0, 0.0
        try:
            while (request := self._owed(peer)) is not None:
                heard = self._heard[peer]
                attempt = attempt if asked > heard else 0
                wait = max(asked, heard) + self._usual.seconds(attempt) - ctx.clock.now()
                if wait > 0:
                    await ctx.clock.sleep(min(wait, FLOOR_S))  # what is measured meanwhile counts
                    continue
                attempt, asked = attempt + 1, ctx.clock.now()
                if ctx.roster.stage(self._stage) == (peer,):
                    continue  # a stage's last peer is not given up for being slow
                if await ctx.probe(peer, request.lineage, request.step) is None:
                    ctx.give_up(peer, "it is silent, and answers no probe")
        finally:
            self._listening.discard(peer)
