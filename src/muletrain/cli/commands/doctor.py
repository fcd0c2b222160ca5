"""``muletrain doctor``: can this machine train, and what to do if not?"""

from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import TICKET_VARIABLE, Announce, ConfigFile, JsonObject, Listen, Overrides
from muletrain.errors import ConfigError
from muletrain.runs.join.ticket import read_ticket

Ticket = Annotated[
    str | None,
    typer.Option(
        metavar="TICKET",
        envvar=TICKET_VARIABLE,
        callback=read_ticket,
        help="Ticket of a run that waits or trains: its members check this machine's clock, and whether they can "
        "connect to it.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="TCP port for 'start' or 'join'; 0 takes any free one. Default: network.port of CONFIG."
    ),
]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers",
        help="Instead, measure the machines of a run that has not begun, and the links between them. Use it where "
        "'muletrain start' was called.",
    ),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN_DIR", help="For --peers, the run folder of that 'start'. Default: the newest run that waits here."
    ),
]


def doctor(
    config: ConfigFile = None,
    overrides: Overrides = None,
    ticket: Ticket = None,
    listen: Listen = "0.0.0.0",
    port: Port = None,
    announce: Announce = None,
    peers: Peers = False,
    run: RunFolder = None,
    json: JsonObject = False,
) -> None:
    """Check whether this machine can train the run, and say how to fix what is wrong.

    Checks Python, torch, GPUs, memory, disk, clock, and how other machines reach this one. Exits with 1 if something
    that training needs is missing; warnings do not count.

    With --peers, every machine that has joined computes a block of the run's model, forward and backward, and all pairs
    measure round trip and bandwidth in both directions, on the connections that training uses. This takes some seconds
    per machine and sends a bounded amount of data. The result is fleet.toml in the run folder, for 'muletrain plan' and
    'muletrain simulate fleet'. 'muletrain start --probe' measures the same before it trains. A run that has begun is
    not measured, because measuring would slow it down and training would distort the figures.
    """
    if peers:
        from muletrain.cli.actions.probe_peers import probe_peers

        probe_peers(run, json=json)
        return
    if run is not None:
        raise ConfigError("--run belongs to --peers; add --peers, or leave --run out")
    from muletrain.cli.actions.examine import examine_machine

    if not examine_machine(config, overrides or [], ticket, listen, port, tuple(announce or ()), json=json):
        raise typer.Exit(1)
