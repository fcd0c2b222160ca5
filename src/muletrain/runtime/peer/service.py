"""A service is a peer's whole time in a run: the peer serves one stage after the other.

Accumulators never move: a peer leaves its stage in order, between two steps, and comes to the next stage as a newcomer.
A peer that rolls back with the run begins anew, too, so nothing of the abandoned steps can affect later steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.events import PeerMoved, SteppedBack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from muletrain.runtime.peer.peer import Peer
    from muletrain.runtime.recovery.messages import StepBack


class Service:
    """Makes the peer for each stage in turn. ``make`` builds the peer for the stage that the roster names; its
    arguments: whether the peer joins a running run, and the rollback to begin with, if any."""

    def __init__(self, make: Callable[[bool, StepBack | None], Awaitable[Peer]], *, joining: bool) -> None:
        self._make = make
        self._joining = joining
        self.peer: Peer | None = None

    async def run(self) -> bool:
        """Serve to the end of the run, or until this peer leaves the run. Returns False if the last checkpoint could
        not be written. Raises as ``Peer.run`` does."""
        joining, back = self._joining, None
        while True:
            before, peer = self.peer, await self._make(joining, back)
            self.peer = peer
            if before is not None and before.departure.stop_requested:
                peer.stop()
            written = await peer.run()
            joining, back = True, None
            if peer.begins_anew:
                back = self._step_back(peer)
            elif peer.left and peer.destination is not None:
                own = peer.roster.own
                peer.emit(PeerMoved(name=own.name, stage=own.stage, target=peer.destination))
                peer.roster.moved(own.id, peer.destination)
            else:
                return written

    def _step_back(self, peer: Peer) -> StepBack | None:
        """Returns the rollback to begin anew with; None: begin with a replica's state."""
        roster, back = peer.roster, peer.begins_at
        if back is None:
            return None
        moves = [f"{roster.name(p)} to stage {s}" for p, s in back.moves if roster.knows(p)]
        peer.emit(
            SteppedBack(
                step=peer.position.step, to=back.step, lost=list(back.lost), moves=moves, lineage=back.lineage.hex()
            )
        )
        for mover, stage in back.moves:
            roster.moved(mover, stage)
        return back
