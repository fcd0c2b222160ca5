"""``python -m reproduction``: the papers' tables and figures beside ours."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.main import main
from muletrain.cli.options import Command, JsonObject
from reproduction import INDEX

REPORT = Path("docs") / "reproduction"
Out = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Also draw the figure into this folder; needs matplotlib.")
]


class Policy(StrEnum):
    """A rule that moves peers between stages."""

    NONE = "none"
    SWARM = "swarm"
    MULETRAIN = "muletrain"


app = typer.Typer(
    help="Compare the papers' tables and figures with ours, side by side. Without a command: all of them.\n\n"
    "Tells calibration from prediction, and names what cannot be reproduced. Everything is computed again in seconds, "
    "fits included; nothing is trained. Exits with 1 if a result misses its bar.",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def every(
    context: typer.Context,
    report: Annotated[
        bool,
        typer.Option("--report", help=f"Write all as one report, {REPORT}/README.md and pictures; needs matplotlib."),
    ] = False,
    json: JsonObject = False,
) -> None:
    if context.invoked_subcommand is None:
        from reproduction.comparing import show_all

        raise typer.Exit(0 if show_all(REPORT if report else None, json=json) else 1)


def _add(name: str, shows: str) -> None:
    def show(out: Out = None, json: JsonObject = False) -> None:
        from reproduction.comparing import show_one

        raise typer.Exit(0 if show_one(name, out, json=json) else 1)

    app.command(name, cls=Command, help=f"{shows[0].upper()}{shows[1:]}.")(show)


for _name, (_, _, _shows) in INDEX.items():
    _add(_name, _shows)


@app.command(cls=Command)
def rebalance(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Columns time_s (seconds) and change (peers that come; negative: that go). Default: a trace fitted to "
            "SWARM's table 5.",
        ),
    ] = None,
    peers: Annotated[int, typer.Option(min=1, help="Peers at the start, spread evenly.")] = 340,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages, all with the same work.")] = 4,
    policy: Annotated[
        list[Policy] | None,
        typer.Option(help="'none', 'swarm' (its algorithm 2) or 'muletrain' (by marginal throughput). Default: all."),
    ] = None,
    period: Annotated[float, typer.Option(min=1.0, help="Seconds between two decisions.")] = 60.0,
    downtime: Annotated[float, typer.Option(min=0.0, help="Seconds without work for a peer that moves.")] = 0.0,
    runs: Annotated[
        int, typer.Option(min=1, help="Number of runs; each draws the stages of peers that come or go.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="The same seed gives the same figures.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per policy, one per line.")] = False,
) -> None:
    """Share of the best possible throughput that each rebalancing rule keeps while equal peers come and go.

    The throughput is that of the smallest stage; the optimum spreads all peers evenly. Figures are means over the
    runs, which last 32 hours."""
    from reproduction.rules import compare_rules

    compare_rules(
        trace,
        [rule.value for rule in policy or Policy],
        peers=peers,
        stages=stages,
        period_s=period,
        downtime_s=downtime,
        runs=runs,
        seed=seed,
        json=json,
    )


if __name__ == "__main__":
    main(app)
