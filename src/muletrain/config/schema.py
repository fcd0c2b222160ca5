"""The run's configuration: one frozen model per section, with a description and a unit for every field.

``muletrain config`` prints all fields with defaults and comments. Unknown keys are rejected. ``RunConfig`` checks how
fields fit together, so every config object can run. Units stand in brackets at the end of a description; ``[1]`` is a
pure number. ``examples`` is the printed value of a field that is off by default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, model_validator

from muletrain.config.model_sections import AdapterConfig, DataConfig, ModelConfig, check_factories, check_shape
from muletrain.config.peer_sections import (
    FleetConfig,
    HubConfig,
    LoggingConfig,
    NetworkConfig,
    PipelineConfig,
    SwapConfig,
    check_fleet,
    check_hub,
    check_network,
    check_pipeline,
    check_swap,
)
from muletrain.config.section import Fraction, PositiveInt, Section

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_MICROBATCHES = 1 << 15
"""Microbatches of a step, at most: peers list the held ones, with their losses, in one answer (``runtime.members.row``)."""


class Precision(StrEnum):
    """Arithmetic of forward and backward. ``AUTO`` measures, and takes the fastest."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Codec(StrEnum):
    """Encoding of a tensor on the wire. The two of 8 bits quantise blocks by their largest number (SWARM app. J.1): ``INT8``
    to evenly spaced numbers, ``DYNAMIC8`` to numbers that lie closer together where they are small."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    DYNAMIC8 = "dynamic8"


class TrainConfig(Section):
    """The length of the run, and the size of a step (one optimizer update)."""

    steps: PositiveInt = Field(default=300, description="length of the run [optimizer steps]")
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="instead, passes over the data; the last step is a whole one [1]",
        examples=[2.0],
    )
    batch: PositiveInt = Field(default=16, description="size of one step, over the whole fleet [sequences]")
    microbatch: PositiveInt = Field(default=4, description="unit of work of a peer, must divide batch [sequences]")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of weights, data order and dropout [1]")
    data_offset: int = Field(
        default=0,
        description="sequences by which the order of the data is shifted; a resume with another batch sets it, so that the data go "
        "on where they were [sequences]",
    )
    sequence_start: PositiveInt | None = Field(
        default=None,
        description="sequence length at step 0, growing linearly to model.context (SWARM app. G) [tokens]",
        examples=[32],
    )
    sequence_warmup: int = Field(
        default=0, ge=0, description="steps from sequence_start to the full sequence length [optimizer steps]"
    )
    validate_every: int = Field(
        default=0,
        ge=0,
        description="measure the held-out loss first and then every so many updates; 0: only at the end [optimizer steps]",
    )
    validate_tokens: PositiveInt = Field(
        default=1 << 16,
        le=1 << 20,
        description="held-out text that this measures, at most [tokens; of data.factory samples]",
    )
    max_skipped: int = Field(
        default=10,
        ge=0,
        description="end with an error after so many updates in a row that were skipped, because the gradient was not "
        "finite; 0: never [optimizer steps]",
    )
    time_limit: float | None = Field(
        default=None, gt=0, description="end in order after this time [s]", examples=[3600.0]
    )


def _by_rule(adamw: T, lamb: T) -> Callable[[dict[str, Any]], T]:
    """The default of a field that depends on ``optimizer.name``. LAMB has SWARM's settings (app. G): the settings of
    You et al. 2020 for a batch of 16384 sequences (warm-up over a tenth, linear decay, eps 1e-6, weight decay 0.01),
    with learning rate 1e-3 and beta2 0.95."""
    return lambda fields: lamb if fields.get("name") == "lamb" else adamw


FINE_TUNING_LR, ADAPTER_LR = 2e-5, 2e-4
"""Peak learning rates of AdamW with ``model.from``: the usual rates for further training of all weights of a language
model, and of an adapter."""


class OptimizerConfig(Section):
    """AdamW, or LAMB with SWARM's settings (app. G), with warm-up, decay, and clipping by the global norm over all
    stages."""

    name: Literal["adamw", "lamb"] = Field(default="adamw", description="update rule")
    lr: float = Field(
        default_factory=_by_rule(3e-3, 1e-3),
        gt=0,
        description="peak learning rate; default: 0.003, lamb 0.001, with model.from 2e-05, with an adapter 2e-04 [1]",
    )
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95), description="decay of the first and the second moment per step [1]"
    )
    eps: float = Field(
        default_factory=_by_rule(1e-8, 1e-6),
        gt=0,
        description="added to the root of the second moment; default: 1e-08, lamb 1e-06 [1]",
    )
    weight_decay: float = Field(
        default_factory=_by_rule(0.1, 0.01),
        ge=0,
        description="decoupled weight decay, not on norms; default: 0.1, lamb 0.01 [1]",
    )
    clip: float | None = Field(default=1.0, gt=0, description="largest global gradient norm; 'none': no clipping [1]")
    warmup: int | None = Field(
        default=None,
        ge=0,
        description="linear warm-up; default: a tenth of train.steps [optimizer steps]",
        examples=[30],
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default_factory=_by_rule("cosine", "linear"),
        description="decay after the warm-up; default: cosine, lamb linear",
    )
    final_lr: Fraction = Field(default=0.0, description="learning rate at the last step, as a share of the peak [1]")
    state_device: Literal["device", "cpu"] = Field(
        default="device", description="memory of moments and fp32 master weights"
    )
    delayed: bool = Field(
        default=False,
        description="average and update during the next step, which therefore uses weights one update old (DPU, SWARM sec. 3.2)",
    )


class WireConfig(Section):
    """Encoding of tensors on the wire."""

    activations: Codec = Field(default=Codec.INT8, description="encoding of activations and their gradients")
    gradients: Codec = Field(default=Codec.FP16, description="encoding of gradients while replicas average them")


Checkpointing = Literal["auto", "block", "always", "never"]


class ComputeConfig(Section):
    """Resources and arithmetic of a peer."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="'auto', 'cpu', 'mps', 'cuda', or one of several as 'cuda:1'",
    )
    precision: Precision = Field(
        default=Precision.AUTO, description="arithmetic; auto measures for a second and takes the fastest"
    )
    threads: PositiveInt | None = Field(
        default=None, description="CPU threads per peer; default: cores / local peers [threads]", examples=[1]
    )
    memory: float | None = Field(
        default=None, gt=0, description="memory that a peer may use; default: what is free [GiB]", examples=[8.0]
    )
    checkpointing: Checkpointing = Field(
        default="auto",
        description="compute activations again in backward: always (the whole stage at once), by block (one at a time), never; auto "
        "keeps activations where memory allows, and goes by block where a stage's do not fit at once",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="compile the native decoder's blocks by torch.compile before training; auto: on CUDA devices; where that fails, or the "
        "stage is swapped, blocks compute as they are",
    )


