"""The process of one peer: ``python -m muletrain.runs.worker`` with a ``WorkerSpec`` on standard input.

Afterwards the line ``stop`` on standard input asks for an orderly end; end of file means that whoever started us is gone, and
the process leaves at once. Everything it has to say goes into its event log.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import muletrain
from muletrain.clock import LoopClock
from muletrain.config.schema import RunConfig
from muletrain.errors import AdmissionError, MuletrainError
from muletrain.events import EventLog, Note, PeerJoined, RunFinished, RunStarted
from muletrain.runs.spec import WorkerSpec
from muletrain.runs.ticket import Ticket

if TYPE_CHECKING:
    from muletrain.data.tokens import TokenCache
    from muletrain.network.base import Network
    from muletrain.runs.assemble import RunFacts
    from muletrain.swarm.peer import Peer

TICKET_FILE = "ticket"
EXIT_REFUSED = 3
LEAVE_S = 30.0
"""After the parent is gone or asked twice: how long an orderly end may take."""


class Worker:
    """Builds one peer from its spec and runs it to the end."""

    def __init__(self, spec: WorkerSpec, log: EventLog) -> None:
        self._spec = spec
        self._log = log
        self._clock = LoopClock()
        self._peer: Peer | None = None
        self._stop_early = asyncio.Event()

    def stop(self) -> None:
        """End in order: after the current step, or at once if training has not begun."""
        if self._peer is not None:
            self._peer.stop()
        else:
            self._stop_early.set()

    async def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="mule-") as sockets:
            begin = self._clock.now()
            main = asyncio.create_task(self._run(Path(sockets)))
            early = asyncio.create_task(self._stop_early.wait())
            await asyncio.wait({main, early}, return_when=asyncio.FIRST_COMPLETED)
            early.cancel()
            if not main.done():
                main.cancel()
                await asyncio.gather(main, return_exceptions=True)
                self._log.emit(RunFinished(steps=0, seconds=self._clock.now() - begin, reason="stopped before the first step"))
                return
            steps, reason = await main
            self._log.emit(RunFinished(steps=steps, seconds=self._clock.now() - begin, reason=reason))

    async def _run(self, sockets: Path) -> tuple[int, str]:
        ticket = Ticket.parse(self._spec.ticket)
        network = await self._network(ticket, sockets)
        try:
            if self._spec.role == "found":
                return await self._found(ticket, network)
            return await self._join(ticket, network)
        finally:
            await network.close()
