"""``muletrain doctor --peers``: ask a waiting ``muletrain start`` on this machine to measure its members."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.progress import Progress

from muletrain.cli.show.console import make_console
from muletrain.cli.show.measured_fleet import fleet_tables
from muletrain.errors import MuletrainError
from muletrain.events import EventTail, FleetMeasured, ProbeFailed, ProbeProgress
from muletrain.runs.folder import ROOT
from muletrain.runs.worker_files import OWNER_FILE, PROBE_FILE

if TYPE_CHECKING:
    from pathlib import Path

POLL_S = 0.1
"""Seconds between two looks at the events."""
TAKEN_S = 10.0
"""Longest wait until 'start' takes the request [s]."""
SILENT_S = 240.0
"""Longest wait for news [s]; every round is shorter."""


def probe_peers(folder: Path | None, *, json: bool) -> None:
    """Request the measurement, show its progress and its result. Raises MuletrainError."""
    folder = folder or _newest()
    if not (folder / OWNER_FILE).is_file():
        raise MuletrainError(
            f"--run {folder}: no run that was started here and still waits; give the run folder of a waiting 'muletrain start'"
        )
    tail, request = EventTail(folder, from_now=True), folder / PROBE_FILE
    console = make_console(sys.stderr)
    request.touch()
    try:
        with Progress(console=console, transient=True, disable=json or not console.is_terminal) as progress:
            measured = _wait(tail, request, progress)
    finally:
        request.unlink(missing_ok=True)
    if json:
        print(measured.to_json())
        return
    out = make_console()
    out.print(fleet_tables(measured))
    out.print(
        f"\nmuletrain plan {measured.path} --config {folder / 'config.toml'}   # strategy and placement",
        soft_wrap=True,
    )


def _wait(tail: EventTail, request: Path, progress: Progress) -> FleetMeasured:
    bar = progress.add_task("asking", total=1)
    heard = time.monotonic()
    while True:
        for event in tail.poll():
            match event:
                case FleetMeasured():
                    return event
                case ProbeFailed():
                    raise MuletrainError(f"measuring failed: {event.reason}")
                case ProbeProgress():
                    heard = time.monotonic()
                    progress.update(bar, total=event.total, completed=event.done, description=event.what)
        silent_s = time.monotonic() - heard
        if request.exists() and silent_s > TAKEN_S:
            raise MuletrainError(f"{request.parent}: no answer; 'muletrain start' must be running with this folder")
        if silent_s > SILENT_S:
            raise MuletrainError(f"{request.parent}: no news for {SILENT_S:.0f} s; see {request.parent}/*.log")
        time.sleep(POLL_S)


def _newest() -> Path:
    """The newest run that was started here and still goes on. Raises MuletrainError."""
    found = sorted(ROOT.glob(f"*/{OWNER_FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise MuletrainError(
            f"no waiting run under {ROOT.resolve()}; use the folder where 'muletrain start' was called, while it waits for peers (start "
            f"--set fleet.peers=N waits for N peers)"
        )
    return found[-1].parent
