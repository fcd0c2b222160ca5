"""Fleets of two to six machines, drawn: unequal devices, links, memory, and machines that leave."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.errors import CapacityError
from muletrain.model.spec import ModelSpec
from muletrain.sim.fleet.simulation import weather
from muletrain.sim.plan.planner import in_order, predict
from muletrain.sim.plan.question import Question

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = ("model.width=512", "model.heads=8", "model.layers=4", "model.context=256", "model.vocab=1024")
NEEDS_GIB = 0.5
"""What the whole of it takes, about."""


def drawn(seed: int, folder: Path, most: int = 6) -> Question:
    """A fleet of at most so many machines, and a run on it."""
    draw = random.Random(f"subsets/{seed}")
    left, text = draw.randint(2, most), ""
    for n in range(draw.randint(1, 4)):
        count = min(left, draw.randint(1, 3))
        left -= count
        if count:
            up = round(10 ** draw.uniform(1, 3.5))
            text += (
                f'[[machines]]\nname = "m{n}"\ncount = {count}\nregion = "{draw.choice("xyz")}"\n'
                f"tflops = {10 ** draw.uniform(-1.5, 0.5):.3f}\nmemory_gib = {NEEDS_GIB * 10 ** draw.uniform(-0.6, 0.7):.3f}\n"
                f"host_gib = {draw.choice([0.3, 1, 8])}\n"
                f"up_mbps = {up}\ndown_mbps = {up * draw.choice([1, 1, 5])}\nreliable = {draw.choice(['true', 'false'])}\n"
            )
    text += f"[defaults]\nrtt_ms = {draw.choice([5, 40, 150])}\nlocal_rtt_ms = 1\n"
    if draw.random() < 0.5:
        text += f"[churn]\nleave_per_hour = {10 ** draw.uniform(-1, 0.5):.3f}\naway_min = {draw.choice([5, 30])}\n"
    folder.mkdir(exist_ok=True)
    (folder / "fleet.toml").write_text(text)
    fleet = load_fleet(folder / "fleet.toml")
    run = load_config(None, [*MODEL, f"train.batch={draw.choice([16, 32])}", "train.microbatch=1"])
    return Question(fleet, run, ModelSpec.from_config(run.model), microbatch=1, weather=weather(fleet.churn, folder))


def subsets(question: Question) -> Iterator[Question]:
    """The same question about every subset of the machines, but all."""
    whole = [m.count for m in question.fleet.machines]
    for counts in product(*(range(n + 1) for n in whole)):
        if any(counts) and list(counts) != whole:
            yield question.of_first({m.name: n for m, n in zip(question.fleet.machines, counts, strict=True)})


def best_per_s(question: Question) -> float:
    """Tokens/s of the fastest strategy that runs on exactly these machines, under churn."""
    try:
        found = in_order(predict(question, time_limit_s=600.0))
    except CapacityError:
        return 0.0
    return max((p.expected_per_s for p in found if p.runnable and not p.problem), default=0.0)
