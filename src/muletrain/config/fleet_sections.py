"""The sections of a fleet file: machines, paths, churn, stalls, pacing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from muletrain.config.section import Fraction, PositiveInt, Section

QUEUE_S = 0.25
"""Default queue. Home routers without active queue management hold from 0.1 s to several seconds of data (Kreibich et
al. 2010: Netalyzr)."""


class Machine(Section):
    """A kind of machine, and how many of them there are."""

    name: str = Field(description="name, unique in this file", examples=["desk"])
    count: PositiveInt = Field(default=1, description="number of such machines [machines]")
    region: str = Field(
        default="here",
        description="place of the machine; links connect regions or machines, so a region with the name of a machine holds no other",
    )
    device: str | None = Field(
        default=None, description="GPU, or other device that computes", examples=["NVIDIA RTX 3090"]
    )
    tflops: float | None = Field(default=None, gt=0, description="sustained speed [TFLOP/s]", examples=[35.0])
    speed: float = Field(default=1.0, gt=0, description="speed relative to the pacing below [1]")
    memory_gib: float | None = Field(default=None, gt=0, description="memory for training [GiB]", examples=[24.0])
    host_gib: float | None = Field(
        default=None,
        gt=0,
        description="host memory beside a GPU, for training; default: enough [GiB]",
        examples=[64.0],
    )
    load_gbytes: float = Field(
        default=12.0,
        gt=0,
        description="copies from host memory to the GPU, for plans that swap layers; default: PCIe 3.0 x16 in practice [GB/s]",
    )
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        description="price of one machine, for plans; any currency, the same for all [1/hour]",
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
        description="most data that its router queues in front of the upload, and of the download; home routers: 0.1 to 2 [s]",
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
    """The path between two places, in both directions. A pair of machines overrides a pair of regions."""

    between: tuple[str, str] = Field(
        description="two regions or two machine names, or one of them twice", examples=[["here", "here"]]
    )
    rtt_ms: float = Field(default=0.0, ge=0, description="round trip added by the path [ms]")
    bandwidth_mbps: float | None = Field(
        default=None,
        gt=0,
        description="bandwidth of the path, for each pair of machines; default: unlimited [Mb/s]",
        examples=[200.0],
    )


class PathDefaults(Section):
    """Paths without an entry in links."""

    rtt_ms: float = Field(default=0.0, ge=0, description="round trip between regions [ms]")
    bandwidth_mbps: float | None = Field(
        default=None, gt=0, description="bandwidth between regions; default: unlimited [Mb/s]", examples=[200.0]
    )
    local_rtt_ms: float = Field(default=0.0, ge=0, description="round trip inside a region [ms]")
    local_bandwidth_mbps: float | None = Field(
        default=None, gt=0, description="bandwidth inside a region; default: unlimited [Mb/s]", examples=[1000.0]
    )


class Matrix(Section):
    """All paths at once: a published network by its name, or one row and one column per region. Entries of links
    override it."""

    preset: str = Field(
        default="", description="published network, whose regions the machines use: regional-4, worldwide-8; '': none"
    )
    regions: tuple[str, ...] = Field(default=(), description="names of rows and columns, e.g. ['berlin', 'boston']")
    rtt_ms: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...] = Field(
        default=(), description="round trips, one row per region, e.g. [[1, 80], [80, 1]]; default: as in defaults [ms]"
    )
    bandwidth_mbps: tuple[tuple[Annotated[float, Field(gt=0)], ...], ...] = Field(
        default=(),
        description="bandwidths, from row to column, e.g. [[1000, 200], [200, 1000]]; default: as in defaults [Mb/s]",
    )


class Churn(Section):
    """Machines that come and go in a simulation: the unreliable ones, or any if all are reliable."""

    trace: str | None = Field(
        default=None,
        description="CSV file (relative to this file) with the columns time_s and change, in machines; 'a': the built-in trace",
        examples=["last-week.csv"],
    )
    leave_per_hour: float = Field(
        default=0.0, ge=0, description="rate at which each machine leaves on its own [1/hour]", examples=[0.1]
    )
    bursts_per_hour: float = Field(default=0.0, ge=0, description="rate at which many are preempted at once [1/hour]")
    burst_share: Fraction = Field(default=0.25, description="share of machines that a burst takes [1]")
    away_min: float = Field(
        default=30.0, gt=0, description="mean time until a machine that left is replaced; not for traces [min]"
    )


class Stalls(Section):
    """Times without traffic on a machine's links, at exponentially distributed intervals."""

    every_s: float | None = Field(
        default=None,
        gt=0,
        description="mean time between two stalls of a machine; default: no stalls [s]",
        examples=[60.0],
    )
    duration_s: float = Field(default=1.0, gt=0, description="duration of a stall [s]")


class Pacing(Section):
    """Declared compute times of a machine with speed 1, because shared cores would hide unequal machines."""

    forward_ms: float | None = Field(
        default=None,
        gt=0,
        description="forward of one microbatch in one stage; default: not paced [ms]",
        examples=[40.0],
    )
    backward_ms: float | None = Field(
        default=None, gt=0, description="backward of one microbatch; default: twice forward [ms]", examples=[80.0]
    )
