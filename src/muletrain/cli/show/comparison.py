"""Runs side by side as text: the figures of the dashboard's comparison, and the fields in which configurations differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape

from muletrain.cli.show.tables import new_table
from muletrain.units import format_bytes, format_duration, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muletrain.dashboard.page import RunPage

FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "health": lambda s: str(s["health"]["word"]),
    "step": lambda s: f"{s['head']['step']:,} of {s['head']['steps'] or '-'}",
    "loss [nats/token]": lambda s: _number(s["head"]["loss"], ".3f"),
    "held-out loss [nats/token]": lambda s: _number(s["heldout"][-1][2] if s["heldout"] else None, ".3f"),
    "throughput, last steps [tokens/s]": lambda s: _number(s["head"]["tokens_per_s"], ",.0f"),
    "mean throughput [tokens/s]": lambda s: _number(_mean(s["head"]), ",.0f"),
    "tokens": lambda s: f"{s['head']['tokens']:,}",
    "trained for": lambda s: format_duration(s["head"]["trained_s"] or 0.0),
    "sent": lambda s: format_bytes(s["head"]["sent"]),
    "peers": lambda s: f"{sum(sum(stage['states'].values()) for stage in s['stages']):,}",
    "recomputed microbatches": lambda s: f"{s['head']['recomputed']:,}",
}
"""By name, from a page's sections; the names are those of the page (``panels.js``)."""


def comparison(pages: Sequence[RunPage]) -> RenderableType:
    """Two tables with a column for each run."""
    found = [page.sections() for page in pages]
    names = [printable(page.name) for page in pages]
    figures = new_table("Side by side", ["figure"], names)
    for name, of in FIGURES.items():
        figures.add_row(escape(name), *map(escape, map(of, found)))
    configs = [sections["run"]["config"] for sections in found]
    fields = new_table("Differences of the configuration", ["field", *names])
    for key in sorted({key for config in configs for key in config}):
        values = [printable(str(config.get(key, "-"))) for config in configs]
        if len(set(values)) > 1:
            fields.add_row(*map(escape, (key, *values)))
    return Group(figures, "", fields if fields.row_count else "The configurations are equal.")


def _mean(head: dict[str, Any]) -> float | None:
    return head["tokens"] / head["trained_s"] if head["trained_s"] else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)
