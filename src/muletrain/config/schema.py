"""The run's configuration: one frozen model per section, a description and a unit for every field.

``muletrain config`` prints these with their defaults and comments. Unknown keys are refused. Cross-field checks live
here (``RunConfig``), so that a config object that exists is one that can run. Units stand in brackets at the end of a
description; ``[1]`` is a pure number. ``examples`` gives the value printed for a field that is off by default.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Precision(StrEnum):
    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Codec(StrEnum):
    """How a tensor travels. ``INT8`` is block-wise absmax quantisation (SWARM app. J.1, "quantized activations")."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    YIELDS: ClassVar[frozenset[str]] = frozenset()
    """Fields whose defaults give way to other fields, as sizes to a preset: a printed configuration must not set
    them."""

    def stated(self) -> set[str]:
        """Fields (by attribute name) that a written copy of this section must name to mean the same."""
        return set(type(self).model_fields)


class ModelConfig(Section):
    """The decoder (SWARM app. G, mapped one to one onto LlamaForCausalLM). Defaults stand behind '#': what is given
    overrides a preset."""

    YIELDS: ClassVar[frozenset[str]] = frozenset(
        (
            "layers",
            "width",
            "heads",
            "vocab",
            "context",
            "activation",
            "dropout",
            "rope_theta",
            "norm_eps",
            "share_layers",
        )
    )
    preset: str | None = Field(
        default=None,
        description="named size, e.g. 'gpt3-125m' or 'llama-7b'; fields given beside it override it",
        examples=["gpt3-125m"],
    )
    layers: PositiveInt = Field(default=4, description="depth [transformer blocks]")
    width: PositiveInt = Field(default=192, description="model width d_model [features]")
    heads: PositiveInt = Field(default=6, description="attention heads, must divide width [heads]")
    kv_heads: PositiveInt | None = Field(
        default=None,
        description="key/value heads (grouped-query attention), must divide heads; default: heads [heads]",
        examples=[2],
    )
    ffn: PositiveInt | None = Field(
        default=None,
        description="feed-forward width; default: 8/3 width, rounded up to 64 [features]",
        examples=[512],
    )
    vocab: PositiveInt = Field(
        default=1024, description="vocabulary, and the size of a tokenizer trained by the run [tokens]"
    )
    context: PositiveInt = Field(default=128, description="longest sequence [tokens]")
    activation: Literal["gelu", "silu"] = Field(
        default="gelu", description="gate of the feed-forward: gelu = GeGLU, silu = Llama"
    )
    dropout: Fraction = Field(default=0.1, description="probability of dropping a residual feature in training [1]")
    rope_theta: float = Field(default=10000.0, gt=0, description="base of the rotary embedding [1]")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of RMSNorm [1]")
    share_layers: bool = Field(default=False, description="repeat one block inside each stage (ALBERT; SWARM sec. 4.3)")
    from_: str | None = Field(
        default=None,
        alias="from",
        description="Hugging Face checkpoint folder to start from: sizes and weights are its own",
        examples=["my-llama"],
    )

    def stated(self) -> set[str]:
        """With a preset or a checkpoint only what was given: written out, a default would override theirs."""
        return super().stated() if self.preset is None and self.from_ is None else set(self.model_fields_set)

    @model_serializer(mode="wrap")
    def _json_of_stated(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if info.mode != "json":
            return fields
        known = type(self).model_fields
        names = self.stated() | {known[name].alias for name in self.stated()}
        return {name: value for name, value in fields.items() if name in names}


class DataConfig(Section):
    """What is trained on."""

    path: str = Field(
        default="pydoc",
        description="files or globs (text, .jsonl, .parquet; ',' separates), 'hf:NAME' for a Hugging Face dataset, "
        "or 'pydoc' for the documentation that ships with Python",
    )
    field: str = Field(default="text", description="column of .jsonl, .parquet and Hugging Face rows")
    tokenizer: str = Field(
        default="train", description="'train' (BPE on the corpus), a tokenizer.json, or a Hugging Face name"
    )
    heldout: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        default=0.05, description="share of paragraphs kept for validation [1]"
    )
    cache: str | None = Field(
        default=None,
        description="folder of the token cache; default: ~/.cache/muletrain",
        examples=["/data/cache"],
    )
    share: bool = Field(
        default=False,
        description="give the tokens of the training text (so the text itself) to members that ask for them: a few peers without the data "
        "take them, and the run outlives its only data owner. Whoever has the ticket can read the text then",
    )


