"""The sections about the model and the data."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, SerializationInfo, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import PydanticCustomError

from muletrain.config.section import Fraction, PositiveInt, Section

FACTORY = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
"""Pattern of an importable function."""


def _as_typed(value: object) -> object:
    """``value`` itself: pydantic's own check of several types makes ``True`` of 1 and of "1"."""
    if type(value) not in (bool, int, float, str) or (isinstance(value, float) and not math.isfinite(value)):
        raise PydanticCustomError("argument", 'expected a finite number, true, false, or text in "quotes"')
    return value


Argument = Annotated[bool | int | float | str, PlainValidator(_as_typed)]
"""A value of ``model.arguments``, with the type preserved."""
ArgumentName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,63}$")]


class ModelConfig(Section):
    """The decoder (SWARM app. G, as LlamaForCausalLM). Defaults are commented out: a set field overrides the preset."""

    YIELDS: ClassVar[frozenset[str]] = frozenset(
        [
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
            "tie",
            "untie",
            "attention",
            "compression",
            "compression_factor",
        ]
    )
    preset: str | None = Field(
        default=None,
        description="named size, e.g. 'gpt3-125m' or 'llama-7b'; fields set beside it override it",
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
        default=1024, description="size of the vocabulary, and of a tokenizer that the run trains [tokens]"
    )
    context: PositiveInt = Field(
        default=128,
        description="longest sequence; with model.from what its config.json declares, at most 1024 [tokens]",
    )
    activation: Literal["gelu", "silu"] = Field(
        default="gelu", description="gate of the feed-forward: gelu = GeGLU, silu = Llama"
    )
    dropout: Fraction = Field(default=0.1, description="probability of dropping a residual feature in training [1]")
    rope_theta: float = Field(default=10000.0, gt=0, description="base of the rotary embedding [1]")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of RMSNorm [1]")
    attention: Literal["auto", "conversation", "row"] = Field(
        default="auto",
        description="tokens that a token sees where data.pack puts several conversations into one sequence: conversation = earlier "
        "ones of its own, which has positions from 0; row = all earlier ones; auto = conversation if the architecture allows it",
    )
    share_layers: bool = Field(default=False, description="repeat one block inside each stage (ALBERT; SWARM sec. 4.3)")
    tie: bool = Field(default=False, description="use the embedding as output matrix, too (tied weights)")
    from_: str | None = Field(
        default=None,
        alias="from",
        description="Hugging Face folder, or name on the Hub, of a causal language model that gives architecture, sizes and first weights",
        examples=["my-llama"],
    )
    factory: str | None = Field(
        default=None,
        pattern=FACTORY,
        description="'package.module:function', installed on each machine, that returns an nn.Module whose forward(inputs, targets) is "
        "a mean loss; every integer in its inputs and targets is below model.vocab",
        examples=["mypackage.models:build"],
    )
    arguments: dict[ArgumentName, Argument] = Field(
        default_factory=dict,
        max_length=64,
        description="keyword arguments of model.factory, e.g. {width = 64} [values]",
    )
    untie: bool = Field(
        default=False,
        description="train an output matrix of its own where model.from ties it to the embedding, so that stages have no "
        "gradient of it to exchange; it begins as a copy",
    )
    architecture: str | None = Field(
        default=None,
        description="what the traced model is built from, as JSON; filled in from model.from or model.factory",
        examples=["{}"],
    )
    chain: str | None = Field(
        default=None,
        description="digest of the traced model's blocks, and the versions that made them; filled in",
        examples=["0123 (transformers 5.0, torch 2.13)"],
    )

    compression: Literal["none", "bottleneck", "maxout"] = Field(
        default="none",
        description="layers at the borders between stages that learn to send less: a smaller projection, or the maximum over windows of "
        "features (SWARM app. J); it takes more steps to the same loss, and no Hugging Face architecture has them",
    )
    compression_factor: Annotated[int, Field(ge=2, le=64)] = Field(
        default=2, description="how many times fewer numbers go from stage to stage with compression; divides width [1]"
    )
    compression_after: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        max_length=1024,
        description="layers whose output is compressed; default: the last of each stage; a resumed run keeps them [layers]",
        examples=[[1]],
    )
    stops: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        max_length=1024,
        description="ids that end a text, by the generation settings of model.from; filled in [tokens]",
        examples=[[2, 3]],
    )

    @property
    def sized_elsewhere(self) -> bool:
        """Sizes come from a preset or a checkpoint: sizes stated here are not known to be the model's."""
        return any(x is not None for x in (self.preset, self.from_, self.factory, self.architecture))

    @property
    def given(self) -> str | None:
        """The field that gives the first weights; None: drawn from the seed."""
        return "model.from" if self.from_ is not None else None if self.factory is None else "model.factory"

    def stated(self) -> set[str]:
        """Beside a preset or a checkpoint, only the fields that were set: a written default would override theirs."""
        return set(self.model_fields_set) if self.sized_elsewhere else super().stated()

    @model_serializer(mode="wrap")
    def _json_of_stated(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if info.mode != "json":
            return fields
        known = type(self).model_fields
        names = self.stated() | {known[name].alias for name in self.stated()}
        return {name: value for name, value in fields.items() if name in names}


class AdapterConfig(Section):
    """A low-rank adapter (LoRA, Hu et al. 2021), which is trained instead of the model of ``model.from``."""

    rank: PositiveInt | None = Field(
        default=None,
        description="rank of an adapter of peft in each target; default: none, and all weights are trained [1]",
        examples=[16],
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="the adapter's output is multiplied by alpha / rank; default: 2 rank [1]",
        examples=[32.0],
    )
    dropout: Fraction = Field(default=0.0, description="share of the adapter's inputs that are dropped [1]")
    targets: str | tuple[str, ...] = Field(
        default="all-linear",
        description="layers with an adapter: 'all-linear' (all but the output matrix), ends of names, also of tensors that hold the "
        "matrices of several experts, or one regular expression",
        examples=[["q_proj", "v_proj"]],
    )
    ranks: dict[str, PositiveInt] = Field(
        default={},
        description="other ranks, by the end of a target's name or a regular expression (peft's rank_pattern) [1]",
        examples=[{"v_proj": 4}],
    )
    alphas: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="other alphas, likewise (peft's alpha_pattern) [1]", examples=[{"v_proj": 8.0}]
    )
    rslora: bool = Field(default=False, description="multiply by alpha / sqrt(rank) instead (rsLoRA) [1]")
    dora: bool = Field(
        default=False,
        description="train the length of each output's weights apart from their direction (DoRA, Liu et al. 2024); slower",
    )
    base: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="type in which the weights beside the adapter, which are not trained, are held; auto: as the model's files have "
        "them, so that nothing is rounded",
    )
    quantise: Literal["none", "int8", "nf4"] = Field(
        default="none",
        description="codes in which each machine holds the matrices of linear layers among those weights, of 8 or 4 bits a number with "
        "a scale for 64 of them (bitsandbytes); not the output matrix. What travels stays exact",
    )
    digests: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] | None = Field(
        default=None,
        description="digests of those weights, for each part of the chain; filled in",
        examples=[["0" * 64]],
    )
    from_: str | None = Field(
        default=None,
        alias="from",
        description="folder of an adapter of peft to train further, which gives the fields above but dropout",
        examples=["my-adapter"],
    )


