"""The run that a command of this machine serves now: find its folder, tell its state by its events, and stop it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from muletrain import events as ev
from muletrain.errors import AdmissionError, MuletrainError
from muletrain.runs.folder import ROOT, is_held
from muletrain.runs.join.ticket import PREFIX, Ticket
from muletrain.runs.view import NAMED, RunView
from muletrain.runs.worker_files import LEFT, OWNER_FILE, STOP_FILE, TICKET_FILE

if TYPE_CHECKING:
    from pathlib import Path

TAKEN_S, POLL_S = 10.0, 0.1
"""Longest wait until the run's command takes the request to stop, and the time between two looks [s]."""
TOLD = (
    ev.RunPrepared,
    ev.RunStarted,
    ev.PeerJoined,
    ev.StepDone,
    ev.StepApplied,
    ev.SteppedBack,
    ev.Waiting,
    ev.PeerDown,
    ev.PeerLeft,
    ev.PeerExpelled,
    ev.MemberRemoved,
    ev.Validated,
    ev.RunFinished,
)
"""Events that ``state_in`` needs."""


class Found(NamedTuple):
    """A run as a command of this machine finds it."""

    folder: Path | None
    """Folder of a run that a command of this machine serves now."""
    ticket: Ticket | None
    """None: no machine can join by this one, at least not yet."""

    @property
    def begun_here(self) -> bool:
        """Did 'run' or 'start' begin the run on this machine? A folder of 'join' has no configuration."""
        return self.folder is not None and (self.folder / "config.toml").is_file()

    @property
    def preparing(self) -> bool:
        """Is the command at the model and the data still? Its plan is an event, and newer than the run's owner key."""
        if self.folder is None or not self.begun_here:
            return False
        try:
            begun_s = (self.folder / OWNER_FILE).stat().st_mtime
        except OSError:
            return True
        return all(event.t < begun_s for event in ev.events_in(self.folder, ev.RunPrepared)[-1:])

    @property
    def whole_here(self) -> bool:
        """Do all peers of the run report into the folder, which 'run' made?"""
        plans = [] if self.folder is None else ev.events_in(self.folder, ev.RunPrepared)
        return any(isinstance(plan, ev.RunPrepared) and plan.command == "run" for plan in plans[-1:])


def find(folder: Path | None) -> Found:
    """The run in ``folder``, or else the one run that commands of this machine serve under ``ROOT``, or the newest one
    with a ticket, which a killed command leaves behind. Raises MuletrainError if no run or several runs are found."""
    if folder is None:
        going = _served()
        if len(going) > 1:
            raise MuletrainError(
                f"{len(going)} runs go on here: {', '.join(map(str, going))}; name one of these folders"
            )
        left = sorted(ROOT.glob(f"*/{TICKET_FILE}"), key=lambda p: p.stat().st_mtime)
        folder = going[0] if going else left[-1].parent if left else None
        if folder is None:
            raise MuletrainError(
                f"no running run under {ROOT.resolve()}; name its folder, give a ticket, or use the folder where 'run', 'start' "
                f"or 'join' was called"
            )
    if not folder.is_dir():
        there = ", ".join(str(path) for path in sorted(ROOT.glob("*/"))[-NAMED:])
        raise AdmissionError(
            f"{folder}: no run folder, no ticket (which begins with '{PREFIX}'), and no file with one"
            + (f"; the newest runs here: {there}" if there else "")
        )
    ticket, served = _ticket_in(folder), is_held(folder)
    if ticket is None and not served:
        raise MuletrainError(f"{folder}: no run goes on there")
    return Found(folder if served else None, ticket)


def _served() -> list[Path]:
    """A folder of each run that commands serve under ``ROOT``. Several machines of one run may share ``ROOT``; the folder
    of the command that began the run comes first."""
    found: dict[str, Path] = {}
    for path in sorted(filter(is_held, ROOT.glob("*/")), key=lambda p: not (p / "config.toml").is_file()):
        ticket = _ticket_in(path)
        found.setdefault(str(path) if ticket is None else ticket.run_id, path)
    return sorted(found.values())


def _ticket_in(folder: Path) -> Ticket | None:
    try:
        return Ticket.parse((folder / TICKET_FILE).read_text(encoding="utf-8"))
    except (OSError, AdmissionError):
        return None


def state_in(folder: Path) -> RunView:
    """The state of the run that a command of this machine began in ``folder``, since the command's plan."""
    events = ev.events_in(folder, *TOLD)
    begin = max((n for n, event in enumerate(events) if isinstance(event, ev.RunPrepared)), default=0)
    view = RunView(earlier=events[:begin])
    for event in events[begin:]:
        view.fold(event)
    return view


def has_ended(folder: Path) -> bool:
    """Do the events in ``folder`` say that the run has ended? Processes write that event last. If this machine only left,
    the run may go on."""
    told = ev.events_in(folder, ev.RunStarted, ev.RunFinished)
    return bool(told) and isinstance(told[-1], ev.RunFinished) and told[-1].reason != LEFT


def ask_command(folder: Path) -> Literal["taken", "ended", "silent"]:
    """Ask the command that serves the run in ``folder`` to end the run in order, by a file. A command that is preparing
    finds the file later."""
    request = folder / STOP_FILE
    request.touch()
    for _ in range(int(TAKEN_S / POLL_S)):
        if not request.exists():
            return "taken"
        if has_ended(folder):
            request.unlink(missing_ok=True)
            return "ended"
        if Found(folder, None).preparing:
            return "taken"
        time.sleep(POLL_S)
    request.unlink(missing_ok=True)
    return "silent"
