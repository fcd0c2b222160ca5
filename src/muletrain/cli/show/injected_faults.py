"""Injected faults beside what the run noticed of them, for the final report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muletrain import events as ev
from muletrain.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class _Injected:
    event: ev.FaultInjected
    noticed_s: float | None = None
    """After the injection."""
    by: set[str] = field(default_factory=set)


class FaultsView:
    """A fold over the events: each fault, who noticed it first, and how soon."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        """``name_of``: a peer's name from its id."""
        self._name_of = name_of
        self._faults: list[_Injected] = []

    def fold(self, event: ev.Event) -> None:
        match event:
            case ev.FaultInjected():
                self._faults.append(_Injected(event))
            case ev.PeerSuspected():
                self._noticed(self._name_of(event.peer_id), event, ("kill", "freeze", "partition"))
            case ev.FrameRefused():
                self._noticed(self._name_of(event.remote), event, ("corrupt",))
            case ev.PeerExpelled():
                self._noticed(event.name, event, ("corrupt",))
            case ev.PeerJoined():
                self._noticed(event.name, event, ("join",))
            case _:
                pass

    def _noticed(self, name: str, event: ev.Event, kinds: tuple[str, ...]) -> None:
        """The newest fault of these kinds that ``name`` suffered explains it."""
        for fault in reversed(self._faults):
            if name in fault.event.who and fault.event.what in kinds:
                fault.by.add(event.peer)
                if fault.noticed_s is None:
                    fault.noticed_s = max(0.0, event.t - fault.event.t)
                return

    def killed(self, name: str) -> bool:
        """Was it killed on purpose?"""
        return any(fault.event.what == "kill" and name in fault.event.who for fault in self._faults)

    def __len__(self) -> int:
        return len(self._faults)

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """(after step, fault as planned, whom it hit, who noticed it and how soon)."""
        for fault in self._faults:
            noticed = "not noticed"
            if fault.noticed_s is not None:
                noticed = f"after {format_duration(fault.noticed_s)} by {', '.join(sorted(fault.by))}"
            yield str(fault.event.step), fault.event.planned, ", ".join(fault.event.who), noticed
