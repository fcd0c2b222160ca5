"""``muletrain simulate fleet``: play a run on a fleet, and report what happened."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import math
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from muletrain.cli.actions.hypothetical import load_run, need_matplotlib
from muletrain.cli.actions.planned import follows
from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.fleet_outcome import draw, links, results, say_advice, say_costs, say_run, say_swapped, shares
from muletrain.cli.show.playing import Playing
from muletrain.config.costs import Costs, load_costs
from muletrain.config.fleet_file import Fleet, load_located_fleet
from muletrain.config.load import located
from muletrain.errors import ConfigError
from muletrain.sim.fleet.advice import suggestions, worth_of_swapping
from muletrain.sim.fleet.calibration import calibrated, with_speeds
from muletrain.sim.fleet.planned import as_hub
from muletrain.sim.fleet.simulation import EXAMPLE, simulate_fleet, weather
from muletrain.sim.setting import once_mixed, seated, setting, stages_for
from muletrain.strategies import STRATEGIES, listed_of, strategy_of
from muletrain.timeline import check_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.model.chain import Model
    from muletrain.sim.fleet.accounts import Outcome
    from muletrain.sim.fleet.advice import Change, Suggestion
    from muletrain.sim.fleet.flow import Weather
    from muletrain.sim.fleet.simulation import Fidelity
    from muletrain.sim.setting import Setting

WHAT: dict[Fidelity, str] = {"flow": "simulating throughput", "protocol": "simulating every message"}
"""Labels of the progress bar."""
FAILS = (
    "This run does not work as it is, and '--fidelity flow' does not apply to it. Use more stages (--set fleet.stages=N), smaller "
    "messages (--set wire.gradients=int8) or larger steps (--set train.batch=N); --trace OUT.json shows what each peer did"
)
"""Advice if peers gave up."""


def what_if(
    path: Path | None,
    config: Path | None,
    model: str | None,
    overrides: Sequence[str],
    *,
    hours: float,
    seed: int,
    plot: Path | None,
    json: bool,
    fidelity: Fidelity | None = None,
    costs: Path | None = None,
    trace: Path | None = None,
    choice: str | None = None,
) -> int:
    """Print the report. Returns the exit code: 1 if peers gave up, 128 + its number after a signal. ``costs``: see
    ``config.costs``; ``choice``: see ``follows``; default: the configuration's. Raises ConfigError, CapacityError and
    DataError with the place of the cause."""
    if plot is not None:
        need_matplotlib()
    if trace is not None:
        check_trace(trace)
    measured = Costs() if costs is None else load_costs(costs)
    fleet, origins = load_located_fleet(path or EXAMPLE)
    with located(origins, Fleet):
        given = [*overrides, *([f"model.preset={model}"] if model else [])]
        question = _Question(with_speeds(fleet, measured), config, given, measured, choice)
        scene, run = question.scene()
        planned = as_hub(scene, strategy_of(run)) if strategy_of(run).pooled else None
        played = _fidelity(fidelity, pooled=planned is not None, traced=trace is not None)
        churn = weather(fleet.churn, Path(path or EXAMPLE).parent)
        seen: list[Event] = []
        with Playing(WHAT[played], 3600 * hours, quiet=json) as playing:
            outcome = simulate_fleet(
                scene,
                run,
                churn,
                hours=hours,
                seed=seed,
                fidelity=played,
                watch=seen.append if trace is not None else None,
                planned=planned,
                goes_on=playing,
            )
    if trace is not None:
        write_trace(trace, seen)
    if plot is not None:
        draw(outcome, scene, plot)
    if json:
        advice = question.advice(outcome, churn)
        print(jsonlib.dumps({**_as_json(outcome, scene, advice, hours), "costs": measured.model_dump()}))
    else:
        if path is None:
            say(make_console(), f"no fleet file given; this is the example {escape(str(EXAMPLE))}\n")
        _tell(question, outcome, churn, hours, [p for p in (plot, trace) if p is not None])
    if outcome.failure:
        print(f"error: {outcome.failure}. {FAILS}", file=sys.stderr)
    if playing.stopped_by is not None:
        return 128 + playing.stopped_by
    return 1 if outcome.gave_up else 0


def _fidelity(asked: Fidelity | None, *, pooled: bool, traced: bool) -> Fidelity:
    """How the fleet is played. Raises ConfigError for what that cannot show."""
    if pooled and asked == "flow":
        raise ConfigError("--fidelity flow: rates know nothing of a hub's clients; leave it out")
    if traced and (asked or "flow") == "flow" and not pooled:
        raise ConfigError("--trace shows the slots of each peer; only --fidelity protocol has them: add it")
    return asked or ("protocol" if pooled else "flow")


@dataclass(frozen=True)
class _Question:
    fleet: Fleet
    config: Path | None
    given: list[str]
    measured: Costs
    choice: str | None

    @property
    def stages_given(self) -> bool:
        return _stages_given(self.config, self.given)

    @cached_property
    def run(self) -> tuple[RunConfig, Model]:
        return _run(self.fleet, self.config, self.given, self.choice)

    def scene(self, change: Change | None = None) -> tuple[Setting, RunConfig]:
        """Raises MuletrainError for a change that is not possible."""
        run, spec = (
            self.run if change is None else _run(self.fleet, self.config, [*self.given, change.text], self.choice)
        )
        return calibrated(setting(self.fleet, run, spec), self.measured), run

    def advice(self, outcome: Outcome, churn: Weather) -> list[Suggestion]:
        """None if nothing was trained: gains are relative to what was. None for a hub: they are predicted by rates."""
        able = outcome.throughput and not outcome.gave_up and not strategy_of(self.run[0]).pooled
        return suggestions(self.scene, churn) if able else []


def _run(fleet: Fleet, config: Path | None, given: list[str], choice: str | None) -> tuple[RunConfig, Model]:
    """Default number of stages: as few as memory allows. The CPU updates the weights where stages mix devices. Raises
    ConfigError for a strategy that is not played."""
    run, spec = load_run(config, given)
    if not listed_of(run).simulated:
        played = ", ".join(s.name for s in STRATEGIES if s.simulated)
        raise ConfigError(
            f"pipeline.seats: 'simulate fleet' plays strategies {played} only; leave the section [pipeline] out, or predict the "
            "planned pipelines with 'muletrain plan'"
        )
    if not _stages_given(config, given):
        run, spec = load_run(None, given, f"fleet.stages={stages_for(fleet, run, spec)}")
    if choice is not None:
        run = follows(run, choice, local=False)
    scene = setting(fleet, run, spec)
    if not strategy_of(run).pooled:
        return once_mixed(scene, run, seated(scene)), spec
    members = as_hub(scene, strategy_of(run))
    serving = [[0] * len(scene.kinds) for _ in scene.cut]
    for name, stage in members.stages.items():
        serving[stage][members.kinds[name]] += 1
    return once_mixed(scene, run, serving), spec


def _stages_given(config: Path | None, given: Sequence[str]) -> bool:
    return config is not None or any(text.startswith("fleet.stages") for text in given)


def _tell(question: _Question, outcome: Outcome, churn: Weather, hours: float, written: list[Path]) -> None:
    console, (scene, run), (_, spec) = make_console(), question.scene(), question.run
    say_run(console, question.fleet, run, spec, scene, outcome, hours)
    if not question.stages_given:
        say(
            console,
            "stages: the fewest that all machines have room for, if any number is; 'muletrain plan' finds the fastest number "
            "(then --set fleet.stages=N here)",
        )
    say_swapped(console, scene, worth_of_swapping(question.scene, churn))
    for table in (results(scene, outcome), shares(outcome)):
        console.print()
        console.print(table)
    console.print()
    if not strategy_of(run).pooled:
        with make_console(sys.stderr).status("looking for changes that help"):
            found = question.advice(outcome, churn)
        say_advice(console, scene, outcome, found)
        console.print()
    console.print(links(outcome))
    for estimate in sorted({k.assumed for k in scene.kinds if k.assumed}):
        console.print(f"estimated: {escape(estimate)}; to use a measured speed, add 'tflops' beside 'device'")
    if question.measured != Costs():
        say_costs(console, question.measured, spec, scene)
    for path in written:
        say(console, f"wrote {escape(str(path))}")


def _as_json(outcome: Outcome, scene: Setting, found: Sequence[Suggestion], hours: float) -> dict[str, Any]:
    fields = dataclasses.asdict(outcome)
    links = {f"{a} to {b}": sent for (a, b), sent in outcome.bytes.items()}
    median_s, longest_s = (None if math.isnan(s) else s for s in outcome.recovery_s)
    tokens_per_s = outcome.throughput * scene.cost.tokens
    advice = [
        {
            "set": s.change.text,
            "gain": s.gain,
            "tokens_per_s": (1 + s.gain) * tokens_per_s,
            "stages": s.stages,
            "training": s.change.training,
        }
        for s in found
    ]
    return {
        "stages": len(scene.cut),
        "machines": sum(k.count for k in scene.kinds),
        "tokens_per_s": tokens_per_s,
        "recovery_median_s": median_s,
        "recovery_longest_s": longest_s,
        "hours_asked": hours,
        **fields,
        "bytes": links,
        "advice": advice,
        "left_out": scene.left_out,
        "estimates": sorted({k.assumed for k in scene.kinds if k.assumed}),
    }
