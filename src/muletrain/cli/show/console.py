"""The display of a running run: live on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from muletrain import events as ev
from muletrain.cli.show.final_report import final_report
from muletrain.cli.show.measured_fleet import fleet_tables
from muletrain.cli.show.screen import plain_line, status
from muletrain.cli.show.summary import Example, summary_table
from muletrain.runs.measure.quality import Quality
from muletrain.runs.session import Silent
from muletrain.runs.view import RunView
from muletrain.units import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "JsonConsole",
    "LiveConsole",
    "Quality",
    "RunView",
    "final_report",
    "make_console",
    "plain_line",
    "say",
    "status",
]

PADDING = re.compile(r" +$", re.MULTILINE)
"""Blanks by which tables fill their lines: of no use in a pipe or a file."""
PLAIN_WIDTH = 120
"""Width of tables in a pipe or a file [columns]."""


class SafeConsole(Console):
    """A console for untrusted text (models, remote machines, files): the terminal never obeys any text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, lines=True), segment.style)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else PADDING.sub("", text)


def make_console(file: TextIO | None = None) -> Console:
    """A rich console on ``file`` (default: standard output), wide enough for tables without a terminal."""
    console = SafeConsole(file=file, highlight=False)
    return console if console.is_terminal else SafeConsole(file=file, highlight=False, width=PLAIN_WIDTH)


def say(console: Console, text: str) -> None:
    """Print a paragraph, wrapped on a terminal, and as one line elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal)


def sentence_at(sentence: str, event: ev.Event, *, clock: bool = True) -> Text:
    """A sentence about ``event``; on a terminal with the time of day, because people look at it later."""
    time_of_day = time.strftime("%H:%M:%S  ", time.localtime(event.t)) if clock else ""
    return Text(time_of_day, style="dim").append(
        printable(sentence), "not dim yellow" if event.is_warning() else "not dim"
    )


class LiveConsole(Silent):
    """Folds events into ``view`` and shows the view. A context manager; call with each event, from one thread."""

    def __init__(
        self,
        view: RunView,
        console: Console | None = None,
        *,
        interval_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(view)
        self.console = console or make_console()
        self._interval_s = interval_s
        self._now = now
        self._next_line = -math.inf
        self._printed_step = 0
        self._lock = threading.Lock()  # rich draws in a thread of its own
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._draw, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.view.step != self._printed_step:
            self._print_line()
        self._live = None

    def __call__(self, event: ev.Event) -> None:
        """Fold the event; print its sentence, and a progress line if the last one is old enough."""
        with self._lock:
            news = self.view.fold(event)
            asides, self.view.asides = self.view.asides, []
        if news and (sentence := self.view.headline(event)):
            self._print(sentence, event)
        for aside in asides:
            self._print(aside, event)
        if isinstance(event, ev.FleetMeasured):
            self.console.print(fleet_tables(event))
        if isinstance(event, ev.RunPrepared):
            self.console.print(summary_table(event))
            for found in event.examples if self.console.is_terminal or self.console.is_jupyter else ():
                self.console.print(Example(found))
        if self._live is None and isinstance(event, ev.StepDone) and self._now() >= self._next_line:
            self._print_line()

    def say(self, text: str) -> None:
        """Print above the live view, which would overwrite a second console's text."""
        self.console.print(text, soft_wrap=True, markup=False)

    def _print(self, sentence: str, event: ev.Event) -> None:
        self.console.print(sentence_at(sentence, event, clock=self._live is not None), soft_wrap=True)

    def _print_line(self) -> None:
        self._next_line = self._now() + self._interval_s
        self._printed_step = self.view.step
        self.console.print(Text(plain_line(self.view)), soft_wrap=True)

    def _draw(self) -> RenderableType:
        with self._lock:  # drawn here, because the view changes
            return Group(*status(self.view, time.time()).parts(self.console, self.console.options))


class JsonConsole(Silent):
    """Prints each event as one line of JSON, and folds the event."""

    def __init__(self, view: RunView, file: TextIO | None = None) -> None:
        super().__init__(view)
        self._file = file

    def __exit__(self, *_: object) -> None:
        (self._file or sys.stdout).flush()

    def __call__(self, event: ev.Event) -> None:
        super().__call__(event)
        print(event.to_json(), file=self._file, flush=True)
