"""``muletrain reproduce``: tables and figures of the papers beside ours."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.tables import new_table
from muletrain.errors import ConfigError
from muletrain.papers import INDEX, reproduce
from muletrain.papers.rendering import draw, mark, number, write
from muletrain.units import plural

if TYPE_CHECKING:
    from rich.console import Console

    from muletrain.papers.reproduction import Reproduction

REPORT = Path("docs") / "reproduction"


def list_all(*, json: bool) -> None:
    """Print the names of all reproductions."""
    if json:
        print(jsonlib.dumps({name: shows for name, (_, _, shows) in INDEX.items()}))
        return
    table = new_table("", ["muletrain reproduce", "shows"])
    for name, (_, _, shows) in INDEX.items():
        table.add_row(name, shows)
    make_console().print(table)


def show_one(name: str, out: Path | None, *, plot: bool, json: bool) -> bool:
    """Compute, print, and draw into ``out`` (default: the current folder). Returns whether it meets its bars."""
    console = make_console()
    with doing(f"{name}: computing"):
        found = reproduce(name)
    path = (out or Path()) / f"{name}.png"
    if plot:
        draw(found, path)
    if json:
        print(jsonlib.dumps({**found.to_dict(), "plot": str(path) if plot else None}))
    else:
        _print(found, console)
        console.print(f"plot: {path}" if plot else "no plot (--no-plot)", soft_wrap=True)
    return found.met


def write_all(out: Path | None, *, json: bool) -> bool:
    """Write one report of all into ``out`` (default: docs/reproduction). Returns whether all meet their bars."""
    console, found = make_console(), []
    with doing("computing") as tell:
        for done, name in enumerate(INDEX):
            tell(done / len(INDEX), f"computing {name}")
            found.append(reproduce(name))
    path = write(found, out or REPORT)
    if json:
        print(jsonlib.dumps({"report": str(path), "met": {r.name: r.met for r in found}}))
    else:
        for r in found:
            console.print(f"{mark(r.met)} {r.name}: {sum(b.met for b in r.bars)} of {plural(len(r.bars), 'bar')} met")
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


def check_arguments(name: str | None, out: Path | None, *, every: bool, no_plot: bool) -> None:
    """Raises ConfigError for arguments that contradict each other."""
    if every and name is not None:
        raise ConfigError(f"reproduce: give either {name} or --all")
    if every and no_plot:
        raise ConfigError("reproduce: the report of --all contains plots; leave --no-plot out")
    if name is None and not every and (out is not None or no_plot):
        raise ConfigError("reproduce: give a name ('muletrain reproduce' lists them), or --all")
