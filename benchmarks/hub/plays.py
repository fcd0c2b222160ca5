"""What the scripts of this folder share: a fleet of HYBRID's kind under faults, played by production code in virtual
time. Every strategy suffers the same number of faults per machine and second, for as long as it runs."""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from counting import averaging

from muletrain.config.fleet_file import Fleet, load_fleet
from muletrain.config.load import load_config
from muletrain.model.spec import ModelSpec
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.planned import Planned, as_hub
from muletrain.sim.fleet.simulation import simulate_fleet
from muletrain.sim.plan import pipeline as plan_pipeline
from muletrain.sim.plan.question import Question
from muletrain.sim.setting import setting
from muletrain.strategies import strategy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
STRATEGIES = ("hub", "swarm", "pipeline")
DEDLOC = "dedloc"
"""DeDLOC (Diskin et al., 2021): data parallel, each machine has the whole model and computes as many sequences as its speed
allows, and what it had accumulated goes with it. That is ``swarm`` with one stage."""
FASTER = 30
"""All of the paper's times are divided by this, and bandwidths multiplied: a run gives up a step that takes an hour."""
EVEN, LAST = "even", "last"
"""Cuts into stages: as many layers for each, or one layer for each but the last, and the rest for that. Backward computes
the forward again in all stages but the last, so ``LAST`` has the least work: a layer costs 3 forwards there, and 4
elsewhere."""
TFLOPS, SLOWER = 0.0707 * FASTER, 1.55
"""A V100 as in case 1 of the paper's table 2 (12 layers of ALBERT-xxlarge, 512 sequences of 512 tokens, 56.1 min on 16);
an RTX 2080 is slower by this factor."""
MODEL = (
    "model.layers=12",
    "model.width=4096",
    "model.heads=32",
    "model.ffn=16384",
    "model.vocab=512",
    "model.context=512",
    "model.share_layers=true",
    "train.batch=512",
    "wire.activations=fp32",
    "checkpoint.every=0",
)
"""ALBERT-xxlarge as the paper trains it; one block's weights serve all layers of a stage."""


@dataclass(frozen=True)
class Draw:
    """A fleet. ``v100``, ``rtx``: devices; ``unreliable``: of them, RTX 2080 first; ranges: of each machine's links, as in the
    paper."""

    v100: int
    rtx: int
    unreliable: int
    mbps: tuple[float, float]
    delay_ms: tuple[float, float]
    seed: int = 0

    def fleet(self) -> Fleet:
        """Each machine has a place of its own."""
        rng, rows = random.Random(f"fleet/{self.seed}"), []
        devices = [("v100", TFLOPS)] * self.v100 + [("rtx", TFLOPS / SLOWER)] * self.rtx
        for n, (name, tflops) in enumerate(devices):
            mbps = FASTER * rng.uniform(*self.mbps)
            reliable = "true" if n < len(devices) - self.unreliable else "false"
            rows.append(
                f"[[machines]]\nname = '{name}-{n}'\ntflops = {tflops}\nmemory_gib = 32\nreliable = {reliable}\n"
                f"up_mbps = {mbps:.0f}\ndown_mbps = {mbps:.0f}"
            )
        names = [f"{name}-{n}" for n, (name, _) in enumerate(devices)]
        for i, a in enumerate(names):
            rows += [
                f"[[links]]\nbetween = ['{a}', '{b}']\nrtt_ms = {2 * rng.uniform(*self.delay_ms) / FASTER:.1f}"
                for b in names[i + 1 :]
            ]
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write("\n".join(rows))
            file.flush()
            return load_fleet(Path(file.name))


