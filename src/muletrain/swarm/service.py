"""A peer's whole time in a run: the stages it serves, one after the other (DESIGN "Joining, moving, leaving").

Accumulators never move: a peer leaves its stage in order, between two steps, and comes to the next one as any newcomer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.events import Note

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from muletrain.swarm.peer import Peer


class Service:
    """``make`` builds the peer for the stage that the roster names; its argument: whether it joins a running run."""

    def __init__(self, make: Callable[[bool], Awaitable[Peer]], *, joining: bool) -> None:
        self._make = make
        self._joining = joining
        self.peer: Peer | None = None

    async def run(self) -> Path | None:
        """To the end of the run, or until this peer leaves it. Returns the last checkpoint on the collector; raises as ``Peer.run``."""
        joining = self._joining
        while True:
            peer = self.peer = await self._make(joining)
            written = await peer.run()
            if not peer.left or peer.destination is None:
                return written
            roster = peer.roster
            peer.emit(
                Note(
                    level="info", message=f"{roster.own.name} moves from stage {roster.own.stage} to {peer.destination}"
                )
            )
            roster.move(peer.destination, since=peer.stepper.step)
            joining = True
