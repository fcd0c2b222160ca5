"""``muletrain simulate``: predict a run with the production rules and code in the virtual world."""

import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from muletrain.cli.options import (
    COSTS_HELP,
    MODEL_HELP,
    PICTURE_HELP,
    QUALITY_HELP,
    RUN_CONFIG_HELP,
    FleetFile,
    JsonObject,
    Simulated,
)


class Fidelity(StrEnum):
    """How closely a fleet is simulated."""

    FLOW = "flow"
    PROTOCOL = "protocol"


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one field of the run, e.g. fleet.stages=8 (default: as 'muletrain plan' lays it out), "
        "wire.activations=fp16, optimizer.delayed=true. Repeatable.",
    ),
]
Plot = Annotated[
    list[Path] | None,
    typer.Option(metavar="OUT.svg", help=f"Draw throughput and the machines that came and left. {PICTURE_HELP}"),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="OUT.json",
        help="Write a timeline of each peer's slots for https://ui.perfetto.dev; needs --fidelity protocol.",
    ),
]


def fleet(
    file: FleetFile = None,
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="Simulated hours.")] = 2.0,
    fidelity: Annotated[
        Fidelity | None,
        typer.Option(
            help="'flow': constant throughput between two events; days take seconds. 'protocol': the production code, "
            "message by message, on a virtual clock. Default: 'flow'; of a hub 'protocol'.",
        ),
    ] = None,
    strategy: Annotated[
        Simulated | None,
        typer.Option(
            help="'swarm'; 'hub': machines that the file calls reliable are servers, the others their clients; or 'swap': every machine "
            "has the whole model. With --plan: one of its strategies. Default: what plan or configuration ask for, else the faster of "
            "swarm and swap."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.json",
            help="Play what 'muletrain plan FLEET.toml --json' wrote: its strategy, machines, stages and microbatches. Default: such a "
            "layout is made here, for the faster of swarm and swap, unless CONFIG or --set fleet.stages says how many stages there are.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step. Default: the batch of plan or CONFIG, or 1024.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="CONFIG.toml", help=RUN_CONFIG_HELP)] = None,
    overrides: Overrides = None,
    costs: Annotated[Path | None, typer.Option(metavar="COSTS.toml", help=COSTS_HELP)] = None,
    quality: Annotated[list[str] | None, typer.Option(metavar="KIND=TIMES", help=QUALITY_HELP)] = None,
    plot: Plot = None,
    trace: Trace = None,
    seed: Annotated[
        int, typer.Option(help="Draws which machines leave, and when; the same seed gives the same figures.")
    ] = 0,
    json: JsonObject = False,
) -> None:
    """Simulate a run on a fleet while its machines come and go.

    Reports throughput, idle time by cause, bytes by link, and recovery times, and suggests up to three changes of the
    run with the gain that each promises. The simulator runs the production policies. The optimum assumes that every
    machine that is present is always busy.

    Ctrl-C reports what was simulated so far (exit code 130); a second Ctrl-C ends at once. Exits with 1 if peers gave
    up, which means that such a run fails."""
    from muletrain.cli.show.console import make_console

    with nullcontext() if json else make_console(sys.stderr).status("loading"):
        from muletrain.cli.actions.simulate_fleet import what_if  # torch takes seconds

    code = what_if(
        file,
        config,
        model,
        [*(overrides or []), *([f"train.batch={batch}"] if batch else [])],
        hours=hours,
        seed=seed,
        plot=plot or (),
        json=json,
        fidelity=None if fidelity is None else fidelity.value,
        choice=str(strategy) if strategy else None,
        plan=plan,
        costs=costs,
        quality=quality or (),
        trace=trace,
    )
    raise typer.Exit(code)


def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of real runs.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="COSTS.toml", help="File to write.")] = Path("costs.toml"),
    json: JsonObject = False,
) -> None:
    """Measure, from the events of real runs, the costs that no fleet file states; for 'simulate fleet --costs'.

    Needs three steps or more. Runs with 'muletrain run --trace out.json' (or --set fleet.trace=true) also tell the cost
    of messages."""
    from muletrain.cli.actions.fit_costs import calibrate

    calibrate(runs, out, json=json)
