"""``ModelSpec``: the sizes of a decoder, with the number of parameters and FLOPs. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from muletrain.errors import ConfigError
from muletrain.model.chain import LOSS_BYTES, Compression, Model, TiedParameter
from muletrain.model.presets import preset_fields

if TYPE_CHECKING:
    from muletrain.config.model_sections import ModelConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two matrices that may be tied."""
_FFN_MULTIPLE = 64  # the default feed-forward width is rounded up to a multiple


@dataclass(frozen=True)
class ModelSpec(Model):
    """All sizes of a decoder, with presets resolved."""

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
    tie: bool = False
    """The embedding is also the output matrix."""
    compression: Compression | None = None
    apart: bool = False

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
        if self.compression is not None:
            self.compression.check(self.width, self.layers)
        if self.activation not in ("gelu", "silu"):
            raise ConfigError(f"model.activation: {self.activation!r}; use 'gelu' or 'silu'")

    @classmethod
    def from_config(cls, config: ModelConfig) -> ModelSpec:
        """Resolve the preset and the defaults. Fields the user gave override the preset (``model_fields_set``).

        Raises ConfigError for an unknown preset and for sizes that do not fit together.
        """
        fields: dict[str, Any] = config.model_dump(include=set(cls.__dataclass_fields__))
        fields["compression"] = Compression.from_config(config)
        fields["apart"] = config.attention == "conversation"
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
            fields = json.loads(text)
            return cls(**{**fields, "compression": Compression.of(fields.get("compression"))})
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
        """Parameters of one block without the two norms: the matrices, which count for weight decay and FLOPs."""
        return 2 * self.width * (self.width + self.kv_width) + 3 * self.width * self.ffn

    @property
    def layer_params(self) -> int:
        return self.layer_matrix_params + 2 * self.width

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.width

    @property
    def head_params(self) -> int:
        """The output matrix, unless tied, and the final norm."""
        return self.width if self.tie else self.vocab * self.width + self.width

    @property
    def tied(self) -> dict[str, TiedParameter]:
        parts = TiedParameter((0, self.layers + 1), self.vocab * self.width)
        return {EMBEDDING: parts} if self.tie else {}

    @property
    def largest_tensor(self) -> int:
        return self.width * self.ffn

    def tables_bytes(self, sequences: int) -> int:
        """The masks of a few microbatches in which conversations are apart (``stage.SHARED``), and one that is made."""
        return 4 * (4 + 1) * sequences * self.context**2 if self.apart else 0

    def params_of(self, layer: int) -> int:
        """All blocks have the same size."""
        return self.layer_params

    def flops_of(self, layer: int, tokens: int | None = None) -> float:
        return self.layer_flops(tokens)

    def layer_flops(self, tokens: int | None = None) -> float:
        """Forward FLOPs per token of one block in a sequence of ``tokens`` (default: the context).

        Causal attention looks at half the sequence on average: 2 products x 2 FLOPs x tokens / 2 x width.
        """
        return 2.0 * self.layer_matrix_params + 2.0 * (tokens or self.context) * self.width

    @property
    def embedding_flops(self) -> float:
        """A lookup computes nothing, and the backward scatters. About one addition per feature, for the cut's sake."""
        return float(self.width)

    @property
    def head_flops(self) -> float:
        """Forward FLOPs per token of the head and of the softmax over the vocabulary (about 5 per entry)."""
        return 2.0 * self.width * self.vocab + 5.0 * self.vocab

    def kept_bytes(self, layer: int, size: int) -> float:
        """Counted in numbers: 2 norms x (fp32 input of the square, normed, weighted) 6D, rotated q, k and v, the
        attention's output D, three feed-forward products and the gate 4F, byte masks D/2; plus rsqrt and log-sum-exp,
        which are small."""
        masks = 2 * self.width if self.dropout else 0
        norms = 2 * self.width * (2 * 4 + size)
        return norms + size * (2 * self.width + 2 * self.kv_width + 4 * self.ffn) + masks

    def embedding_kept_bytes(self, size: int) -> float:
        """The token, and a byte mask of dropout."""
        return 8 + (self.width if self.dropout else 0)

    def head_kept_bytes(self, size: int) -> float:
        return self.width * (2 * 4 + size) + self.vocab * LOSS_BYTES


def _default_ffn(width: int) -> int:
    """8/3 width, so that three gated matrices have as many parameters as two of 4 width (Shazeer 2020)."""
    return -(-8 * width // 3 // _FFN_MULTIPLE) * _FFN_MULTIPLE
