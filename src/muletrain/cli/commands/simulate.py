"""``muletrain simulate``: what would happen, from the production rules and code in the virtual world."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muletrain.strategies import STRATEGIES

app = typer.Typer(
    help="What would happen: the production rules in a virtual world.", no_args_is_help=True, rich_markup_mode="rich"
)


class Policy(StrEnum):
    """Who rebalances."""

    NONE = "none"
    SWARM = "swarm"
    MULETRAIN = "muletrain"


class Fidelity(StrEnum):
    """How closely it is played."""

    FLOW = "flow"
    PROTOCOL = "protocol"


if TYPE_CHECKING:
    Strategy = str
else:
    Strategy = StrEnum("Strategy", [(s.name, s.name) for s in STRATEGIES if s.simulated])
SWARM = Strategy("swarm")


@app.callback()
def _group() -> None:
    pass


@app.command()
def rebalance(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Columns time_s (seconds) and change (peers that come, or, below 0, go). Default: one fitted to SWARM's table 5.",
        ),
    ] = None,
    peers: Annotated[int, typer.Option(min=1, help="At the start, spread evenly.")] = 340,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages, all of the same work.")] = 4,
    policy: Annotated[
        list[Policy] | None,
        typer.Option(help="'none', 'swarm' (its algorithm 2) or 'muletrain' (by marginal throughput). Default: all."),
    ] = None,
    period: Annotated[float, typer.Option(min=1.0, help="Seconds between two decisions.")] = 60.0,
    downtime: Annotated[float, typer.Option(min=0.0, help="Seconds a peer that moves serves nobody.")] = 0.0,
    runs: Annotated[int, typer.Option(min=1, help="They differ in the stages of those that come and go.")] = 100,
    seed: Annotated[int, typer.Option(help="Draws them; the same seed gives the same figures.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a policy, a line each.")] = False,
) -> None:
    """How much of the best possible throughput is kept over 32 hours while peers come and go.

    Throughput is that of the smallest stage; the optimum is all peers spread evenly. Figures are means over the
    runs."""
    from rich.progress import track
    from rich.table import Table

    from muletrain.cli.show.console import make_console
    from muletrain.sim.fleet.churn import Throughput, courses
    from muletrain.sim.fleet.trace import TRACE_A, read_trace

    changes = read_trace(trace or TRACE_A)
    console, results = make_console(), {}
    for rule in track(policy or list(Policy), "simulating", console=console, transient=True, disable=json):
        results[rule.value] = Throughput.mean(
            courses(
                changes,
                peers=peers,
                stages=stages,
                rule=rule.value,
                period_s=period,
                downtime_s=downtime,
                runs=runs,
                seed=seed,
            )
        )
    if json:
        for name, result in results.items():
            print(jsonlib.dumps({"policy": name, **dataclasses.asdict(result)}))
        return
    table = Table(
        "policy", title=f"share of the optimum: {peers} peers, {stages} stages, {runs} runs", title_justify="left"
    )
    for heading in ("32 hours", "first hour", "last hour", "moves an hour"):
        table.add_column(heading, justify="right")
    for name, r in results.items():
        shares = (f"{share:.1f} %" for share in (r.overall, r.first_hour, r.last_hour))
        table.add_row(name, *shares, f"{r.moves_per_hour:.1f}")
    console.print(table)


@app.command()
def fleet(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FLEET.toml",
            help="Machines, links and churn ('muletrain config --fleet' explains it). Default: an example, whose path is printed.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A preset, e.g. 'llama-7b'. Default: gpt3-xl, or CONFIG's.")] = None,
    strategy: Annotated[Strategy, typer.Option(help="How the fleet is used.")] = SWARM,
    hours: Annotated[float, typer.Option(min=0.01, help="How long.")] = 2.0,
    fidelity: Annotated[
        Fidelity,
        typer.Option(
            help="'flow': rates between events, seconds for days. 'protocol': every message of the code that trains, on a virtual clock."
        ),
    ] = Fidelity.FLOW,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG.toml", help="A run's configuration, as for 'muletrain run'.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override one field of the run, e.g. fleet.stages=8 (default: as few as memory allows), train.batch=4096 (1024), "
            "wire.activations=fp16, optimizer.delayed=true. Repeatable.",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="COSTS.toml", help="What 'simulate calibrate' measured: times that no fleet file says."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="OUT.png", help="Draw throughput, peers by stage and events over time; needs matplotlib."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.json",
            help="Write what the slots of each peer did, for https://ui.perfetto.dev (with --fidelity protocol).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws who leaves and when; the same seed gives the same figures.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What would happen: throughput, idle time by cause, bytes by link, and recovery of a run on these machines, while
    they come and go.

    The simulator runs the production policies. The optimum assumes that every machine that is present is always busy.
    The report shows where the time goes and up to three changes of the run that would make it faster, with the
    predicted gain of each.

    Ctrl-C shows what was played so far (exit code 130); once more ends at once. Exits with 1 where peers gave up: such
    a run fails."""
    from muletrain.cli.show.console import make_console

    with nullcontext() if json else make_console(sys.stderr).status("loading"):
        from muletrain.cli.commands.whatif import what_if  # torch takes seconds

    code = what_if(
        file,
        config,
        model,
        overrides or [],
        hours=hours,
        seed=seed,
        plot=plot,
        json=json,
        fidelity=fidelity.value,
        costs=costs,
        trace=trace,
    )
    raise typer.Exit(code)


@app.command()
def calibrate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of real runs.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="COSTS.toml", help="Where to write what was measured.")] = Path(
        "costs.toml"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What real runs take beside what a fleet file says, measured from their events, for 'simulate fleet --costs'.

    Needs three steps or more; 'muletrain run --trace out.json' (or --set fleet.trace=true) makes runs that tell about
    messages, too."""
    from muletrain.cli.commands.calibrate import calibrate

    calibrate(runs, out, json=json)
