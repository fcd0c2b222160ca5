"""How a run that ended early goes on: its last step, and the command that resumes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.errors import MuletrainError
from muletrain.events import RunPrepared, RunStarted, StepDone, SteppedBack, events_in
from muletrain.runs.folder import ROOT, is_held, run_folder
from muletrain.runs.view import Pace

if TYPE_CHECKING:
    from pathlib import Path


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


def ended_early() -> str:
    """A sentence about the newest run under ``ROOT`` if it ended before its last step: how to resume it; else empty."""
    try:
        folder = run_folder(ROOT)
    except MuletrainError:
        return ""
    prepared = next((e for e in reversed(events_in(folder, RunPrepared)) if isinstance(e, RunPrepared)), None)
    step = last_step(folder)
    if prepared is None or is_held(folder) or step >= prepared.steps:
        return ""
    return f"{folder} ended at step {step} of {prepared.steps}; go on: {resuming(folder, prepared.command)}"
