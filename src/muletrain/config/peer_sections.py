"""The sections about peers: number, stages under each strategy, listening addresses.

``check_*`` raise ValueError; ``schema`` explains the form of the messages.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from muletrain.config.section import PEER_NAME, PositiveInt, Section


class FleetConfig(Section):
    """Number of peers, and their roles. A profile gives the speeds and links of an emulated fleet."""

    stages: PositiveInt = Field(default=2, description="parts that the model is cut into [pipeline stages]")
    layers: tuple[PositiveInt, ...] | None = Field(
        default=None,
        description="layers of each stage, model.layers in total; default: equal compute [transformer blocks]",
        examples=[[2, 2]],
    )
    peers: PositiveInt | None = Field(
        default=None,
        description="'run' starts this many, default: 2 per stage; 'start' waits for this many, default: until every stage has one "
        "[peers]",
        examples=[4],
    )
    trainers: PositiveInt | None = Field(
        default=None,
        description="most peers that build microbatches; default: 2 in a local fleet, else all that have the data [peers]",
        examples=[2],
    )
    trace: bool = Field(
        default=False,
        description="also write an event for each microbatch that a peer takes or finishes, for timelines and benchmarks",
    )
    profile: str | None = Field(
        default=None,
        description="fleet file of machines and links to emulate ('muletrain config --fleet' prints one)",
        examples=["slow-home"],
    )
    rebalance: Literal["off", "paper", "throughput"] = Field(
        default="throughput",
        description="which peers move to another stage: 'throughput': those whose move raises the throughput; 'paper': SWARM's rule, "
        "one peer at a time by queue length",
    )
    rebalance_period: Annotated[float, Field(ge=1, le=86400)] = Field(
        default=60.0, description="time between two decisions to move peers [s]"
    )
    adopt_after: Annotated[float, Field(ge=1, le=86400)] = Field(
        default=30.0,
        description="time without a peer after which other peers take a stage over, from the newest checkpoint [s]",
    )

    @property
    def local_peers(self) -> int:
        """Number of processes of a local fleet."""
        return self.peers or 2 * self.stages


class PipelineConfig(Section):
    """Planned placement for strategy 'pipeline'; 'muletrain run --plan' fills it in. Without seats, the strategy is
    'swarm'."""

    seats: tuple[tuple[str, ...], ...] = Field(
        default=(),
        description="peer names by stage and pipeline, e.g. [['a', 'b'], ['c', 'd']]: two stages, pipelines a-c and b-d; a peer that "
        "serves several pipelines is repeated: [['a', 'a'], ['c', 'd']]",
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        default="1f1b",
        description="order of work at each stage. gpipe: forward before backward; 1f1b: backward first, few microbatches in flight",
    )
    microbatches: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="microbatches of a step by pipeline; default: evenly [microbatches]"
    )
    spares: tuple[str, ...] = Field(
        default=(), description="names of further peers, which replace peers that the run loses"
    )

    @property
    def machines(self) -> list[str]:
        """Names of all planned peers: peers with a seat first, stage by stage, then spares."""
        return [*(name for row in self.seats for name in dict.fromkeys(row)), *self.spares]


class HubConfig(Section):
    """Strategy 'hub': reliable peers serve the stages, and clients compute for them."""

    clients: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="clients of a local fleet; any number makes the strategy 'hub': who joins with --reliable serves, everyone else is a "
        "client [peers]",
        examples=[4],
    )
    verify: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="share of the parts that clients compute which another worker computes again, to find clients that compute falsely; "
        "results that stand out are always checked; 0: nothing is [1]",
    )
    seats: tuple[tuple[str, ...], ...] = Field(
        default=(),
        description="planned servers: their names by stage, e.g. [['a'], ['b', 'c']]; default: who joins serves the stage that needs it",
    )
    helpers: tuple[tuple[str, ...], ...] = Field(
        default=(), description="planned clients: their names by stage; others help the stage that needs it"
    )

    @property
    def servers(self) -> list[str]:
        """Names of all planned servers."""
        return [name for row in self.seats for name in row]

    @property
    def helping(self) -> list[str]:
        """Names of all planned clients."""
        return [name for row in self.helpers for name in row]


class SwapConfig(Section):
    """Stages that are larger than a peer's device: their blocks pass through it in turn. Strategy 'swap': every peer
    serves the whole model so."""

    whole: bool = Field(
        default=False,
        description="every peer serves the whole model (strategy 'swap'), whatever memory it has; needs fleet.stages = 1",
    )
    backing: Literal["auto", "ram", "disk", "off"] = Field(
        default="auto",
        description="where a peer keeps a stage that is larger than its device; 'auto': the machine's memory beside a GPU, a disk beside "
        "a CPU; 'off': the peer is turned away",
    )
    folder: str | None = Field(
        default=None,
        description="folder on a disk for such stages, of this machine's peers; default: the run folder",
        examples=["/scratch/muletrain"],
    )
    together: PositiveInt | None = Field(
        default=None,
        description="a load of weights waits for this many microbatches (ATOM's C); default: as many as hide the loading [microbatches]",
        examples=[4],
    )


class NetworkConfig(Section):
    """The name of the machine that starts the run, and where its peers listen."""

    name: str | None = Field(
        default=None,
        pattern=f"^{PEER_NAME}$",
        examples=["lab-7"],
        description="name of the machine that calls 'start', as tables show it; default: the host name",
    )
    listen: str = Field(default="127.0.0.1", description="address to listen on; 'start' and 'join' use 0.0.0.0")
    port: int = Field(default=0, ge=0, lt=65536, description="port to listen on; 0: any free one [TCP port]")
    announce: tuple[str, ...] = Field(
        default=(),
        description="addresses that others dial instead (port forwarding), e.g. ['/ip4/1.2.3.4/tcp/4000']",
    )


class LoggingConfig(Section):
    """Where the figures of the run go, from the machine that began the run. Events are always written."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=("tensorboard",),
        description="tools that get the figures of every step; 'wandb' and 'trackio' need the extra of that name",
    )
    project: str = Field(default="muletrain", min_length=1, description="name of the project in wandb and trackio")


