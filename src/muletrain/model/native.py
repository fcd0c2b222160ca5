"""Decides whether the native decoder is equivalent to a Llama of ``transformers``: shrunken copies of both must give
the same logits. A list of the configuration's fields would miss new fields.
"""

from __future__ import annotations

import functools
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from muletrain.config.cache import keep, kept
from muletrain.config.section import Section
from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.hf import spec_of
from muletrain.model.hf_files import CONFIG, read_json

if TYPE_CHECKING:
    from muletrain.model.spec import ModelSpec

KIND = "native"
"""The cache's folder."""
CLOSE = 1e-4
"""Norm of the difference over the norm, up to which logits count as equal."""
_TOKENS = 24
_ROWS = 64
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


class Verdict(Section):
    """The outcome of the comparison."""

    native: bool = Field(description="do both give the same logits?")


def is_native(folder: Path) -> bool:
    """Is the native decoder equivalent to the model in ``folder``? If not, the model is traced. Raises CheckpointError
    without a readable ``config.json``."""
    config = read_json(folder / CONFIG)
    if config.get("model_type") != "llama":
        return False
    try:
        small = _shrunk(config)
        spec = spec_of(small, str(folder))
    except (CheckpointError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return False
    return _computes(json.dumps(small, sort_keys=True), spec)


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with two layers and few heads, with the same width of heads."""
    heads, head = int(config["num_attention_heads"]), int(config["hidden_size"]) // int(config["num_attention_heads"])
    group = heads // int(config.get("num_key_value_heads") or heads)
    few = 2 if group <= 8 else 1
    sizes = {"num_attention_heads": few * group, "num_key_value_heads": few, "hidden_size": few * group * head}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": _ROWS, "vocab_size": _ROWS}
    return {**config, **sizes, **{name: 0 for name in _TOKEN_IDS if config.get(name) is not None}}


@functools.lru_cache(maxsize=16)
def _computes(config: str, spec: ModelSpec) -> bool:
    """Do both give the same logits? The verdict comes from the cache, or from a comparison."""
    about: dict[str, object] = {"config": config, "muletrain": _own_text()}
    about |= {name: version(name) for name in ("torch", "transformers")}
    if (known := kept(KIND, about, Verdict)) is not None:
        return known.native
    found = _same_logits(json.loads(config), spec)
    keep(KIND, about, Verdict(native=found))
    return found


def _same_logits(config: dict[str, Any], spec: ModelSpec) -> bool:
    """Compare the logits, in training mode, so that dropout counts. Rotary frequencies that depend on the length of a
    text differ from the decoder's, even if the logits of a short text agree."""
    import torch

    from muletrain.model.stage import Stage
    from muletrain.model.traced.architecture import Whole, build, turning

    try:
        theirs = Whole(spec, build(config))
    except ConfigError:
        return False
    ours = Stage(spec, None, ((0, spec.layers),))
    if theirs.shapes() != ours.shapes() or turning(theirs):
        return False
    draws = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=draws) * 0.2 + (len(shape) == 1) for name, shape in ours.shapes().items()
    }
    tokens = torch.randint(1, _ROWS, (2, min(_TOKENS, spec.context)), generator=draws)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        a, b = theirs.bind(weights).train()(tokens), ours.bind(weights)(tokens)
    return bool((a - b).norm() <= CLOSE * b.norm())


@functools.cache
def _own_text() -> str:
    """Digest of the files that decide the result."""
    files = [Path(__file__).parent / name for name in ("stage.py", "spec.py", "hf.py", "native.py")]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
