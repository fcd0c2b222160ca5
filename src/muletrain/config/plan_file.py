"""The output of ``muletrain plan --json``: predictions for each strategy on a fleet, and the recommended one.

``muletrain run --plan`` reads this file (``cli.actions.planned``). The reference of the documentation is made from
the descriptions below (``scripts/reference.py``). Times in seconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from muletrain.config.section import Section

StrategyName = Literal["swarm", "pipeline", "swap", "hub"]
VERSION = 1


class Split(Section):
    """The parts of a step's time; the sum is the step's time."""

    compute_s: float = Field(description="compute of the busiest part of the fleet [s]")
    pipeline_s: float = Field(description="additional time for links between stages [s]")
    data_parallel_s: float = Field(
        description="additional time for averaging gradients, and for agreement at the end of a step [s]"
    )
    bubble_s: float = Field(description="the rest: pipelines that fill and drain, last pieces, layers being loaded [s]")

    @property
    def step_s(self) -> float:
        return self.compute_s + self.pipeline_s + self.data_parallel_s + self.bubble_s


class Stage(Section):
    """Consecutive layers, and the serving machines."""

    layers: tuple[int, int] = Field(description="first layer, and the first of the next stage")
    machines: tuple[str, ...] = Field(
        description="names; with strategy pipeline, one per pipeline, so a machine that serves several stands there as often; with swarm, "
        "where rebalancing comes to rest"
    )
    clients: tuple[str, ...] = Field(
        default=(), description="strategy hub: those of the machines that are clients; the others are servers"
    )


class Memory(Section):
    """Memory of the fullest machine of one entry of the fleet file [bytes]. The five parts are together as much as the
    device and host memory need."""

    machine: str = Field(description="name of the entry")
    stage: int = Field(description="stage that it serves")
    weights: int = Field(description="fp32 masters and working copies [bytes]")
    optimizer: int = Field(description="optimizer moments [bytes]")
    gradients: int = Field(
        description="accumulators, and buffers for averaging; beside an accelerator, also the sent copy [bytes]"
    )
    activations: int = Field(description="graphs, and inputs of microbatches that wait for backward [bytes]")
    buffers: int = Field(
        description="copies of weights and optimizer for checkpoints and newcomers, two unless one machine trains alone; layers that are "
        "swapped to the device [bytes]"
    )
    device_needs: int = Field(description="part of the total that is on the device [bytes]")
    device_has: int | None = Field(description="memory of the device; null: unknown [bytes]")
    host_needs: int = Field(
        description="part of the total in host memory, for devices with memory of their own [bytes]"
    )
    host_has: int | None = Field(description="host memory; null: unknown, assumed to be enough [bytes]")


class Traffic(Section):
    """Traffic per step from machines of one region to machines of another, or of the same [bytes]."""

    sender: str = Field(description="region that sends")
    receiver: str = Field(description="region that receives")
    activations: float = Field(description="between stages, forward [bytes]")
    gradients: float = Field(description="between stages, backward [bytes]")
    averaging: float = Field(description="between replicas [bytes]")
    bandwidth_bytes_per_s: float | None = Field(
        description="bandwidth of the narrowest pair of machines, while the bytes are of all pairs; null: unlimited"
    )
    delay_s: float = Field(description="one-way delay of the farthest pair [s]")

    @property
    def total(self) -> float:
        return self.activations + self.gradients + self.averaging


class Prediction(Section):
    """One strategy on the fleet, with the best layout found. If there is a ``problem``, only ``strategy``, ``schedule``
    and ``runnable`` are meaningful as well."""

    strategy: StrategyName = Field(description="swarm, pipeline, swap or hub")
    schedule: Literal["", "gpipe", "1f1b"] = Field(default="", description="schedule of strategy pipeline")
    runnable: bool = Field(description="whether 'muletrain run' supports it today")
    problem: str = Field(default="", description="why it is impossible on this fleet; empty: it is possible")
    microbatch: int = Field(default=0, description="size of a microbatch [sequences]")
    microbatches: tuple[int, ...] = Field(
        default=(), description="number per step; pipeline: by pipeline; otherwise one number"
    )
    accumulate: int = Field(default=0, description="swap: microbatches per load of a block (ATOM's C)")
    stages: tuple[Stage, ...] = Field(
        default=(), description="stages in pipeline order; swap: one stage with all layers"
    )
    swapped: tuple[tuple[int, int], ...] = Field(default=(), description="swap: blocks that are on a device together")
    spares: tuple[str, ...] = Field(default=(), description="machines that have nothing to do, or no room")
    left_out: tuple[str, ...] = Field(
        default=(),
        description="machines that should not join, since the run is faster without them; 'run --plan' does not start them",
    )
    state_device: Literal["device", "cpu"] = Field(
        default="device",
        description="cpu: a stage mixes devices, whose arithmetic may differ in the last bit, so every peer updates on "
        "the CPU; the run takes this over, and memory and times are for it",
    )
    step_s: float = Field(default=0.0, description="time of one step, for machines that stay [s]")
    tokens_per_s: float = Field(default=0.0, description="of machines that stay")
    churned_tokens_per_s: float | None = Field(
        default=None,
        description="with the churn of the fleet file (lost stages, steps taken back, states to fetch), by "
        "which strategies are compared; null: no churn",
    )
    played_step_s: float | None = Field(
        default=None,
        description="time of one step when the production code plays it; null: not played, or see notes [s]",
    )
    split: Split | None = Field(default=None, description="parts of step_s")
    memory: tuple[Memory, ...] = Field(default=(), description="the fullest machine of each entry of the fleet file")
    traffic: tuple[Traffic, ...] = Field(default=(), description="traffic between regions, largest first")
    price_per_billion_tokens: float | None = Field(
        default=None, description="price of the machines in use; null: the fleet file lacks a price"
    )
    limit: str = Field(default="", description="what takes the largest part of a step, and on which machines")
    notes: tuple[str, ...] = Field(default=(), description="what the figures leave out")

    @property
    def expected_per_s(self) -> float:
        """Tokens/s by which strategies and machines are compared: under churn, if there is any."""
        return self.tokens_per_s if self.churned_tokens_per_s is None else self.churned_tokens_per_s


class Improvement(Section):
    """A change that makes the run faster on this fleet."""

    change: str = Field(description="for --set", examples=["wire.gradients=int8"])
    tokens_per_s: float = Field(description="speed with the change")
    gain: float = Field(description="0.2: 20 % faster to the same loss than the recommended strategy")
    machines: int = Field(description="machines in use with this change")
    training: str = Field(default="", description="what changes in the training itself; empty: nothing")


class Plan(Section):
    """Predictions for a fleet and a model, by strategy."""

    version: int = Field(default=VERSION, description="version of this format")
    fleet: str = Field(description="name of the fleet")
    model: str = Field(description="preset, or 'model'")
    params: int = Field(description="size of the model [parameters]")
    batch: int = Field(description="size of a step [sequences]")
    context: int = Field(description="length of a sequence [tokens]")
    strategies: tuple[Prediction, ...] = Field(description="a prediction for each strategy")
    recommended: int | None = Field(description="index of the recommended strategy; null: none can run")
    why: str = Field(description="reason of the recommendation")
    fewer: str = Field(
        default="",
        description="how much faster the run is without some machines, and from which batch on it no longer is; empty: all may join",
    )
    swapping: str = Field(
        default="",
        description="machines that swap their stage in the recommended strategy, and how much faster it is with them; empty: none",
    )
    improvements: tuple[Improvement, ...] = Field(
        default=(), description="changes of the run that give 5 % more or better"
    )
    without_work: tuple[str, ...] = Field(
        default=(), description="machines without work in the recommended strategy, and why"
    )
    assumed: tuple[str, ...] = Field(default=(), description="speeds that are estimates")
