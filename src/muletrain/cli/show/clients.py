"""The clients of a hub, as far as the events folded so far tell."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from muletrain import events as ev


@dataclass
class ClientView:
    """One client, from events of the client and of servers."""

    name: str
    stage: int = -1
    state: str = "working"
    parts: int = 0
    late: int = 0
    redone: int = 0


class ClientsView:
    """All clients of a run."""

    def __init__(self) -> None:
        self._by_name: dict[str, ClientView] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def working(self) -> int:
        """Returns how many are at work."""
        return sum(client.state == "working" for client in self._by_name.values())

    def by_stage(self) -> dict[int, list[ClientView]]:
        """Returns the clients of each stage, both in order."""
        found = defaultdict[int, list[ClientView]](list)
        for client in sorted(self._by_name.values(), key=lambda c: (c.stage, c.name)):
            found[client.stage].append(client)
        return dict(found)

    def ended(self, name: str) -> None:
        """The process of that name was killed."""
        if name in self._by_name:
            self._by_name[name].state = "ended"

    def fold(self, event: ev.Event) -> None:
        """Take in an event."""
        match event:
            case ev.ClientBegan() | ev.ClientEnlisted():
                client = self._client(event.name)
                client.stage, client.state = event.stage, "working"
            case ev.ClientLost():
                self._client(event.name).state = "gone"
            case ev.ClientFinished():
                self._client(event.peer).state = "finished"
            case ev.PoolWorked():
                for name, counts in event.clients.items():
                    client = self._client(name)
                    client.stage = event.stage
                    client.parts += counts.get("parts", 0)
                    client.late += counts.get("late", 0)
                    client.redone += counts.get("redone", 0)

    def _client(self, name: str) -> ClientView:
        return self._by_name.setdefault(name, ClientView(name))
