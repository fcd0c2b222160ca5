"""A fleet as TOML: machines, the links between their regions, churn, stalls and pacing.

Shaped links, paced compute and simulation read it. Bandwidths are in Mb/s (10^6 bits per second,
as providers state them), delays as round trips in ms (as ``ping`` shows them); the methods answer in SI units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from muletrain.config.load import load_toml_located
from muletrain.config.networks import NETWORKS
from muletrain.config.problems import closest
from muletrain.config.schema import Fraction, PositiveInt, Section
from muletrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from muletrain.config.locate import Origins

BYTES_PER_S_PER_MBPS = 1e6 / 8
QUEUE_S = 0.25
"""Home routers without active queue management hold between some 0.1 s and several seconds of data (Kreibich et al.
2010: Netalyzr)."""


@dataclass(frozen=True)
class Link:
    """One direction of a path between two peers."""

    delay_s: float
    """One way: half the round trip."""
    bandwidth_bytes_per_s: float
    """Narrowest of the sender's upload, the path and the receiver's download; ``inf`` when nothing limits it."""


@dataclass(frozen=True)
class Stall:
    """A peer's links stop now and then: exponentially distributed intervals, fixed duration."""

    every_s: float
    duration_s: float


@dataclass(frozen=True)
class FleetPeer:
    """One machine of the expanded fleet."""

    index: int
    name: str
    region: str
    device: str | None
    speed: float
    flops: float | None
    """Sustained floating-point operations per second, if stated."""
    memory_bytes: int | None
    reliable: bool
    up_bytes_per_s: float
    down_bytes_per_s: float
    forward_s: float | None
    """Paced service time per microbatch of one stage; None: as fast as it computes."""
    backward_s: float | None
    stall: Stall | None
    host_bytes: int | None = None
    """Memory beside an accelerator's own, if stated."""
    load_bytes_per_s: float = math.inf
    """From there into the accelerator's."""
    price_per_hour: float | None = None
    queue_s: float = QUEUE_S
    """Seconds of data that wait in front of each direction of its link, at most."""


def limited_peer(bytes_per_s: float) -> FleetPeer:
    """A machine of which only the bandwidth is known, and that in both directions."""
    return FleetPeer(
        index=0,
        name="",
        region="",
        device=None,
        speed=1.0,
        flops=None,
        memory_bytes=None,
        reliable=True,
        up_bytes_per_s=bytes_per_s,
        down_bytes_per_s=bytes_per_s,
        forward_s=None,
        backward_s=None,
        stall=None,
    )


class Machine(Section):
    """A kind of machine, as often as count says."""

    name: str = Field(description="name, unique in this file", examples=["desk"])
    count: PositiveInt = Field(default=1, description="how many of them [machines]")
    region: str = Field(default="here", description="place; links are between regions or between machines")
    device: str | None = Field(default=None, description="what computes in it", examples=["NVIDIA RTX 3090"])
    tflops: float | None = Field(default=None, gt=0, description="sustained speed [TFLOP/s]", examples=[35.0])
    speed: float = Field(default=1.0, gt=0, description="speed relative to the pacing below [1]")
    memory_gib: float | None = Field(default=None, gt=0, description="memory for training [GiB]", examples=[24.0])
    host_gib: float | None = Field(
        default=None,
        gt=0,
        description="memory beside that of a GPU, for training; default: enough [GiB]",
        examples=[64.0],
    )
    load_gbytes: float = Field(
        default=12.0,
        gt=0,
        description="from there into the GPU; default: PCIe 3.0 x16 in practice; for plans that swap layers [GB/s]",
    )
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        description="of one machine, in any currency, the same for all; for plans [1/hour]",
        examples=[0.35],
    )
    reliable: bool = Field(
        default=True, description="expected to stay to the end (false: a spot instance, a volunteer)"
    )
    up_mbps: float | None = Field(default=None, gt=0, description="upload; default: unlimited [Mb/s]", examples=[40.0])
    down_mbps: float | None = Field(
        default=None, gt=0, description="download; default: unlimited [Mb/s]", examples=[100.0]
    )
    queue_s: float = Field(
        default=QUEUE_S,
        ge=0,
        description="data that its router queues in front of the upload, and of the download, at most; home routers: 0.1 to 2 [s]",
    )
    forward_ms: float | None = Field(
        default=None,
        gt=0,
        description="paced forward of one microbatch; default: pacing.forward_ms / speed [ms]",
        examples=[40.0],
    )
    backward_ms: float | None = Field(
        default=None,
        gt=0,
        description="paced backward of one microbatch; default: pacing.backward_ms / speed [ms]",
        examples=[80.0],
    )
    stall_every_s: float | None = Field(
        default=None, gt=0, description="mean time between stalls; default: stalls.every_s [s]", examples=[30.0]
    )


