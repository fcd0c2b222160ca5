"""How a run that ended early goes on: its last step, and the command that resumes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.events import RunPrepared, RunStarted, StepDone, SteppedBack, events_in
from muletrain.runs.folder import ROOT, is_held, run_folder
from muletrain.runs.view import Pace
from muletrain.runs.worker_files import TICKET_FILE

if TYPE_CHECKING:
    from pathlib import Path

GOES_ON = (
    "Other machines may train the run still: look there ('muletrain status'), and join with a ticket of theirs ('muletrain ticket'). A "
    "resume begins a second run from the newest checkpoint here; only if no machine is left: "
)
"""Advice about a run of several machines after the command of the first one was killed; a command follows."""


def resuming(folder: Path | str, command: str) -> str:
    """The command that continues the run in ``folder``, which ``command`` ('run' or 'start') began."""
    return f"muletrain {command} --resume {folder}"


def last_step(folder: Path) -> int:
    """The last step that the run in ``folder`` has done, also if no checkpoint has it."""
    pace = Pace()
    for event in events_in(folder, RunStarted, StepDone, SteppedBack):
        match event:
            case RunStarted():
                pace.begin(event.first_step)
            case SteppedBack():
                pace.back_to(event.to)
            case StepDone():
                pace.fold(event)
    return pace.step


def ended_early(path: Path = ROOT) -> str:
    """A sentence about the run in ``path``, or else the newest one under ``path``, if it ended before its last step: how
    to resume it; else empty."""
    try:
        folder = run_folder(path)
    except MuletrainError:
        return ""
    prepared = next((e for e in reversed(events_in(folder, RunPrepared)) if isinstance(e, RunPrepared)), None)
    step = last_step(folder)
    if prepared is None or is_held(folder) or step >= prepared.steps:
        return ""
    how = resuming(folder, prepared.command)
    if not (folder / TICKET_FILE).exists():
        return f"{folder} ended at step {step} of {prepared.steps}; go on: {how}"
    # a command that ends in order removes the ticket
    return f"{folder}: this machine's part ended without a last word at step {step} of {prepared.steps}. {GOES_ON}{how}"
