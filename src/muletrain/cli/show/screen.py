"""A run in at most 24 lines: progress, load and peers of each stage, lost peers and their replacement; and the same as
one line of text for logs and pipes."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.text import Text

from muletrain.cli.show.tables import new_table
from muletrain.units import format_bytes, format_duration, plural, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

    from muletrain.runs.view import PeerView, RunView

LINES = 24
"""Most lines of the screen; fewer on a lower terminal."""
BAR, WIDE_BAR = 10, 24
"""Columns of a bar in the table. The first table that fits is drawn: with a wide bar, and also devices, steps and bytes
of peers; with a bar; with neither bars nor microbatches, and cut names if need be."""
LONG_BAR = 80
"""Most columns of the bar of progress."""
RECENT_S = 300.0
"""Time for which a lost peer keeps its line [s]."""
NAMED_PEERS, NAMED_STAGES = 12, 8
"""Most peers, and stages, that a plain line names."""
LISTED = 4
"""Most conditions that a waiting run lists."""
STYLES = {
    "training": "green",
    "ready": "cyan",
    "suspected": "bold yellow",
    "gone": "bold red",
    "ended": "bold red",
    "left": "dim",
    "finished": "dim",
}


def plain_line(view: RunView, now: float | None = None) -> str:
    """Progress as one line, for logs and pipes. ``now``: see ``Pace``."""
    gone = f"; {gone} gone" if (gone := view.gone()) else ""
    clients = f"; {plural(view.clients.working(), 'client')}" if view.clients else ""
    figures = [f"step {view.step}/{view.steps}", _loss(view), _speed(view, now), _left(view, now)]
    return "  ".join([*filter(None, figures), f"{_served(view)}{gone}{clients}"]).rstrip()


def status(view: RunView, now: float | None = None) -> Screen:
    """Progress and the peers of every stage, as drawn on a terminal. ``now``: see ``Pace``."""
    return Screen(view, now)


def progress_words(view: RunView, now: float | None = None) -> tuple[str, str, str, str]:
    """Step, loss, speed and time left. ``now``: see ``Pace``."""
    return f"step {view.step}/{view.steps or '?'}", _loss(view), _speed(view, now), _left(view, now)


class Screen:
    """Renders a view to the width and height of the console."""

    def __init__(self, view: RunView, now: float | None) -> None:
        self._view, self._now, self._ascii_only = view, now, False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from self.parts(console, options)

    def parts(self, console: Console, options: ConsoleOptions) -> list[RenderableType]:
        """The screen, which no longer depends on the view."""
        view, width, self._ascii_only = self._view, options.max_width, options.ascii_only
        above = [Text(), *self._progress(width)]
        below = [*self._below()]
        below = [Text(), *below] if below and view.peers else below
        table: list[RenderableType] = []
        if view.peers:
            taken = sum(max(1, -(-len(text) // width)) for text in (*above, *below))
            room = min(LINES, console.height) - taken
            table = [self.table(max(room, 3), lambda t: console.measure(t, options=options).maximum < width)]
        return [*above, *table, *below]

    def _progress(self, width: int) -> Iterator[Text]:
        view, length = self._view, min(LONG_BAR, width // 2)
        if view.started:
            step, loss, speed, left = progress_words(view, self._now)
            bar = _bar(view.step / max(1, view.steps), length, self._ascii_only, style="green")
            yield bar.append("  ".join(["", step, *filter(None, [left])]), "bold")
            yield Text(f"{loss}  {speed}")
            yield Text("")
        if view.probing:
            bar = _bar(view.probing.done / max(1, view.probing.total), length, self._ascii_only, style="cyan")
            yield bar.append(f"  {view.probing.what}")

    def _below(self) -> Iterator[Text]:
        view = self._view
        if view.clients:
            yield Text(_clients(view))
        if view.peers and not view.whole:
            yield Text("this machine's peers; 'muletrain status' shows all", style="dim")
        if view.missing:
            more = f" and {n} more" if (n := len(view.missing) - LISTED) > 0 else ""
            yield Text(f"waiting: {'; '.join(view.missing[:LISTED])}{more}", style="yellow")
        waits = [peer.waits for peer in view.peers.values() if peer.waits is not None and not peer.lost]
        if waits:
            yield Text(max(waits, key=lambda w: w.seconds).sentence(), style="yellow")
        for stage, lost in list(self._lost().items())[:2]:
            names = ", ".join(p.name for p in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            plainly = "does not answer" if lost[0].state == "suspected" else "is gone"
            what = plainly if len(lost) == 1 else "do not answer"
            yield Text(f"{names} {what}: {view.goes_on(stage)}", style="yellow")
        if view.halted:
            yield Text(printable(view.halted), style="bold red")

    def _lost(self) -> dict[int, list[PeerView]]:
        """The peers lost lately, by stage; the newest loss first."""
        found: dict[int, list[PeerView]] = {}
        for peer in sorted(self._view.peers.values(), key=lambda p: -p.suspected_at):
            if self._recently(peer):
                found.setdefault(peer.stage, []).append(peer)
        return found

    def _recently(self, peer: PeerView) -> bool:
        now = self._view.pace.end_s if self._now is None else self._now
        return peer.lost and peer.state != "replaced" and (not math.isfinite(now) or now - peer.suspected_at < RECENT_S)

    def table(self, room: int, fits: Callable[[Table], bool] = lambda table: True) -> Table:
        """The stages in at most ``room`` lines: with a line for each peer if they fit, else with one for each stage.
        ``fits``: whether a table is narrow enough."""
        present = self._view.stages(present=True)
        peers = {
            stage: [
                *present.get(stage, ()),
                *(p for p in of_stage if p.state in ("gone", "ended") and self._recently(p)),
            ]
            for stage, of_stage in self._view.stages().items()
        }
        listed = sum(max(1, len(of_stage)) for of_stage in peers.values())
        gone = self._view.gone() - sum(len(peers[s]) - len(present.get(s, ())) for s in peers)
        for bar in (WIDE_BAR, BAR, 0):
            in_full = listed + 1 + bool(gone) <= room
            table = self._by_peer(peers, gone, bar) if in_full else self._by_stage(present, room, bar)
            if fits(table):
                break
        return table

    def _by_peer(self, peers: dict[int, list[PeerView]], gone: int, bar: int) -> Table:
        wide = bar == WIDE_BAR
        more = ("device", "role") if wide else ()
        table = new_table("", ("stage", "busy", "peer", "state", *more), _numbers(bar))
        for name in ("step", "sent") if wide else ():
            table.add_column(name, justify="right")
        _one_line(table)
        for stage, of_stage in peers.items():
            if not of_stage:
                table.add_row(str(stage), "", "[bold red]no peer[/]")
            for n, peer in enumerate(of_stage):
                first = (str(stage), self._load(of_stage, bar)) if n == 0 else ("", "")
                table.add_row(*first, *self._of_peer(peer, bar))
        if gone:
            table.add_row("", "", f"[dim]{gone} gone[/]")
        return table

    def _of_peer(self, peer: PeerView, bar: int) -> list[str | Text]:
        wide = bar == WIDE_BAR
        state = f"[{STYLES.get(peer.state, 'default')}]{'gone' if peer.state == 'ended' else peer.state}[/]"
        more = [escape(f"{peer.device} {peer.precision}"), "trainer" if peer.trainer else ""] if wide else []
        work = [f"{peer.microbatches:,}", self._tokens_per_s([peer])][-len(_numbers(bar)) :]
        moved = [str(peer.step), format_bytes(peer.sent_bytes())] if wide else []
        return [_cut(escape(peer.name)), state, *more, *work, *moved]

    def _by_stage(self, peers: dict[int, list[PeerView]], room: int, bar: int) -> Table:
        """The stages with the fewest peers, if there is no room for all."""
        table = new_table("", ("stage", "busy"), ("peers",))
        table.add_column("states")
        for name in _numbers(bar):
            table.add_column(name, justify="right")
        _one_line(table)
        few = sorted(peers, key=lambda s: len(peers[s]))[: room - (1 if len(peers) < room else 2)]
        for stage in sorted(few):
            of_stage = peers[stage]
            lost = sum(p.lost and p.state in ("gone", "ended") for p in self._view.stages().get(stage, ()))
            states = Counter(p.state for p in of_stage) + Counter({"gone": lost})
            words = ", ".join(f"[{STYLES.get(s, 'default')}]{n} {s}[/]" for s, n in states.most_common())
            work = [f"{sum(p.microbatches for p in of_stage):,}", self._tokens_per_s(of_stage)][-len(_numbers(bar)) :]
            words = words or "[bold red]no peer[/]"
            table.add_row(str(stage), self._load(of_stage, bar), str(len(of_stage)), _cut(words), *work)
        if len(few) < len(peers):
            table.add_row("", "", "", f"[dim]{len(peers) - len(few)} more, with more peers[/]")
        return table

    def _load(self, peers: Sequence[PeerView], bar: int) -> Text:
        """The share of time in which the peers of a stage work."""
        known = [p.busy for p in peers if not p.lost and not math.isnan(p.busy)]
        if not known:
            return Text("-")
        share = sum(known) / len(known)
        return _bar(share, bar, self._ascii_only, style="cyan").append(f"{' ' if bar else ''}{share:4.0%}")

    def _tokens_per_s(self, peers: Sequence[PeerView]) -> str:
        each = self._view.tokens_per_microbatch()
        speed = sum(p.microbatches_per_s for p in peers if not p.lost) * (0.0 if math.isnan(each) else each)
        return f"{speed:,.0f}" if speed else "-"


def peers_table(view: RunView) -> Table:
    """The peers of every stage, as far as they fit into the lines of a screen."""
    return Screen(view, None).table(LINES)


def _numbers(bar: int) -> tuple[str, ...]:
    """Headings of a table with bars of ``bar`` columns."""
    return ("microbatches", "tokens/s") if bar else ("tokens/s",)


def _one_line(table: Table) -> None:
    for column in table.columns:
        column.no_wrap = column.header not in ("peer", "states")  # rich narrows these two (``_cut``), and no other


def _cut(markup: str) -> Text:
    """A cell that stays one line, however narrow."""
    text = Text.from_markup(markup, overflow="ellipsis")
    text.no_wrap = True
    return text


def _bar(share: float, width: int, ascii_only: bool, style: str) -> Text:
    """A bar whose parts differ also without colours."""
    full = round(min(1.0, max(0.0, share)) * width)
    done, left = (
        ("#", ".")
        if ascii_only
        else ("\N{BOX DRAWINGS HEAVY HORIZONTAL}", "\N{BOX DRAWINGS LIGHT DOUBLE DASH HORIZONTAL}")
    )
    return Text().append(done * full, style).append(left * (width - full), "dim")


def _served(view: RunView) -> str:
    """The peers of each stage, or their numbers."""
    stages = view.stages(present=True)
    counts = {stage: len(peers) for stage, peers in stages.items()}
    if sum(counts.values()) <= NAMED_PEERS:
        peers = "; ".join(f"stage {s}: {', '.join(map(_named_state, of)) or 'no peer'}" for s, of in stages.items())
    elif len(stages) <= NAMED_STAGES:
        peers = "; ".join(f"stage {s}: {plural(n, 'peer') if n else 'no peer'}" for s, n in counts.items())
    else:
        least = min(counts, key=lambda s: counts[s])
        peers = (
            f"{plural(sum(counts.values()), 'peer')} in {len(counts)} stages, fewest in stage {least}: {counts[least]}"
        )
    return f"this machine: {peers}" if peers and not view.whole else peers


def _clients(view: RunView) -> str:
    """The clients at work: number and progress."""
    of_stages = list[str]()
    for stage, clients in view.clients.by_stage().items():
        working, parts = sum(c.state == "working" for c in clients), sum(c.parts for c in clients)
        of_stages.append(f"stage {stage}: {plural(working, 'client')} at work, {plural(parts, 'part')} done")
    return "; ".join(of_stages) if len(of_stages) <= LISTED else f"{plural(view.clients.working(), 'client')} at work"


def _named_state(peer: PeerView) -> str:
    return peer.name if peer.state == "training" else f"{peer.name} ({peer.state})"


def _left(view: RunView, now: float | None) -> str:
    if 0 < view.steps <= view.step:
        return "done"
    if view.finished is not None:
        return "stopped"
    if view.halted:
        return "waiting"
    left = view.pace.seconds_left(view.steps, now)
    return "" if math.isnan(left) else f"{format_duration(left)} left"


def _loss(view: RunView) -> str:
    training = "loss ?" if math.isnan(view.pace.loss) else f"loss {view.pace.loss:.3f}"
    heldout = f"  held-out {view.validated[max(view.validated)].loss:.3f}" if view.validated else ""
    skipped = f"  {plural(len(view.skips), 'update')} skipped" if view.skips else ""
    return training + heldout + skipped


def _speed(view: RunView, now: float | None) -> str:
    tokens_per_s = view.pace.tokens_per_s(now)
    if math.isnan(tokens_per_s):
        return "? tokens/s"
    return f"{tokens_per_s:,.0f} tokens/s over {plural(view.pace.measured, 'step')}"
