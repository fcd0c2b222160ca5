"""``muletrain doctor``: run the checks and show the results; with ``--peers``, ask a waiting ``muletrain start`` on
this machine to measure the members."""

from __future__ import annotations

import json as jsonlib
import time
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from muletrain.cli.show.console import make_console
from muletrain.cli.show.doing import doing
from muletrain.cli.show.measured_fleet import fleet_tables
from muletrain.cli.show.tables import new_table
from muletrain.config.load import load_config
from muletrain.errors import MuletrainError
from muletrain.events import EventTail, FleetMeasured, ProbeFailed, ProbeProgress
from muletrain.runs.doctor.examination import Question, examine
from muletrain.runs.folder import ROOT
from muletrain.runs.worker_files import OWNER_FILE, PROBE_FILE
from muletrain.units import plural, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from muletrain.cli.show.doing import Doing
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
    with doing("checking this machine") as tell:
        checks = list(examine(question, lambda part: tell(what=f"checking the {part}")))
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
    shown = new_table("", ("check", "", "result"))
    for (verdict, found, fix), same in groupby(checks, lambda check: (check.verdict, check.found, check.fix)):
        result = Text(printable(found))
        if fix:
            result.append(f"\nwhat to do: {printable(fix)}", style=STYLES[verdict])
        shown.add_row(Text("\n".join(check.name for check in same)), Text(verdict, style=STYLES[verdict]), result)
    return shown


POLL_S = 0.1
"""Seconds between two looks at the events."""
TAKEN_S = 10.0
"""Longest wait until 'start' takes the request [s]."""
SILENT_S = 240.0
"""Longest wait for news [s]; every round is shorter."""


def probe_peers(folder: Path | None, *, json: bool) -> None:
    """Request the measurement, show progress and result. Raises MuletrainError."""
    folder = folder or _newest()
    if not (folder / OWNER_FILE).is_file():
        raise MuletrainError(
            f"--run {folder}: no run that was started here and still waits; give the run folder of a waiting 'muletrain start'"
        )
    tail, request = EventTail(folder, from_now=True), folder / PROBE_FILE
    request.touch()
    try:
        with doing("asking 'muletrain start' to measure") as tell:
            measured = _wait(tail, request, tell)
    finally:
        request.unlink(missing_ok=True)
    if json:
        print(measured.to_json())
        return
    out = make_console()
    out.print(fleet_tables(measured))
    out.print(
        f"\nmuletrain plan {measured.path} --config {folder / 'config.toml'}   # strategy and placement",
        soft_wrap=True,
    )


def _wait(tail: EventTail, request: Path, tell: Doing) -> FleetMeasured:
    heard = time.monotonic()
    while True:
        for event in tail.poll():
            match event:
                case FleetMeasured():
                    return event
                case ProbeFailed():
                    raise MuletrainError(f"measuring failed: {event.reason}")
                case ProbeProgress():
                    heard = time.monotonic()
                    tell(event.done / max(1, event.total), event.what)
        silent_s = time.monotonic() - heard
        if request.exists() and silent_s > TAKEN_S:
            raise MuletrainError(f"{request.parent}: no answer; 'muletrain start' must be running with this folder")
        if silent_s > SILENT_S:
            raise MuletrainError(f"{request.parent}: no news for {SILENT_S:.0f} s; see {request.parent}/*.log")
        time.sleep(POLL_S)


def _newest() -> Path:
    """The newest run that was started here and still goes on. Raises MuletrainError."""
    found = sorted(ROOT.glob(f"*/{OWNER_FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise MuletrainError(
            f"no waiting run under {ROOT.resolve()}; use the folder where 'muletrain start' was called, while it waits for peers (start "
            f"--set fleet.peers=N waits for N peers)"
        )
    return found[-1].parent
