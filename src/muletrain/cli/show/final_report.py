"""The final report: five lines, samples, lost peers; and on request tables of quality, work and traffic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from muletrain.cli.show.tables import new_table
from muletrain.events import TRAFFIC_CLASSES
from muletrain.units import format_bytes, format_duration, plural, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from muletrain.runs.measure.quality import Quality
    from muletrain.runs.view import PeerView, RunView


NAMED = 4
"""Most lost peers that the report's first lines name."""
MEASURED = 12
"""Held-out losses during training that are shown."""


def final_report(
    view: RunView,
    evaluation: Quality | None,
    samples: Sequence[str],
    paths: Mapping[str, Path | str],
    commands: Sequence[str] = (),
    *,
    tables: bool = True,
) -> RenderableType:
    """The report for rich. ``evaluation`` is None, and there are no samples, if the run ended without a checkpoint.
    ``paths``: by label, the run folder first. ``commands``: what to do next. ``tables``: with the tables of quality,
    peers and bytes."""
    parts = list[RenderableType]()
    if samples:
        parts.append(_section("The model writes", _texts(samples)))
    if view.failed:
        parts.append(_failed(view))
    if len(view.faults):
        parts.append(_faults(view))
    if tables:
        parts += _tables(view, evaluation, paths)
    lines = _lines(view, evaluation, paths, commands)
    return Group("", *lines, *(Padding(part, (1, 0, 0, 0), expand=False) for part in parts))


def _tables(view: RunView, evaluation: Quality | None, paths: Mapping[str, Path | str]) -> Iterator[RenderableType]:
    if evaluation is not None:
        yield quality_table(evaluation)
    if view.validated:
        yield _validations(view)
    if view.peers:
        yield from (_work(view), _links(view))
    if any(peer.rounds for peer in view.peers.values()):
        yield _swapped(view)
    if view.clients:
        yield _clients(view)
    yield _places(paths)


def _lines(
    view: RunView, evaluation: Quality | None, paths: Mapping[str, Path | str], commands: Sequence[str]
) -> Iterator[Text]:
    """Result, speed, trouble, files and next commands, a line each. No line is broken, so that paths and commands can be
    copied."""
    none = [] if "checkpoint" in paths else ["there is no checkpoint to go on from"]
    trouble, since = _trouble(view), f"{_since(view).strip()}: " if _since(view) else ""
    told = (
        ("result", [_result(view, evaluation)], "bold"),
        ("speed", [_speed(view)], ""),
        ("trouble", [f"{since}{'; '.join(trouble) or 'none'}"], "yellow" if trouble else ""),
        ("files", [_files(paths)] if paths else [], ""),
        ("next", commands or none, ""),
    )
    for label, lines, style in told:
        for n, line in enumerate(lines):
            yield Text(no_wrap=True, overflow="ignore").append(f"{'' if n else label:<9}", "dim").append(line, style)


def _result(view: RunView, q: Quality | None) -> str:
    if q is not None and q.own_loss:
        return f"loss {q.loss:.4g} on held-out data"
    if q is not None:
        others = {"before training": q.before, "unigram": q.unigram, "bigram": q.bigram}
        beside = ", ".join(f"{name} {loss:.3f}" for name, loss in others.items() if loss is not None)
        return f"held-out loss {q.loss:.3f}{f' ({beside})' if beside else ''}, perplexity {_perplexity(q.loss)}"
    if view.validated:
        step = max(view.validated)
        return f"held-out loss {view.validated[step].loss:.3f} after step {step}"
    if math.isfinite(view.pace.loss):
        return f"training loss {view.pace.loss:.3f}; no measurement on held-out data"
    return "no step was completed"


def _speed(view: RunView) -> str:
    reason = f" ({view.finished.reason})" if view.finished and view.finished.reason else ""
    speed = f"{view.pace.tokens / view.pace.seconds:,.0f} tokens/s" if view.pace.seconds else "no step was completed"
    steps = f"{view.step} of {plural(view.steps, 'step')}"
    before = "" if math.isnan(view.prepared_s) else f"; prepared in {format_duration(view.prepared_s)}"
    return f"{steps}, {view.pace.tokens:,} tokens in {format_duration(view.pace.seconds)}: {speed}{reason}{before}"