class TrainConfig(Section):
    """The step: what one optimizer update sees."""

    steps: PositiveInt = Field(default=300, description="length of the run [optimizer steps]")
    batch: PositiveInt = Field(default=16, description="batch of one step, over the whole fleet [sequences]")
    microbatch: PositiveInt = Field(default=4, description="unit of work of a peer, must divide batch [sequences]")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of weights, data order and dropout [1]")
    sequence_start: PositiveInt | None = Field(
        default=None,
        description="sequence length at step 0, growing linearly to model.context (SWARM app. G) [tokens]",
        examples=[32],
    )
    sequence_warmup: int = Field(default=0, ge=0, description="time until full sequence length [optimizer steps]")
    time_limit: float | None = Field(
        default=None, gt=0, description="stop in order after this long [s]", examples=[3600.0]
    )


def _by_rule(adamw: T, lamb: T) -> Callable[[dict[str, Any]], T]:
    """The default of a field that depends on ``optimizer.name``. LAMB's are SWARM's (app. G): those of You et al. 2020
    for a batch of 16384 sequences (warm-up over a tenth, linear decay, eps 1e-6, weight decay 0.01), with learning rate
    1e-3 and beta2 0.95."""
    return lambda fields: lamb if fields.get("name") == "lamb" else adamw


class OptimizerConfig(Section):
    """AdamW, or LAMB with SWARM's settings (app. G); warm-up, decay, and clipping by the global norm over all
    stages."""

    name: Literal["adamw", "lamb"] = Field(default="adamw", description="update rule")
    lr: float = Field(
        default_factory=_by_rule(3e-3, 1e-3), gt=0, description="peak learning rate; default: 0.003, lamb 0.001 [1]"
    )
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.95), description="decay of the first and of the second moment, per step [1]"
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
        default="device", description="where moments and fp32 master weights live"
    )
    delayed: bool = Field(
        default=False,
        description="average and update while the next step computes, which so lacks that update (DPU, SWARM sec. 3.2)",
    )


class FleetConfig(Section):
    """How many peers and what they do. Speeds and links of an emulated fleet come from its profile."""

    stages: PositiveInt = Field(default=2, description="parts the model is cut into [pipeline stages]")
    layers: tuple[PositiveInt, ...] | None = Field(
        default=None,
        description="of each stage, together model.layers; default: cut as evenly as compute cost allows [transformer blocks]",
        examples=[[2, 2]],
    )
    peers: PositiveInt | None = Field(
        default=None,
        description="'run' starts as many, default: 2 per stage; 'start' waits for as many, default: until every stage has one [peers]",
        examples=[4],
    )
    trainers: PositiveInt | None = Field(
        default=None,
        description="at most so many peers build microbatches; default: 2 of a local fleet, else all that have the data [peers]",
        examples=[2],
    )
    trace: bool = Field(
        default=False,
        description="write events when a peer takes a microbatch and has served it: timelines, benchmarks",
    )
    profile: str | None = Field(
        default=None,
        description="fleet TOML with machines and links to emulate ('muletrain config --fleet' prints one)",
        examples=["slow-home"],
    )
    rebalance: Literal["off", "paper", "throughput"] = Field(
        default="throughput",
        description="who moves to another stage: those who raise the run's throughput; 'paper': SWARM's rule, one at a time by queue",
    )
    rebalance_period: Annotated[float, Field(ge=1, le=86400)] = Field(
        default=60.0, description="between two decisions to move [s]"
    )
    adopt_after: Annotated[float, Field(ge=1, le=86400)] = Field(
        default=30.0,
        description="how long a stage may be without a peer before others adopt it, from the newest checkpoint on [s]",
    )

    @property
    def local_peers(self) -> int:
        """Processes of a local fleet."""
        return self.peers or 2 * self.stages


