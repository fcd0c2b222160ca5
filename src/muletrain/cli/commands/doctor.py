"""``muletrain doctor``: is this machine fit to train, and what to do if not."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

from muletrain.errors import ConfigError
from muletrain.runs.join.ticket import read_ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from muletrain.runs.doctor.checks import Check

STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red", "not checked": "dim"}


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.toml",
            help="The run that is planned: how much memory and disk it needs. Default: the defaults.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one field of it, e.g. model.preset=gpt3-125m. Repeatable."
        ),
    ] = None,
    ticket: Annotated[
        str | None,
        typer.Option(
            metavar="TICKET",
            envvar="MULETRAIN_TICKET",
            callback=read_ticket,
            help="Of a run, waiting or training: ask its members about this machine's clock, and whether they can connect to it.",
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="Address to listen on, as for 'start' and 'join'.")] = "0.0.0.0",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="TCP port that 'start' or 'join' will be given; 0: any free one. Default: network.port.",
        ),
    ] = None,
    announce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="What others should dial instead, e.g. /ip4/1.2.3.4/tcp/4000. Repeatable."
        ),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Instead: measure the machines that have joined a run which waits for its beginning, and the links between them. Call it "
            "where 'muletrain start' was called.",
        ),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="The run folder of that 'start', for --peers. Default: the newest one that waits here.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this machine can train: Python, torch, GPUs, memory, disk, clock, and how others reach it.

    Says what to do about each thing that is wrong. Exits with 1 where something is missing that training needs; a
    warning is none.

    With --peers: every machine computes a block of the run's model, forward and backward; round trips and bandwidth are
    measured between all of them, both ways, on the connections that training uses (some seconds for each machine there
    is; what a link carries meanwhile is bounded). Writes fleet.toml into the run folder, for 'muletrain plan' and
    'muletrain simulate fleet'. 'muletrain start --probe' does the same when all are there, and then trains. A run that
    has begun is not measured: it would be held up, and so would the figures.
    """
    if peers:
        from muletrain.cli.show.peers import probe_peers

        probe_peers(run, json=json)
        return
    if run is not None:
        raise ConfigError("--run names the run of --peers; add that, or leave it out")
    if any(
        check.verdict == "missing"
        for check in _examined(config, overrides or [], ticket, listen, port, announce or [], json=json)
    ):
        raise typer.Exit(1)


def _examined(
    config: Path | None,
    overrides: Sequence[str],
    ticket: str | None,
    listen: str,
    port: int | None,
    announce: Sequence[str],
    *,
    json: bool,
) -> list[Check]:
    from muletrain.cli.show.console import make_console
    from muletrain.config.load import load_config
    from muletrain.runs.doctor.checks import Question, examine

    run = load_config(config, overrides)
    question = Question(
        config=run.model_dump_json(by_alias=True),
        ticket=ticket,
        listen=listen,
        port=run.network.port if port is None else port,
        announce=tuple(announce) or run.network.announce,
    )
    with make_console(sys.stderr).status("looking at this machine") as status:
        checks = list(examine(question, lambda part: status.update(f"looking at the {part}")))
    counts = {verdict: sum(c.verdict == verdict for c in checks) for verdict in ("missing", "warning")}
    if json:
        print(jsonlib.dumps({"ready": not counts["missing"], "checks": [asdict(check) for check in checks]}))
        return checks
    console = make_console()
    console.print(table(checks))
    warnings = f", {counts['warning']} warning{'s' * (counts['warning'] != 1)}" if counts["warning"] else ""
    ready = f"{counts['missing']} missing" if counts["missing"] else "ready to train"
    console.print(f"{ready}{warnings}", style=STYLES["missing" if counts["missing"] else "ok"])
    return checks


def table(checks: Sequence[Check]) -> Table:
    """What to do stands under what was found, so that both have room in 80 columns; what is said of several checks is
    said once."""
    from rich.table import Table
    from rich.text import Text

    from muletrain.cli.show.view import printable

    shown = Table("check", "", "result", box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for (verdict, found, fix), same in groupby(checks, lambda check: (check.verdict, check.found, check.fix)):
        result = Text(printable(found))
        if fix:
            result.append(f"\nwhat to do: {printable(fix)}", style=STYLES[verdict])
        shown.add_row(Text("\n".join(check.name for check in same)), Text(verdict, style=STYLES[verdict]), result)
    return shown
