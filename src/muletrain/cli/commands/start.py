"""``muletrain start``: found a run on several machines."""

from typing import Annotated

import typer

from muletrain.cli.options import (
    Announce,
    ConfigFile,
    JsonLines,
    Listen,
    MachineName,
    Overrides,
    PlanFile,
    Port,
    Resume,
    StrategyChoice,
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
    json: JsonLines = False,
) -> None:
    """Start a run on several machines and serve it with this one.

    Prints a ticket for 'muletrain join', waits until every stage has a peer, then trains and collects checkpoints.
    Ctrl-C writes a checkpoint and ends the run."""
    from muletrain.cli.actions.own_peers import Listening
    from muletrain.cli.actions.start_run import start_run

    start_run(
        config,
        [*(overrides or []), *(["data.share=true"] if share_data else [])],
        listening=Listening(listen, port, tuple(announce or ())),
        json=json,
        resume=resume,
        plan=plan,
        strategy=strategy,
        name=name,
        probe=probe,
    )
