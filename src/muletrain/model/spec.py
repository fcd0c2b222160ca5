"""``ModelSpec``: the sizes of a decoder, and what follows from them (parameters, FLOPs, stages). Imports no torch.

Units: parameters are counted in numbers, FLOPs per token of a forward pass (a backward pass costs twice that), one
multiply-add = 2 FLOPs.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from muletrain.errors import ConfigError
from muletrain.model.presets import preset_fields
from muletrain.planning.partition import Chain, Cut, Shared, partition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from muletrain.config.schema import ModelConfig

MAX_SEARCH = 1 << 24
"""Stages x layers^2: the search for the best cut takes some 32 bytes for each."""
_FFN_MULTIPLE = 64  # the default feed-forward width is rounded up to it


@dataclass(frozen=True)
class ModelSpec:
    """Everything resolved: no field is optional, no preset is left to look up."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int
    activation: str
    """'gelu' (exact) or 'silu'"""
    dropout: float
    rope_theta: float
    norm_eps: float
    share_layers: bool

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}: {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads or self.head_width % 2:
            raise ConfigError(
                f"model.heads: {self.heads} heads must divide model.width = {self.width} into even widths, for rotary "
                "embeddings; use another number of heads"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads: {self.kv_heads} does not divide model.heads = {self.heads}")
        if self.activation not in ("gelu", "silu"):
            raise ConfigError(f"model.activation: {self.activation!r}; use 'gelu' or 'silu'")

    @classmethod
    def from_config(cls, config: ModelConfig) -> ModelSpec:
        """Resolve the preset and the defaults. Fields the user gave override the preset (``model_fields_set``).

        Raises ConfigError for an unknown preset and for sizes that do not fit together.
        """
        fields: dict[str, Any] = config.model_dump(exclude={"preset", "from_"})
        if config.preset is not None:
            preset = preset_fields(config.preset)
            fields.update({name: value for name, value in preset.items() if name not in config.model_fields_set})
        fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
        fields["ffn"] = fields["ffn"] or _default_ffn(fields["width"])
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """The inverse of ``to_json``. Raises ConfigError when fields are missing or unknown."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"not a model spec: {e}") from e

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """Features of all key (or value) heads together."""
        return self.kv_heads * self.head_width

    @property
    def layer_matrix_params(self) -> int:
        """Parameters of one block without its two norms: the matrices that weight decay and FLOPs see."""
        return 2 * self.width * (self.width + self.kv_width) + 3 * self.width * self.ffn

    @property
    def layer_params(self) -> int:
        return self.layer_matrix_params + 2 * self.width

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.width

    @property
    def head_params(self) -> int:
        """The output matrix (untied) and the final norm."""
        return self.vocab * self.width + self.width

    def stage_params(self, cut: Cut, stage: int) -> int:
        """Parameters of ``stage``; shared layers count once."""
        first, end = cut[stage]
        blocks = 1 if self.share_layers else end - first
        total = blocks * self.layer_params
        return total + self.embedding_params * (stage == 0) + self.head_params * (stage == len(cut) - 1)

    @property
    def params(self) -> int:
        """Parameters of the whole model without sharing (as it is exported)."""
        return self.layers * self.layer_params + self.embedding_params + self.head_params

    def layer_flops(self, tokens: int | None = None) -> float:
        """Forward FLOPs per token of one block in a sequence of ``tokens`` (default: the context).

        Causal attention looks at half the sequence on average: 2 products x 2 FLOPs x tokens / 2 x width.
        """
        return 2.0 * self.layer_matrix_params + 2.0 * (tokens or self.context) * self.width

    @property
    def embedding_flops(self) -> float:
        """A lookup computes nothing; its backward scatters. About one addition per feature, for the cut's sake."""
        return float(self.width)

    @property
    def head_flops(self) -> float:
        """Forward FLOPs per token of the head and of the softmax over the vocabulary (about 5 per entry)."""
        return 2.0 * self.width * self.vocab + 5.0 * self.vocab

    def stage_flops(self, cut: Cut, stage: int, tokens: int | None = None) -> float:
        """Forward FLOPs per token of ``stage``."""
        first, end = cut[stage]
        total = (end - first) * self.layer_flops(tokens)
        return total + self.embedding_flops * (stage == 0) + self.head_flops * (stage == len(cut) - 1)

    def cut(self, stages: int, sizes: Sequence[int] | None = None) -> Cut:
        """The most even cut into ``stages`` by compute cost, or the one into stages of ``sizes`` layers. Raises
        ConfigError for more stages than layers, and for other layers than there are."""
        if sizes is not None:
            if len(sizes) != stages or sum(sizes) != self.layers or min(sizes) < 1:
                raise ConfigError(
                    f"fleet.layers: {list(sizes)} for {stages} stages and {self.layers} layers; give one number a stage"
                )
            ends = list(itertools.accumulate(sizes))
            return tuple(zip([0, *ends[:-1]], ends, strict=True))
        if not 1 <= stages <= self.layers:
            raise ConfigError(
                f"fleet.stages: {stages} stages for model.layers = {self.layers}; a stage needs at least one layer"
            )
        if stages * self.layers**2 > MAX_SEARCH:  # also what a founder's configuration can make a joiner compute
            raise ConfigError(
                f"fleet.layers: {self.layers} layers in {stages} stages are too many to search for the best cut; say how many layers each "
                f"stage has"
            )
        costs = [self.layer_flops()] * self.layers
        return partition(costs, stages, first_extra=self.embedding_flops, last_extra=self.head_flops)

    def chain(self, sequences: int, tokens: int, *, parameter_bytes: float, token_bytes: float) -> Chain:
        """For ``planning.partition_chain`` and the hub: one microbatch of ``sequences`` of ``tokens``, forward and
        backward [FLOP].

        ``parameter_bytes``: what a parameter takes with its gradient and its part of the optimizer; ``token_bytes``:
        what a layer keeps of a token until its backward. Embedding and head belong to the first and the last layer;
        shared layers are held once a stage."""
        work = [3.0 * sequences * tokens * self.layer_flops(tokens)] * self.layers
        work[0] += 3.0 * sequences * tokens * self.embedding_flops
        work[-1] += 3.0 * sequences * tokens * self.head_flops
        block = self.layer_params * parameter_bytes
        state = [0.0 if self.share_layers else block] * self.layers
        state[0] += self.embedding_params * parameter_bytes
        state[-1] += self.head_params * parameter_bytes
        shared = (Shared(block, tuple(range(self.layers))),) if self.share_layers else ()
        return Chain(tuple(work), tuple(state), (token_bytes * sequences * tokens,) * self.layers, shared)


def _default_ffn(width: int) -> int:
    """8/3 width, so that three gated matrices have as many parameters as two of 4 width (Shazeer 2020)."""
    return -(-8 * width // 3 // _FFN_MULTIPLE) * _FFN_MULTIPLE
