"""``muletrain join``: add this machine to a run."""

from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import TICKET_VARIABLE, Announce, Factories, JsonLines, Listen, MachineName, Port
from muletrain.runs.join.ticket import read_ticket

Ticket = Annotated[
    str,
    typer.Argument(
        metavar="TICKET",
        envvar=TICKET_VARIABLE,
        callback=read_ticket,
        help="Ticket from 'muletrain start' (or from 'muletrain ticket' on any member), a file that contains it, or "
        "'-' for standard input. Other users of this machine can see arguments, but not files or the environment.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="The run's corpus on this machine (checked by digest), to build microbatches here too."
    ),
]
Tokens = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="GIB",
        help="If the run shares its tokens (data.share), keep up to this much of them in this machine's cache, build "
        "microbatches when no other peer has the data, and pass the tokens on; 0 keeps none.",
    ),
]
Place = Annotated[
    str | None,
    typer.Option(
        help="Write checkpoints from here to the run's checkpoint.place, with this machine's credentials; copy the "
        "value that 'start' prints. Default: other peers write this machine's part."
    ),
]
Stage = Annotated[int | None, typer.Option(min=0, help="Serve this stage. Default: the one that needs a peer most.")]
Memory = Annotated[float | None, typer.Option(metavar="GIB", help="Memory this peer may use. Default: what is free.")]
Hours = Annotated[
    float | None, typer.Option(min=0.001, help="Leave in order after this many hours. Default: stay to the end.")
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        min=0.01, metavar="MBIT", help="Limit training traffic, each way, to this many Mbit/s. Default: unlimited."
    ),
]
PauseFile = Annotated[
    Path | None,
    typer.Option(help="While this file exists, the machine is yours: leave in order, and rejoin when it is gone."),
]
Device = Annotated[str, typer.Option(help="'auto' (every GPU, or the CPU), 'cpu', or one GPU as 'cuda:1'.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")]
Private = Annotated[
    bool,
    typer.Option(
        "--private", help="Open no port: other members relay traffic to this machine, as they do behind a firewall."
    ),
]
Reliable = Annotated[
    bool,
    typer.Option(
        "--reliable",
        help="In a run with strategy 'hub', serve a stage with this machine, whose loss costs more than a client's. "
        "Default: become a client, which computes for the servers. In runs with other strategies it changes nothing.",
    ),
]


def join(
    ticket: Ticket,
    data: Data = None,
    factory: Factories = None,
    tokens: Tokens = 1.0,
    place: Place = None,
    stage: Stage = None,
    memory: Memory = None,
    hours: Hours = None,
    bandwidth: Bandwidth = None,
    pause_file: PauseFile = None,
    device: Device = "auto",
    threads: Threads = None,
    name: MachineName = None,
    listen: Listen = "0.0.0.0",
    port: Port = 0,
    announce: Announce = None,
    private: Private = False,
    reliable: Reliable = False,
    json: JsonLines = False,
) -> None:
    """Add this machine to a run, with one peer per GPU, or one on the CPU.

    If the run trains a module of its own (model.factory), that package must be installed here, and --factory must name
    it. With --factory for its data.factory too, this machine also builds microbatches.

    Ctrl-C leaves in order, between two steps; a second Ctrl-C leaves at once."""
    from muletrain.cli.actions.join_run import Limits, join_run
    from muletrain.cli.actions.own_peers import Listening
    from muletrain.config.trusted import trust

    trust(*(factory or ()))
    join_run(
        ticket,
        data=data,
        tokens=tokens,
        place=place,
        stage=stage,
        memory=memory,
        device=device,
        threads=threads,
        listening=Listening(listen, port, tuple(announce or ())),
        json=json,
        name=name,
        private=private,
        reliable=reliable,
        limits=Limits(hours=hours, bandwidth_mbps=bandwidth, pause_file=pause_file),
    )
