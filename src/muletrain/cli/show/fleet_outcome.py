"""A simulated fleet for people: tables, suggestions and a picture."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.markup import escape

from muletrain.cli.show.console import say
from muletrain.cli.show.pictures import counted, headline, write
from muletrain.cli.show.plan_tables import kind_of
from muletrain.cli.show.tables import new_table
from muletrain.sim.fleet.advice import WORTH
from muletrain.sim.setting import mixed, seated
from muletrain.strategies import listed_of
from muletrain.units import format_bytes, format_count, format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from muletrain.cli.show.pictures import Look
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
FLAT = 0.2
"""Share of the optimum below which the picture leaves the optimum out: it would press the curve to the ground."""
BINS = 60
"""Bars of the machines that came and left."""
SEVERE = ("stage lost", "stepped back", "gave up")
"""Events after which work is done again."""


def say_run(
    console: Console, fleet: Fleet, run: RunConfig, spec: Model, scene: Setting, outcome: Outcome, hours: float
) -> None:
    kinds = ", ".join(kind_of(k.name, k.count, k.device, k.region) for k in scene.kinds)
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
        less = "since the last loss the machines are less busy than before it"
        recovery = "; ".join([*([recovery] if outcome.recoveries_s else []), less])
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


def draw(outcome: Outcome, scene: Setting, about: str, paths: Sequence[Path]) -> None:
    """Write a picture of throughput and events over time to each of ``paths``. ``about``: fleet and model. Raises
    MuletrainError."""
    hours = [p.time_s / 3600 for p in outcome.curve]
    tokens = scene.cost.tokens
    speed = format_count(outcome.throughput * tokens)

    def on(figure: Figure, look: Look) -> None:
        share = f"{100 * outcome.share_of_optimum:.0f} % of what its machines could do"
        headline(figure, look, f"The fleet trains {speed} tokens/s, {share}", about)
        comes_and_goes = any(p.events for p in outcome.curve)
        every = figure.subplots(
            1 + comes_and_goes, 1, sharex=True, squeeze=False, height_ratios=(3, 1.2)[: 1 + comes_and_goes]
        )
        top, bottom = every[0, 0], every[-1, 0]
        if outcome.share_of_optimum > FLAT:
            best = [p.optimum * tokens for p in outcome.curve]
            top.plot(hours, best, color=look.faint, linewidth=2, label="if all present machines were always busy")
        done = [p.throughput * tokens for p in outcome.curve]
        top.fill_between(hours, done, color=look.main, alpha=0.25, linewidth=0)
        top.plot(hours, done, color=look.main, linewidth=1.6, label="trained")
        top.set(ylabel="tokens/s", ylim=(0, None), xlim=(0, max(hours, default=1.0)))
        counted(top)
        _mark(top, outcome, look)
        top.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=10, borderaxespad=0.2)
        bottom.set_xlabel("hours")
        if comes_and_goes:
            _draw_comings(bottom, outcome, look)

    write(paths, on)


def _mark(axes: Axes, outcome: Outcome, look: Look) -> None:
    """Mark the times at which steps were lost."""
    lost = [p.time_s / 3600 for p in outcome.curve if p.events.keys() & set(SEVERE)]
    if lost:
        words = " or ".join(what for what in SEVERE if outcome.events.get(what))
        axes.plot(lost, [0.0] * len(lost), "v", color=look.second, markersize=9, clip_on=False, label=words, zorder=4)


def _draw_comings(axes: Axes, outcome: Outcome, look: Look) -> None:
    """How many machines left and came in each of ``BINS`` parts of the time."""
    end_h = max(outcome.curve[-1].time_s / 3600, 1e-9) if outcome.curve else 1.0
    width = end_h / BINS
    counts = {"left": [0] * BINS, "joined": [0] * BINS}
    for p in outcome.curve:
        for what, of in counts.items():
            of[min(BINS - 1, int(p.time_s / 3600 / width))] += p.events.get(what, 0)
    middles = [(n + 0.5) * width for n in range(BINS)]
    axes.bar(middles, counts["joined"], 0.8 * width, color=look.main, label="joined")
    axes.bar(
        middles,
        [-n for n in counts["left"]],
        0.8 * width,
        color=look.second,
        label="left",
        hatch="///",
        edgecolor=look.back,
    )
    most = max([*counts["left"], *counts["joined"], 1])
    axes.axhline(0, color=look.text, linewidth=0.8)
    axes.set(ylim=(-1.15 * most, 1.15 * most), yticks=(-most, 0, most), ylabel="machines")
    axes.set_yticklabels([str(most), "0", str(most)])
    moved = f"; {outcome.events['moved']:,} moves between stages" if outcome.events.get("moved") else ""
    axes.set_title(
        f"{outcome.events.get('joined', 0):,} joined (up), {outcome.events.get('left', 0):,} left (down){moved}",
        loc="left",
        fontsize=12,
    )
