"""A run's events as a trace for https://ui.perfetto.dev and chrome://tracing: the work of each slot of each peer.

The format is Chrome's "Trace Event Format": complete events ('X', with a duration), instants ('i') and names ('M'), in
microseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from muletrain import events as ev
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SLOTS = ("receive", "compute", "load", "sub-model", "drain", "send", "average")
"""``load``, ``sub-model`` and ``drain`` belong to a swapped stage."""
LANES = 100
"""Most rows per slot; work that overlaps is drawn in several rows."""
INSTANTS = (
    ev.CheckpointWritten,
    ev.FaultInjected,
    ev.LineageLeft,
    ev.MicrobatchRerouted,
    ev.PeerExpelled,
    ev.PeerJoined,
    ev.PeerLeft,
    ev.PeerDown,
    ev.StepApplied,
    ev.SteppedBack,
)


def chrome_trace(events: Iterable[ev.Event]) -> dict[str, Any]:
    """The trace of all processes' events; the run needs ``fleet.trace``. Time 0 is the first event."""
    known = sorted((e for e in events if isinstance(e, (ev.SlotWorked, *INSTANTS))), key=_begin)
    origin = _begin(known[0]) if known else 0.0
    processes = {peer: number for number, peer in enumerate(sorted({e.peer for e in known}), 1)}
    busy_until: dict[tuple[str, str], list[float]] = defaultdict(list)
    rows: list[dict[str, Any]] = []
    for event in known:
        row: dict[str, Any] = {"pid": processes[event.peer], "ts": _us(_begin(event) - origin)}
        fields = {k: v for k, v in vars(event).items() if k not in ("t", "peer")}
        if isinstance(event, ev.SlotWorked):
            lane = _lane(busy_until[event.peer, event.slot], event)
            about = "" if event.index < 0 else f" {event.step}/{event.index}"
            row |= {"ph": "X", "dur": _us(event.seconds), "name": event.what + about, "cat": event.slot}
            row |= {"tid": _thread(event.slot, lane), "args": fields}
        else:
            row |= {"ph": "i", "s": "p", "name": event.kind, "tid": 0, "args": fields}
        rows.append(row)
    return {"traceEvents": [*_names(processes, busy_until), *rows], "displayTimeUnit": "ms"}


def check_trace(path: Path) -> None:
    """Check early that ``path`` can be written. Raises ConfigError."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--trace {path}: give a file in a folder that exists")


def write_trace(path: Path, events: Iterable[ev.Event]) -> None:
    """Write the trace to ``path``. Raises OSError."""
    path.write_text(json.dumps(chrome_trace(events), default=str), encoding="utf-8")


def _begin(event: ev.Event) -> float:
    return event.t - (event.seconds if isinstance(event, ev.SlotWorked) else 0.0)


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


def _lane(busy_until: list[float], event: ev.SlotWorked) -> int:
    """The first row that is free when the work begins."""
    begin = _begin(event)
    lane = next((k for k, until in enumerate(busy_until) if until <= begin + 1e-6), len(busy_until))
    busy_until[lane : lane + 1] = [event.t]
    return lane


def _thread(slot: str, lane: int) -> int:
    return 1 + LANES * SLOTS.index(slot) + min(lane, LANES - 1)


def _names(processes: dict[str, int], lanes: dict[tuple[str, str], list[float]]) -> Iterable[dict[str, Any]]:
    for peer, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": peer}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for (peer, slot), used in lanes.items():
        for lane in range(min(len(used), LANES)):
            thread = {"pid": processes[peer], "tid": _thread(slot, lane)}
            yield {
                "ph": "M",
                "name": "thread_name",
                **thread,
                "args": {"name": slot if lane == 0 else f"{slot} {lane + 1}"},
            }
            yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}}