def _trouble(view: RunView) -> list[str]:
    """What went wrong, and how the run went on."""
    lost = sorted(p.name for p in view.peers.values() if p.lost)
    gave_up = sorted(view.failed.keys() - set(lost))
    names = ", ".join([*lost[:NAMED], *(["..."] if len(lost) > NAMED else [])])
    went_on = ", and the others did the work" if 0 < view.steps <= view.step else ""
    clients = [client for of_stage in view.clients.by_stage().values() for client in of_stage]
    counts = {
        "client": (sum(client.state in ("gone", "ended") for client in clients), "lost"),
        "microbatch": (view.rerouted, "rerouted"),
        "update": (len(view.skips), "skipped"),
        "sample": (len(view.replaced), "unusable and replaced"),
    }
    return [
        *([f"{plural(len(lost), 'peer')} lost ({names}){went_on}"] if lost else []),
        *([f"{', '.join(gave_up[:NAMED])} gave up"] if gave_up else []),
        *view.slow(),
        *([f"went back to a checkpoint ({plural(view.rollbacks, 'time')})"] if view.rollbacks else []),
        *(f"{plural(n, noun)} {what}" for noun, (n, what) in counts.items() if n),
    ]


def _files(paths: Mapping[str, Path | str]) -> str:
    """The run folder, and the newest checkpoint and the report in it."""
    folder, *_ = map(str, paths.values())
    shown = (str(paths[label]).removeprefix(f"{folder}/") for label in ("checkpoint", "report") if label in paths)
    return ": ".join(filter(None, (folder, ", ".join(shown))))


def quality_table(q: Quality) -> RenderableType:
    part = "" if q.tokens == q.heldout else f" (sampled from {q.heldout:,})"
    held = "held-out " if q.trained else ""  # of another text nobody knows whether the model has seen it
    if q.own_loss:
        less = f"; left out: {plural(len(q.left_out), 'sample')}, first: {q.left_out[0]}" if q.left_out else ""
        return Text(f"Loss {q.loss:.4g} on {q.tokens:,} {held}samples or tokens{part}{less}")
    title = f"On {q.tokens:,} {held}tokens{part}"
    table = new_table(title, ["model"], ["loss [nats/token]", "perplexity", "this model is"])
    table.add_row("this model", f"{q.loss:.3f}", _perplexity(q.loss), "")
    if q.before is not None:
        table.add_row("before training", f"{q.before:.3f}", _perplexity(q.before), _compared(q.before - q.loss))
    for name, loss in (("interpolated bigram", q.bigram), ("unigram", q.unigram)) if q.trained else ():
        if loss is None:
            table.add_row(name, "-", "-", "-")
        else:
            table.add_row(name, f"{loss:.3f}", _perplexity(loss), _compared(loss - q.loss))
    if q.bigram is None and q.trained:
        return Group(table, Text(f"too few training tokens for a unigram or bigram: {q.trained:,}", style="dim"))
    if q.counted < q.trained:
        return Group(
            table, Text(f"unigram and bigram from {q.counted:,} of {q.trained:,} training tokens", style="dim")
        )
    return table