def check_fleet(f: FleetConfig) -> None:
    if f.layers is not None and len(f.layers) != f.stages:
        raise ValueError(f"fleet.layers: {len(f.layers)} numbers for fleet.stages = {f.stages}; give one per stage")
    if f.peers is not None and f.peers < f.stages:
        raise ValueError(
            f"fleet.peers: {f.peers} peers cannot serve fleet.stages = {f.stages}; give at least one peer per stage"
        )
    if f.trainers is not None and f.peers is not None and f.trainers > f.peers:
        raise ValueError(f"fleet.trainers: {f.trainers} trainers among fleet.peers = {f.peers}; at most one per peer")


def check_pipeline(p: PipelineConfig, stages: int, microbatches: int) -> None:
    """``microbatches``: of a step."""
    if not p.seats:
        return
    if len(p.seats) != stages:
        raise ValueError(f"pipeline.seats: {len(p.seats)} lists for fleet.stages = {stages}; give one per stage")
    for name in p.machines:
        if not re.fullmatch(PEER_NAME, name):
            raise ValueError(
                f"pipeline.seats: {name!r}: use up to 64 letters, digits, '.', '_' and '-'; names become file names"
            )
    pipelines = len(p.seats[0])
    if not pipelines or any(len(row) != pipelines for row in p.seats):
        raise ValueError("pipeline.seats: lists of unequal length; give each one name per pipeline, and at least one")
    if twice := next((name for name in p.machines if p.machines.count(name) > 1), None):
        raise ValueError(
            f"pipeline.seats: '{twice}' is named twice; a peer has seats of one stage only, or is one of pipeline.spares"
        )
    if p.microbatches and (len(p.microbatches), sum(p.microbatches)) != (pipelines, microbatches):
        raise ValueError(
            f"pipeline.microbatches: {list(p.microbatches)} for {pipelines} pipelines and {microbatches} microbatches "
            f"(train.batch / train.microbatch); give one number per pipeline, with that sum"
        )


def check_hub(h: HubConfig, p: PipelineConfig, stages: int) -> None:
    names = [*h.servers, *h.helping]
    if h.clients is None:
        return
    for field, rows in (("seats", h.seats), ("helpers", h.helpers)):
        if rows and len(rows) != stages:
            raise ValueError(f"hub.{field}: {len(rows)} lists for fleet.stages = {stages}; give one per stage")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"hub.seats: '{twice}' has two places; name each machine once in hub.seats and hub.helpers")
    if p.seats:
        raise ValueError(
            f"hub.clients: {h.clients} beside pipeline.seats, but strategy 'hub' has its servers' stages in hub.seats; "
            f"leave one of them out"
        )


def check_swap(
    s: SwapConfig, stages: int, p: PipelineConfig, h: HubConfig, *, delayed: bool, quantise: str = "none"
) -> None:
    """``stages``: ``fleet.stages``; ``delayed``: ``optimizer.delayed``; ``quantise``: ``adapter.quantise``."""
    if not s.whole:
        return
    if stages != 1:
        raise ValueError(f"swap.whole: every peer serves the whole model, but fleet.stages = {stages}; use one stage")
    if p.seats or h.clients is not None:
        raise ValueError(
            "swap.whole: beside pipeline.seats or hub.clients, which ask for another strategy; leave one out"
        )
    if s.backing == "off":
        raise ValueError("swap.whole: with swap.backing = 'off' nothing is swapped; use another backing")
    if delayed:
        raise ValueError(
            "swap.whole: with optimizer.delayed, but a swapped model has no second copy of its weights; use optimizer.delayed = false"
        )
    if quantise != "none":
        raise ValueError(
            f"swap.whole: with adapter.quantise = '{quantise}', but a swapped model takes its blocks from the model's files, as these are; "
            f"use adapter.quantise = 'none', or stages instead of swap.whole"
        )


def check_network(n: NetworkConfig) -> None:
    for address in n.announce:
        if not address.startswith("/"):
            raise ValueError(f"network.announce: {address!r} is no address; write it as '/ip4/1.2.3.4/tcp/4000'")
