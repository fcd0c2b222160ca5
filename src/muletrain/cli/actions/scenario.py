"""The run that ``muletrain simulate fleet`` plays: machines, stages and microbatches, from the user, from a plan, or as
``muletrain plan`` would choose."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from muletrain.cli.actions.hypothetical import load_run
from muletrain.cli.actions.planned import chosen_of, follows, planned, read_plan
from muletrain.config.load import load_config
from muletrain.config.peer_sections import PipelineConfig
from muletrain.errors import ConfigError
from muletrain.model.make import make_model
from muletrain.model.presets import PRESETS
from muletrain.planning.splits import title
from muletrain.sim.fleet.calibration import calibrated
from muletrain.sim.fleet.planned import as_hub
from muletrain.sim.plan import hub as plan_hub
from muletrain.sim.plan.planner import laid_out
from muletrain.sim.plan.question import Question
from muletrain.sim.setting import once_mixed, seat, seated, setting, stages_for
from muletrain.strategies import STRATEGIES, find, listed_of, strategy_of
from muletrain.units import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from muletrain.config.costs import Costs
    from muletrain.config.fleet_file import Fleet
    from muletrain.config.plan_file import Prediction
    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.sim.fleet.advice import Change
    from muletrain.sim.fleet.flow import Weather
    from muletrain.sim.fleet.planned import Planned
    from muletrain.sim.fleet.rates import Counts
    from muletrain.sim.setting import Setting

MANY = 24
"""Above so many machines, no layout is searched for: the search would take a minute, where a play takes seconds."""
PLANNED_PIPELINE = (
    "rates know nothing of schedules: the machines of each stage share its microbatches, and later the others' places"
)


@dataclass(frozen=True)
class Scenario:
    """A run on a fleet. ``question``: about the machines that take part. ``layout``: seats of the machines; None:
    seated as newcomers. ``told``: sentences on where the layout comes from."""

    question: Question
    layout: Prediction | None = None
    told: tuple[str, ...] = field(default=())

    @property
    def run(self) -> RunConfig:
        return self.question.run

    @property
    def spec(self) -> Model:
        return self.question.spec

    def scene(self, change: Change | None = None) -> tuple[Setting, RunConfig]:
        """Raises MuletrainError for a change that is not possible."""
        asked = self.question if change is None else self.question.changed(change)
        run = asked.run
        found = calibrated(setting(asked.fleet, run, asked.spec, whole=asked.whole), asked.costs)
        if change is not None and not strategy_of(run).pooled:
            run = once_mixed(found, run, seated(found))
        return found, run

    @cached_property
    def planned(self) -> Planned | None:
        """The membership of a hub."""
        scene, run = self.scene()
        if not strategy_of(run).pooled:
            return None
        if self.layout is None:
            return as_hub(scene, strategy_of(run))
        return plan_hub.membership(self.question, self.question.scene_of(self.layout), self.layout)

    def serving(self, scene: Setting) -> list[Counts] | None:
        """Initial servers in ``scene``, by stage and kind; None: as newcomers are seated. Spares sit at the most useful
        stages."""
        if self.layout is None or len(scene.cut) != len(self.layout.stages):
            return None
        kinds = {kind.name: k for k, kind in enumerate(scene.kinds)}
        entry = {name: kinds.get(m) for m, names in self.question.names.items() for name in names}
        rows = [[0] * len(kinds) for _ in scene.cut]
        for row, stage in zip(rows, self.layout.stages, strict=True):
            for k in (entry[name] for name in set(stage.machines)):
                if k is None:
                    return None
                row[k] += 1
        there = [sum(column) for column in zip(*rows, strict=True)]
        spares = list(Counter({k: kind.count - there[k] for k, kind in enumerate(scene.kinds)}).elements())
        for spare, target in zip(spares, seat(scene, spares, rows), strict=True):
            rows[target][spare] += 1
        return list(map(tuple, rows))


def scenario(
    fleet: Fleet,
    weather: Weather,
    config: Path | None,
    given: Sequence[str],
    measured: Costs,
    *,
    plan: Path | None,
    choice: str | None,
) -> Scenario:
    """The scenario to play. ``choice``: a strategy's name for ``--strategy``; default: the plan's, the configuration's,
    or the faster of swarm and swap. Raises ConfigError and CapacityError."""
    if plan is not None:
        return _of_plan(fleet, weather, config, given, measured, plan, choice)
    run, spec = load_run(config, given)
    if not listed_of(run).simulated:
        played = ", ".join(s.name for s in STRATEGIES if s.simulated)
        raise ConfigError(
            f"pipeline.seats: 'simulate fleet' plays strategies {played} only; leave the section [pipeline] out, predict its pipelines "
            "with 'muletrain plan', or play that plan (--plan PLAN.json)"
        )
    stated = config is not None or any(text.startswith("fleet.stages") for text in given)
    pooled = strategy_of(run).pooled or (choice is not None and find(choice).pooled)
    if not (stated or pooled) and len(fleet.peers()) <= MANY:
        return _laid_out(Question(fleet, run, spec, costs=measured, weather=weather), given, choice)
    told: tuple[str, ...] = ()
    if not stated:
        run, spec = load_run(None, given, f"fleet.stages={stages_for(fleet, run, spec)}")
        told = (
            "stages: the fewest that all machines have room for, if any number is; 'muletrain plan' finds the fastest number, and the "
            "machines to leave out, so its figure is another (then play it: --plan PLAN.json)",
        )
    if choice is not None:
        run = follows(run, choice, local=False)
    scene = setting(fleet, run, spec)
    serving = seated(scene) if not strategy_of(run).pooled else _servers(scene, as_hub(scene, strategy_of(run)))
    return Scenario(Question(fleet, once_mixed(scene, run, serving), spec, costs=measured, weather=weather), told=told)


def _servers(scene: Setting, members: Planned) -> list[list[int]]:
    serving = [[0] * len(scene.kinds) for _ in scene.cut]
    for name, stage in members.stages.items():
        serving[stage][members.kinds[name]] += 1
    return serving


def _laid_out(question: Question, given: Sequence[str], choice: str | None) -> Scenario:
    """The layout that ``muletrain plan`` would choose."""
    fixed = any(text.startswith("train.microbatch") for text in given)
    asked = question if not fixed else replace(question, microbatch=question.run.train.microbatch)
    names = [choice] if choice else ["swap"] if question.run.swap.whole else ["swarm", "swap"]
    found = laid_out(asked, names)
    return _placed(question, found, f"laid out as 'muletrain plan' does: {title(found)}")


def _placed(question: Question, found: Prediction, source: str) -> Scenario:
    """The scenario of a prediction."""
    run, cut = question.run, tuple(stage.layers for stage in found.stages)
    strategy = find(found.strategy)
    if strategy.ask is not None:
        run = strategy.ask(run, sum(len(stage.clients) for stage in found.stages))
    run = run.model_copy(
        update={
            "fleet": run.fleet.model_copy(
                update={"stages": len(cut), "layers": tuple(end - first for first, end in cut)}
            ),
            "train": run.train.model_copy(update={"microbatch": found.microbatch}),
            "optimizer": run.optimizer.model_copy(update={"state_device": found.state_device}),
        }
    )
    part = replace(question, run=run, stages=None, microbatch=None).without(found.left_out)
    return Scenario(part, found, (source, *_figures(found)))


def _figures(found: Prediction) -> list[str]:
    """The plan's prediction, so that both figures are shown."""
    per_s = f"{format_count(found.tokens_per_s)} tokens/s for machines that stay"
    if found.churned_tokens_per_s is not None:
        per_s += f", {format_count(found.churned_tokens_per_s)} with this churn in the long run"
    told = [f"predicted: {per_s}"]
    if found.left_out:
        told.append(
            f"without {', '.join(found.left_out)}: the run is faster so ('muletrain plan' says why; --set fleet.stages=N "
            "plays all machines)"
        )
    return told


def _of_plan(
    fleet: Fleet,
    weather: Weather,
    config: Path | None,
    given: Sequence[str],
    measured: Costs,
    path: Path,
    choice: str | None,
) -> Scenario:
    """The layout of the plan in a file. Raises ConfigError if the plan does not fit the fleet or the run."""
    plan = read_plan(path)
    model = [f"model.preset={plan.model}"] if config is None and plan.model in PRESETS else []
    run = planned(load_config(config, [*model, *given]), path, choice)
    if run.model.given is not None:
        run, _ = load_run(config, [*model, *given])
    spec, found = make_model(run.model), chosen_of(plan, path, choice)
    known = {peer.name for peer in fleet.peers()}
    if unknown := sorted({name for stage in found.stages for name in stage.machines} - known):
        raise ConfigError(
            f"--plan: the fleet file has no machine '{unknown[0]}', which {path} names; use the fleet file of the plan"
        )
    run = run.model_copy(update={"pipeline": PipelineConfig()})
    placed = _placed(Question(fleet, run, spec, costs=measured, weather=weather), found, f"{path}: {title(found)}")
    return placed if not found.schedule else Scenario(placed.question, found, (*placed.told, PLANNED_PIPELINE))
