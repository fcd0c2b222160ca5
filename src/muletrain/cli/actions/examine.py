"""``muletrain doctor``: run the checks and show them."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from muletrain.cli.show.console import make_console
from muletrain.cli.show.sentences import printable
from muletrain.config.load import load_config
from muletrain.runs.doctor.examination import Question, examine
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muletrain.runs.doctor.examination import Check

STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red", "not checked": "dim"}


def examine_machine(
    config: Path | None,
    overrides: Sequence[str],
    ticket: str | None,
    listen: str,
    port: int | None,
    announce: tuple[str, ...],
    *,
    json: bool,
) -> bool:
    """Run every check and print the result. Returns whether nothing is missing. Raises ConfigError."""
    run = load_config(config, overrides)
    question = Question(
        config=run.model_dump_json(by_alias=True),
        ticket=ticket,
        listen=listen,
        port=run.network.port if port is None else port,
        announce=announce or run.network.announce,
    )
    with make_console(sys.stderr).status("checking this machine") as status:
        checks = list(examine(question, lambda part: status.update(f"checking the {part}")))
    missing, warnings = (sum(c.verdict == verdict for c in checks) for verdict in ("missing", "warning"))
    if json:
        print(jsonlib.dumps({"ready": not missing, "checks": [asdict(check) for check in checks]}))
        return not missing
    console = make_console()
    console.print(table(checks))
    ready = f"{missing} missing" if missing else "ready to train"
    also = f", {plural(warnings, 'warning')}" if warnings else ""
    console.print(f"{ready}{also}", style=STYLES["missing" if missing else "ok"])
    return not missing


def table(checks: Sequence[Check]) -> Table:
    """The checks as a table of 80 columns: the fix stands under the finding, and equal findings share a row."""
    shown = Table("check", "", "result", box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for (verdict, found, fix), same in groupby(checks, lambda check: (check.verdict, check.found, check.fix)):
        result = Text(printable(found))
        if fix:
            result.append(f"\nwhat to do: {printable(fix)}", style=STYLES[verdict])
        shown.add_row(Text("\n".join(check.name for check in same)), Text(verdict, style=STYLES[verdict]), result)
    return shown
