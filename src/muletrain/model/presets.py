"""Named model sizes.

GPT-3 sizes: Brown et al. 2020, table 2.1 (the 13B there has a width of 5140, which 40 heads do not divide; 5120 is
meant; the XL has 24 heads of 128 at width 2048, which does not fit either; 16 heads of 128 do). Our feed-forward is
gated, three matrices instead of two, so the default is 8/3 width instead of 4 width: equally many parameters. Llama:
Touvron et al. 2023, table 2; Llama 3: Grattafiori et al. 2024, table 3.
"""

from __future__ import annotations

from muletrain.config.problems import closest
from muletrain.errors import ConfigError

Value = int | float | str | None

_COLUMNS = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "context", "activation", "rope_theta", "norm_eps")
_SIZES: dict[str, tuple[Value, ...]] = {
    "gpt3-125m": (12, 768, 12, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "gpt3-350m": (24, 1024, 16, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "gpt3-760m": (24, 1536, 16, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "gpt3-xl": (24, 2048, 16, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "gpt3-2.7b": (32, 2560, 32, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "gpt3-6.7b": (32, 4096, 32, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "gpt3-13b": (40, 5120, 40, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "gpt3-175b": (96, 12288, 96, None, None, 50257, 2048, "gelu", 1e4, 1e-5),
    "llama-7b": (32, 4096, 32, None, 11008, 32000, 2048, "silu", 1e4, 1e-6),
    "llama-13b": (40, 5120, 40, None, 13824, 32000, 2048, "silu", 1e4, 1e-6),
    "llama-30b": (60, 6656, 52, None, 17920, 32000, 2048, "silu", 1e4, 1e-6),
    "llama-65b": (80, 8192, 64, None, 22016, 32000, 2048, "silu", 1e4, 1e-5),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, 8192, "silu", 5e5, 1e-5),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256, 8192, "silu", 5e5, 1e-5),
}
_ALIASES = {"gpt3-medium": "gpt3-350m", "gpt3-large": "gpt3-760m", "gpt3-1.3b": "gpt3-xl"}

PRESETS = tuple(_SIZES)


def preset_fields(name: str) -> dict[str, Value]:
    """Fields of ``ModelConfig`` that the preset sets. Raises ConfigError for an unknown name."""
    key = _ALIASES.get(name, name)
    if key not in _SIZES:
        guess = closest(name, [*PRESETS, *_ALIASES])
        perhaps = f"did you mean '{guess}'? " if guess else ""
        raise ConfigError(f"model.preset: no preset {name!r}; {perhaps}choose one of {', '.join(PRESETS)}")
    fields = dict(zip(_COLUMNS, _SIZES[key], strict=True))
    if key.startswith("llama"):
        fields["dropout"] = 0.0  # Llama was trained without; GPT-3's paper does not say
    return fields
