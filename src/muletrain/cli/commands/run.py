"""``muletrain run``: a local fleet on this machine."""

from typing import Annotated

import typer

from muletrain.cli.options import ConfigFile, JsonLines, Overrides, PlanFile, Resume, StrategyChoice, Trace
from muletrain.policy.chaos import HELP as CHAOS_HELP


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
    json: JsonLines = False,
) -> None:
    """Train with a local fleet: every peer is a process on this machine; a single one works in the command itself.

    With --plan, there is one process for each machine of the plan. Ctrl-C writes a checkpoint and ends the run; a
    second Ctrl-C ends it at once."""
    from muletrain.cli.actions.local_run import run_local

    run_local(
        config,
        overrides or [],
        json=json,
        resume=resume,
        chaos=chaos,
        seed=seed,
        trace=trace,
        plan=plan,
        strategy=strategy,
    )
