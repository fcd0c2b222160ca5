"""The servers of a stage, as one client knows them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muletrain.errors import NetworkError
from muletrain.policy.deadline import Deadline
from muletrain.runtime.pool.messages import Enlisted, GetState

if TYPE_CHECKING:
    from muletrain.clock import Clock
    from muletrain.network.base import Network, PeerId
    from muletrain.runtime.core.messages import Message
    from muletrain.runtime.core.tasks import Tasks

CALL_S, CALL_FLOOR_S = 10.0, 2.0
"""Seconds for a call, before any was answered, and at least."""
OTHERS_S = 0.5
"""Seconds for the answers of other servers after the first one's."""


class StageServers:
    """Asks the servers of a stage. ``known``: who they are."""

    def __init__(self, net: Network, clock: Clock, tasks: Tasks, known: tuple[PeerId, ...]) -> None:
        self._net, self._clock, self._tasks = net, clock, tasks
        self.known = known
        self._answers = Deadline(unmeasured_s=CALL_S, floor_s=CALL_FLOOR_S)

    async def states(self, *, but: PeerId | None = None) -> dict[PeerId, Enlisted]:
        """Returns the states of the servers (without ``but``) that answer about as soon as the first one."""
        asked = {s: self._tasks.spawn(self._state_of(s), "state of a server") for s in self.known if s != but}
        found: dict[PeerId, Enlisted] = {}
        waiting, timeout_s = {*asked.values()}, None
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            found = {s: state for s, t in asked.items() if t.done() and (state := t.result()) is not None}
            if not done:
                break
            timeout_s = OTHERS_S if found else None
        for task in waiting:
            task.cancel()
        return found

    async def _state_of(self, server: PeerId) -> Enlisted | None:
        """Returns the state of ``server``; None: it does not answer."""
        try:
            return Enlisted.unpack(await self.call(server, GetState()))
        except NetworkError:
            return None

    async def call(self, server: PeerId, ask: Message) -> bytes:
        """Returns the answer of ``server``, within a measured deadline. Raises NetworkError."""
        begin = self._clock.now()
        answer = await self._net.call(server, ask.KIND, ask.pack(), timeout_s=self._answers.seconds())
        self._answers.measured(self._clock.now() - begin)
        return answer