def _validations(view: RunView) -> RenderableType:
    """Held-out losses during training, at most ``MEASURED``; the events have all."""
    steps = sorted(view.validated)
    last = len(steps) - 1
    shown = sorted({steps[last * k // (MEASURED - 1)] for k in range(MEASURED)})
    latest = view.validated[steps[-1]]
    own = latest.perplexity is None
    what, numbers = ("samples or tokens", ["loss"]) if own else ("tokens", ["loss [nats/token]", "perplexity"])
    table = new_table(f"During training, on {latest.tokens:,} held-out {what}", ["after step"], numbers)
    for step in shown:
        loss = view.validated[step].loss
        table.add_row(str(step), f"{loss:.3f}", *(() if own else (_perplexity(loss),)))
    return table


def _texts(samples: Sequence[str]) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    for sample in samples:
        grid.add_row("-", Text(" ".join(sample.split())))
    return grid


def _work(view: RunView) -> RenderableType:
    """One row per peer, within 80 columns; a device that all share is in the title."""
    kinds = {f"{peer.device} {peer.precision}" for peer in view.peers.values()}
    alike = len(kinds) == 1
    table = new_table(
        f"Peers{_since(view)}{f' ({escape(kinds.pop())})' if alike else ''}: microbatches, speed, shares of time",
        ["stage", "peer", *([] if alike else ["device"])],
        ["done", "again", "tokens/s", "compute", "averaging", "update", "idle"],
    )
    for stage, peers in view.stages().items():
        for peer in peers:
            device = [] if alike else [escape(f"{peer.device} {peer.precision}")]
            table.add_row(str(stage), escape(peer.name), *device, *_shares(peer, view))
    return table


def _since(view: RunView) -> str:
    """The beginning of the counts of trouble, work and bytes, if the run was resumed; steps and speed count all."""
    first = view.started.first_step if view.started else 0
    return f" since step {first}" if first else ""


def _shares(peer: PeerView, view: RunView) -> tuple[str, ...]:
    tokens = peer.microbatches * view.tokens_per_microbatch()
    speed = f"{tokens / peer.total_s:,.0f}" if peer.total_s else "-"
    seconds = (peer.compute_s, peer.averaging_s, peer.apply_s, peer.wait_s)
    shares = (f"{s / peer.total_s:.0%}" if peer.total_s else "-" for s in seconds)
    return (str(peer.microbatches), str(peer.recomputed), speed, *shares)


def _links(view: RunView) -> RenderableType:
    classes = [c for c in TRAFFIC_CLASSES if c != "relayed" or any(p.sent_bytes(c) for p in view.peers.values())]
    table = new_table(f"Sent over the network{_since(view)}", ["from", "to"], [*classes, "total"])
    rows = [(p.name, receiver, counts) for p in view.peers.values() for receiver, counts in p.sent.items()]
    named = sorted((sender, view.name_of(receiver), counts) for sender, receiver, counts in rows)
    last = ""
    for sender, receiver, counts in named:
        cells = (format_bytes(n) if n else "-" for n in (*(counts[c] for c in classes), sum(counts.values())))
        table.add_row(escape(sender) if sender != last else "", escape(receiver), *cells)
        last = sender
    sums = [sum(p.sent_bytes(c) for p in view.peers.values()) for c in classes]
    table.add_row("all", "", *(format_bytes(n) for n in (*sums, sum(sums))), style="bold")
    return table


def _swapped(view: RunView) -> RenderableType:
    """Peers with a stage larger than the device."""
    table = new_table(
        "Swapped stages",
        ["stage", "peer"],
        ["parts", "loads", "loaded", "microbatches a pass", "waits for it"],
    )
    for stage, peers in view.stages().items():
        for p in (p for p in peers if p.rounds):
            waits = f"{p.load_wait_s / p.total_s:.0%}" if p.total_s else "-"
            loaded = (str(p.parts or "-"), str(p.loads), format_bytes(p.loaded_bytes))
            table.add_row(str(stage), escape(p.name), *loaded, f"{p.passed / p.rounds:.1f}", waits)
    return table


def _clients(view: RunView) -> RenderableType:
    table = new_table("Clients", ["stage", "client", ""], ["parts", "late", "redone"])
    for stage, clients in view.clients.by_stage().items():
        for c in clients:
            table.add_row(str(stage), escape(c.name), c.state, *map(str, (c.parts, c.late, c.redone)))
    return table


def _failed(view: RunView) -> RenderableType:
    table = new_table("Peers that gave up or ended early", ["peer", "why"], [])
    for name, why in view.failed.items():
        table.add_row(escape(name), escape(printable(view.named(why))))
    return table


def _faults(view: RunView) -> RenderableType:
    table = new_table(f"Injected faults: {len(view.faults)}", ["after step", "fault", "hit", "detected"], [])
    for row in view.faults.rows():
        table.add_row(*map(escape, row))
    return table


def _places(paths: Mapping[str, Path | str]) -> RenderableType:
    width = max(map(len, paths), default=0)
    return Group(*(Text(f"{label:<{width}}  {path}", overflow="fold") for label, path in paths.items()))


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(title, style="bold"), body)


def _compared(ahead: float) -> str:
    """How far this model is ahead of a model [nats/token], in words."""
    return f"{'better' if ahead >= 0 else 'worse'} by {abs(ahead):.3f} nats"


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 50 else "inf"
