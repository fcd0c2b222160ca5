"""The summary of a run before the first step, for people: lines that fit into 80 columns."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from muletrain.cli.show.tables import new_table
from muletrain.units import format_count, format_memory, plural, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions

    from muletrain.compute.estimate import Offer
    from muletrain.events import RunPrepared
    from muletrain.runs.assemble import RunFacts

LEARNED, READ = "green", "dim"
MARKS = ("[[", "]]")


def summary_table(e: RunPrepared) -> Table:
    """The run as a table of two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, lines in (("data", _data(e)), ("steps", _steps(e)), ("model", _model(e)), ("where", _where(e))):
        table.add_row(name, Text(printable("\n".join(lines), lines=True)))
    return table


def stages_table(facts: RunFacts, offer: Offer) -> Table:
    """The stages of a run, with what a peer needs for each, and whether one with ``offer`` can serve it."""
    table = new_table(f"Stages (a peer here may use {offer})", ["stage", "blocks"], ["parameters", "memory"])
    table.add_column("on this machine")
    for stage, (need, (first, end)) in enumerate(zip(facts.needs(), facts.cut, strict=True)):
        fits = "fits" if need.resident(offer) else "fits, swapped" if need.fits(offer) else "too large"
        size, params = format_memory(need.of_device(offer)), format_count(facts.spec.stage_params(facts.cut, stage))
        table.add_row(str(stage), f"{first + 1} to {end}", params, size, fits)
    return table


class Example:
    """A document in the form that the model reads (``data.shown``). The learned text is in colour; without colours,
    ``MARKS`` enclose it."""

    def __init__(self, found: Sequence[str]) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        place, *pieces = self._found
        colours = console.color_system is not None and not console.no_color
        begin, end = ("", "") if colours else MARKS
        how = "" if colours else f" (the model learns to write what stands between {begin} and {end})"
        text = Text(f"\n{printable(place)}{how}\n", style="bold")
        for number, piece in enumerate(pieces):
            shown = printable(piece, lines=True)
            if number % 2:
                text.append(f"{begin}{shown}{end}", style=f"not bold {LEARNED}")
            else:
                text.append(shown, style=f"not bold {READ}")
        yield text


def _data(e: RunPrepared) -> list[str]:
    own = e.documents
    noun = "conversation" if own.get("counted") else "document"
    trained = f"{plural(own['documents'], noun)}, " if own else ""
    size, padded = f"{e.train:,} {e.unit} to train on", ""
    if own.get("counted"):
        size, padded = f"{own['counted']:,} tokens count towards the loss", " with padding"
    lines = [f"{e.data}: {trained}{size}"]
    if padded:
        share = own["padding"] / (e.train + e.heldout)
        lines.append(f"their sequences have {e.train:,} tokens, {share:.0%} of them padding")
    whole = [plural(own["heldout_documents"], noun)] if own.get("heldout_documents") else []
    ends = [f"the ends of {plural(own['ends'], 'long document')}"] if own.get("ends") else []
    source = f" ({' and '.join([*whole, *ends])})" if own else ""
    lines.append(f"held out: {e.heldout:,} {e.unit}{padded}{source}" if e.heldout else "nothing is held out")
    if e.date:
        lines.append(dated(e.date))
    return [*lines, *e.changes]


def dated(date: str) -> str:
    """The remark about a chat template that prints a date."""
    return f"the chat template prints today's date: always {date} here (data.date)"


def _steps(e: RunPrepared) -> list[str]:
    of = f"{e.batch:,} x {e.context:,} = {e.batch * e.context:,} tokens" if e.context else plural(e.batch, "sample")
    done = f"{e.steps - e.first_step:,} more, to step {e.steps:,}," if e.first_step else plural(e.steps, "step")
    falls = "" if e.schedule == "constant" else f", {e.schedule} decay to {e.lr * e.final_lr:.3g}"
    rises = f" after {plural(e.warmup, 'step')} of warm-up" if e.warmup else ""
    rate = f"learning rate {e.lr:.3g}{rises}{falls}"
    if e.warmup >= e.steps:
        last = e.lr * e.steps / e.warmup
        rate = f"learning rate rises to {last:.3g} at the last step: the warm-up to {e.lr:.3g} takes {plural(e.warmup, 'step')}"
    unit = f"{e.unit} with padding" if e.documents.get("counted") else e.unit
    return [
        f"{done} of {of}, in microbatches of {e.microbatch:,}",
        f"all {plural(e.steps, 'step')} take {e.taken:,} {unit}: {_epochs(e.epochs)} of the data",
        f"{e.optimizer}, {rate}",
    ]


def _epochs(count: float) -> str:
    return f"{count:.2g} epochs" if count < 0.1 else f"{count:,.1f} epochs"


def _model(e: RunPrepared) -> list[str]:
    trained = "all trained" if e.trained_params == e.params else f"{format_count(e.trained_params)} of them trained"
    adapter = [f"adapter (LoRA): {e.adapter}"] if e.adapter else []
    return [f"{e.model}: {format_count(e.params)} parameters, {trained}", *adapter, f"first weights: {e.start}"]


def _where(e: RunPrepared) -> list[str]:
    peers = plural(e.peers, "peer") if e.peers else "as many peers as join"
    precision = "precision: each machine's fastest" if e.precision == "auto" else e.precision
    here = ", ".join(f"{plural(n, 'process')} on {device}" for device, n in Counter(e.devices).items())
    return [f"{plural(e.stages, 'stage')}, {peers}, strategy {e.strategy}", f"this machine: {here}, {precision}"]
