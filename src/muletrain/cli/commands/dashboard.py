"""``muletrain dashboard``: a page of runs that are over or under way, or of a simulated one."""

from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import LOOPBACK, DashboardHost

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN_DIR...",
        help="Run folders, shown side by side. Default: the newest run under runs/.",
        show_default=False,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="TCP port; 0 takes any free one. Default: 8265 or the next free one."),
]
Simulated = Annotated[
    Path | None,
    typer.Option("--sim", metavar="FLEET.toml", help="Play this fleet message by message, and show the simulated run."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="With --sim: override one field of the run. Repeatable."),
]


def dashboard(
    runs: Runs = None,
    sim: Simulated = None,
    hours: Annotated[float, typer.Option(min=0.01, help="With --sim: simulated hours.")] = 0.5,
    overrides: Overrides = None,
    text: Annotated[bool, typer.Option("--text", help="Print figures and differences of the runs; no page.")] = False,
    port: Port = None,
    dashboard_host: DashboardHost = LOOPBACK,
) -> None:
    """Show runs on a local page: loss and speed, machines and links, where the time goes, events and checkpoints.

    Ctrl-C ends the page, not the runs."""
    from muletrain.cli.actions.dashboard import board_of, print_folders, show_folders, show_simulated

    if text and sim is None:
        return print_folders(runs or [])
    board = board_of("auto" if port is None else str(port), dashboard_host)
    assert board is not None
    if sim is not None:
        show_simulated(sim, hours, overrides or [], board)
    else:
        show_folders(runs or [], board)
