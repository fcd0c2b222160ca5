"""The run's configuration: one frozen model per section, a docstring-like ``description`` and a unit for every field.

``muletrain config`` prints these with their defaults and comments. Unknown keys are refused. Cross-field checks live here
(``RunConfig``), so that a config object that exists is one that can run.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    """Base of every section: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ModelConfig(Section):
    """The decoder (SWARM app. G, mapped one to one onto ``LlamaForCausalLM``)."""

    preset: str | None = Field(None, description="named size, e.g. 'gpt3-125m' or 'llama-7b'; fields below override it")
    layers: PositiveInt = Field(4, description="transformer blocks")
    width: PositiveInt = Field(192, description="model width d_model [features]")
    heads: PositiveInt = Field(6, description="attention heads; must divide width")
    kv_heads: PositiveInt | None = Field(None, description="key/value heads (grouped-query attention); default: heads")
    ffn: PositiveInt | None = Field(None, description="feed-forward width [features]; default 8/3 width, rounded up to 64")
    vocab: PositiveInt = Field(1024, description="vocabulary [tokens]; also the size of a tokenizer trained by the run")
    context: PositiveInt = Field(128, description="longest sequence [tokens]")
    activation: Literal["gelu", "silu"] = Field("gelu", description="gate of the feed-forward: gelu = GeGLU, silu = Llama")
    dropout: Fraction = Field(0.1, description="probability of dropping a residual feature in training")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary embedding")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")
    share_layers: bool = Field(False, description="repeat one block inside each stage (ALBERT; SWARM sec. 4.3)")
    from_: str | None = Field(None, alias="from", description="Hugging Face checkpoint folder to start from")


class DataConfig(Section):
    """What is trained on."""

    path: str = Field(
        "pydoc",
        description="files or globs (text, .jsonl, .parquet; ',' separates), 'hf:NAME' for a Hugging Face dataset, "
        "or 'pydoc' for the documentation that ships with Python",
    )
    field: str = Field("text", description="column of .jsonl, .parquet and Hugging Face rows")
    tokenizer: str = Field("train", description="'train' (BPE on the corpus), a tokenizer.json, or a Hugging Face name")
    heldout: Annotated[float, Field(gt=0, lt=0.5)] = Field(0.05, description="share of paragraphs kept for validation")
    cache: str | None = Field(None, description="folder of the token cache; default: ~/.cache/muletrain")


class TrainConfig(Section):
    """The step: what one optimizer update sees."""

    steps: PositiveInt = Field(500, description="optimizer steps")
    batch: PositiveInt = Field(16, description="sequences per step, over the whole fleet")
    microbatch: PositiveInt = Field(4, description="sequences per microbatch; must divide batch")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of weights, data order and dropout")
    sequence_start: PositiveInt | None = Field(
        None, description="sequence length at step 0 [tokens], growing linearly to model.context (SWARM app. G)"
    )
    sequence_warmup: int = Field(0, ge=0, description="steps until full sequence length")
    time_limit: float | None = Field(None, gt=0, description="stop in order after this long [s]")


class OptimizerConfig(Section):
    """AdamW or LAMB, with warm-up, decay and clipping by the global norm over all stages."""

    name: Literal["adamw", "lamb"] = Field("adamw", description="update rule")
    lr: float = Field(3e-3, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay (not on norms)")
    clip: float | None = Field(1.0, gt=0, description="largest global gradient norm; remove with 'none'")
    warmup: int = Field(50, ge=0, description="steps of linear warm-up")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="decay after the warm-up")
    final_lr: Fraction = Field(0.0, description="learning rate at the last step, as a share of the peak")
    state_device: Literal["device", "cpu"] = Field("device", description="where moments and fp32 master weights live")


class FleetConfig(Section):
    """How many peers and what they do. Speeds and links of an emulated fleet come from ``profile``."""

    stages: PositiveInt = Field(2, description="pipeline stages")
    peers: PositiveInt = Field(4, description="peers to start ('run') or to wait for ('start'); at least one per stage")
    trainers: PositiveInt = Field(2, description="peers of a local fleet that also build microbatches")
    profile: str | None = Field(None, description="fleet TOML with machines and links to emulate; see 'muletrain config --fleet'")


class WireConfig(Section):
    """How tensors travel."""

    activations: Codec = Field(Codec.INT8, description="activations and their gradients: fp32, fp16, bf16, int8")
    gradients: Codec = Field(Codec.FP16, description="gradient averaging: fp32, fp16, int8")


class ComputeConfig(Section):
    """How a peer computes."""

    device: str = Field("auto", description="'auto', 'cpu', 'cuda', 'cuda:1'")
    precision: Precision = Field(Precision.AUTO, description="auto measures for a second; fp32, bf16, fp16")
    threads: PositiveInt | None = Field(None, description="CPU threads of a peer; default: cores / local peers")
    memory: float | None = Field(None, gt=0, description="memory a peer may use [GiB]; default: what is free")
    checkpointing: Literal["auto", "always", "never"] = Field(
        "auto", description="recompute activations in backward; auto stashes them where memory allows"
    )


class CheckpointConfig(Section):
    """When the run is written down."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")


class NetworkConfig(Section):
    """Where a peer listens."""

    listen: str = Field("127.0.0.1", description="address to listen on; 'start' and 'join' use 0.0.0.0")
    port: int = Field(0, ge=0, lt=65536, description="TCP port; 0: any free one")
    announce: tuple[str, ...] = Field((), description="addresses others should dial instead (port forwarding)")


class RunConfig(Section):
    """Everything a run is. Its digest is part of the run's identity."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    fleet: FleetConfig = FleetConfig()
    wire: WireConfig = WireConfig()
    compute: ComputeConfig = ComputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    network: NetworkConfig = NetworkConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        # (message starts with the field's dotted name: the loader turns it into file and line)
        m, t, f = self.model, self.train, self.fleet
        if m.width % m.heads:
            raise ValueError(f"model.heads: {m.heads} heads do not divide model.width = {m.width}; try {_near(m.width, m.heads)}")
        if (m.width // m.heads) % 2:
            raise ValueError(f"model.heads: width / heads = {m.width // m.heads} must be even for rotary embeddings")
        if m.kv_heads and m.heads % m.kv_heads:
            raise ValueError(f"model.kv_heads: {m.kv_heads} does not divide model.heads = {m.heads}")
        if t.batch % t.microbatch:
            raise ValueError(f"train.microbatch: {t.microbatch} does not divide train.batch = {t.batch}")
        if f.peers < f.stages:
            raise ValueError(f"fleet.peers: {f.peers} peers cannot serve fleet.stages = {f.stages}; give at least one peer per stage")
        if f.stages > m.layers:
            raise ValueError(f"fleet.stages: {f.stages} stages for model.layers = {m.layers}; a stage needs at least one layer")
        if f.trainers > f.peers:
            raise ValueError(f"fleet.trainers: {f.trainers} trainers among {f.peers} peers; at most one per peer")
        if t.sequence_start and t.sequence_start > m.context:
            raise ValueError(f"train.sequence_start: {t.sequence_start} exceeds model.context = {m.context}")
        return self

    @property
    def microbatches(self) -> int:
        """Microbatches per step, M."""
        return self.train.batch // self.train.microbatch


def _near(width: int, heads: int) -> int:
    return min((h for h in range(1, width + 1) if width % h == 0 and (width // h) % 2 == 0), key=lambda h: abs(h - heads))
