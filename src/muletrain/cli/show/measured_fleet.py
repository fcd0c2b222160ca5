"""Tables of a measured fleet: machines and links."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from muletrain.cli.show.tables import new_table
from muletrain.config.fleet_file import BYTES_PER_S_PER_MBPS, load_fleet
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from muletrain.config.fleet_file import Fleet, FleetPeer, Link
    from muletrain.events import FleetMeasured

WHOLE = 8
"""Largest number of peers with all links listed one by one."""


def fleet_tables(measured: FleetMeasured) -> RenderableType:
    """The tables of the fleet file that was written."""
    try:
        fleet = load_fleet(Path(measured.path))
    except ConfigError as e:  # the file was changed meanwhile
        return Text(str(e), style="yellow")
    lacking = [Text(line, style="yellow") for line in measured.lacking]
    small = len(fleet.peers()) <= WHOLE
    return Group(_machines(fleet), _matrix(fleet) if small else Text("the file lists all links"), *lacking)


def _machines(fleet: Fleet) -> Table:
    peers = fleet.peers()
    table = new_table("Machines", ["peer", "device"], ["TFLOP/s", "memory", "round trip", "upload", "download"])
    for peer in peers:
        others = [other for other in peers if other.index != peer.index]
        there, back = ([fleet.link(*pair) for pair in _pairs(peer, others, up=up)] for up in (True, False))
        memory = "-" if peer.memory_bytes is None else f"{peer.memory_bytes / 2**30:.4g} GiB"
        speed = "-" if peer.flops is None else f"{peer.flops / 1e12:.3g}"
        delay = f"{median(2000 * link.delay_s for link in there):.3g} ms" if there else "-"
        table.add_row(peer.name, peer.device or "", speed, memory, delay, _usual(there), _usual(back))
    return table


def _pairs(peer: FleetPeer, others: Sequence[FleetPeer], *, up: bool) -> list[tuple[int, int]]:
    return [(peer.index, o.index) if up else (o.index, peer.index) for o in others]


def _usual(links: Sequence[Link]) -> str:
    return _mbps(median(link.bandwidth_bytes_per_s for link in links)) if links else "-"


def _mbps(bytes_per_s: float) -> str:
    return f"{bytes_per_s / BYTES_PER_S_PER_MBPS:.3g} Mb/s"


def _matrix(fleet: Fleet) -> RenderableType:
    peers = fleet.peers()
    if len(peers) < 2:
        return Text("only one machine, so no links")
    table = new_table("Links: round trip, bandwidth", ["from"], [f"to {peer.name}" for peer in peers])
    for a in peers:
        links = (fleet.link(a.index, b.index) for b in peers)
        cells = (f"{2000 * link.delay_s:.3g} ms, {_mbps(link.bandwidth_bytes_per_s)}" for link in links)
        table.add_row(a.name, *("" if b is a else cell for b, cell in zip(peers, cells, strict=True)))
    return table
