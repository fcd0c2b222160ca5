"""A picture of a plan: the speed of each strategy, and where the recommended one puts its stages."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from muletrain.cli.show.pictures import counted, headline, write
from muletrain.planning.splits import named, title
from muletrain.units import format_count, plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from muletrain.cli.show.pictures import Look
    from muletrain.config.fleet_file import Fleet
    from muletrain.config.plan_file import Plan, Prediction

LAYERED = 6
"""Most stages whose layers are written below them."""
WIDE = 54
"""Characters of a line of the legend."""
ROWS = 10
"""Most regions in the picture."""


class Way(NamedTuple):
    """The narrowest bandwidth [bytes/s] and the longest delay [s] between two groups of machines."""

    bytes_per_s: float
    delay_s: float

    def __str__(self) -> str:
        mbps, delay = 8e-6 * self.bytes_per_s, f"{1000 * self.delay_s:.3g} ms"
        if mbps == math.inf:
            return delay
        return f"{mbps / 1000:.3g} Gb/s, {delay}" if mbps >= 1000 else f"{mbps:.3g} Mb/s, {delay}"


def draw(plan: Plan, fleet: Fleet, paths: Sequence[Path]) -> None:
    """Draw the plan to each of ``paths``. Raises MuletrainError."""
    chosen = None if plan.recommended is None else plan.strategies[plan.recommended]

    def on(figure: Figure, look: Look) -> None:
        about = (
            f"Prediction for {plan.model} ({format_count(plan.params)} parameters) on {plan.fleet}, "
            f"{plan.batch:,} sequences of {plan.context:,} tokens a step"
        )
        headline(figure, look, _message(plan, chosen), about)
        if chosen is None:
            _draw_speeds(figure.subplots(), plan, look)
            return
        left, right = figure.subplots(1, 2, width_ratios=(1.2, 1.5))
        _draw_speeds(left, plan, look)
        _draw_layout(right, chosen, fleet, look)

    write(paths, on)


def _message(plan: Plan, chosen: Prediction | None) -> str:
    if chosen is None:
        return "No strategy can be recommended on this fleet"
    machines = len({name for stage in chosen.stages for name in stage.machines})
    where = f" with {machines} machines in {plural(len(chosen.stages), 'stage')}" if machines > 1 else ""
    return f"Use {named(chosen)}: {format_count(chosen.expected_per_s)} tokens/s{where}"


def _draw_speeds(axes: Axes, plan: Plan, look: Look) -> None:
    """A bar for each strategy: the recommended one above, in colour, then the fastest."""
    chosen = None if plan.recommended is None else plan.strategies[plan.recommended]
    shown = sorted(plan.strategies, key=lambda p: (bool(p.problem), p is not chosen, -p.expected_per_s))
    most = max((p.expected_per_s for p in shown if not p.problem), default=1.0)
    for row, p in enumerate(shown):
        recommended = p is chosen
        speed = 0.0 if p.problem else p.expected_per_s
        axes.barh(row, speed, height=0.62, color=look.main if recommended else look.faint)
        words = "not possible" if p.problem else format_count(speed)
        words += ", recommended" if recommended else "" if p.runnable or p.problem else ", not yet"
        axes.text(speed + 0.02 * most, row, words, va="center", fontweight="bold" if recommended else "normal")
    churned = any(p.expected_per_s != p.tokens_per_s for p in plan.strategies)
    axes.set_yticks(range(len(shown)), [title(p) for p in shown])
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, 1.9 * most))
    axes.set_xlabel("tokens/s while machines leave and come" if churned else "tokens/s")
    axes.set_title("Speed of each strategy", loc="left", fontsize=12)
    axes.tick_params(axis="y", length=0)
    half = float(f"{most / 2:.1g}")
    axes.set_xticks([0.0, half, 2 * half])
    counted(axes, "x")


def _draw_layout(axes: Axes, p: Prediction, fleet: Fleet, look: Look) -> None:
    """The machines of each region and stage, and the links between them: the wider a line, the faster the link."""
    peers = {peer.name: peer for peer in fleet.peers()}
    working = {name for stage in p.stages for name in stage.machines}
    every = dict.fromkeys(m.region for m in fleet.machines)  # regions without work below the others
    regions = sorted(every, key=lambda r: not any(peers[n].region == r for n in working))
    shown, ways, several, crowded = regions[:ROWS], _ways(p, fleet), len(p.stages) > 1, len(p.stages) > 8
    slowest = min(ways, key=lambda key: (min(w.bytes_per_s for w in ways[key]), -ways[key][0].delay_s), default=None)
    for key, both in ways.items():
        stage, a, b = key
        if several and a in shown and b in shown:
            width = (1 if crowded else 2) * (
                0.5 + 0.5 * math.log10(max(1.0, 8e-6 * min(1e10, *(w.bytes_per_s for w in both))))
            )
            at = ((stage, stage + 1), (shown.index(a), shown.index(b)))
            of_all = key == slowest and len({min(w.bytes_per_s for w in both) for both in ways.values()}) > 1
            axes.plot(*at, color=look.second if of_all else look.faint, linewidth=width, zorder=2 if of_all else 1)
    for stage, served in enumerate(p.stages):
        for row, region in enumerate(shown):
            names = {n for n in served.machines if peers[n].region == region}
            if names:
                clients = sum(n in served.clients for n in names)
                words = f"{len(names) - clients}+{clients}" if clients else str(len(names))
                size = 190 if crowded else 520
                axes.scatter(stage, row, s=size, color=look.back, edgecolor=look.main, linewidth=1.8, zorder=3)
                small = 7 if crowded else 9 if len(words) > 2 else 12
                axes.annotate(words, (stage, row), ha="center", va="center", fontsize=small, zorder=4)
    devices = {
        r: Counter(peers[n].device or n.rsplit("-", 1)[0] for n in working if peers[n].region == r) for r in shown
    }
    idle = Counter(peer.region for name, peer in peers.items() if name not in working)
    labels = [
        "\n".join(
            [
                r,
                *(f"{n} x {device}" for device, n in devices[r].most_common(2)),
                *([f"{idle[r]} without work"] if idle[r] else []),
            ]
        )
        for r in shown
    ]
    axes.set_yticks(range(len(shown)), labels)
    layers = [s.layers for s in p.stages]
    named = [f"{n}\nlayers\n{a} to {b - 1}" if len(layers) <= LAYERED else str(n) for n, (a, b) in enumerate(layers)]
    axes.set_xticks(range(len(layers)), named, fontsize=8 if crowded else 11)
    axes.set(xlim=(-0.6, len(p.stages) - 0.4), ylim=(len(shown) - 0.4, -0.6))
    axes.set_xlabel(
        _caption(
            p, ways, slowest, idle=sum(idle.values()) - sum(idle[r] for r in shown), more=len(regions) - len(shown)
        ),
        fontsize=10,
        loc="left",
    )
    axes.set_title("Machines of each region in each stage", loc="left", fontsize=12)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def _caption(
    p: Prediction,
    ways: dict[tuple[int, str, str], tuple[Way, Way]],
    slowest: tuple[int, str, str] | None,
    *,
    idle: int,
    more: int,
) -> str:
    """The legend, in words."""
    lines = ["stage"] if len(p.stages) > 1 else []
    if any(stage.clients for stage in p.stages):
        lines.append("a+b: servers + clients")
    if slowest is not None:
        (_, a, b), (there, back) = slowest, ways[slowest]
        both = f"{there}" if there == back else f"{there}; back {back}"
        alike = len({min(w.bytes_per_s for w in both) for both in ways.values()}) == 1
        lines.append(f"slowest link{'' if alike or len(p.stages) == 1 else ' (orange)'}: {a} to {b}, {both}")
    lines += [f"{more} more regions"] if more else []
    lines += [f"{plural(idle, 'machine')} there without work in this plan"] if idle else []
    return "\n".join(part for line in lines for part in textwrap.wrap(line, WIDE))


def _ways(p: Prediction, fleet: Fleet) -> dict[tuple[int, str, str], tuple[Way, Way]]:
    """By stage and two regions, the links to the next stage and back; with one stage, between regions. A pipeline has
    fixed pairs; otherwise all may send to all."""
    peers = {peer.name: peer for peer in fleet.peers()}
    found: dict[tuple[int, str, str], list[tuple[int, int]]] = {}
    several = len(p.stages) > 1  # else replicas only average
    for stage, (one, two) in enumerate(pairwise(p.stages) if several else [(p.stages[0], p.stages[0])]):
        fixed = p.schedule and several
        pairs = (
            zip(one.machines, two.machines, strict=True)
            if fixed
            else ((a, b) for a in one.machines for b in two.machines)
        )
        for a, b in pairs:
            if several or peers[a].region < peers[b].region:
                key = stage, peers[a].region, peers[b].region
                found.setdefault(key, []).append((peers[a].index, peers[b].index))
    return {
        key: (_narrowest(fleet, pairs), _narrowest(fleet, [(b, a) for a, b in pairs])) for key, pairs in found.items()
    }


def _narrowest(fleet: Fleet, pairs: list[tuple[int, int]]) -> Way:
    links = [fleet.link(a, b) for a, b in pairs]
    return Way(min(link.bandwidth_bytes_per_s for link in links), max(link.delay_s for link in links))
