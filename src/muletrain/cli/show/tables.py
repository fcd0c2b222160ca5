"""The one style of all tables: no lines, and headings in a fainter colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence


def new_table(title: str, left: Sequence[str], right: Sequence[str] = (), *, gap: int = 2) -> Table:
    """An empty table with columns aligned to the left and to the right, ``gap`` columns of the terminal apart. Long cells
    are folded, never cut off."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, gap, 0, 0),
    )
    for headings, justify in ((left, "left"), (right, "right")):
        for heading in headings:
            table.add_column(escape(heading), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table
