"""A picture of a plan: for each strategy which region serves which stage, and the links between regions."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from muletrain.planning.splits import title
from muletrain.units import format_count

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from muletrain.config.fleet_file import Fleet
    from muletrain.config.plan_file import Plan, Prediction

ROW_IN, STAGE_IN = 1.15, 2.0
"""Height of a region and width of a stage [inches]."""
LABELLED = 12
"""Most links of a strategy with labels; of more links, only the narrowest have labels, which would otherwise
overlap."""
WIDE = 26
"""Characters of a line beside a machine."""
SMALL, FONT = 8.5, 10
"""Sizes of text in points: beside links and machines, and elsewhere."""
Way = tuple[float, float]
"""Narrowest bandwidth [bytes/s] and longest delay [s]."""


def draw(plan: Plan, fleet: Fleet, path: Path) -> None:
    """Draw every strategy that is possible, the recommended one first, in rows of stages and regions. A line's colour
    shows the bandwidth of the narrower direction; the label has both, forward first.

    Raises OSError."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    shown = _shown(plan)
    peers = {peer.name: peer for peer in fleet.peers()}
    regions = [
        [
            r
            for r in dict.fromkeys(m.region for m in fleet.machines)
            if any(peers[n].region == r for s in p.stages for n in s.machines)
        ]
        for p in shown
    ]
    most = max((len(p.stages) for p in shown), default=1)
    heights = [ROW_IN * len(rows) + 0.9 for rows in regions]
    figure = Figure(figsize=(min(24.0, max(7.0, 2.5 + STAGE_IN * most)), 0.6 + sum(heights)), layout="constrained")
    ways = [_ways(p, fleet) for p in shown]
    mbps = [8e-6 * w for found in ways for both in found.values() for w, _ in both if w < math.inf]
    scale = ScalarMappable(LogNorm(min(mbps, default=1.0) / 1.5, max(mbps, default=1.0) * 1.5), colormaps["viridis_r"])
    every = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, p, rows, found in zip(every, shown, regions, ways, strict=True):
        _draw_one(axes, p, fleet, rows, found, scale)
        chosen = plan.recommended is not None and p is plan.strategies[plan.recommended]
        runs = ", recommended" if chosen else "" if p.runnable else ", without clients"
        churned = (
            f", {format_count(p.expected_per_s)} while machines leave" if p.expected_per_s != p.tokens_per_s else ""
        )
        axes.set_title(
            f"{title(p)}{runs}: {format_count(p.tokens_per_s)} tokens/s{churned}",
            fontsize=FONT + 1,
            fontweight="bold" if chosen else "normal",
            loc="left",
        )
    if len(set(mbps)) > 1:
        bar = figure.colorbar(scale, ax=list(every), label="Mb/s", shrink=min(1.0, 3.5 / sum(heights)), format="{x:g}")
        bar.ax.yaxis.set_minor_formatter("{x:g}")
    figure.savefig(path, dpi=120)


def _shown(plan: Plan) -> list[Prediction]:
    """The possible strategies: the recommended one, then the rest by tokens/s."""
    able = [p for p in plan.strategies if not p.problem]
    chosen = [] if plan.recommended is None else [plan.strategies[plan.recommended]]
    return [*chosen, *sorted((p for p in able if p not in chosen), key=lambda p: -p.expected_per_s)]


def _draw_one(
    axes: Axes,
    p: Prediction,
    fleet: Fleet,
    regions: list[str],
    ways: dict[tuple[int, str, str], tuple[Way, Way]],
    scale: object,
) -> None:
    peers = {peer.name: peer for peer in fleet.peers()}
    several = len(p.stages) > 1
    labelled = sorted(ways, key=lambda key: min(w for w, _ in ways[key]))[:LABELLED]
    for key, both in ways.items():
        stage, a, b = key
        (left, right), (top, bottom) = (stage, stage + several), (regions.index(a), regions.index(b))
        narrowest = 8e-6 * min(w for w, _ in both)
        colour = "0.5" if narrowest == math.inf else scale.to_rgba(narrowest)  # type: ignore[attr-defined]
        axes.plot((left, right), (top, bottom), color=colour, linewidth=2.2, zorder=1)
        if key not in labelled:
            continue
        share = 0.5 if top == bottom else 0.36  # beside the labels of links that cross it
        at = left + share * (right - left), top + share * (bottom - top)
        axes.annotate(
            _label(
                both,
                arrows=("\N{RIGHTWARDS ARROW}", "\N{LEFTWARDS ARROW}")
                if several
                else ("\N{DOWNWARDS ARROW}", "\N{UPWARDS ARROW}"),
            ),
            at,
            fontsize=SMALL,
            ha="center",
            va="center",
            zorder=2,
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
        )
    for stage, served in enumerate(p.stages):
        for row, region in enumerate(regions):
            names = sorted({n for n in served.machines if peers[n].region == region})
            if not names:
                continue
            clients = sum(n in served.clients for n in names)
            devices = Counter(peers[n].device or n.rsplit("-", 1)[0] for n in names)
            what = ", ".join(f"{n} x {device}" if n > 1 else device for device, n in devices.items())
            what += f" ({clients} clients)" if clients else ""
            axes.scatter(stage, row, s=420, color="white", edgecolor="black", zorder=3)
            axes.annotate(str(len(names)), (stage, row), ha="center", va="center", fontsize=FONT, zorder=4)
            axes.annotate(
                "\n".join(textwrap.wrap(what, WIDE)),
                (stage, row),
                (0, -15),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=SMALL,
                zorder=4,
                bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.7},
            )
    layers = [
        f"{n}: layers {a} to {b - 1}" if b - a > 1 else f"{n}: layer {a}"
        for n, (a, b) in enumerate(s.layers for s in p.stages)
    ]
    axes.set(
        xlim=(-0.6, len(p.stages) - 0.4),
        ylim=(len(regions) - 0.3, -0.5),
        xticks=range(len(p.stages)),
        yticks=range(len(regions)),
    )
    axes.set_xticklabels(layers if several else ["all layers"], fontsize=SMALL if len(layers) <= 12 else 6)
    axes.set_yticklabels(regions, fontsize=FONT)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def _label(both: tuple[Way, Way], *, arrows: tuple[str, str]) -> str:
    """Both directions in a line each, or one if alike."""
    forward, back = (_speed(way) for way in both)
    if forward == back:
        return forward
    return f"{arrows[0]} {forward}\n{arrows[1]} {back}"


def _speed(way: Way) -> str:
    mbps, delay = 8e-6 * way[0], f"{1000 * way[1]:.3g} ms"
    if mbps == math.inf:
        return delay
    return f"{mbps / 1000:.3g} Gb/s, {delay}" if mbps >= 1000 else f"{mbps:.3g} Mb/s, {delay}"


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
    return min(link.bandwidth_bytes_per_s for link in links), max(link.delay_s for link in links)