class PathRule(Section):
    """The path between two places, in both directions. A pair of machines goes before a pair of regions."""

    between: tuple[str, str] = Field(
        description="two regions or two machine names, or one of them twice", examples=[["here", "here"]]
    )
    rtt_ms: float = Field(default=0.0, ge=0, description="round trip added by the path [ms]")
    bandwidth_mbps: float | None = Field(
        default=None, gt=0, description="bandwidth of the path; default: unlimited [Mb/s]", examples=[200.0]
    )


class PathDefaults(Section):
    """Paths that no entry of links names."""

    rtt_ms: float = Field(default=0.0, ge=0, description="round trip between regions [ms]")
    bandwidth_mbps: float | None = Field(
        default=None, gt=0, description="bandwidth between regions; default: unlimited [Mb/s]", examples=[200.0]
    )
    local_rtt_ms: float = Field(default=0.0, ge=0, description="round trip inside a region [ms]")
    local_bandwidth_mbps: float | None = Field(
        default=None, gt=0, description="bandwidth inside a region; default: unlimited [Mb/s]", examples=[1000.0]
    )


class Matrix(Section):
    """All paths at once: a published network by its name, or one row and one column a region. An entry of links goes
    before it."""

    preset: str = Field(
        default="", description="published network whose regions the machines are in: regional-4, worldwide-8; '': none"
    )
    regions: tuple[str, ...] = Field(default=(), description="names of rows and columns, e.g. ['berlin', 'boston']")
    rtt_ms: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...] = Field(
        default=(), description="round trips, one row a region, e.g. [[1, 80], [80, 1]]; default: the defaults' [ms]"
    )
    bandwidth_mbps: tuple[tuple[Annotated[float, Field(gt=0)], ...], ...] = Field(
        default=(),
        description="bandwidths, from row to column, e.g. [[1000, 200], [200, 1000]]; default: the defaults' [Mb/s]",
    )


class Churn(Section):
    """Machines that come and go in a simulation: those that are not reliable, or any if all are."""

    trace: str | None = Field(
        default=None,
        description="CSV file (from this file's folder) with the columns time_s and change, in machines; 'a': the shipped one",
        examples=["last-week.csv"],
    )
    leave_per_hour: float = Field(
        default=0.0, ge=0, description="how often a machine leaves, each by itself [1/hour]", examples=[0.1]
    )
    bursts_per_hour: float = Field(default=0.0, ge=0, description="how often many are preempted at once [1/hour]")
    burst_share: Fraction = Field(default=0.25, description="share of the machines that a burst takes [1]")
    away_min: float = Field(
        default=30.0, gt=0, description="mean time until another machine comes for one that left, but for traces [min]"
    )


class Stalls(Section):
    """Times in which nothing passes a machine's links, at exponentially distributed intervals."""

    every_s: float | None = Field(
        default=None, gt=0, description="mean time between two stalls of a machine; default: never [s]", examples=[60.0]
    )
    duration_s: float = Field(default=1.0, gt=0, description="how long a stall lasts [s]")


class Pacing(Section):
    """Declared service times of a machine of speed 1: shared cores would hide unequal machines."""

    forward_ms: float | None = Field(
        default=None,
        gt=0,
        description="forward of one microbatch in one stage; default: not paced [ms]",
        examples=[40.0],
    )
    backward_ms: float | None = Field(
        default=None, gt=0, description="backward of one microbatch; default: twice forward [ms]", examples=[80.0]
    )


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
        """Every machine, ``count`` times, in the order of the file: 'desk' if there is one, else 'desk-0', 'desk-1'."""
        return self._expanded

    def number(self, name: str) -> int:
        """Index into ``peers()`` of the machine of that name; of 'peer-7', that no machine has, 7, and from the
        beginning again."""
        found = next((peer.index for peer in self._expanded if peer.name == name), None)
        if found is None:
            tail = name.rsplit("-", 1)[-1]
            found = int(tail) if tail.isdecimal() else 0
        return found % len(self._expanded)

    def link(self, i: int, j: int) -> Link:
        """The path from peer ``i`` to peer ``j`` (indices into ``peers()``); no delay and no limit to oneself."""
        return Link(0.0, math.inf) if i == j else self.between_kinds(i, j)

    def between_kinds(self, i: int, j: int) -> Link:
        """The path from a machine like peer ``i`` to another one like peer ``j``."""
        rtt_ms, mbps = self._path(self._machine_of[i], self._machine_of[j])
        sender, receiver = self._expanded[i], self._expanded[j]
        narrowest = min(sender.up_bytes_per_s, _bytes_per_s(mbps), receiver.down_bytes_per_s)
        return Link(rtt_ms / 2000, narrowest)

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
    """The fleet of a TOML file, or of a shipped example by its name ('slow-home').

    Raises ConfigError; also when it has fewer machines than the ``peers`` it is wanted for."""
    return load_located_fleet(path, peers=peers)[0]