Format = Literal["auto", "text", "messages", "pairs"]


class DataConfig(Section):
    """The training text or conversations, or samples of another kind."""

    path: str = Field(
        default="pydoc",
        description="files or globs (text, .jsonl, .json, .csv, .tsv, .parquet; ',' separates), 'hf:NAME' for a Hugging Face "
        "dataset, or 'pydoc' for the documentation that ships with Python; relative paths count from the folder where the command runs",
    )
    validation: str | None = Field(
        default=None,
        description="held-out text, written like path; all of path is then trained",
        examples=["validation.jsonl"],
    )
    factory: str | None = Field(
        default=None,
        pattern=FACTORY,
        description="'package.module:function' that returns samples for model.factory, instead of text: (train, heldout), two "
        "sequences of (input, target)",
        examples=["mypackage.data:build"],
    )
    format: Format = Field(
        default="auto",
        description="a row of path: text = the column field; messages = a conversation (columns 'messages', or ShareGPT's "
        "'conversations'); pairs = 'prompt' and 'completion', or 'instruction', 'input' and 'output'; auto = by the columns",
    )
    chat_template: str | None = Field(
        default=None,
        description="how conversations are written: a file of Jinja text, the text itself, a model whose template is taken, or "
        "'chatml'; default: the tokenizer's own",
        examples=["chatml"],
    )
    date: str = Field(
        default="2024-07-26",
        pattern=r"^\d{4}-\d\d-\d\d$",
        description="date (year-month-day) that a chat template prints as today's, so that tokens depend on no clock",
    )
    loss_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="tokens of a conversation that are learned: assistant = all that it says, last = its last turn, all = every token",
    )
    pack: bool = Field(
        default=True,
        description="put several conversations into one sequence (model.attention says what they see of each other); false: each "
        "has a sequence of its own, and the rest of that is padding",
    )
    field: str = Field(default="text", description="column of rows (.jsonl, .json, .csv, .tsv, .parquet, Hugging Face)")
    tokenizer: str = Field(
        default="train",
        description="'train' (that of model.from, or else BPE on the corpus), a tokenizer.json, a model's folder, or a Hugging Face "
        "name (OWNER/NAME, or OWNER/NAME@REVISION)",
    )
    special_tokens: Literal["parse", "text"] = Field(
        default="parse",
        description="special tokens that the text spells: parse = they are these tokens, text = they stay text",
    )
    end_token: str | None = Field(
        default=None,
        description="token that ends a document; default: the one that the tokenizer's model declares",
        examples=["</s>"],
    )
    heldout: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.05,
        description="share of the documents kept for validation (of a single long document its end); 0: none [1]",
    )
    deduplicate: Literal["none", "documents"] = Field(
        default="none", description="documents = leave out documents that equal an earlier one up to white space"
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="a sample of data.factory that raises, has another shape, NaN, Inf or integers out of range: the next usable one takes "
        "its place; stop = the run ends after that step, with a checkpoint and an error; skip = it goes on, and counts",
    )
    cache: str | None = Field(
        default=None,
        description="folder of the token cache; default: ~/.cache/muletrain",
        examples=["/data/cache"],
    )
    share: bool = Field(
        default=False,
        description="let members fetch the tokens of the training text: a few peers without the data keep them, so the run survives the "
        "loss of its only data owner. Everyone who has the ticket can then read the text",
    )

    @property
    def counts(self) -> bool:
        """Do only some of the tokens count towards the loss?"""
        return self.format in ("messages", "pairs")


# See ``schema`` for the errors of checks.


def check_shape(m: ModelConfig) -> None:
    """Sizes of the native decoder."""
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
        raise ValueError(f"model.kv_heads: {m.kv_heads} does not divide model.heads = {m.heads}; use a divisor")


def check_factories(m: ModelConfig, d: DataConfig) -> None:
    """Where model and samples come from."""
    if d.factory is not None and m.factory is None and m.architecture is None:
        raise ValueError("data.factory: its samples are for a module of yours; set model.factory too")


def _near(width: int, heads: int) -> int | str:
    """The usable head count next to ``heads``: a divisor of the width that leaves an even width per head."""
    usable = [h for h in range(1, width + 1) if width % h == 0 and (width // h) % 2 == 0]
    return min(usable, key=lambda h: abs(h - heads)) if usable else "other"