class PipelineConfig(Section):
    """Strategy 'pipeline': membership as planned, which 'muletrain run --plan' fills in. Without seats: strategy
    'swarm'."""

    seats: tuple[tuple[str, ...], ...] = Field(
        default=(),
        description="names of peers, for each stage one a pipeline, e.g. [['a', 'b'], ['c', 'd']]: two stages, pipelines a-c and b-d; "
        "who serves several pipelines stands there as often: [['a', 'a'], ['c', 'd']]",
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        default="1f1b",
        description="order of work at each stage. gpipe: forward before backward; 1f1b: backward first, few microbatches in between",
    )
    microbatches: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="of a step, by pipeline; none: evenly [microbatches]"
    )
    spares: tuple[str, ...] = Field(
        default=(), description="names of further peers of 'run': they stand in for those that are lost"
    )


class WireConfig(Section):
    """How tensors travel."""

    activations: Codec = Field(default=Codec.INT8, description="activations and their gradients")
    gradients: Codec = Field(default=Codec.FP16, description="gradient averaging")


class ComputeConfig(Section):
    """How a peer computes."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="'auto', 'cpu', 'mps', 'cuda', or one of several as 'cuda:1'",
    )
    precision: Precision = Field(
        default=Precision.AUTO, description="arithmetic; auto measures for a second and takes the fastest"
    )
    threads: PositiveInt | None = Field(
        default=None, description="CPU threads of a peer; default: cores / local peers [threads]", examples=[1]
    )
    memory: float | None = Field(
        default=None, gt=0, description="memory a peer may use; default: what is free [GiB]", examples=[8.0]
    )
    checkpointing: Literal["auto", "always", "never"] = Field(
        default="auto", description="recompute activations in backward; auto stashes them where memory allows"
    )


class CheckpointConfig(Section):
    """When the run is written down."""

    every: int = Field(default=50, ge=0, description="time between checkpoints; 0: only at the end [optimizer steps]")
    keep: PositiveInt = Field(default=2, description="how many of the newest are kept [checkpoints]")
    place: str | None = Field(
        default=None,
        examples=["s3://bucket/runs"],
        description="a folder that all machines share, or a URL of fsspec (e.g. s3://bucket/folder), that peers write checkpoints to "
        "themselves; default: the run folder, and parts on other machines against its loss",
    )


class NetworkConfig(Section):
    """Where a peer listens."""

    listen: str = Field(default="127.0.0.1", description="address to listen on; 'start' and 'join' use 0.0.0.0")
    port: int = Field(default=0, ge=0, lt=65536, description="0: any free one [TCP port]")
    announce: tuple[str, ...] = Field(
        default=(), description="addresses others should dial instead (port forwarding), e.g. ['/ip4/1.2.3.4/tcp/4000']"
    )


class RunConfig(Section):
    """Everything a run is. Its digest is part of the run's identity."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    fleet: FleetConfig = FleetConfig()
    pipeline: PipelineConfig = PipelineConfig()
    wire: WireConfig = WireConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        # with a preset or a checkpoint the sizes are known only once they are filled in
        if self.model.preset is None and self.model.from_ is None:
            _check_shape(self.model)
            _check_depth(self.model, self.fleet)
            _check_sequences(self.model, self.train)
        _check_batch(self.train)
        _check_fleet(self.fleet)
        _check_pipeline(self)
        _check_network(self.network)
        if self.data.share and self.fleet.trainers == 1:
            raise ValueError(
                "data.share: of no use beside fleet.trainers = 1; let two peers build microbatches, or leave it out"
            )
        return self

    def local(self) -> RunConfig:
        """With what a local fleet has where nothing is said: the peers of the plan, or two a stage, and two
        trainers."""
        p = self.pipeline
        peers = self.fleet.peers or sum(len(set(row)) for row in p.seats) + len(p.spares) or self.fleet.local_peers
        counts = {"peers": peers, "trainers": self.fleet.trainers or min(2, peers)}
        return self.model_copy(update={"fleet": self.fleet.model_copy(update=counts)})

    @property
    def microbatches(self) -> int:
        """Microbatches per step, M."""
        return self.train.batch // self.train.microbatch


# The checks raise ValueError whose message starts with the field's dotted name and calls every other field it involves
# by its dotted name too: the loader turns these into file and line.