def load_located_fleet(path: str | Path, *, peers: int = 1) -> tuple[Fleet, Origins]:
    """As ``load_fleet``, with who set what: for errors that are found later."""
    examples = {p.stem: p for p in example_files()}
    file = Path(path) if Path(path).exists() else examples.get(str(path))
    if file is None:
        raise ConfigError(f"{path}: no such file and no shipped fleet; shipped are {', '.join(sorted(examples))}")
    fleet, origins = load_toml_located(Fleet, file)
    found = len(fleet.peers())
    if found < peers:
        what = f"{found} machines for fleet.peers = {peers}"
        raise ConfigError(f"{file}: machines: {what}; raise a count or lower fleet.peers")
    return fleet, origins


def example_files() -> list[Path]:
    """The fleets that ship with muletrain."""
    return sorted(Path(str(files("muletrain.config"))).glob("examples/*.toml"))


def _check_names(fleet: Fleet) -> None:
    seen: set[str] = set()
    regions = {machine.region for machine in fleet.machines}
    for n, machine in enumerate(fleet.machines):
        for name in {machine.name, *_names(machine)}:
            if name in seen:
                raise ValueError(f"machines[{n}].name: '{name}' names two machines; give each its own name")
        if machine.name in regions:
            raise ValueError(
                f"machines[{n}].name: '{machine.name}' is a region too, so links could mean either; rename one"
            )
        seen |= {machine.name, *_names(machine)}


def _check_links(fleet: Fleet) -> None:
    places = {m.name for m in fleet.machines} | {m.region for m in fleet.machines}
    seen: set[frozenset[str]] = set()
    for n, rule in enumerate(fleet.links):
        for end in rule.between:
            if end not in places:
                guess = closest(end, sorted(places))
                hint = f"did you mean '{guess}'?" if guess else f"known are {', '.join(sorted(places))}"
                raise ValueError(f"links[{n}].between: no machine or region is called '{end}'; {hint}")
        if frozenset(rule.between) in seen:
            raise ValueError(f"links[{n}].between: this pair has an entry already; links hold in both directions")
        seen.add(frozenset(rule.between))


def _check_matrix(fleet: Fleet) -> None:
    m = fleet.matrix
    regions = m.regions
    if m.preset:
        if m.preset not in NETWORKS:
            guess = closest(m.preset, list(NETWORKS))
            hint = f"did you mean '{guess}'?" if guess else f"known are {', '.join(NETWORKS)}"
            raise ValueError(f"matrix.preset: no published network is called '{m.preset}'; {hint}")
        for name in ("regions", "rtt_ms", "bandwidth_mbps"):
            if getattr(m, name):
                raise ValueError(f"matrix.{name}: stands beside matrix.preset; leave one of them out")
        regions = NETWORKS[m.preset].regions
    for name, rows in (("rtt_ms", m.rtt_ms), ("bandwidth_mbps", m.bandwidth_mbps)):
        wrong = next(
            (f"row {n + 1} has {len(row)} values" for n, row in enumerate(rows) if len(row) != len(regions)), None
        )
        if rows and len(rows) != len(regions):
            wrong = f"{len(rows)} rows"
        if wrong:
            raise ValueError(
                f"matrix.{name}: {wrong}, but matrix.regions names {len(regions)} regions; give one row, and in each one value, a region"
            )
    for n, machine in enumerate(fleet.machines) if regions else ():
        if machine.region not in regions:
            guess = closest(machine.region, list(regions))
            hint = f"did you mean '{guess}'?" if guess else f"it has {', '.join(regions)}"
            raise ValueError(f"machines[{n}].region: the matrix has no region '{machine.region}'; {hint}")


def _names(machine: Machine) -> Iterator[str]:
    return (machine.name if machine.count == 1 else f"{machine.name}-{i}" for i in range(machine.count))


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


def _bytes_per_s(mbps: float | None) -> float:
    return math.inf if mbps is None else mbps * BYTES_PER_S_PER_MBPS
