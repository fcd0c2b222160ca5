"""The current activity of a command, reported on standard error while nothing else is shown. Every command that may
take more than two seconds reports before loading anything large."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

BEGINS = {
    "run": "preparing the run",
    "start": "preparing the run",
    "join": "preparing to join the run",
    "status": "looking at the run",
    "stop": "asking the run to stop",
    "kick": "telling the run's members",
    "dashboard": "preparing the page",
    "doctor": "examining this machine",
    "data": "reading the data",
    "plan": "preparing the plan",
    "trace": "preparing to trace the model",
    "profile": "preparing to measure the model",
    "eval": "reading the trained model",
    "generate": "reading the trained model",
    "export": "reading the trained model",
    "fleet": "preparing to play the fleet",
    "calibrate": "reading the runs' events",
}
"""The first line of each command that loads torch, computes or asks remote machines."""
SOON_S, PAUSE_S, SELDOM_S = 1.0, 5.0, 60.0
"""Without a terminal: seconds to an activity's first and second line; later pauses double up to the last."""


def begins(command: str) -> None:
    """Print the first line of a command, if any."""
    if (what := BEGINS.get(command)) is not None:
        _say(what)


def _say(what: str) -> None:
    from muletrain.units import printable

    print(f"{printable(what)} ...", file=sys.stderr, flush=True)


class Doing:
    """One activity. Call with the finished share (0 to 1; None: unknown), and with new words when the activity
    changes."""

    def __init__(self, what: str, bar: Progress | None) -> None:
        self._what, self._bar, self._share = what, bar, None if bar is None else 0.0
        self._told, self._pause_s, self._next_s = "", PAUSE_S, time.monotonic() + SOON_S
        self._timer: threading.Timer | None = None
        if bar is None:
            self._timer = threading.Timer(SOON_S, self._line)
            self._timer.daemon = True
            self._timer.start()
        else:
            self._task = bar.add_task(what, total=None)

    def __call__(self, share: float | None = None, what: str | None = None) -> None:
        self._share, self._what = share, what or self._what
        if self._bar is not None:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=self._what, total=total, completed=share)
        elif time.monotonic() >= self._next_s:
            self._line()

    def _line(self) -> None:
        share = "" if not self._share or self._share >= 1 else f" {self._share:.0%}"
        now = f"{self._what}{share}"
        if now != self._told:
            self._told = now
            _say(now)
        self._next_s = time.monotonic() + self._pause_s
        self._pause_s = min(SELDOM_S, 2 * self._pause_s)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@contextmanager
def doing(what: str) -> Iterator[Doing]:
    """Tell people about an activity while the context lasts: by a bar on a terminal, which vanishes at the end;
    elsewhere by lines, after ``SOON_S``."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from muletrain.cli.show.console import make_console

    console = make_console(sys.stderr)
    if not console.is_terminal:
        told = Doing(what, None)
        try:
            yield told
        finally:
            told.close()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        yield Doing(what, bar)
