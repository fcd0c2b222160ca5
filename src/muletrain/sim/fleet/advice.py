"""Suggest single changes of a run's configuration that make the run faster. Rates choose the candidates; each
suggestion has been played like the run itself, and its gain comes from the play."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from muletrain.config.schema import Codec
from muletrain.errors import ConfigError, MuletrainError
from muletrain.sim.fleet.flow import Weather
from muletrain.sim.fleet.simulation import by_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from muletrain.config.schema import RunConfig
    from muletrain.sim.setting import Setting

WORTH = 0.05
"""Smallest gain that is suggested: predictions err by as much."""
MOST = 3
HOURS, MACHINE_HOURS = 8.0, 1000.0
"""Hours for which each change is played; fewer for large fleets (machine-hours), but at least 1."""
SEEDS, MANY = 3, 100
"""Number of churn seeds to average; a fleet of more than ``MANY`` machines needs only one play."""
COUNTLESS = 1000
"""Above this many machines churn is ignored: a play would take minutes, and no stage loses its last peer."""
QUALITY = {"bottleneck": 1.31, "maxout": 1.28}
"""Times as many steps that a kind of ``model.compression`` takes to the same loss, at a factor of 2 between two stages: the
larger of SWARM's table 7 and of benchmarks/compression."""
BITS = {Codec.FP32: 32, Codec.FP16: 16, Codec.BF16: 16, Codec.INT8: 8, Codec.DYNAMIC8: 8}


def quality_of(given: Sequence[str]) -> dict[str, float]:
    """``QUALITY``, with KIND=TIMES instead of some. Raises ConfigError."""
    found = dict(QUALITY)
    for text in given:
        kind, _, times = text.partition("=")
        try:
            found[kind] = float(times)
        except ValueError:
            kind = ""
        if kind not in QUALITY or not 0 < found[kind] < math.inf:
            raise ConfigError(
                f"--quality {text}: write {' or '.join(QUALITY)}, '=' and a number above 0, e.g. maxout=1.3"
            )
    return found


@dataclass(frozen=True)
class Change:
    """A changed setting. ``training``: effect on the training itself; empty: none."""

    field: str
    value: str
    training: str = ""
    longer: float = 1.0
    """Times as many steps to the same loss."""

    @property
    def text(self) -> str:
        return f"{self.field}={self.value}"


NO_SWAPPING = Change("swap.backing", "off")


@dataclass(frozen=True)
class Suggestion:
    """A change worth making. ``gain``: 0.2 for 20 % less time to the same loss; ``stages``: of the changed run."""

    change: Change
    gain: float
    stages: int

    @property
    def faster(self) -> float:
        """Times as many tokens/s."""
        return (1 + self.gain) * self.change.longer


def suggestions(
    changed: Callable[[Change | None], tuple[Setting, RunConfig]],
    weather: Weather,
    played: Callable[[Setting, RunConfig], float],
    quality: Mapping[str, float] = QUALITY,
) -> list[Suggestion]:
    """Return the best changes, at most one for each field. ``changed`` applies a change (None: no change); raises
    MuletrainError for an impossible change, such as more stages than machines. ``played``: tokens/s of a play as
    thorough as the run's. ``quality``: see ``QUALITY``."""
    setting, run = changed(None)
    before, best = _tokens_per_s(setting, run, weather), dict[str, Suggestion]()
    for change in changes(run, paced=any(kind.declared for kind in setting.kinds), quality=quality):
        try:
            other = changed(change)
            gain = _tokens_per_s(*other, weather) / (change.longer * before) - 1
            found = Suggestion(change, gain, len(other[0].cut))
        except MuletrainError:
            continue
        if change.field not in best or found.gain > best[change.field].gain:
            best[change.field] = found
    promising = sorted((s for s in best.values() if s.gain >= WORTH), key=lambda s: -s.gain)
    as_it_is, kept = played(setting, run) if promising else 0.0, list[Suggestion]()
    for s in promising:
        if as_it_is and len(kept) < MOST:
            gain = played(*changed(s.change)) / (s.change.longer * as_it_is) - 1
            kept += [replace(s, gain=gain)] if gain >= WORTH else []
    return sorted(kept, key=lambda s: -s.gain)


def worth_of_swapping(changed: Callable[[Change | None], tuple[Setting, RunConfig]], weather: Weather) -> float | None:
    """Speedup of the run from swapping stages that exceed a machine's memory; infinite: without swapping, a stage gets
    no machine; None: no machine swaps."""
    setting, run = changed(None)
    if not any(kind.swaps for kind in setting.kinds):
        return None
    try:
        without = _tokens_per_s(*changed(NO_SWAPPING), weather)
    except MuletrainError:
        without = 0.0
    return _tokens_per_s(setting, run, weather) / without if without else math.inf


def changes(run: RunConfig, *, paced: bool, quality: Mapping[str, float] = QUALITY) -> Iterator[Change]:
    """List the changes to try, some impossible. ``paced``: the fleet file declares stage times for any stage size, so
    other sizes cannot be predicted. ``quality``: see ``QUALITY``."""
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
    if run.model.given is None:  # new layers amid trained ones would undo the training
        before = quality.get(run.model.compression, 1.0)
        for kind in ("none", *quality):
            longer = quality.get(kind, 1.0) / before
            steps = f"about {longer:.2f} times as many steps to the same loss, counted in the gain"
            if kind != run.model.compression:
                yield Change("model.compression", kind, f"{steps}; {'no' if kind != 'none' else 'an'} export", longer)
    if run.swap.backing != "off":
        yield NO_SWAPPING
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


def applied(run: RunConfig, change: Change) -> RunConfig:
    """Returns the changed run. Raises MuletrainError if the configuration rejects the change."""
    name, _, field = change.field.partition(".")
    section = getattr(run, name)
    own = {known: getattr(section, known) for known in section.model_fields_set}
    if change.field == "fleet.stages":
        own["layers"] = None
    return run.model_copy(update={name: type(section).model_validate({**own, field: change.value})})


def _tokens_per_s(setting: Setting, run: RunConfig, weather: Weather) -> float:
    machines = sum(kind.count for kind in setting.kinds)
    hours = min(HOURS, max(1.0, MACHINE_HOURS / machines))
    weather = weather if machines <= COUNTLESS else Weather()
    seeds = 1 if weather == Weather() or machines > MANY else SEEDS
    plays = [by_rates(setting, run, weather, hours=hours, seed=seed) for seed in range(seeds)]
    return fmean(play.throughput for play in plays) * setting.cost.tokens