def _check_shape(m: ModelConfig) -> None:
    if m.width % m.heads:
        raise ValueError(
            f"model.heads: {m.heads} heads do not divide model.width = {m.width}; "
            f"use {_near(m.width, m.heads)} heads or another width"
        )
    if (m.width // m.heads) % 2:
        raise ValueError(
            f"model.heads: model.width / heads = {m.width // m.heads} must be even for rotary embeddings; "
            f"use {_near(m.width, m.heads)} heads or another width"
        )
    if m.kv_heads and m.heads % m.kv_heads:
        raise ValueError(f"model.kv_heads: {m.kv_heads} does not divide model.heads = {m.heads}; use a divisor of it")


def _check_depth(m: ModelConfig, f: FleetConfig) -> None:
    if f.layers is not None and sum(f.layers) != m.layers:
        raise ValueError(f"fleet.layers: {sum(f.layers)} in all, model.layers is {m.layers}; they must be the same")
    if f.stages > m.layers:
        raise ValueError(
            f"fleet.stages: {f.stages} stages for model.layers = {m.layers}; a stage needs at least one layer"
        )


def _check_pipeline(c: RunConfig) -> None:
    p, stages = c.pipeline, c.fleet.stages
    if c.fleet.layers is not None and len(c.fleet.layers) != stages:
        raise ValueError(f"fleet.layers: {len(c.fleet.layers)} numbers for fleet.stages = {stages}; give one a stage")
    if not p.seats:
        if p.microbatches or p.spares:
            raise ValueError(
                "pipeline.seats: none, beside pipeline.microbatches or spares; name the peers of each stage"
            )
        return
    if len(p.seats) != stages:
        raise ValueError(f"pipeline.seats: {len(p.seats)} lists for fleet.stages = {stages}; give one a stage")
    pipelines = len(p.seats[0])
    for name in (name for row in (*p.seats, p.spares) for name in row):
        if not re.fullmatch(r"\w[\w.-]{0,63}", name):
            raise ValueError(
                f"pipeline.seats: {name!r}: names have up to 64 letters, digits, '.', '_' and '-', as they name files, too"
            )
    if not pipelines or any(len(row) != pipelines for row in p.seats):
        raise ValueError("pipeline.seats: as many names in each list as there are pipelines, and one pipeline at least")
    names = [*(name for row in p.seats for name in dict.fromkeys(row)), *p.spares]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"pipeline.seats: '{twice}' is named twice; a peer has seats of one stage only, or is among pipeline.spares"
        )
    if p.microbatches and (len(p.microbatches), sum(p.microbatches)) != (pipelines, c.microbatches):
        raise ValueError(
            f"pipeline.microbatches: {list(p.microbatches)} for {pipelines} pipelines and {c.microbatches} microbatches "
            f"(train.batch / train.microbatch); give one number a pipeline, with that sum"
        )


def _check_sequences(m: ModelConfig, t: TrainConfig) -> None:
    if (t.sequence_start or 0) > m.context:
        raise ValueError(f"train.sequence_start: {t.sequence_start} exceeds model.context = {m.context}; start shorter")


def _check_batch(t: TrainConfig) -> None:
    if t.batch % t.microbatch:
        raise ValueError(
            f"train.microbatch: {t.microbatch} does not divide train.batch = {t.batch}; use a divisor of the batch"
        )


def _check_fleet(f: FleetConfig) -> None:
    if f.peers is not None and f.peers < f.stages:
        raise ValueError(
            f"fleet.peers: {f.peers} peers cannot serve fleet.stages = {f.stages}; give at least one peer per stage"
        )
    if f.trainers is not None and f.peers is not None and f.trainers > f.peers:
        raise ValueError(f"fleet.trainers: {f.trainers} trainers among fleet.peers = {f.peers}; at most one per peer")


def _check_network(n: NetworkConfig) -> None:
    for address in n.announce:
        if not address.startswith("/"):
            raise ValueError(f"network.announce: {address!r} is no address; write it as '/ip4/1.2.3.4/tcp/4000'")


def _near(width: int, heads: int) -> int | str:
    """The usable head count next to ``heads``: it divides the width and leaves an even width per head."""
    usable = [h for h in range(1, width + 1) if width % h == 0 and (width // h) % 2 == 0]
    return min(usable, key=lambda h: abs(h - heads)) if usable else "other"
