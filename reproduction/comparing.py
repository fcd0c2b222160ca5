"""Tables and figures of the papers beside ours, printed."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.tables import new_table
from muletrain.units import plural
from reproduction import INDEX, reproduce
from reproduction.rendering import draw, mark, number, write

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from reproduction.reproduction import Reproduction


def show_one(name: str, out: Path | None, *, json: bool) -> bool:
    """Compute and print, then draw into ``out`` if that is given. Returns whether it meets its bars."""
    console = make_console()
    with doing(f"{name}: computing"):
        found = reproduce(name)
    if json:
        print(jsonlib.dumps(found.to_dict()))
    else:
        _print(found, console)
    if out is not None:
        path = out / f"{name}.png"
        draw(found, path)
        if not json:
            console.print(f"plot: {path}", soft_wrap=True)
    return found.met


def show_all(report: Path | None, *, json: bool) -> bool:
    """Compute all and print their marks, then write a report into the folder ``report`` if that is given. Returns
    whether all meet their bars."""
    console, found = make_console(), []
    with doing("computing") as tell:
        for done, name in enumerate(INDEX):
            tell(done / len(INDEX), f"computing {name}")
            found.append(reproduce(name))
    if json:
        print(jsonlib.dumps({r.name: r.to_dict() for r in found}))
    else:
        for r in found:
            console.print(f"{mark(r.met)} {r.name}: {sum(b.met for b in r.bars)} of {plural(len(r.bars), 'bar')} met")
        met, bars = (sum(n) for n in zip(*((sum(b.met for b in r.bars), len(r.bars)) for r in found), strict=True))
        console.print(f"{met} of {plural(bars, 'bar')} met")
    if report is not None:
        path = write(found, report)
        if not json:
            console.print(f"report: {path}", soft_wrap=True)
    return all(r.met for r in found)


def _print(r: Reproduction, console: Console) -> None:
    console.print(f"[bold]{r.title}[/bold]\n{r.method}\n")
    if r.values:
        table = new_table("", [""], ["published", "ours", "difference"])
        table.add_column("")
        for v in r.values:
            kind = "calibration" if v.calibrated else "prediction"
            ours = f"{number(v.ours)} {v.unit}"
            table.add_row(v.what, f"{number(v.published)} {v.unit}", ours, v.difference_text, kind)
        console.print(table)
    for heading, lines in (
        ("statements of the paper, and ours", [f"{mark(s.holds)} {s.stated}: {s.ours}" for s in r.statements]),
        ("bars", [f"{mark(b.met)} {b}" for b in r.bars]),
        ("constants", [str(c) for c in r.constants]),
        ("not reproduced", r.not_reproduced),
    ):
        if lines:
            console.print(f"\n[bold]{heading}[/bold]")
            for line in lines:
                console.print(f"- {line}", markup=False)
