"""``muletrain plan --network``: place pipeline stages and replicas on a network."""

from __future__ import annotations

import json as jsonlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.doing import doing
from muletrain.cli.show.tables import new_table
from muletrain.config.matrices import load_matrices
from muletrain.errors import ConfigError
from muletrain.planning.place import place
from muletrain.planning.placement import Task, link_times
from muletrain.units import plural

if TYPE_CHECKING:
    from rich.table import Table

    from muletrain.config.matrices import Matrices
    from muletrain.planning.place import Placement


def plan_network(
    network: str,
    stages: int,
    pipelines: int,
    activation_bytes: int,
    gradient_bytes: int,
    seed: int,
    limit_s: float,
    *,
    spares: bool,
    json: bool,
) -> None:
    """Search and print a placement. Raises ConfigError if the network does not fit."""
    matrices = load_matrices(network)
    task = _task(matrices, stages, pipelines, spares, activation_bytes, gradient_bytes)
    started = time.monotonic()
    console = make_console()
    with doing("searching (the first time, compilation takes some seconds)") as tell:
        placement = place(
            task,
            seed=seed,
            time_limit_s=limit_s,
            watch=lambda share, best_s: tell(share, f"searching: {best_s:.4g} s"),
        )
    took_s = time.monotonic() - started
    if json:
        print(jsonlib.dumps({**_as_json(placement), "seed": seed, "seconds": round(took_s, 3)}))
        return
    cost = placement.cost
    ended = "" if placement.complete else " (ended by the time limit)"
    for line in (
        f"[bold]{matrices.name}[/bold]: {plural(len(task.delay_ms), 'device')}, {plural(stages, 'stage')} x "
        f"{plural(pipelines, 'pipeline')}; seed {seed}, {took_s:.1f} s{ended}",
        f"cost [bold]{cost.cost_s:.4g} s[/bold] per step = {cost.data_parallel_s:.4g} s data-parallel + 2 x {cost.pipeline_s:.4g} s "
        f"pipeline; no placement costs less than {placement.lower_bound_s:.4g} s (a simple bound, seldom reached)",
    ):
        say(console, line)
    console.print(_table(placement, task, matrices))
    if placement.spares:
        console.print(f"left out: {', '.join(map(str, placement.spares))}")


def _task(
    matrices: Matrices, stages: int, pipelines: int, spares: bool, activation_bytes: int, gradient_bytes: int
) -> Task:
    devices, places = len(matrices.delay_ms), stages * pipelines
    if devices != places and not (spares and devices > places):
        shapes = [f"{k} x {devices // k}" for k in range(1, devices + 1) if devices % k == 0]
        near = sorted(shapes, key=lambda shape: abs(int(shape.split()[0]) - stages))[:3]
        leave = ", or add --spares to leave some out" if devices > places else ""
        raise ConfigError(
            f"{matrices.name} has {plural(devices, 'device')}, but {stages} stages x {pipelines} pipelines need {places}; choose numbers "
            f"whose product is {devices} ({', '.join(near)}){leave}"
        )
    delay_ms, bandwidth_gbps = np.array(matrices.delay_ms), np.array(matrices.bandwidth_gbps)
    return Task(delay_ms, bandwidth_gbps, (pipelines,) * stages, activation_bytes, gradient_bytes)


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
    link, share = link_times(task, task.activation_bytes), 2 * link_times(task, task.gradient_bytes / task.pipelines)
    regions = ["regions"] if matrices.regions else []
    table = new_table(
        "", ["stage", "devices by pipeline", *regions], ["data-parallel", "slowest link to the next stage"]
    )
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
