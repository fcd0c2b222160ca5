"""What would make a run faster: single changes of its configuration, each played by rates while machines come and go as
the file says."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from muletrain.config.schema import Codec
from muletrain.errors import MuletrainError
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import by_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from muletrain.config.schema import RunConfig
    from muletrain.sim.setting import Setting

WORTH = 0.05
"""Smaller gains are not told: predictions err by as much."""
MOST = 3
HOURS, MACHINE_HOURS = 8.0, 1000.0
"""Each change is played for so long, and large fleets for less, but for an hour at least."""
SEEDS, MANY = 3, 100
"""Of who leaves and when, for a mean; of more machines than ``MANY`` one play has enough that leave."""
COUNTLESS = 1000
"""Of more machines nobody leaves here: it would take minutes, and each stage has so many that it does not lose its last
one."""
BITS = {Codec.FP32: 32, Codec.FP16: 16, Codec.BF16: 16, Codec.INT8: 8}


@dataclass(frozen=True)
class Change:
    """``text``: for ``--set``. ``training``: what becomes of the training itself; empty: nothing."""

    field: str
    value: str
    training: str = ""

    @property
    def text(self) -> str:
        return f"{self.field}={self.value}"


@dataclass(frozen=True)
class Suggestion:
    """``gain``: 0.2 for 20 % more tokens/s. ``stages``: of the run with that change."""

    change: Change
    gain: float
    stages: int


def suggestions(changed: Callable[[Change | None], tuple[Setting, RunConfig]], weather: Weather) -> list[Suggestion]:
    """The best ones, at most one for each field. ``changed``: the run with a change, or (None) as it is; raises
    MuletrainError for a change that cannot work, as more stages than there are machines."""
    setting, run = changed(None)
    before, best = _tokens_per_s(setting, run, weather), dict[str, Suggestion]()
    for change in changes(run, paced=any(kind.declared for kind in setting.kinds)):
        try:
            other = changed(change)
            found = Suggestion(change, _tokens_per_s(*other, weather) / before - 1, len(other[0].cut))
        except MuletrainError:
            continue
        if change.field not in best or found.gain > best[change.field].gain:
            best[change.field] = found
    return sorted((s for s in best.values() if s.gain >= WORTH), key=lambda s: -s.gain)[:MOST]


def changes(run: RunConfig, *, paced: bool) -> Iterator[Change]:
    """What a run may be changed to; not all of it fits. ``paced``: the fleet file says what a stage takes, however
    large it is, so that nothing is known of stages and microbatches of other sizes."""
    batch, microbatch, stages = run.train.batch, run.train.microbatch, run.fleet.stages
    yield Change("train.batch", str(2 * batch), f"each step has {2 * batch} sequences instead of {batch}")
    if not run.optimizer.delayed:
        yield Change("optimizer.delayed", "true", "a step uses weights that are one update old")
    for field, codec, what in (
        ("wire.gradients", run.wire.gradients, "gradients"),
        ("wire.activations", run.wire.activations, "activations and their gradients"),
    ):
        for smaller in (Codec.FP16, Codec.INT8):
            if BITS[smaller] < BITS[codec]:
                yield Change(field, smaller.value, f"{what} are rounded to {BITS[smaller]} bits")
    if run.fleet.rebalance != "throughput":
        yield Change("fleet.rebalance", "throughput")
    if run.fleet.trainers is not None:
        yield Change("fleet.trainers", str(2 * run.fleet.trainers))
    if paced:
        return
    for other in sorted({stages // 2, stages - 1, stages + 1, 2 * stages} - {0, stages}):
        yield Change("fleet.stages", str(other))
    for size in (2 * microbatch, microbatch // 2):
        if size and batch % size == 0:
            yield Change("train.microbatch", str(size))


def _tokens_per_s(setting: Setting, run: RunConfig, weather: Weather) -> float:
    machines = sum(kind.count for kind in setting.kinds)
    hours = min(HOURS, max(1.0, MACHINE_HOURS / machines))
    weather = weather if machines <= COUNTLESS else Weather()
    seeds = 1 if weather == Weather() or machines > MANY else SEEDS
    plays = [by_rates(setting, run, weather, hours=hours, seed=seed) for seed in range(seeds)]
    return fmean(play.throughput for play in plays) * setting.cost.tokens
