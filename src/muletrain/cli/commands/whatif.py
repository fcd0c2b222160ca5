"""``muletrain simulate fleet``: what would happen to a run on machines that nobody has, told in a table and drawn."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import HORIZONTALS
from rich.markup import escape
from rich.table import Table

from muletrain.cli.show.console import make_console, say
from muletrain.cli.show.playing import Playing
from muletrain.config.costs import Costs, load_costs
from muletrain.config.fleet import Fleet, load_located_fleet
from muletrain.config.load import load_config, located
from muletrain.errors import ConfigError, MuletrainError
from muletrain.model.spec import ModelSpec
from muletrain.sim.fleet.advice import WORTH, suggestions
from muletrain.sim.fleet.calibration import calibrated, with_speeds
from muletrain.sim.fleet.simulation import EXAMPLE, simulate_fleet, weather
from muletrain.sim.setting import mixed, once_mixed, seated, setting, stages_for
from muletrain.timeline import check_trace, write_trace
from muletrain.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from muletrain.config.schema import RunConfig
    from muletrain.events import Event
    from muletrain.sim.fleet.accounts import Outcome
    from muletrain.sim.fleet.advice import Change, Suggestion
    from muletrain.sim.fleet.simulation import Fidelity
    from muletrain.sim.setting import Setting

LINKS = 10
"""Pairs of regions in the table; '--json' has all."""
FAR = 4.0
"""Times as large as the stages that costs were measured with: then people are told."""
USUAL = ("train.batch=1024", "train.microbatch=1")
"""What a run of this kind sets, where the user says nothing."""
WHAT: dict[Fidelity, str] = {"flow": "playing by rates", "protocol": "playing every message"}
"""For the progress bar."""
FAILS = (
    "This run does not work as it is, and predictions by rates do not hold for it. Take more stages (--set fleet.stages=N), send less "
    "(--set wire.gradients=int8) or do more in a step (--set train.batch=N); --trace OUT.json shows what each peer did"
)
"""What to do where peers gave up."""


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
    fidelity: Fidelity = "flow",
    costs: Path | None = None,
    trace: Path | None = None,
) -> int:
    """The exit code: 1 where peers gave up, 128 + its number after a signal. ``costs``: what 'simulate calibrate'
    wrote. Raises ConfigError, CapacityError and DataError, which say where to look."""
    if plot is not None:
        need_matplotlib()
    if trace is not None:
        if fidelity != "protocol":
            raise ConfigError("--trace shows what the slots of each peer do; rates have none: add --fidelity protocol")
        check_trace(trace)
    file = EXAMPLE if path is None else path
    measured = Costs() if costs is None else load_costs(costs)
    fleet, origins = load_located_fleet(file)
    given = [*overrides, *([f"model.preset={model}"] if model else [])]
    with located(origins, Fleet):
        fleet = with_speeds(fleet, measured)
        run, spec = _run(fleet, config, given)
        scene = calibrated(setting(fleet, run, spec), measured)
        churn = weather(fleet.churn, Path(file).parent)
        seen: list[Event] = []
        with Playing(WHAT[fidelity], 3600 * hours, quiet=json) as playing:
            outcome = simulate_fleet(
                scene,
                run,
                churn,
                hours=hours,
                seed=seed,
                fidelity=fidelity,
                watch=seen.append if trace is not None else None,
                goes_on=playing,
            )
    if trace is not None:
        write_trace(trace, seen)
    if plot is not None:
        draw(outcome, scene, plot)

    def changed(change: Change | None) -> tuple[Setting, RunConfig]:
        other, of = (run, spec) if change is None else _run(fleet, config, [*given, change.text])
        return calibrated(setting(fleet, other, of), measured), other

    def advice() -> list[Suggestion]:
        """Gains are said of what was played: there are none where that is nothing, or a fleet that fails."""
        return suggestions(changed, churn) if outcome.throughput and not outcome.gave_up else []

    if json:
        print(jsonlib.dumps({**_as_json(outcome, scene, advice(), hours), "costs": measured.model_dump()}))
    else:
        console = make_console()
        if path is None:
            console.print(f"no fleet was named, so this is the example {escape(str(EXAMPLE))}\n", soft_wrap=True)
        _tell(console, fleet, run, spec, scene, outcome, hours)
        console.print(_results(scene, outcome))
        console.print(_shares(outcome))
        with make_console(sys.stderr).status("looking for what would help"):
            found = advice()
        _tell_of_changes(console, scene, outcome, found)
        console.print(_links(outcome))
        for estimate in sorted({k.assumed for k in scene.kinds if k.assumed}):
            console.print(f"an estimate: {escape(estimate)}; 'tflops' beside 'device' says what you measured")
        if costs is not None:
            _tell_of_costs(console, measured, spec, scene)
        for written in (p for p in (plot, trace) if p is not None):
            console.print(f"wrote {escape(str(written))}", soft_wrap=True)
    if outcome.failure:
        print(f"error: {outcome.failure}. {FAILS}", file=sys.stderr)
    if playing.stopped_by is not None:
        return 128 + playing.stopped_by
    return 1 if outcome.gave_up else 0


def _run(fleet: Fleet, config: Path | None, given: list[str]) -> tuple[RunConfig, ModelSpec]:
    """Where nobody says into how many stages: as few as memory allows. Where stages mix devices, the CPU updates the
    weights."""
    named = any(text.startswith(("model.", "model =")) for text in given)
    base = [] if config is not None else [*USUAL, *([] if named else ["model.preset=gpt3-xl"])]
    run = load_config(config, [*base, *given])
    spec = ModelSpec.from_config(run.model)
    if config is None and not any(text.startswith("fleet.stages") for text in given):
        run = load_config(None, [*base, f"fleet.stages={stages_for(fleet, run, spec)}", *given])
    scene = setting(fleet, run, spec)
    return once_mixed(scene, run, seated(scene)), spec


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


def _tell(
    console: Console, fleet: Fleet, run: RunConfig, spec: ModelSpec, scene: Setting, outcome: Outcome, hours: float
) -> None:
    kinds = ", ".join(f"{k.count} x {k.device} in {k.region}" for k in scene.kinds)
    name = run.model.preset or "model"
    console.print(f"[bold]{escape(fleet.name)}[/bold]: {escape(kinds)}")
    console.print(
        f"{name} ({format_count(spec.params)} parameters) in {len(scene.cut)} stages, {scene.cost.microbatches} microbatches of "
        f"{scene.cost.sequences} x {spec.context} tokens a step, strategy swarm, {hours:g} hours\n"
    )
    if outcome.partial:
        so_far, asked = (format_duration(3600 * h) for h in (outcome.hours, hours))
        say(console, f"[yellow]interrupted after {so_far} of {asked}: what follows is of that time[/yellow]\n")
    for machine in scene.left_out:
        console.print(
            f"left out: '{escape(machine)}' has no room for any stage; more stages are smaller (--set fleet.stages=N)"
        )
    if run.optimizer.state_device == "cpu" and (devices := mixed(scene, seated(scene))):
        console.print(
            f"stages mix devices ({escape(', '.join(devices))}): the CPU updates the weights (optimizer.state_device = 'cpu')"
        )


def _tell_of_changes(console: Console, scene: Setting, outcome: Outcome, found: Sequence[Suggestion]) -> None:
    if not outcome.throughput or outcome.gave_up:
        return
    cause, share = max(outcome.idle.items(), key=lambda item: item[1])
    if not found:
        say(console, f"no single change of the run that 'simulate' knows of gives {100 * WORTH:.0f} % more, by rates")
        return
    say(console, f"most is lost to {cause} ({100 * share:.0f} %); one of these would help, by rates:")
    table = Table("change", "tokens/s", "more", "the training")
    table.columns[1].justify = table.columns[2].justify = "right"
    for s in found:
        others = "" if s.stages == len(scene.cut) or s.change.field == "fleet.stages" else f"{s.stages} stages"
        tokens_per_s = (1 + s.gain) * outcome.throughput * scene.cost.tokens
        table.add_row(
            f"--set {s.change.text}",
            format_count(tokens_per_s),
            f"{100 * s.gain:.0f} %",
            "; ".join(filter(None, (s.change.training, others))) or "is the same",
        )
    console.print(table)


def _tell_of_costs(console: Console, costs: Costs, spec: ModelSpec, scene: Setting) -> None:
    runs = ", ".join(costs.runs) or "nowhere"
    console.print(
        f"measured in {escape(runs)}: {costs.call_ms:g} ms more a call where the file paces machines, {costs.hop_ms:g} ms a message, "
        f"{costs.ending_ms:g} ms at the end of a step"
    )
    params = max(spec.stage_params(scene.cut, s) for s in range(len(scene.cut)))
    if costs.stage_params and not 1 / FAR <= params / costs.stage_params <= FAR:
        console.print(
            f"that was with stages of up to {format_count(costs.stage_params)} parameters; these have {format_count(params)}, so the end "
            f"of a step takes another time than that"
        )


def _results(scene: Setting, outcome: Outcome) -> Table:
    table = Table(show_header=False, title="what it does", title_justify="left")
    median_s, longest_s = outcome.recovery_s
    recovery = "nothing slowed it by more than 5 %"
    if not math.isnan(median_s):
        recovery = f"median {format_duration(median_s)}, longest {format_duration(longest_s)}"
    if outcome.not_recovered:
        recovery = (
            (recovery if outcome.recoveries_s else "") + ("; " if outcome.recoveries_s else "") + "at the end not yet"
        )
    each = f"each {format_duration(3600 * outcome.hours / outcome.steps)}" if outcome.steps else "none came to its end"
    happened = ", ".join(f"{n} {what}" for what, n in outcome.events.items()) or "nobody came or went"
    for label, value in (
        ("tokens/s", format_count(outcome.throughput * scene.cost.tokens)),
        ("sequences/s", f"{outcome.throughput * scene.cost.sequences:.3g}"),
        ("steps", f"{outcome.steps:.0f}, {each}"),
        ("machines", happened),
        ("computed again", f"{outcome.repeated_microbatches:.0f} microbatches, each at one stage"),
        ("lost", f"{outcome.lost_microbatches:.0f} microbatches of steps taken back"),
        ("time to recover", recovery),
    ):
        table.add_row(label, value)
    return table


def _shares(outcome: Outcome) -> Table:
    """Sums to 100 %."""
    table = Table("where the machines' time goes", "", title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("training (share of the optimum)", f"[bold]{100 * outcome.share_of_optimum:.1f} %[/bold]")
    for cause, share in outcome.idle.items():
        if share >= 5e-4:
            table.add_row(f"idle: {cause}", f"{100 * share:.1f} %")
    return table


def _links(outcome: Outcome) -> Table:
    table = Table(
        "from", "to", title="bytes", title_justify="left", box=HORIZONTALS, show_edge=False, pad_edge=False
    )  # without lines between columns it fits into 80
    classes = ("activations", "gradients", "averaging", "state")
    for heading in (*classes, "mean"):
        table.add_column(heading, justify="right")
    busiest = sorted(outcome.bytes.items(), key=lambda item: -sum(item[1].values()))
    for (a, b), sent in busiest[:LINKS]:
        rate = 8 * sum(sent.values()) / (3600 * outcome.hours)
        table.add_row(a, b, *(format_bytes(sent.get(c, 0.0)) for c in classes), f"{rate / 1e6:,.0f} Mb/s")
    if len(busiest) > LINKS:
        table.caption = f"the busiest {LINKS} of {len(busiest)} pairs of regions; --json has all"
    return table


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise MuletrainError("--plot needs matplotlib: pip install 'muletrain[plots]', or leave it out") from e


def draw(outcome: Outcome, scene: Setting, path: Path) -> None:
    """Throughput, peers by stage and events over time, as an image. Raises OSError."""
    from matplotlib.figure import Figure

    hours = [p.time_s / 3600 for p in outcome.curve]
    tokens = scene.cost.tokens
    figure = Figure(figsize=(10, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.5))
    top.plot(hours, [p.optimum * tokens for p in outcome.curve], color="0.7", label="optimum")
    top.plot(hours, [p.throughput * tokens for p in outcome.curve], label="throughput")
    top.set(ylabel="tokens/s", ylim=(0, None), title=f"{100 * outcome.share_of_optimum:.1f} % of the optimum")
    top.legend(loc="upper left", bbox_to_anchor=BESIDE)
    stages = len(scene.cut)
    for s in range(stages):
        middle.step(hours, [p.peers[s] for p in outcome.curve], where="pre", label=f"stage {s}", alpha=0.8)
    middle.set(ylabel="peers by stage", ylim=(0, None))
    if stages <= NAMED_STAGES:
        middle.legend(loc="upper left", bbox_to_anchor=BESIDE)
    kinds = sorted({what for p in outcome.curve for what in p.events})
    for row, what in enumerate(kinds):
        seen = [(h, p.events[what]) for h, p in zip(hours, outcome.curve, strict=True) if what in p.events]
        bottom.scatter([h for h, _ in seen], [row] * len(seen), s=[12 * n for _, n in seen], alpha=0.6)
    bottom.set(xlabel="hours", yticks=range(len(kinds)), yticklabels=kinds, ylim=(-0.7, len(kinds) - 0.3))
    figure.savefig(path, dpi=120)


BESIDE = (1.0, 1.0)
NAMED_STAGES = 12
"""In a legend; of more nobody could tell the colours apart."""