class CheckpointConfig(Section):
    """When and where checkpoints are written."""

    every: int = Field(default=50, ge=0, description="steps between checkpoints; 0: only at the end [optimizer steps]")
    keep: PositiveInt = Field(default=2, description="number of newest checkpoints to keep [checkpoints]")
    place: str | None = Field(
        default=None,
        examples=["s3://bucket/runs"],
        description="folder that all machines share, or fsspec URL (e.g. s3://bucket/folder), to which every peer writes its part; "
        "default: the run folder, with copies of each part on other machines",
    )


class RunConfig(Section):
    """The whole configuration of a run. Its digest is part of the run's identity."""

    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    fleet: FleetConfig = FleetConfig()
    pipeline: PipelineConfig = PipelineConfig()
    hub: HubConfig = HubConfig()
    swap: SwapConfig = SwapConfig()
    wire: WireConfig = WireConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        # with a preset or a checkpoint the sizes are known only once filled in
        if not self.model.sized_elsewhere:
            check_shape(self.model)
            _check_depth(self.model, self.fleet)
            _check_sequences(self.model, self.train)
        _check_batch(self.train)
        check_factories(self.model, self.data)
        check_fleet(self.fleet)
        check_pipeline(self.pipeline, self.fleet.stages, self.microbatches)
        check_hub(self.hub, self.pipeline, self.fleet.stages)
        late, quantise = self.optimizer.delayed, self.adapter.quantise
        check_swap(self.swap, self.fleet.stages, self.pipeline, self.hub, delayed=late, quantise=quantise)
        check_network(self.network)
        return self

    def local(self) -> RunConfig:
        """The configuration with the defaults of a local fleet: the peers of the plan, or two per stage, and two
        trainers. If every peer serves the whole model, there is one: a second one would share the device."""
        default = 1 if self.swap.whole else self.fleet.local_peers
        peers = self.fleet.peers or len(self.pipeline.machines) or default
        counts = {"peers": peers, "trainers": self.fleet.trainers or min(2, peers)}
        return self.model_copy(update={"fleet": self.fleet.model_copy(update=counts)})

    @property
    def microbatches(self) -> int:
        """Microbatches per step, M."""
        return self.train.batch // self.train.microbatch


# Checks raise ValueError with a message that starts with the dotted name of the field, and uses the dotted names of all
# other fields that it mentions: the loader turns them into file and line.


def _check_depth(m: ModelConfig, f: FleetConfig) -> None:
    if f.layers is not None and sum(f.layers) != m.layers:
        raise ValueError(f"fleet.layers: {sum(f.layers)} in total, but model.layers = {m.layers}; they must be equal")
    if f.stages > m.layers:
        raise ValueError(
            f"fleet.stages: {f.stages} stages for model.layers = {m.layers}; a stage needs at least one layer"
        )


def _check_sequences(m: ModelConfig, t: TrainConfig) -> None:
    if (t.sequence_start or 0) > m.context:
        raise ValueError(f"train.sequence_start: {t.sequence_start} exceeds model.context = {m.context}; start shorter")


def _check_batch(t: TrainConfig) -> None:
    if (count := t.batch // t.microbatch) > MAX_MICROBATCHES:
        raise ValueError(
            f"train.batch: {t.batch} sequences with train.microbatch = {t.microbatch} are {count:,} microbatches a step, and "
            f"peers agree on at most {MAX_MICROBATCHES:,}; raise train.microbatch, or lower the batch"
        )
    if t.batch % t.microbatch:
        raise ValueError(
            f"train.microbatch: {t.microbatch} does not divide train.batch = {t.batch}; use a divisor of the batch"
        )
