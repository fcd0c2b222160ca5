"""``muletrain plan``: which strategy is best on a fleet (``plan_fleet``); where to place stages and replicas on a
network."""

from __future__ import annotations

import json as jsonlib
import time
from collections import Counter
from enum import StrEnum
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from muletrain.config.matrices import Matrices
    from muletrain.planning.place import Placement
    from muletrain.planning.placement import Task


class Search(StrEnum):
    """Who looks for a placement."""

    MULETRAIN = "muletrain"
    DTFM = "dtfm"
    KERNIGHAN_LIN = "kernighan-lin"
    RANDOM = "random"


FLEETS, NETWORKS = "A fleet", "A network, whose links are all that counts"
"""Which options go together, in the help."""


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FLEET.toml",
            help="Machines and links ('muletrain config --fleet' explains it). Default: an example, whose path is printed.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A preset, e.g. 'llama-7b'. Default: gpt3-xl, or CONFIG's.", rich_help_panel=FLEETS),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of one step. Default: 1024, or CONFIG's.", rich_help_panel=FLEETS),
    ] = None,
    microbatch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences of one microbatch. Default: what does most, or CONFIG's.", rich_help_panel=FLEETS
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.toml",
            help="A run's configuration, as for 'muletrain run'; its number of stages is not taken.",
            rich_help_panel=FLEETS,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override one field of the run, e.g. wire.activations=fp16. Repeatable.",
            rich_help_panel=FLEETS,
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="COSTS.toml", help="What 'simulate calibrate' measured.", rich_help_panel=FLEETS),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.png",
            help="Draw which region serves which stage, and the links between; needs matplotlib.",
            rich_help_panel=FLEETS,
        ),
    ] = None,
    confirm: Annotated[
        bool,
        typer.Option(
            "--confirm",
            help="Play the recommended one with every message of the code that trains, too (minutes for tens of machines).",
            rich_help_panel=FLEETS,
        ),
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NET.json",
            help="Instead of a fleet file: 'delay_ms' and 'bandwidth_gbps', each a list of N lists of N numbers from row to column "
            "(bandwidth 0: no link), and, if you like, N names as 'regions'; or a network that ships: dtfm-case1 to dtfm-case5, "
            "dtfm-case1-text to dtfm-case3-text.",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    pipelines: Annotated[
        int | None,
        typer.Option(min=1, help="Pipelines side by side: replicas of each stage.", rich_help_panel=NETWORKS),
    ] = None,
    activation_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="What a stage sends to the next for one macro-batch, e.g. '471 MB'.",
            rich_help_panel=NETWORKS,
        ),
    ] = None,
    gradient_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="The gradient of one stage, e.g. '0.65e9' or '650 MB'.", rich_help_panel=NETWORKS
        ),
    ] = None,
    search: Annotated[
        Search,
        typer.Option(
            help="'muletrain' (annealing), DT-FM's evolutionary search, its Kernighan-Lin baseline, or one draw.",
            rich_help_panel=NETWORKS,
        ),
    ] = Search.MULETRAIN,
    spares: Annotated[
        bool,
        typer.Option(
            "--spares",
            help="The network has more devices than places: leave those out that fit worst.",
            rich_help_panel=NETWORKS,
        ),
    ] = False,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline stages. Default with a fleet file: what does most.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            help="Draws what is random; the same seed finds the same, unless the time limit ends a search (which is said).",
        ),
    ] = 0,
    time_limit: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="At most so long for placements, e.g. '30' (seconds) or '2m'. More is searched in more time.",
        ),
    ] = "30",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Which strategy is best on these machines, and where everything goes.

    With FLEET.toml: for each strategy the predicted throughput, where the time of a step goes, memory by machine,
    traffic by link, the price of a billion tokens (where the file has prices), and the strategy that is recommended:
    the fastest of those that 'muletrain run' has today. Stages and microbatch are those with which a strategy does
    most. Strategy swarm is predicted by steps that are played without messages, on the places where machines settle;
    pipeline by its schedules (GPipe, 1F1B), played on the placement that is found (its stages may have unequal numbers
    of layers and machines, and a machine may serve several pipelines); swap by ATOM's constraints; hub by HYBRID's
    latency model. --json prints the whole plan (docs/plan.md explains it), which 'muletrain run --plan' and 'start
    --plan' take.

    With --network: where to place pipeline stages and their replicas on machines with unequal links, so that a step
    spends the least time in communication; --stages, --pipelines, --activation-bytes and --gradient-bytes are needed
    then. The cost model is DT-FM's (Yuan et al. 2022, sec. 3). A link takes delay + bytes x 8 / bandwidth; delays and
    bandwidths of two unequal directions are averaged. Data-parallel: the largest, over stages and their devices, of the
    sum over the stage's other devices of 2 x link(gradient bytes / group size). Pipeline: the sum over neighbouring
    stages of the slowest link(activation bytes) between matched devices. Cost = data-parallel + 2 x pipeline (forward
    and backward). --json prints cost_s, data_parallel_s, pipeline_s (one way), matching (pairs of devices for each two
    neighbouring stages), assignment (stages in pipeline order, each a list of device indices, position = pipeline),
    spares, a lower_bound_s for the best cost there can be, and whether the search is complete, or was ended by the time
    limit."""
    limit_s = _seconds(time_limit)
    for_network = {
        "--pipelines": pipelines,
        "--activation-bytes": activation_bytes,
        "--gradient-bytes": gradient_bytes,
    }
    if network is None:
        given = [name for name, value in for_network.items() if value is not None]
        given += ["--spares"] * spares + ["--search"] * (search is not Search.MULETRAIN)
        if given:
            raise ConfigError(f"{given[0]} belongs to --network; with a fleet file it follows from the model")
        from muletrain.cli.commands.plan_fleet import plan_fleet

        plan_fleet(
            file,
            config,
            model,
            batch,
            microbatch,
            stages,
            overrides or [],
            seed=seed,
            time_limit_s=limit_s,
            plot=plot,
            json=json,
            costs=costs,
            confirm=confirm,
        )
        return
    for_fleets = {
        "FLEET.toml": file,
        "--model": model,
        "--batch": batch,
        "--microbatch": microbatch,
        "--config": config,
        "--set": overrides,
        "--costs": costs,
        "--plot": plot,
        "--confirm": confirm,
    }
    if given := [name for name, value in for_fleets.items() if value]:
        raise ConfigError(f"{given[0]} stands beside --network, which has links only; give a fleet file or a network")
    if stages is None or pipelines is None or activation_bytes is None or gradient_bytes is None:
        missing = [name for name, value in {"--stages": stages, **for_network}.items() if value is None]
        raise ConfigError(f"--network needs {', '.join(missing)} too; a fleet file with a model needs none of these")
    _plan_network(
        network,
        stages,
        pipelines,
        _bytes("activation", activation_bytes),
        _bytes("gradient", gradient_bytes),
        search,
        seed,
        limit_s,
        spares=spares,
        json=json,
    )


def _plan_network(
    network: str,
    stages: int,
    pipelines: int,
    activation_bytes: int,
    gradient_bytes: int,
    search: Search,
    seed: int,
    limit_s: float,
    *,
    spares: bool,
    json: bool,
) -> None:
    from rich.progress import Progress

    from muletrain.cli.show.console import make_console, say
    from muletrain.config.matrices import load_matrices
    from muletrain.planning.place import place

    matrices = load_matrices(network)
    task = _task(matrices, stages, pipelines, spares, activation_bytes, gradient_bytes)
    started = time.monotonic()
    console = make_console()
    with Progress(console=console, transient=True, disable=json or not console.is_terminal) as progress:
        bar = progress.add_task("searching (the first time, compiling takes some seconds)", total=1.0)

        def watch(share: float, best_s: float) -> None:
            progress.update(bar, completed=share, description=f"searching: {best_s:.4g} s")

        placement = place(task, search.value, seed=seed, time_limit_s=limit_s, watch=watch)
    took_s = time.monotonic() - started
    if json:
        print(jsonlib.dumps({**_as_json(placement), "search": search.value, "seed": seed, "seconds": round(took_s, 3)}))
        return
    cost = placement.cost
    ended = "" if placement.complete else " (ended by the time limit)"
    for line in (
        f"[bold]{matrices.name}[/bold]: {len(task.delay_ms)} devices, {stages} stages x {pipelines} pipelines; search {search.value}, seed "
        f"{seed}, {took_s:.1f} s{ended}",
        f"cost [bold]{cost.cost_s:.4g} s[/bold] a step = {cost.data_parallel_s:.4g} s data-parallel + 2 x {cost.pipeline_s:.4g} s "
        f"pipeline; no placement costs less than {placement.lower_bound_s:.4g} s (a simple bound, seldom reached)",
    ):
        say(console, line)
    console.print(_table(placement, task, matrices))
    if placement.spares:
        console.print(f"left out: {', '.join(map(str, placement.spares))}")


def _task(
    matrices: Matrices, stages: int, pipelines: int, spares: bool, activation_bytes: int, gradient_bytes: int
) -> Task:
    import numpy as np

    from muletrain.planning.placement import Task

    devices, places = len(matrices.delay_ms), stages * pipelines
    if devices != places and not (spares and devices > places):
        shapes = [f"{k} x {devices // k}" for k in range(1, devices + 1) if devices % k == 0]
        near = sorted(shapes, key=lambda shape: abs(int(shape.split()[0]) - stages))[:3]
        leave = ", or add --spares to leave some out" if devices > places else ""
        raise ConfigError(
            f"{matrices.name} has {devices} devices, and {stages} stages x {pipelines} pipelines need {places}; choose numbers whose "
            f"product is {devices} ({', '.join(near)}){leave}"
        )
    delay_ms, bandwidth_gbps = np.array(matrices.delay_ms), np.array(matrices.bandwidth_gbps)
    return Task(delay_ms, bandwidth_gbps, (pipelines,) * stages, activation_bytes, gradient_bytes)


def _bytes(what: str, text: str) -> int:
    from muletrain.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as e:
        raise ConfigError(f"--{what}-bytes: {e}") from None


def _seconds(text: str) -> float:
    from muletrain.units import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"--time-limit: {e}") from None
    if seconds <= 0:
        raise ConfigError("--time-limit: give some time, e.g. 30")
    return seconds


def _as_json(p: Placement) -> dict[str, Any]:
    return {
        "cost_s": p.cost.cost_s,
        "data_parallel_s": p.cost.data_parallel_s,
        "pipeline_s": p.cost.pipeline_s,
        "matching": p.matching,
        "assignment": p.assignment,
        "spares": p.spares,
        "lower_bound_s": p.lower_bound_s,
        "gap": p.gap,
        "complete": p.complete,
        "tried": p.tried,
    }


def _table(placement: Placement, task: Task, matrices: Matrices) -> Table:
    from rich.table import Table

    from muletrain.planning.placement import link_times

    link, share = link_times(task, task.activation_bytes), 2 * link_times(task, task.gradient_bytes / task.pipelines)
    table = Table("stage", "devices by pipeline")
    if matrices.regions:
        table.add_column("regions")
    for heading in ("data-parallel", "slowest link to the next stage"):
        table.add_column(heading, justify="right")
    for k, stage in enumerate(placement.assignment):
        row = [str(k), " ".join(map(str, stage))]
        if matrices.regions:
            count = Counter(matrices.regions[d] for d in stage)
            row.append(", ".join(region if n == 1 else f"{n} x {region}" for region, n in count.most_common()))
        row.append(f"{max(sum(share[d, other] for other in stage) for d in stage):.4g} s")
        pairs = placement.matching[k] if k < len(placement.matching) else []
        slowest = max(pairs, key=lambda pair: link[pair], default=None)
        row.append("" if slowest is None else f"{link[slowest]:.4g} s ({slowest[0]} to {slowest[1]})")
        table.add_row(*row)
    return table