def played(
    fleet: Fleet,
    strategy: str,
    run: list[str],
    *,
    seconds: float,
    leave_per_s: float = 0.0,
    away_s: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Seconds of a step, the first left out; goodput: time on microbatches that counted over time connected, weighted by
    speed; share of averaging in the time of the peers that hold parameters. ``seed``: of who leaves when."""
    begin_s = time.process_time()
    clients = sum(not peer.reliable for peer in fleet.peers())
    own = {"hub": [f"hub.clients={clients}"], DEDLOC: cut(LAST, 1)}.get(strategy, [])
    if strategy == "pipeline":  # its plan cuts
        run = [setting for setting in run if not setting.startswith("fleet.layers")]
    config = load_config(None, [*run, *own])
    spec = ModelSpec.from_config(config.model)
    scene = setting(fleet, config, spec)
    planned: Planned | None = None
    if strategy == "hub":
        planned = as_hub(scene, strategy_of(config))
    elif strategy == "pipeline":
        question = Question(fleet, config, spec, config.fleet.stages, config.train.microbatch)
        found = plan_pipeline.predict(question, 0, 60.0)  # it ends by itself after some 1.5 s of CPU time
        chosen = next(p for p in found if p.schedule == "1f1b")
        if chosen.problem:
            return {"problem": chosen.problem}
        one = plan_pipeline.scheduled(question, question.scene_of(chosen), "1f1b", len(chosen.microbatches))
        scene, planned = one.setting, plan_pipeline.membership(question, one, chosen)
    weather = Weather(leave_per_s=leave_per_s, away_s=away_s)
    with averaging() as endings:
        outcome = simulate_fleet(
            scene, config, weather, hours=seconds / 3600, seed=seed, fidelity="protocol", planned=planned
        )
    ends = [point.time_s for point in outcome.curve]
    row: dict[str, Any] = {
        "steps": round(outcome.steps, 2),
        "goodput": round(outcome.share_of_optimum, 3),
        "left": outcome.events.get("left", 0),
        "again": outcome.repeated_microbatches,
        "averaging": round(sum(s for s, _ in endings) / (sum(s for _, s in endings) or 1.0), 3),
        "cpu_s": round(time.process_time() - begin_s),
    }
    if len(ends) > 1:
        row["step_s"] = round((ends[-1] - ends[0]) / (len(ends) - 1), 1)
    elif outcome.steps:
        row["step_s"] = round(seconds / outcome.steps, 1)
        row["few"] = "fewer than two steps ended"
    return row | ({"failure": outcome.failure} if outcome.failure else {})


def cut(how: str, stages: int) -> list[str]:
    """Returns the setting."""
    return [f"fleet.stages={stages}", *([f"fleet.layers={[1] * (stages - 1) + [13 - stages]}"] if how == LAST else [])]


def compared(
    draw: Draw, run: list[str], rate: float, step_s: float, steps: float, strategies: tuple[str, ...] = STRATEGIES
) -> Iterator[dict[str, Any]]:
    """Strategies on one fleet, on which each unreliable machine leaves ``rate`` times in ``step_s`` and is away for half of
    it on average. Each draw has departures of its own, which are the same for all strategies."""
    torch.set_num_threads(1)
    for strategy in strategies:
        found = played(
            draw.fleet(),
            strategy,
            run,
            seconds=steps * step_s,
            leave_per_s=rate / step_s,
            away_s=step_s / 2,
            seed=draw.seed,
        )
        yield {"strategy": strategy, "rate": rate, "seed": draw.seed} | found


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By strategy: draws, on how many of them a step ended, seconds of a step (mean and median of these), goodput (mean of
    all draws), and the median of its time over the hub's on the same draw."""
    hub = {row["seed"]: row["step_s"] for row in rows if row["strategy"] == "hub" and "step_s" in row}
    found: dict[str, dict[str, Any]] = {}
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == strategy]
        ended = {row["seed"]: row["step_s"] for row in own if "step_s" in row}
        found[strategy] = {"draws": len(own), "ended": len(ended)}
        found[strategy]["goodput"] = round(fmean(row.get("goodput", 0.0) for row in own), 3)
        if ended:
            found[strategy] |= {"mean_s": round(fmean(ended.values()), 1), "median_s": round(median(ended.values()), 1)}
        if over := [step_s / hub[seed] for seed, step_s in ended.items() if seed in hub]:
            found[strategy]["over_hub"] = round(median(over), 2)
    return found


def keep(name: str, row: dict[str, Any], *cell: str) -> None:
    """Puts a play into a file of this folder, in place of an earlier one of its draw, strategy and ``cell`` (names of the
    row's values), and summarises each cell anew."""
    print(json.dumps(row), flush=True)
    file, which = HERE / name, (*cell, "seed", "strategy")
    rows = json.loads(file.read_text())["plays"] if file.exists() else []
    rows = [other for other in rows if any(other[key] != row[key] for key in which)] + [row]
    rows.sort(key=lambda row: [row[key] for key in which])
    cells = {tuple(row[key] for key in cell): None for row in rows}
    summaries = [
        dict(zip(cell, values, strict=True))
        | summary([row for row in rows if tuple(row[key] for key in cell) == values])
        for values in cells
    ]
    write(name, {"cells": summaries, "plays": rows})


def write(name: str, found: object) -> None:
    """Into this folder."""
    (HERE / name).write_text(json.dumps(found, indent=1) + "\n")
