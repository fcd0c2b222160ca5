"""The options that several commands share: each is declared once, as an annotated type.

Typer reads annotations when a program runs, so modules that declare commands do without
``from __future__ import annotations``. Such modules import nothing heavy, so that ``--help`` answers at once.
"""

import itertools
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

from muletrain.runs.folder import ROOT
from muletrain.runs.join.ticket import PREFIX, read_ticket
from muletrain.strategies import CHOICES, STRATEGIES

if TYPE_CHECKING:
    Choice = str
    Simulated = str
else:
    Choice = StrEnum("Choice", [(name, name) for name in CHOICES])
    Simulated = StrEnum("Simulated", [(s.name, s.name) for s in STRATEGIES if s.simulated])


class Command(TyperCommand):
    """A command in which an option of ``ALONE`` may stand without a value. Before the command runs, the context's
    object, if any, is called with the command's name."""

    ALONE: ClassVar = {"--resume": str(ROOT), "--dashboard": "auto"}
    """The value that each of these options then has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list[str]()
        for word, after in itertools.pairwise([*args, "-"]):
            alone = after.startswith("-") or (word == "--dashboard" and not after.isdecimal())
            given += [word, self.ALONE[word]] if word in self.ALONE and alone else [word]
        return super().parse_args(ctx, given)

    def invoke(self, ctx: Any) -> Any:
        if ctx.obj is not None:
            ctx.obj(str(self.name))
        return super().invoke(ctx)


# A run ----------------------------------------------------------------------------------------------------------------

ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG.toml", help="Configuration of the run. Default: built-in defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one field, e.g. model.layers=12. Repeatable."),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="[RUN_DIR]",
        help=f"Continue the run in this folder from its newest complete checkpoint. Without a folder: the newest run "
        f"under {ROOT}/.",
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        metavar="PLAN.json",
        help="Output of 'muletrain plan FLEET.toml --json': strategy, stages, microbatches, and which machine serves "
        "which stage.",
    ),
]
StrategyChoice = Annotated[
    Choice | None,
    typer.Option(
        help="Use this strategy of the plan. Default: the one that the plan recommends. Without --plan: 'swarm' (the "
        "default); 'hub': reliable peers serve the stages, and clients compute for them; or 'swap': every peer serves the "
        "whole model, whose blocks pass in turn through a device that is smaller (set compute.memory to what a peer may "
        "use)."
    ),
]
Where = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Run folder (its newest checkpoint is used) or checkpoint folder.")
]
Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Run folder (its newest checkpoint is used), checkpoint folder, Hugging Face folder, or a model's name on the Hub "
        "(OWNER/NAME, or OWNER/NAME@REVISION).",
    ),
]

Factories = Annotated[
    list[str] | None,
    typer.Option(
        "--factory",
        metavar="MODULE:FUNCTION",
        help="Let this machine import this model.factory or data.factory: what a run or a folder names is imported only if "
        "you name it too. Repeatable.",
    ),
]

# A machine in a run ---------------------------------------------------------------------------------------------------

Listen = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="TCP port; 0 takes any free one. Open it in your firewall. With several GPUs, each further one uses the "
        "next port.",
    ),
]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address that other machines dial if it differs from the one we listen on (port forwarding), e.g. "
        "/ip4/1.2.3.4/tcp/4000. Repeatable.",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        help="Name of this machine in the run, as tables and messages show it; with a plan, its name in the plan. "
        "Default: the host name; for 'join' with four random digits behind it."
    ),
]
TICKET_VARIABLE = "MULETRAIN_TICKET"


def _read_run(given: str | None) -> str | None:
    """The ticket in an argument, in the named file or on standard input; else the path of a run folder as it is."""
    folder = given is not None and given != "-" and not given.startswith(PREFIX) and not Path(given).is_file()
    return given if folder else read_ticket(given)


OneRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        envvar=TICKET_VARIABLE,
        callback=_read_run,
        help="Run folder, ticket, a file that contains one, or '-' for standard input. Default: the run that goes on under runs/, if it "
        "is only one.",
    ),
]

# A fleet --------------------------------------------------------------------------------------------------------------

FleetFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FLEET.toml",
        help="Machines, links and churn ('muletrain config --fleet' explains the format). Default: an example, whose "
        "path is printed.",
    ),
]
MODEL_HELP = (
    "A Hugging Face folder (config.json is enough) or name, or a preset: gpt3-125m to gpt3-175b, llama-7b to llama-65b, llama3-8b, "
    "llama3-70b. Default: the model of CONFIG, or gpt3-xl."
)
RUN_CONFIG_HELP = "Configuration of the run, as for 'muletrain run'."
COSTS_HELP = "Times and speeds that 'muletrain simulate calibrate' measured."
QUALITY_HELP = (
    "How many times as many steps your model takes to the same loss with a kind of model.compression, e.g. bottleneck=1.3. Default: as "
    "measured (docs/swarm.md). Repeatable."
)

PICTURE_HELP = "A .png or .svg; a name such as OUT.dark.svg gives a dark picture. Repeatable. Needs: pip install 'muletrain\\[plots]'"

# Output ---------------------------------------------------------------------------------------------------------------

Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="OUT.json",
        help="Write a timeline of each peer's slots (receive, compute, send, average) for https://ui.perfetto.dev",
    ),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="PORT",
        help="Serve metrics for Prometheus on this port of the loopback address, or on HOST:PORT; 0 takes any free port. "
        "Needs: pip install 'muletrain\\[metrics]'",
    ),
]
DashboardPort = Annotated[
    str | None,
    typer.Option(
        "--dashboard",
        metavar="[PORT]",
        help="Show the run on a local page, whose address is printed; 0 takes any free port, and without a number the page is at 8265 "
        "or the next free one. Needs: pip install 'muletrain\\[dashboard]'",
    ),
]
DashboardHost = Annotated[
    str,
    typer.Option(
        "--dashboard-host",
        metavar="ADDRESS",
        help="Serve the page on this address of the machine, unencrypted, to everyone who has the printed link.",
    ),
]
LOOPBACK = "127.0.0.1"
JsonLines = Annotated[bool, typer.Option("--json", help="Print events as JSON, one object per line.")]
JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print the report's tables of peers and bytes, too; report.txt in the run folder has them.",
    ),
]
