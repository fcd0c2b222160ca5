"""``muletrain status``, ``stop``, ``kick`` and ``ticket``: observe and steer a run on several machines."""

from typing import Annotated

import typer

from muletrain.cli.options import LOOPBACK, DashboardHost, DashboardPort, JsonObject, OneRun


def status(
    run: OneRun = None,
    dashboard: DashboardPort = None,
    dashboard_host: DashboardHost = LOOPBACK,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line for each peer, also of many.")] = False,
    json: JsonObject = False,
) -> None:
    """Show the progress and the members of a run; before training starts, what it waits for. With --dashboard, show them
    on a page until Ctrl-C."""
    from muletrain.cli.actions.dashboard import board_of, show_members
    from muletrain.cli.actions.visit import show_status

    if (board := board_of(dashboard, dashboard_host)) is not None:
        show_members(run, board)
    else:
        show_status(run, json=json, verbose=verbose)


def stop(run: OneRun = None) -> None:
    """End a run after the current step, with a checkpoint in its place, or else in the run folder of 'run' or 'start' (of
    another member, if that is gone). That a run has ended already is no error."""
    from muletrain.cli.actions.visit import stop_run

    stop_run(run)


def kick(
    who: Annotated[
        str, typer.Argument(metavar="NAME|ID", help="Name or id as in 'muletrain status'; the end of an id is enough.")
    ],
    run: OneRun = None,
) -> None:
    """Remove a peer from the run for good, and replace the ticket.

    Works only on the machine that started the run, which has the owner's key."""
    from muletrain.cli.actions.visit import kick_peer

    kick_peer(who, run)


def ticket(run: OneRun = None) -> None:
    """Print a ticket for the run that this machine is in.

    Everyone who has the ticket can join: treat it as a password."""
    from muletrain.cli.actions.visit import found_run, ticket_of

    print(ticket_of(found_run(run)))
