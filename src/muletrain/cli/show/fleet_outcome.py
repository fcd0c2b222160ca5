"""A simulated fleet for people: tables, suggestions and a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.markup import escape

from muletrain.cli.show.console import say
from muletrain.cli.show.tables import new_table
from muletrain.sim.fleet.advice import WORTH
from muletrain.sim.setting import mixed, seated
from muletrain.strategies import listed_of
from muletrain.units import format_bytes, format_count, format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from muletrain.config.costs import Costs
    from muletrain.config.fleet_file import Fleet
    from muletrain.config.schema import RunConfig
    from muletrain.model.chain import Model
    from muletrain.sim.fleet.accounts import Outcome
    from muletrain.sim.fleet.advice import Suggestion
    from muletrain.sim.setting import Setting

LINKS = 10
"""Most pairs of regions in the table; '--json' has all."""
FAR = 4.0
"""Ratio between the sizes of the played stages and of the measured ones above which the report warns."""
BESIDE = (1.0, 1.0)
"""Place of a legend, right of the plot."""
NAMED_STAGES = 12
"""Most stages in a legend; the colours of more could not be told apart."""


def say_run(
    console: Console, fleet: Fleet, run: RunConfig, spec: Model, scene: Setting, outcome: Outcome, hours: float
) -> None:
    kinds = ", ".join(f"{k.count} x {k.device} in {k.region}" for k in scene.kinds)
    name = run.model.preset or "model"
    console.print(f"[bold]{escape(fleet.name)}[/bold]: {escape(kinds)}")
    console.print(
        f"{name} ({format_count(spec.params)} parameters) in {plural(len(scene.cut), 'stage')}, "
        f"{plural(scene.cost.microbatches, 'microbatch')} of {scene.cost.sequences} x {spec.context} tokens per step, "
        f"strategy {listed_of(run).name}, {hours:g} h\n"
    )
    if outcome.partial:
        so_far, asked = (format_duration(3600 * h) for h in (outcome.hours, hours))
        say(console, f"[yellow]interrupted after {so_far} of {asked}; the figures cover that time[/yellow]\n")
    for machine in scene.left_out:
        console.print(
            f"left out: '{escape(machine)}' has too little memory for any stage; more stages are smaller (--set fleet.stages=N)"
        )
    if run.optimizer.state_device == "cpu" and (devices := mixed(scene, seated(scene))):
        console.print(
            f"stages mix devices ({escape(', '.join(devices))}), so the CPU updates the weights (optimizer.state_device = 'cpu')"
        )


def say_swapped(console: Console, scene: Setting, times: float | None) -> None:
    """``times``: as fast as without machines that swap; None: none does."""
    if times is None:
        return
    for kind in (kind for kind in scene.kinds if kind.swaps):
        stages = ", ".join(map(str, sorted(kind.swaps)))
        say(console, f"swapped: '{escape(kind.name)}' has too little memory for stage {stages}, and swaps it")
    told = "a stage would get no machine" if math.isinf(times) else f"{times:.2f}x as fast as"
    say(console, f"  {told} without swapping (--set swap.backing=off), by '--fidelity flow'")


def say_advice(console: Console, scene: Setting, outcome: Outcome, found: Sequence[Suggestion]) -> None:
    if not outcome.throughput or outcome.gave_up:
        return
    cause, share = max(outcome.idle.items(), key=lambda item: item[1])
    if not found:
        say(console, f"no single change that 'simulate' tried gives {100 * WORTH:.0f} % more throughput")
        return
    say(
        console,
        f"most time is lost to: {cause} ({100 * share:.0f} %). Any of these changes helps, by '--fidelity flow':",
    )
    table = new_table("", ["change"], ["tokens/s", "gain"])
    table.add_column("effect on training", overflow="fold")
    for s in found:
        others = "" if s.stages == len(scene.cut) or s.change.field == "fleet.stages" else plural(s.stages, "stage")
        tokens_per_s = s.faster * outcome.throughput * scene.cost.tokens
        table.add_row(
            f"--set {s.change.text}",
            format_count(tokens_per_s),
            f"{100 * s.gain:.0f} %",
            "; ".join(filter(None, (s.change.training, others))) or "none",
        )
    console.print(table)


def say_costs(console: Console, costs: Costs, spec: Model, scene: Setting) -> None:
    runs = ", ".join(costs.runs) or "nowhere"
    console.print(
        f"costs measured in {escape(runs)}: {costs.call_ms:g} ms per call on paced machines, {costs.hop_ms:g} ms per message, "
        f"{costs.ending_ms:g} ms per end of a step"
    )
    params = max(spec.stage_params(scene.cut, s) for s in range(len(scene.cut)))
    if costs.stage_params and not 1 / FAR <= params / costs.stage_params <= FAR:
        console.print(
            f"they were measured with stages of up to {format_count(costs.stage_params)} parameters; these have "
            f"{format_count(params)}, so the end of a step takes another time"
        )


def results(scene: Setting, outcome: Outcome) -> Table:
    table = new_table("result", ["", ""])
    table.show_header = False
    median_s, longest_s = outcome.recovery_s
    recovery = "not needed: no machine went away"
    if outcome.events.get("left"):
        recovery = "not needed: no loss slowed the run by more than 5 %"
    if not math.isnan(median_s):
        recovery = f"median {format_duration(median_s)}, longest {format_duration(longest_s)}"
    if outcome.not_recovered:
        recovery = "; ".join([*([recovery] if outcome.recoveries_s else []), "not yet recovered at the end"])
    each = f"{format_duration(3600 * outcome.hours / outcome.steps)} each" if outcome.steps else "none was completed"
    came_or_went = {what: n for what, n in outcome.events.items() if what != "moved"}
    happened = ", ".join(f"{n} {what}" for what, n in came_or_went.items()) or "none came or went"
    for label, value in (
        ("tokens/s", format_count(outcome.throughput * scene.cost.tokens)),
        ("sequences/s", f"{outcome.throughput * scene.cost.sequences:.3g}"),
        ("steps", f"{outcome.steps:.0f}, {each}"),
        ("machines", happened),
        ("moves between stages", str(outcome.events.get("moved", 0))),
        ("computed again", f"{plural(round(outcome.repeated_microbatches), 'microbatch')}, at one stage each"),
        ("lost", f"{plural(round(outcome.lost_microbatches), 'microbatch')} of steps taken back"),
        ("time to recover", recovery),
    ):
        table.add_row(label, value)
    return table


def shares(outcome: Outcome) -> Table:
    """The shares sum to 100 %."""
    table = new_table("where the machines' time goes", [""], [""])
    table.show_header = False
    table.add_row("training (share of the optimum)", f"[bold]{100 * outcome.share_of_optimum:.1f} %[/bold]")
    for cause, share in outcome.idle.items():
        if share >= 5e-4:
            table.add_row(f"idle: {cause}", f"{100 * share:.1f} %")
    return table


def links(outcome: Outcome) -> Table:
    classes = ("activations", "gradients", "averaging", "state")
    table = new_table("traffic", ["from", "to"], [*classes, "mean"])
    busiest = sorted(outcome.bytes.items(), key=lambda item: -sum(item[1].values()))
    for (a, b), sent in busiest[:LINKS]:
        rate = 8 * sum(sent.values()) / (3600 * outcome.hours)
        table.add_row(a, b, *(format_bytes(sent.get(c, 0.0)) for c in classes), f"{rate / 1e6:,.0f} Mb/s")
    if len(busiest) > LINKS:
        table.caption = f"the busiest {LINKS} of {len(busiest)} pairs of regions; --json lists all"
    return table


def draw(outcome: Outcome, scene: Setting, path: Path) -> None:
    """Write a picture of throughput, peers by stage and events over time. Raises OSError."""
    from matplotlib.figure import Figure

    hours = [p.time_s / 3600 for p in outcome.curve]
    tokens = scene.cost.tokens
    kinds = sorted({what for p in outcome.curve for what in p.events})
    figure = Figure(figsize=(10, 8), layout="constrained")
    heights = (3, 3, 1.5)[: 3 if kinds else 2]
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    top, middle, bottom = axes[0], axes[1], axes[-1]
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
    for row, what in enumerate(kinds):
        seen = [(h, p.events[what]) for h, p in zip(hours, outcome.curve, strict=True) if what in p.events]
        bottom.scatter([h for h, _ in seen], [row] * len(seen), s=[12 * n for _, n in seen], alpha=0.6)
    if kinds:
        bottom.set(yticks=range(len(kinds)), yticklabels=kinds, ylim=(-0.7, len(kinds) - 0.3))
    bottom.set(xlabel="hours")
    figure.savefig(path, dpi=120)
