"""Progress and Ctrl-C of a simulated fleet."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from muletrain.cli.show.console import make_console
from muletrain.units import format_duration, plural

if TYPE_CHECKING:
    from types import FrameType

LINES_S = (1.0, 5.0)
"""Seconds to the first and to the second progress line without a terminal; later pauses double."""
SELDOM_S = 60.0
"""Longest pause between two progress lines [s]."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Playing:
    """Shows on standard error how much of ``horizon_s`` was played: as a bar, or as lines without a terminal
    (``quiet``: nothing). The first Ctrl-C (or SIGTERM) ends the play in order, a second one ends the program. A context
    manager; pass the object to a play as ``sim.fleet.accounts.GoesOn``."""

    def __init__(self, what: str, horizon_s: float, *, quiet: bool) -> None:
        self._what, self._horizon_s, self._quiet = what, horizon_s, quiet
        self._console = make_console(sys.stderr)
        columns = (
            TextColumn(what),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
        )
        self._bar = Progress(
            *columns, console=self._console, transient=True, disable=quiet or not self._console.is_terminal
        )
        self._task = self._bar.add_task(self._so_far(0.0, 0.0), total=horizon_s)
        self._pause_s = LINES_S[1]
        self.stopped_by: int | None = None
        """Number of the signal that ended the play."""

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._interrupt) for number in SIGNALS}
        self._bar.start()
        self._begin_s = time.monotonic()
        self._line_s = self._begin_s + LINES_S[0]
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            raise KeyboardInterrupt
        self.stopped_by = number

    def __call__(self, now_s: float, steps: float) -> bool:
        if not self._bar.disable:
            self._bar.update(self._task, completed=now_s, description=self._so_far(now_s, steps))
        elif not self._quiet and time.monotonic() >= self._line_s:
            self._line_s = time.monotonic() + self._pause_s
            self._pause_s = min(SELDOM_S, 2 * self._pause_s)
            took = format_duration(time.monotonic() - self._begin_s)
            self._console.print(f"{self._what}: {self._so_far(now_s, steps)} in {took}", soft_wrap=True)
        return self.stopped_by is None

    def _so_far(self, now_s: float, steps: float) -> str:
        return f"{format_duration(now_s)} of {format_duration(self._horizon_s)}, {plural(int(steps), 'step')}"
