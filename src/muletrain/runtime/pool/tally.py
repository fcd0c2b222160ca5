"""The work of a server's clients, for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from muletrain.events import PoolWorked

if TYPE_CHECKING:
    from muletrain.events import PoolCount

MOST = 256
"""Most clients in one event, which must fit into a report to another machine."""


class Tally:
    """Counts since the last step that was applied."""

    def __init__(self) -> None:
        self._own = 0
        self._clients: dict[str, Counter[PoolCount]] = {}
        """By name: a client that comes back has another id, but is the same machine."""

    def done(self, client: str | None) -> None:
        """A part is done, by ``client``, or (None) by the server itself."""
        if client is None:
            self._own += 1
        else:
            self.count(client, "parts")

    def count(self, client: str, what: PoolCount, times: int = 1) -> None:
        """Something happened to ``client``."""
        if times:
            self._clients.setdefault(client, Counter())[what] += times

    def worked(self, step: int, stage: int) -> PoolWorked:
        """Report a step, and begin anew."""
        busiest = sorted(self._clients, key=lambda name: (-self._clients[name]["parts"], name))[:MOST]
        event = PoolWorked(step=step, stage=stage, own=self._own, clients={c: dict(self._clients[c]) for c in busiest})
        self._own, self._clients = 0, {}
        return event
