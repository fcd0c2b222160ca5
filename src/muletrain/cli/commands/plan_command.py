"""``muletrain plan``: choose a strategy for a fleet, or place stages on a network."""

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
)
from muletrain.errors import ConfigError
from muletrain.units import parse_bytes, parse_duration

FLEETS, NETWORKS = "With a fleet file", "With --network, where only links count"
"""Headings of the options in the help."""

Model = Annotated[str | None, typer.Option(help=MODEL_HELP, rich_help_panel=FLEETS)]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences per step. Default: the batch of CONFIG, or 1024.", rich_help_panel=FLEETS),
]
Microbatch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sequences per microbatch. Default: that of CONFIG, or the fastest.", rich_help_panel=FLEETS
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="CONFIG.toml", help=f"{RUN_CONFIG_HELP} Its number of stages is ignored.", rich_help_panel=FLEETS
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one field of the run, e.g. wire.activations=fp16. Repeatable.",
        rich_help_panel=FLEETS,
    ),
]
Costs = Annotated[Path | None, typer.Option(metavar="COSTS.toml", help=COSTS_HELP, rich_help_panel=FLEETS)]
Quality = Annotated[list[str] | None, typer.Option(metavar="KIND=TIMES", help=QUALITY_HELP, rich_help_panel=FLEETS)]
Profiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--profile",
        metavar="PROFILE.json",
        help="Output of 'muletrain profile --json': plan with the measured times of the model's blocks on that device "
        "instead of counted FLOPs. Once for each kind of device.",
        rich_help_panel=FLEETS,
    ),
]
Plot = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="OUT.svg",
        help=f"Draw the speed of each strategy and the layout of the recommended one. {PICTURE_HELP}",
        rich_help_panel=FLEETS,
    ),
]
Confirm = Annotated[
    bool,
    typer.Option(
        "--confirm",
        help="Also play the recommended strategy with the production code, message by message (minutes for tens of "
        "machines).",
        rich_help_panel=FLEETS,
    ),
]
Network = Annotated[
    str | None,
    typer.Option(
        metavar="NET.json",
        help="Instead of a fleet file: 'delay_ms' and 'bandwidth_gbps', each a list of N lists of N numbers (from row "
        "to column; bandwidth 0: no link), and optionally N names as 'regions'. Or a built-in network: dtfm-case1 to "
        "dtfm-case5, dtfm-case1-text to dtfm-case3-text.",
        rich_help_panel=NETWORKS,
    ),
]
Pipelines = Annotated[
    int | None, typer.Option(min=1, help="Parallel pipelines: replicas of each stage.", rich_help_panel=NETWORKS)
]
ActivationBytes = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Data from one stage to the next per macro-batch, e.g. '471 MB'.",
        rich_help_panel=NETWORKS,
    ),
]
GradientBytes = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Gradient of one stage, e.g. '0.65e9' or '650 MB'.", rich_help_panel=NETWORKS),
]
Spares = Annotated[
    bool,
    typer.Option(
        "--spares", help="Leave out the worst devices if there are more than places.", rich_help_panel=NETWORKS
    ),
]
Stages = Annotated[
    int | None, typer.Option(min=1, help="Pipeline stages. Default with a fleet file: the fastest number.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, help="The same seed finds the same plan, unless the time limit ends a search (the output tells)."
    ),
]
TimeLimit = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Time to search placements, e.g. '30' (seconds) or '2m'. More time searches more."
    ),
]


def plan(
    file: FleetFile = None,
    model: Model = None,
    batch: Batch = None,
    microbatch: Microbatch = None,
    config: Config = None,
    overrides: Overrides = None,
    costs: Costs = None,
    profiles: Profiles = None,
    quality: Quality = None,
    plot: Plot = None,
    confirm: Confirm = False,
    network: Network = None,
    pipelines: Pipelines = None,
    activation_bytes: ActivationBytes = None,
    gradient_bytes: GradientBytes = None,
    spares: Spares = False,
    stages: Stages = None,
    seed: Seed = 0,
    time_limit: TimeLimit = "30",
    json: JsonObject = False,
) -> None:
    """Predict how fast each strategy trains on a fleet, and recommend one.

    With FLEET.toml: for each strategy, the throughput, where the time of a step goes, memory per machine, traffic per
    link, and the price of a billion tokens (if the file has prices). The fastest strategy that 'muletrain run' supports
    is recommended, on fewer machines than there are if that is faster. The output says what limits it, and which changes
    of the run would help. --json prints the whole plan (docs/plan.md explains it) for 'run --plan' and 'start --plan'.

    With --network: a placement of pipeline stages and their replicas that minimises the communication time of a step
    under DT-FM's cost model (Yuan et al. 2022, sec. 3). It needs --stages, --pipelines, --activation-bytes and
    --gradient-bytes. A link takes delay + bytes x 8 / bandwidth, with both directions averaged. Data-parallel time is
    the largest, over devices, of the sum over the stage's other devices of 2 x link(gradient bytes / pipelines).
    Pipeline time is the sum over neighbouring stages of the slowest link(activation bytes) between matched devices.
    Cost = data-parallel + 2 x pipeline (forward and backward). --json prints cost_s, data_parallel_s, pipeline_s (one
    way), matching (pairs of devices of neighbouring stages), assignment (for each stage, device indices by pipeline),
    spares, lower_bound_s (no placement costs less), and complete (false: the time limit ended the search)."""
    limit_s = _seconds(time_limit)
    sizes = {"--pipelines": pipelines, "--activation-bytes": activation_bytes, "--gradient-bytes": gradient_bytes}
    if network is None:
        if given := [name for name, value in {**sizes, "--spares": spares}.items() if value]:
            raise ConfigError(f"{given[0]} belongs to --network; with a fleet file it follows from the model")
        from muletrain.cli.actions.plan_fleet import Wish, plan_fleet

        wish = Wish(config, model, batch, microbatch, stages, overrides or [])
        plan_fleet(
            file,
            wish,
            seed=seed,
            time_limit_s=limit_s,
            plot=plot or (),
            json=json,
            costs_file=costs,
            profiles=profiles or (),
            quality=quality or (),
            confirm=confirm,
        )
        return
    fleets: dict[str, object] = {"FLEET.toml": file, "--model": model, "--batch": batch, "--microbatch": microbatch}
    fleets |= {"--config": config, "--set": overrides, "--costs": costs, "--profile": profiles, "--plot": plot}
    fleets |= {"--confirm": confirm, "--quality": quality}
    if given := [name for name, value in fleets.items() if value]:
        raise ConfigError(f"{given[0]} needs a fleet file, but --network has links only; leave one of the two out")
    if stages is None or pipelines is None or activation_bytes is None or gradient_bytes is None:
        missing = [name for name, value in {"--stages": stages, **sizes}.items() if value is None]
        raise ConfigError(f"--network also needs {', '.join(missing)}; a fleet file with a model needs none of these")
    from muletrain.cli.actions.plan_network import plan_network

    shape = stages, pipelines, _bytes("activation", activation_bytes), _bytes("gradient", gradient_bytes)
    plan_network(network, *shape, seed, limit_s, spares=spares, json=json)


def _bytes(what: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as e:
        raise ConfigError(f"--{what}-bytes: {e}") from None


def _seconds(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"--time-limit: {e}") from None
    if seconds <= 0:
        raise ConfigError("--time-limit: must be longer than 0, e.g. 30")
    return seconds
