"""A fleet file: machines, links between regions, churn, stalls and pacing.

Emulation, simulation and planning read this file. Bandwidths are in Mb/s (10^6 bits per second, as stated by providers)
and round trips in ms (as in ``ping``); methods return SI units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from muletrain.config.fleet_sections import (
    QUEUE_S,
    Churn,
    Machine,
    Matrix,
    Pacing,
    PathDefaults,
    PathRule,
    Stalls,
)
from muletrain.config.load import load_toml_located
from muletrain.config.networks import NETWORKS
from muletrain.config.problems import hint
from muletrain.config.section import Section
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muletrain.config.locate import Origins

BYTES_PER_S_PER_MBPS = 1e6 / 8


@dataclass(frozen=True)
class Link:
    """One direction of a path between two peers."""

    delay_s: float
    """One way: half the round trip."""
    bandwidth_bytes_per_s: float
    """Narrowest of the sender's upload, the path and the receiver's download; ``inf`` if unlimited."""


@dataclass(frozen=True)
class Stall:
    """Stops of a peer's links: at exponentially distributed intervals, for a fixed duration."""

    every_s: float
    duration_s: float


@dataclass(frozen=True)
class FleetPeer:
    """One machine of the expanded fleet."""

    index: int = 0
    name: str = ""
    region: str = ""
    device: str | None = None
    speed: float = 1.0
    flops: float | None = None
    """Sustained speed, if stated [FLOP/s]."""
    memory_bytes: int | None = None
    reliable: bool = True
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    forward_s: float | None = None
    """Paced time per microbatch of one stage; None: not paced."""
    backward_s: float | None = None
    stall: Stall | None = None
    host_bytes: int | None = None
    """Memory beside an accelerator's own, if stated."""
    load_bytes_per_s: float = math.inf
    """Rate of copies from host memory to the accelerator."""
    price_per_hour: float | None = None
    queue_s: float = QUEUE_S
    """Most data that queues in front of each direction of the link [s]."""


class Fleet(Section):
    """Machines and links to emulate, simulate or plan for."""

    name: str = Field(default="fleet", description="name of this fleet")
    machines: tuple[Machine, ...] = Field(min_length=1, description="machines, as [[machines]] tables")
    links: tuple[PathRule, ...] = Field(default=(), description="paths, as [[links]] tables")
    matrix: Matrix = Matrix()
    defaults: PathDefaults = PathDefaults()
    churn: Churn = Churn()
    stalls: Stalls = Stalls()
    pacing: Pacing = Pacing()

    @model_validator(mode="after")
    def _fits_together(self) -> Fleet:
        _check_names(self)
        _check_links(self)
        _check_matrix(self)
        if self.pacing.backward_ms and not self.pacing.forward_ms:
            raise ValueError("pacing.backward_ms: needs pacing.forward_ms too; give both, or forward_ms alone")
        return self

    def peers(self) -> tuple[FleetPeer, ...]:
        """Every machine, ``count`` times, in the order of the file; 'desk', or 'desk-0' and 'desk-1' if there are two."""
        return self._expanded

    @property
    def alone(self) -> bool:
        """One machine: nobody else takes part in its run."""
        return len(self.peers()) == 1

    def number(self, name: str) -> int:
        """Index into ``peers()`` of the machine ``name``. For 'peer-7', if no machine has that name, 7 modulo the
        number of machines."""
        found = next((peer.index for peer in self._expanded if peer.name == name), None)
        if found is None:
            tail = name.rsplit("-", 1)[-1]
            found = int(tail) if tail.isdecimal() else 0
        return found % len(self._expanded)

    def link(self, i: int, j: int) -> Link:
        """The path from peer ``i`` to peer ``j`` (indices into ``peers()``); a peer reaches itself at once."""
        return Link(0.0, math.inf) if i == j else self.between_kinds(i, j)

    def between_kinds(self, i: int, j: int) -> Link:
        """The path from a machine like peer ``i`` to another one like peer ``j``."""
        pair = self._entry_of[i], self._entry_of[j]
        if pair not in self._between:
            rtt_ms, mbps = self._path(self._machine_of[i], self._machine_of[j])
            sender, receiver = self._expanded[i], self._expanded[j]
            narrowest = min(sender.up_bytes_per_s, _bytes_per_s(mbps), receiver.down_bytes_per_s)
            self._between[pair] = Link(rtt_ms / 2000, narrowest)
        return self._between[pair]

    def _path(self, a: Machine, b: Machine) -> tuple[float, float | None]:
        for pair in ({a.name, b.name}, {a.region, b.region}):
            if rule := self._rules.get(frozenset(pair)):
                return rule.rtt_ms, rule.bandwidth_mbps
        d = self.defaults
        rtt_ms, mbps = (
            (d.local_rtt_ms, d.local_bandwidth_mbps) if a.region == b.region else (d.rtt_ms, d.bandwidth_mbps)
        )
        regions, rtts_ms, bandwidths_mbps = self._network
        if regions:
            row, column = regions.index(a.region), regions.index(b.region)
            rtt_ms = rtts_ms[row][column] if rtts_ms else rtt_ms
            mbps = bandwidths_mbps[row][column] if bandwidths_mbps else mbps
        return rtt_ms, mbps

    @cached_property
    def _between(self) -> dict[tuple[int, int], Link]:
        """Known paths by entries: searches of plans ask for the same paths thousands of times."""
        return {}

    @cached_property
    def _entry_of(self) -> list[int]:
        return [entry for entry, machine in enumerate(self.machines) for _ in range(machine.count)]

    @cached_property
    def _network(self) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
        m = self.matrix
        return (m.regions, m.rtt_ms, m.bandwidth_mbps) if not m.preset else NETWORKS[m.preset][:3]

    @cached_property
    def _rules(self) -> dict[frozenset[str], PathRule]:
        return {frozenset(rule.between): rule for rule in self.links}

    @cached_property
    def _machine_of(self) -> list[Machine]:
        return [machine for machine in self.machines for _ in range(machine.count)]

    @cached_property
    def _expanded(self) -> tuple[FleetPeer, ...]:
        names = (name for machine in self.machines for name in _names(machine))
        return tuple(self._peer(i, name, m) for i, (name, m) in enumerate(zip(names, self._machine_of, strict=True)))

    def _peer(self, index: int, name: str, m: Machine) -> FleetPeer:
        forward_ms = m.forward_ms or _over(self.pacing.forward_ms, m.speed)
        backward_ms = m.backward_ms or _over(self.pacing.backward_ms, m.speed) or _over(forward_ms, 0.5)
        every_s = m.stall_every_s or self.stalls.every_s
        return FleetPeer(
            index=index,
            name=name,
            region=m.region,
            device=m.device,
            speed=m.speed,
            flops=m.tflops and m.tflops * 1e12,
            memory_bytes=None if m.memory_gib is None else int(m.memory_gib * 2**30),
            reliable=m.reliable,
            up_bytes_per_s=_bytes_per_s(m.up_mbps),
            down_bytes_per_s=_bytes_per_s(m.down_mbps),
            forward_s=_over(forward_ms, 1000),
            backward_s=_over(backward_ms, 1000),
            stall=Stall(every_s, self.stalls.duration_s) if every_s else None,
            host_bytes=None if m.host_gib is None else int(m.host_gib * 2**30),
            load_bytes_per_s=m.load_gbytes * 1e9,
            price_per_hour=m.price_per_hour,
            queue_s=m.queue_s,
        )


