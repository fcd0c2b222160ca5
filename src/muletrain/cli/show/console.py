"""The display of a running run: live on a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import TYPE_CHECKING, Self, TextIO

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from muletrain import events as ev
from muletrain.cli.show.final_report import final_report
from muletrain.cli.show.measured_fleet import fleet_tables
from muletrain.cli.show.summary import example, summary_table
from muletrain.cli.show.tables import new_table
from muletrain.runs.measure.quality import Quality
from muletrain.runs.session import Silent
from muletrain.runs.view import PeerView, RunView
from muletrain.units import format_bytes, format_duration, plural, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "JsonConsole",
    "LiveConsole",
    "PeerView",
    "Quality",
    "RunView",
    "final_report",
    "make_console",
    "say",
    "status",
]

PLAIN_WIDTH = 120
"""Width of tables in a pipe or a file [columns]."""
STYLES = {"training": "green", "ready": "cyan", "suspected": "bold yellow", "left": "dim", "finished": "dim"}


class SafeConsole(Console):
    """A console for untrusted text (models, remote machines, files): the terminal never obeys any text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, lines=True), segment.style)


def make_console(file: TextIO | None = None) -> Console:
    """A rich console on ``file`` (default: standard output), wide enough for tables without a terminal."""
    console = SafeConsole(file=file, highlight=False)
    return console if console.is_terminal else SafeConsole(file=file, highlight=False, width=PLAIN_WIDTH)


def say(console: Console, text: str) -> None:
    """Print a paragraph, wrapped on a terminal, and as one line elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal)


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
            self._print(sentence, "yellow" if event.is_warning() else "")
        for aside in asides:
            self._print(aside, "yellow")
        if isinstance(event, ev.FleetMeasured):
            self.console.print(fleet_tables(event))
        if isinstance(event, ev.RunPrepared):
            self.console.print(summary_table(event))
            for found in event.examples if self.console.is_terminal or self.console.is_jupyter else ():
                self.console.print(example(found))
        if self._live is None and isinstance(event, ev.StepDone) and self._now() >= self._next_line:
            self._print_line()

    def say(self, text: str) -> None:
        """Print above the live view, which would overwrite a second console's text."""
        self.console.print(text, soft_wrap=True, markup=False)

    def _print(self, sentence: str, style: str) -> None:
        self.console.print(Text(printable(sentence), style=style), soft_wrap=True)

    def _print_line(self) -> None:
        self._next_line = self._now() + self._interval_s
        self._printed_step = self.view.step
        self.console.print(Text(plain_line(self.view)), soft_wrap=True)

    def _draw(self) -> RenderableType:
        with self._lock:
            return status(self.view, time.time())


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


def plain_line(view: RunView, now: float | None = None) -> str:
    """Progress as one line, for logs and pipes. ``now``: see ``Pace``."""
    stages = view.stages(present=True).items()
    peers = "; ".join(f"stage {s}: {', '.join(map(_named_state, peers)) or 'no peer'}" for s, peers in stages)
    if peers and not view.whole:
        peers = f"this machine: {peers}"
    gone = f"; {gone} gone" if (gone := view.gone()) else ""
    helping = view.clients.working()
    gone += f"; {plural(helping, 'client')}" if view.clients else ""
    left = _left(view, now)
    return (
        f"step {view.step}/{view.steps}  {_loss(view)}  {_rate(view.pace.tokens_per_s(now))} tokens/s  "
        f"{left}{'  ' if left else ''}{peers}{gone}"
    ).rstrip()


def status(view: RunView, now: float | None = None) -> RenderableType:
    """Progress and the peers of every stage, as drawn on a terminal. ``now``: see ``Pace``."""
    parts: list[RenderableType] = [_progress(view, now)] if view.started else []
    if view.probing:
        bar = ProgressBar(total=view.probing.total, completed=view.probing.done, width=30)
        parts.append(Columns([bar, Text(view.probing.what)]))
    if view.missing:
        parts.append(Text("waiting: " + ", ".join(view.missing), style="yellow"))
    if view.peers:
        parts.append(peers_table(view))
        if not view.whole:
            parts.append(Text("this machine's peers; 'muletrain status' shows all", style="dim"))
    if view.clients:
        parts.append(Text(_clients(view), style="dim"))
    return Group(*parts)


def _progress(view: RunView, now: float | None) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, view.steps), completed=view.step, width=30)
    grid.add_row(bar, *progress_words(view, now))
    return grid


def progress_words(view: RunView, now: float | None = None) -> tuple[str, str, str, str]:
    """Step, loss, speed and time left. ``now``: see ``Pace``."""
    speed = f"{_rate(view.pace.tokens_per_s(now))} tokens/s"
    return f"step {view.step}/{view.steps or '?'}", _loss(view), speed, _left(view, now)


def peers_table(view: RunView) -> RenderableType:
    """The peers of every stage."""
    table = new_table("", ("stage", "peer", "state", "device"), ("step", "microbatches", "idle", "sent"))
    for stage, peers in view.stages(present=True).items():
        if not peers:
            table.add_row(str(stage), "[bold red]no peer[/]")
        for n, peer in enumerate(peers):
            table.add_row(str(stage) if n == 0 else "", *_peer_row(peer))
    if gone := view.gone():
        table.add_row("", f"[dim]{gone} gone[/]")
    return table


def _clients(view: RunView) -> str:
    """The clients at work: number and progress."""
    of_stages = []
    for stage, clients in view.clients.by_stage().items():
        working = sum(c.state == "working" for c in clients)
        of_stages.append(f"stage {stage}: {working}, {plural(sum(c.parts for c in clients), 'part')}")
    return f"clients  {'; '.join(of_stages)}"


def _peer_row(peer: PeerView) -> tuple[str, ...]:
    state = f"[{STYLES.get(peer.state, 'default')}]{peer.state}[/]"
    role = " (trainer)" if peer.trainer else ""
    device = escape(f"{peer.device} {peer.precision}")
    idle = f"{peer.idle_share:.0%}" if peer.total_s else "-"
    counts = (str(peer.step), str(peer.microbatches), idle, format_bytes(peer.sent_bytes()))
    return (escape(peer.name) + role, state, device, *counts)


def _named_state(peer: PeerView) -> str:
    return peer.name if peer.state == "training" else f"{peer.name} ({peer.state})"


def _left(view: RunView, now: float | None) -> str:
    if 0 < view.steps <= view.step:
        return "done"
    if view.finished is not None:
        return "stopped"
    left = view.pace.seconds_left(view.steps, now)
    return "" if math.isnan(left) else f"{format_duration(left)} left"


def _loss(view: RunView) -> str:
    training = "loss ?" if math.isnan(view.pace.loss) else f"loss {view.pace.loss:.3f}"
    heldout = f"  held-out {view.validated[max(view.validated)].loss:.3f}" if view.validated else ""
    skipped = f"  {plural(len(view.skips), 'update')} skipped" if view.skips else ""
    return training + heldout + skipped


def _rate(tokens_per_s: float) -> str:
    return "?" if math.isnan(tokens_per_s) else f"{tokens_per_s:,.0f}"
