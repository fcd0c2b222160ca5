"""A picture of a plan: which region serves which stage, and the links between them."""

from __future__ import annotations

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

DRAWN = 2
"""Strategies drawn side by side: the recommended one, and the fastest of the others."""
LABELLED = 24
"""Most links with labels; more would hide each other."""


def draw(plan: Plan, fleet: Fleet, path: Path) -> None:
    """Draw stages from left to right and regions from top to bottom. The width of a link shows its traffic, the colour
    its bandwidth.

    Raises OSError."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    shown = _shown(plan)
    regions = list(dict.fromkeys(m.region for m in fleet.machines))
    widths = [max(2.5, 1.4 * len(p.stages)) for p in shown]
    figure = Figure(figsize=(min(20.0, 3 + sum(widths)), 2.2 + 1.3 * len(regions)), layout="constrained")
    mbps = [8e-6 * link for link in _bandwidths(fleet)]
    low, high = min(mbps, default=1.0), max(mbps, default=1.0)
    scale = ScalarMappable(LogNorm(low / 1.5, high * 1.5), colormaps["viridis_r"])
    every = figure.subplots(1, len(shown), squeeze=False, width_ratios=widths)[0]
    for axes, p in zip(every, shown, strict=True):
        _draw_one(axes, p, fleet, regions, scale)
        runs = "" if p.runnable else " (not yet runnable)"
        axes.set_title(f"{title(p)}{runs}: {format_count(p.tokens_per_s)} tokens/s", fontsize="medium")
    if mbps:
        bar = figure.colorbar(scale, ax=list(every), label="Mb/s", shrink=0.8, format="{x:g}")
        bar.ax.yaxis.set_minor_formatter("{x:g}")
    figure.savefig(path, dpi=120)


def _shown(plan: Plan) -> list[Prediction]:
    able = [p for p in plan.strategies if not p.problem]
    chosen = [] if plan.recommended is None else [plan.strategies[plan.recommended]]
    others = sorted((p for p in able if p not in chosen), key=lambda p: -p.tokens_per_s)
    return [*chosen, *others][:DRAWN]


def _bandwidths(fleet: Fleet) -> list[float]:
    """Limited bandwidths between the entries of the file [bytes/s]."""
    firsts = list({peer.region + (peer.device or ""): peer.index for peer in fleet.peers()}.values())
    links = [fleet.between_kinds(a, b).bandwidth_bytes_per_s for a in firsts for b in firsts]
    return [width for width in links if width != float("inf")]


def _draw_one(axes: Axes, p: Prediction, fleet: Fleet, regions: list[str], scale: object) -> None:
    peers = {peer.name: peer for peer in fleet.peers()}
    here = [Counter(peers[name].region for name in set(stage.machines)) for stage in p.stages]
    kinds = [
        {r: Counter(peers[n].device or "machine" for n in stage.machines if peers[n].region == r) for r in found}
        for stage, found in zip(p.stages, here, strict=True)
    ]
    links = _links(p, fleet)
    for (stage, a, b), (pairs, bandwidth, delay_s) in links.items():
        ends = (stage, stage + (len(p.stages) > 1)), (regions.index(a), regions.index(b))
        mbps = 8e-6 * bandwidth
        colour = "0.5" if mbps == float("inf") else scale.to_rgba(mbps)  # type: ignore[attr-defined]
        axes.plot(*ends, color=colour, linewidth=0.8 + 3 * pairs, zorder=1)
        if len(links) <= LABELLED:
            (left, right), (top, bottom) = ends
            share = (0.5, 0.28, 0.25, 0.18)[min(3, abs(bottom - top))]  # beside the labels of links that cross it
            at = left + share * (right - left), top + share * (bottom - top)
            speed = (
                "" if mbps == float("inf") else f"{mbps / 1000:.3g} Gb/s\n" if mbps >= 1000 else f"{mbps:.3g} Mb/s\n"
            )
            axes.annotate(
                f"{speed}{1000 * delay_s:.3g} ms",
                at,
                fontsize=6,
                ha="center",
                va="center",
                zorder=2,
                bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75},
            )
    most = max(max(found.values()) for found in here)
    for stage, found in enumerate(here):
        for region, n in found.items():
            at = stage, regions.index(region)
            axes.scatter(*at, s=180 + 520 * n / most, color="white", edgecolor="black", zorder=3)
            axes.annotate(str(n), at, ha="center", va="center", fontsize=8, zorder=4)
            what = "\n".join(kinds[stage][region])
            axes.annotate(what, at, (0, -19), textcoords="offset points", ha="center", va="top", fontsize=6, zorder=4)
    count = len(p.stages)
    axes.set(
        xlim=(-0.6, count - 0.4),
        ylim=(len(regions) - 0.4, -0.6),
        xticks=range(count),
        yticks=range(len(regions)),
        yticklabels=regions,
        xlabel="all layers" if p.accumulate else "stage",
    )
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def _links(p: Prediction, fleet: Fleet) -> dict[tuple[int, str, str], tuple[float, float, float]]:
    """By stage and two regions, the links to the next stage (or, with one stage, between its regions): share of the
    stage's pairs, narrowest bandwidth [bytes/s], longest delay [s]. A pipeline has fixed pairs; otherwise all may send
    to all."""
    peers = {peer.name: peer for peer in fleet.peers()}
    found: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    totals = Counter[int]()
    several = len(p.stages) > 1  # else replicas only average
    for stage, (one, two) in enumerate(pairwise(p.stages) if several else [(p.stages[0], p.stages[0])]):
        fixed = p.schedule and several
        pairs = (
            zip(one.machines, two.machines, strict=True)
            if fixed
            else ((a, b) for a in one.machines for b in two.machines)
        )
        for a, b in pairs:
            if not several and peers[a].region >= peers[b].region:
                continue
            link = fleet.link(peers[a].index, peers[b].index)
            found.setdefault((stage, peers[a].region, peers[b].region), []).append(
                (link.bandwidth_bytes_per_s, link.delay_s)
            )
            totals[stage] += 1
    return {
        key: (len(links) / totals[key[0]], min(w for w, _ in links), max(d for _, d in links))
        for key, links in found.items()
    }