def load_fleet(path: str | Path, *, peers: int = 1) -> Fleet:
    """The fleet of a file, or the built-in fleet of that name ('slow-home').

    Raises ConfigError, also for fewer machines than ``peers``."""
    return load_located_fleet(path, peers=peers)[0]


def load_located_fleet(path: str | Path, *, peers: int = 1) -> tuple[Fleet, Origins]:
    """Like ``load_fleet``, with the origins of the values, for later errors."""
    examples = {p.stem: p for p in example_files()}
    file = Path(path) if Path(path).exists() else examples.get(str(path))
    if file is None:
        raise ConfigError(f"{path}: no such file and no built-in fleet; {hint(str(path), sorted(examples))}")
    fleet, origins = load_toml_located(Fleet, file)
    found = len(fleet.peers())
    if found < peers:
        raise ConfigError(
            f"{file}: machines: {found} machines for fleet.peers = {peers}; raise a count or lower fleet.peers"
        )
    return fleet, origins


def example_files() -> list[Path]:
    """Files of the built-in fleets."""
    return sorted(Path(str(files("muletrain.config"))).glob("examples/*.toml"))


def _check_names(fleet: Fleet) -> None:
    seen: set[str] = set()
    for n, machine in enumerate(fleet.machines):
        for name in {machine.name, *_names(machine)}:
            if name in seen:
                raise ValueError(f"machines[{n}].name: '{name}' names two machines; give each its own name")
        # alone in a region of the same name, both mean the same
        if also := next((m for m in fleet.machines if m is not machine and m.region == machine.name), None):
            raise ValueError(
                f"machines[{n}].name: '{machine.name}' is also the region of '{also.name}', so links would be ambiguous; rename "
                f"one, e.g. region = '{machine.name}-lan'"
            )
        seen |= {machine.name, *_names(machine)}


def _check_links(fleet: Fleet) -> None:
    places = {m.name for m in fleet.machines} | {m.region for m in fleet.machines}
    seen: set[frozenset[str]] = set()
    for n, rule in enumerate(fleet.links):
        for end in rule.between:
            if end not in places:
                raise ValueError(
                    f"links[{n}].between: no machine or region is called '{end}'; {hint(end, sorted(places))}"
                )
        if frozenset(rule.between) in seen:
            raise ValueError(
                f"links[{n}].between: this pair has an entry already (links apply in both directions); remove one"
            )
        seen.add(frozenset(rule.between))


def _check_matrix(fleet: Fleet) -> None:
    m = fleet.matrix
    regions = m.regions
    if m.preset:
        if m.preset not in NETWORKS:
            raise ValueError(f"matrix.preset: no published network is called '{m.preset}'; {hint(m.preset, NETWORKS)}")
        for name in ("regions", "rtt_ms", "bandwidth_mbps"):
            if getattr(m, name):
                raise ValueError(f"matrix.{name}: cannot be combined with matrix.preset; leave one of them out")
        regions = NETWORKS[m.preset].regions
    for name, rows in (("rtt_ms", m.rtt_ms), ("bandwidth_mbps", m.bandwidth_mbps)):
        wrong = next(
            (f"row {n + 1} has {len(row)} values" for n, row in enumerate(rows) if len(row) != len(regions)), None
        )
        if rows and len(rows) != len(regions):
            wrong = f"{len(rows)} rows"
        if wrong:
            raise ValueError(
                f"matrix.{name}: {wrong}, but matrix.regions has {len(regions)} regions; give one row per region, with one value per region"
            )
    for n, machine in enumerate(fleet.machines) if regions else ():
        if machine.region not in regions:
            raise ValueError(
                f"machines[{n}].region: the matrix has no region '{machine.region}'; {hint(machine.region, regions)}"
            )


def _names(machine: Machine) -> Iterator[str]:
    return (machine.name if machine.count == 1 else f"{machine.name}-{i}" for i in range(machine.count))


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _bytes_per_s(mbps: float | None) -> float:
    return math.inf if mbps is None else mbps * BYTES_PER_S_PER_MBPS
