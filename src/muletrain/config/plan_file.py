"""What ``muletrain plan --json`` prints: what each strategy would do on a fleet, where everything goes, and which one
is recommended.

``muletrain run --plan`` takes it (``cli.actions.planned``). ``docs/plan.md`` explains it field by field
(``tests/test_plan.py`` holds the two together). Times in seconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from muletrain.config.schema import Section

Strategy = Literal["swarm", "pipeline", "swap", "hub"]
VERSION = 1


class Split(Section):
    """Where the time of a step goes; the parts sum to it."""

    compute_s: float = Field(description="what the busiest part of the fleet computes [s]")
    pipeline_s: float = Field(description="longer than that for links between stages [s]")
    data_parallel_s: float = Field(
        description="longer for averaging gradients, and what is agreed on at a step's end [s]"
    )
    bubble_s: float = Field(description="idle: pipelines that fill and drain, last pieces, layers that are loaded [s]")

    @property
    def step_s(self) -> float:
        return self.compute_s + self.pipeline_s + self.data_parallel_s + self.bubble_s


class Stage(Section):
    """Consecutive layers, and the machines that serve them."""

    layers: tuple[int, int] = Field(description="first layer, and the first of the next stage")
    machines: tuple[str, ...] = Field(description="names; strategy pipeline: by pipeline")


class Memory(Section):
    """What the fullest machine of one entry of the fleet file needs [bytes]."""

    machine: str = Field(description="name of the entry")
    stage: int = Field(description="the one it serves")
    weights: int = Field(description="fp32 masters and working copies [bytes]")
    optimizer: int = Field(description="moments [bytes]")
    gradients: int = Field(description="accumulators and what is averaged [bytes]")
    activations: int = Field(description="graphs, and inputs of microbatches whose backward is owed [bytes]")
    buffers: int = Field(description="copies for checkpoints, layers on their way into the device [bytes]")
    device_needs: int = Field(description="of all that, on the device [bytes]")
    device_has: int | None = Field(description="null: nobody said [bytes]")
    host_needs: int = Field(description="beside the device, where that has memory of its own [bytes]")
    host_has: int | None = Field(description="null: nobody said, so it is taken to be enough [bytes]")


class Traffic(Section):
    """What a step sends from machines of one region to those of another (or the same) [bytes]."""

    sender: str = Field(description="region")
    receiver: str = Field(description="region")
    activations: float = Field(description="between stages, forward [bytes]")
    gradients: float = Field(description="between stages, backward [bytes]")
    averaging: float = Field(description="between replicas [bytes]")
    bandwidth_bytes_per_s: float | None = Field(description="of the narrowest pair of machines; null: unlimited")
    delay_s: float = Field(description="of the farthest pair, one way [s]")

    @property
    def total(self) -> float:
        return self.activations + self.gradients + self.averaging


class Prediction(Section):
    """One strategy on the fleet, with the best layout that was found for it. Nothing but ``strategy``, ``runnable`` and
    ``problem`` means anything where there is a problem."""

    strategy: Strategy
    schedule: Literal["", "gpipe", "1f1b"] = Field(default="", description="of strategy pipeline")
    runnable: bool = Field(description="'muletrain run' has it today")
    problem: str = Field(default="", description="why it is not possible on this fleet; empty: it is")
    microbatch: int = Field(default=0, description="[sequences]")
    microbatches: tuple[int, ...] = Field(
        default=(), description="of a step; pipeline: by pipeline; swap: by machine; else one number"
    )
    accumulate: int = Field(default=0, description="swap: microbatches in a row by each layer (ATOM's C)")
    stages: tuple[Stage, ...] = Field(default=(), description="in the order of the pipeline; swap: one, all layers")
    swapped: tuple[tuple[int, int], ...] = Field(default=(), description="swap: layers that are on a device at a time")
    spares: tuple[str, ...] = Field(default=(), description="machines that have nothing to do, or no room for it")
    state_device: Literal["device", "cpu"] = Field(
        default="device", description="cpu: stages mix devices, so optimizer.state_device = 'cpu' in the plan's run"
    )
    step_s: float = Field(default=0.0, description="of one step [s]")
    tokens_per_s: float = Field(default=0.0)
    played_step_s: float | None = Field(
        default=None,
        description="of one step, by every message of the code that trains; null: not played, or see the notes [s]",
    )
    split: Split | None = None
    memory: tuple[Memory, ...] = ()
    traffic: tuple[Traffic, ...] = Field(default=(), description="the largest first")
    price_per_billion_tokens: float | None = Field(
        default=None, description="of the machines that are used; null: the fleet file lacks a price"
    )
    notes: tuple[str, ...] = Field(default=(), description="what the figures leave out")


class Plan(Section):
    """A fleet, a model, and what each strategy would make of them."""

    version: int = VERSION
    fleet: str = Field(description="name")
    model: str = Field(description="preset, or 'model'")
    params: int = Field(description="of the model")
    batch: int = Field(description="of a step [sequences]")
    context: int = Field(description="of a sequence [tokens]")
    strategies: tuple[Prediction, ...]
    recommended: int | None = Field(description="index of the one that is; null: none of them can run")
    why: str
    assumed: tuple[str, ...] = Field(default=(), description="speeds that are estimates")
