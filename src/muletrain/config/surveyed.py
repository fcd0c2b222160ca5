"""Measurements of machines and links as a fleet file, for ``plan``, ``simulate fleet`` and emulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from muletrain.config.dump import toml_value
from muletrain.config.fleet_file import BYTES_PER_S_PER_MBPS, Fleet
from muletrain.config.fleet_sections import Machine, Matrix
from muletrain.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NO_LIMIT_MBPS = 1e6
"""Bandwidth from a machine with one peer to itself."""
LEAST_MBPS = 0.001
"""Bandwidth of a link on which nothing arrived; a fleet file cannot state that there is none."""
FAR_MS = 10_000.0
"""Round trip of such a link."""


@dataclass(frozen=True)
class Found:
    """Measurements of one peer. ``place``: number of the machine, which may have several peers. ``forward_s`` and
    ``backward_s``: one microbatch in one block."""

    name: str
    place: int
    device: str
    forward_s: float
    backward_s: float
    flops: float
    """Sustained speed of forward and backward together [FLOP/s]."""
    memory_bytes: int
    host_bytes: int | None
    disk_bytes: int


@dataclass(frozen=True)
class Path:
    """The path from one machine to another, or between two peers of one machine."""

    rtt_s: float
    bytes_per_s: float


Paths = dict[tuple[int, int], Path]
"""By places. Missing paths could not be measured."""


def fleet_of(peers: Sequence[Found], paths: Paths) -> Fleet:
    """The measured fleet. Every peer is a machine; every place is a region, called '@' and the name of the first peer.

    Upload and download of a machine are the fastest that any pair measured, because pairs are measured one by one."""
    places = range(1 + max(p.place for p in peers))
    regions = tuple("@" + next(p.name for p in peers if p.place == place) for place in places)
    single = [sum(p.place == place for p in peers) == 1 for place in places]

    def path(a: int, b: int) -> tuple[float, float]:
        if (found := paths.get((a, b))) is not None:
            return _digits(1000 * found.rtt_s), _digits(max(LEAST_MBPS, found.bytes_per_s / BYTES_PER_S_PER_MBPS))
        return (0.0, NO_LIMIT_MBPS) if a == b and single[a] else (FAR_MS, LEAST_MBPS)

    matrix = [[path(a, b) for b in places] for a in places]
    machines = tuple(
        Machine(
            name=p.name,
            region=regions[p.place],
            device=p.device,
            tflops=_digits(p.flops / 1e12),
            memory_gib=_digits(p.memory_bytes / 2**30),
            host_gib=None if p.host_bytes is None else _digits(p.host_bytes / 2**30),
            up_mbps=_fastest(matrix, p.place, single, up=True),
            down_mbps=_fastest(matrix, p.place, single, up=False),
        )
        for p in peers
    )
    return Fleet(
        name="measured",
        machines=machines,
        matrix=Matrix(
            regions=regions,
            rtt_ms=tuple(tuple(rtt for rtt, _ in row) for row in matrix),
            bandwidth_mbps=tuple(tuple(mbps for _, mbps in row) for row in matrix),
        ),
    )


def _fastest(matrix: list[list[tuple[float, float]]], place: int, single: list[bool], *, up: bool) -> float | None:
    """Fastest bandwidth to or from another machine [Mb/s]; None: the only machine."""
    pairs = [(place, other) if up else (other, place) for other in range(len(matrix))]
    return max((matrix[a][b][1] for a, b in pairs if a != b or not single[a]), default=None)


def written(fleet: Fleet, peers: Sequence[Found], about: Sequence[str]) -> str:
    """The fleet as TOML, with the remaining measurements as comments. ``about``: lines for the head."""
    tables = [*(f"# {line}" for line in about), f"name = {toml_value(fleet.name)}", ""]
    for machine, peer in zip(fleet.machines, peers, strict=True):
        block = f"a block: forward {format_duration(peer.forward_s)}, backward {format_duration(peer.backward_s)}"
        tables += [f"# {block}; {format_bytes(peer.disk_bytes)} of free disk", "[[machines]]"]
        stated = ("name", "region", "device", "tflops", "memory_gib", "host_gib", "up_mbps", "down_mbps")
        tables += [f"{k} = {toml_value(v)}" for k in stated if (v := getattr(machine, k)) is not None]
        tables.append("")
    m = fleet.matrix
    tables += ["[matrix]  # row: from; column: to", f"regions = {toml_value(m.regions)}", "rtt_ms = ["]
    tables += [*_rows(m.rtt_ms), "]", "bandwidth_mbps = [", *_rows(m.bandwidth_mbps), "]"]
    return "\n".join(tables) + "\n"


def _rows(matrix: Sequence[Sequence[float]]) -> Iterator[str]:
    return (f"    {toml_value(row)}," for row in matrix)


def _digits(value: float) -> float:
    """Rounds to four digits: no measurement has more. More than nothing."""
    return max(1e-9, float(f"{value:.4g}"))
