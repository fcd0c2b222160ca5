"""``muletrain run``, ``start`` and ``join``: train on this machine, or on several."""

from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import (
    LOOPBACK,
    TICKET_VARIABLE,
    Announce,
    ConfigFile,
    DashboardHost,
    DashboardPort,
    Factories,
    JsonLines,
    Listen,
    MachineName,
    MetricsAddress,
    Overrides,
    PlanFile,
    Port,
    Resume,
    StrategyChoice,
    Trace,
    Verbose,
)
from muletrain.policy.chaos import HELP as CHAOS_HELP
from muletrain.runs.join.ticket import read_ticket

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Read model and data, print what would be trained, the stages with the memory that they need, and the data; "
        "start nothing.",
    ),
]


def run(
    config: ConfigFile = None,
    overrides: Overrides = None,
    resume: Resume = None,
    chaos: Annotated[str | None, typer.Option(metavar="PLAN", help=CHAOS_HELP)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of --chaos: draws the plan 'random' and the targets 'any'.")
    ] = None,
    trace: Trace = None,
    plan: PlanFile = None,
    strategy: StrategyChoice = None,
    metrics: MetricsAddress = None,
    dashboard: DashboardPort = None,
    dashboard_host: DashboardHost = LOOPBACK,
    dry_run: DryRun = False,
    json: JsonLines = False,
    verbose: Verbose = False,
) -> None:
    """Train with a local fleet: every peer is a process on this machine; a single one works in the command itself.

    With --plan, there is one process for each machine of the plan. Ctrl-C writes a checkpoint and ends the run; a
    second Ctrl-C ends it at once."""
    from muletrain.cli.actions.dashboard import board_of
    from muletrain.cli.actions.opening import Wanted
    from muletrain.cli.actions.train import dry_run as show
    from muletrain.cli.actions.train import run_local

    wanted = Wanted(config, overrides or [], resume, plan, strategy)
    if dry_run:
        show(wanted, "run", json=json, chaos=chaos, seed=seed or 0)
        return
    run_local(
        wanted,
        json=json,
        chaos=chaos,
        seed=seed,
        trace=trace,
        metrics=metrics,
        board=board_of(dashboard, dashboard_host),
        verbose=verbose,
    )


Probe = Annotated[
    bool,
    typer.Option(
        "--probe",
        help="Before training, measure every machine and the links between them, and write fleet.toml (for 'muletrain "
        "plan') to the run folder.",
    ),
]
ShareData = Annotated[
    bool,
    typer.Option(
        "--share-data",
        help="Same as --set data.share=true: members may fetch the tokens of your training text, and a few keep them "
        "on disk, so that the run survives the loss of this machine. Everyone who has the ticket can then read the "
        "text.",
    ),
]


def start(
    config: ConfigFile = None,
    overrides: Overrides = None,
    listen: Listen = "0.0.0.0",
    port: Port = 0,
    announce: Announce = None,
    resume: Resume = None,
    plan: PlanFile = None,
    strategy: StrategyChoice = None,
    name: MachineName = None,
    probe: Probe = False,
    share_data: ShareData = False,
    metrics: MetricsAddress = None,
    dashboard: DashboardPort = None,
    dashboard_host: DashboardHost = LOOPBACK,
    dry_run: DryRun = False,
    json: JsonLines = False,
    verbose: Verbose = False,
) -> None:
    """Start a run on several machines and serve it with this one.

    Prints a ticket for 'muletrain join', waits until every stage has a peer, then trains and collects checkpoints.
    Ctrl-C writes a checkpoint and ends the run."""
    from muletrain.cli.actions.dashboard import board_of
    from muletrain.cli.actions.opening import Wanted
    from muletrain.cli.actions.train import dry_run as show
    from muletrain.cli.actions.train import start_run
    from muletrain.runs.own_peers import Listening

    overrides = [*(overrides or []), *(["data.share=true"] if share_data else [])]
    listening = Listening(listen, port, tuple(announce or ()))
    wanted = Wanted(config, overrides, resume, plan, strategy)
    if dry_run:
        show(wanted, "start", json=json)
        return
    start_run(
        wanted,
        listening=listening,
        json=json,
        name=name,
        probe=probe,
        metrics=metrics,
        board=board_of(dashboard, dashboard_host),
        verbose=verbose,
    )


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
Model = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder with the model that the run trains an adapter for; other peers send its weights otherwise.",
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
    model: Model = None,
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
    metrics: MetricsAddress = None,
    dashboard: DashboardPort = None,
    dashboard_host: DashboardHost = LOOPBACK,
    json: JsonLines = False,
) -> None:
    """Add this machine to a run, with one peer per GPU, or one on the CPU.

    If the run trains a module of its own (model.factory), that package must be installed here, and --factory must name
    it. With --factory for its data.factory too, this machine also builds microbatches.

    Ctrl-C leaves in order, between two steps; a second Ctrl-C leaves at once."""
    from muletrain.cli.actions.dashboard import board_of
    from muletrain.cli.actions.train import join_run
    from muletrain.config.trusted import trust
    from muletrain.runs.own_peers import Listening
    from muletrain.runs.session import Limits

    trust(*(factory or ()))
    join_run(
        ticket,
        listening=Listening(listen, port, tuple(announce or ())),
        json=json,
        metrics=metrics,
        board=board_of(dashboard, dashboard_host),
        name=name,
        device=device,
        threads=threads,
        data=data,
        private=private,
        limits=Limits(hours=hours, bandwidth_mbps=bandwidth, pause_file=pause_file),
        tokens_gib=tokens,
        model=model,
        place=place,
        stage=stage,
        memory_gib=memory,
        client=not reliable,
    )
