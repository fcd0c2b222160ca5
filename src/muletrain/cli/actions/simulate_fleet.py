"""``muletrain simulate fleet``: play a run on a fleet, and report the result."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import math
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from muletrain.cli.actions.hypothetical import model_setting
from muletrain.cli.actions.scenario import scenario
from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.doing import doing
from muletrain.cli.show.fleet_outcome import draw, links, results, say_advice, say_costs, say_run, say_swapped, shares
from muletrain.cli.show.pictures import check_pictures
from muletrain.config.costs import Costs, load_costs
from muletrain.config.fleet_file import Fleet, load_located_fleet
from muletrain.config.load import located
from muletrain.errors import ConfigError
from muletrain.runs.asked import BY_SIGNAL, Asked
from muletrain.sim.fleet.advice import quality_of, suggestions, worth_of_swapping
from muletrain.sim.fleet.calibration import with_speeds
from muletrain.sim.fleet.simulation import EXAMPLE, simulate_fleet, weather
from muletrain.strategies import listed_of, strategy_of
from muletrain.timeline import check_trace, write_trace
from muletrain.units import format_count, format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muletrain.cli.actions.scenario import Scenario
    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.sim.fleet.accounts import GoesOn, Outcome
    from muletrain.sim.fleet.advice import Suggestion
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
    plot: Sequence[Path],
    json: bool,
    fidelity: Fidelity | None = None,
    costs: Path | None = None,
    quality: Sequence[str] = (),
    trace: Path | None = None,
    choice: str | None = None,
    plan: Path | None = None,
) -> int:
    """Print the report. Returns the exit code: 1 if peers gave up, 128 + the signal's number after a signal. ``costs``:
    see ``config.costs``; ``quality``: see ``advice.quality_of``; ``choice``, ``plan``: see ``scenario``. Raises
    ConfigError, CapacityError and DataError with the place of the cause."""
    check_pictures(plot)
    if trace is not None:
        check_trace(trace)
    measured = Costs() if costs is None else load_costs(costs)
    fleet, origins = load_located_fleet(path or EXAMPLE)
    with located(origins, Fleet):
        given = [*overrides, *([model_setting(model)] if model else [])]
        churn = weather(fleet.churn, Path(path or EXAMPLE).parent)
        asked = scenario(with_speeds(fleet, measured), churn, config, given, measured, plan=plan, choice=choice)
        asked = dataclasses.replace(asked, question=dataclasses.replace(asked.question, quality=quality_of(quality)))
        (scene, run), planned = asked.scene(), asked.planned
        played = _fidelity(fidelity, pooled=planned is not None, traced=trace is not None)
        seen: list[Event] = []
        with shown(WHAT[played], 3600 * hours, wish := Asked(), quiet=json) as goes_on:
            outcome = simulate_fleet(
                scene,
                run,
                churn,
                hours=hours,
                seed=seed,
                fidelity=played,
                watch=seen.append if trace is not None else None,
                planned=planned,
                serving=asked.serving(scene),
                goes_on=goes_on,
            )
    if trace is not None:
        write_trace(trace, seen)
    if plot:
        sizes = f"{format_count(asked.spec.params)} parameters, {plural(len(scene.cut), 'stage')}"
        about = f"Simulation of {fleet.name}: {run.model.preset or 'model'} ({sizes}), strategy {listed_of(run).name}"
        draw(outcome, scene, about, plot)
    if json:
        advice = _advice(asked, outcome, churn, hours, seed)
        print(jsonlib.dumps({**_as_json(outcome, scene, advice, hours), "costs": measured.model_dump()}))
    else:
        if path is None:
            say(make_console(), f"no fleet file given; this is the example {escape(str(EXAMPLE))}\n")
        _tell(asked, outcome, churn, hours, seed, [*plot, *([] if trace is None else [trace])])
    if outcome.failure:
        print(f"error: {outcome.failure}. {FAILS}", file=sys.stderr)
    if wish.number:
        return BY_SIGNAL + wish.number
    return 1 if outcome.gave_up else 0


@contextmanager
def shown(what: str, horizon_s: float, wish: Asked, *, quiet: bool) -> Iterator[GoesOn]:
    """Tell how much of ``horizon_s`` was played, unless ``quiet``. The first signal (``wish``) ends the play in order, a
    second one ends the program."""
    with wish.heard(), nullcontext() if quiet else doing(what) as tell:

        def goes_on(now_s: float, steps: float) -> bool:
            if tell is not None:
                so_far = f"{format_duration(now_s)} of {format_duration(horizon_s)}, {plural(int(steps), 'step')}"
                tell(now_s / horizon_s, f"{what}: {so_far}")
            return not wish.number

        goes_on(0.0, 0.0)
        yield goes_on


def _fidelity(asked: Fidelity | None, *, pooled: bool, traced: bool) -> Fidelity:
    """How the fleet is played. Raises ConfigError for an unsupported request."""
    if pooled and asked == "flow":
        raise ConfigError("--fidelity flow: rates know nothing of a hub's clients; leave it out")
    if traced and (asked or "flow") == "flow" and not pooled:
        raise ConfigError("--trace shows the slots of each peer; only --fidelity protocol has them: add it")
    return asked or ("protocol" if pooled else "flow")


def _advice(asked: Scenario, outcome: Outcome, churn: Weather, hours: float, seed: int) -> list[Suggestion]:
    """None if nothing was trained: gains are relative to training. None for a hub: gains are predicted by rates."""

    def tokens_per_s(scene: Setting, run: RunConfig) -> float:
        serving = asked.serving(scene)
        again = simulate_fleet(scene, run, churn, hours=hours, seed=seed, serving=serving, budget_s=0.0)
        return again.throughput * scene.cost.tokens

    able = outcome.throughput and not outcome.gave_up and not strategy_of(asked.run).pooled
    return suggestions(asked.scene, churn, tokens_per_s, asked.question.quality) if able else []


def _tell(asked: Scenario, outcome: Outcome, churn: Weather, hours: float, seed: int, written: list[Path]) -> None:
    console, (scene, run), spec = make_console(), asked.scene(), asked.spec
    say_run(console, asked.question.fleet, run, spec, scene, outcome, hours)
    for told in asked.told:
        say(console, escape(told))
    say_swapped(console, scene, worth_of_swapping(asked.scene, churn))
    for table in (results(scene, outcome), shares(outcome)):
        console.print()
        console.print(table)
    console.print()
    if not strategy_of(run).pooled:
        with make_console(sys.stderr).status("looking for changes that help"):
            found = _advice(asked, outcome, churn, hours, seed)
        say_advice(console, scene, outcome, found)
        console.print()
    if outcome.bytes:
        console.print(links(outcome))
    for estimate in sorted({k.assumed for k in scene.kinds if k.assumed}):
        console.print(f"estimated: {escape(estimate)}; to use a measured speed, add 'tflops' beside 'device'")
    if asked.question.costs != Costs():
        say_costs(console, asked.question.costs, spec, scene)
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
            "tokens_per_s": s.faster * tokens_per_s,
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
