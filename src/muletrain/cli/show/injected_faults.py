"""Injected faults, and how soon the run detected them, for the final report."""

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
    """Time after the injection; None: not detected."""
    by: set[str] = field(default_factory=set)


class FaultsView:
    """A fold over events: each fault, the detecting peers, and the first detection time."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        """``name_of``: a peer's name from the id."""
        self._name_of = name_of
        self._faults: list[_Injected] = []

    def fold(self, event: ev.Event) -> None:
        match event:
            case ev.FaultInjected():
                self._faults.append(_Injected(event))
            case ev.PeerDown():
                self._noticed(self._name_of(event.peer_id), event, ("kill", "freeze", "partition"))
            case ev.FrameRefused():
                self._noticed(self._name_of(event.remote), event, ("corrupt",))
            case ev.PeerExpelled():
                self._noticed(event.name, event, ("corrupt",))
            case ev.ClientLost() | ev.ClientLate():
                self._noticed(event.name, event, ("kill", "freeze"))
            case ev.PeerJoined():
                self._noticed(event.name, event, ("join",))
            case _:
                pass

    def _noticed(self, name: str, event: ev.Event, kinds: tuple[str, ...]) -> None:
        """Attribute the event to the newest fault of ``kinds`` that hit ``name``."""
        for fault in reversed(self._faults):
            if name in fault.event.who and fault.event.what in kinds:
                fault.by.add(event.peer)
                if fault.noticed_s is None:
                    fault.noticed_s = max(0.0, event.t - fault.event.t)
                return

    def killed(self, name: str) -> bool:
        """Whether the peer was killed on purpose."""
        return any(fault.event.what == "kill" and name in fault.event.who for fault in self._faults)

    def __len__(self) -> int:
        return len(self._faults)

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Rows of (after step, fault, peers hit, detection)."""
        for fault in self._faults:
            noticed = "not detected"
            if fault.noticed_s is not None:
                noticed = f"after {format_duration(fault.noticed_s)} by {', '.join(sorted(fault.by))}"
            yield str(fault.event.step), fault.event.planned, ", ".join(fault.event.who), noticed
