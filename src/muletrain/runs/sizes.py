"""Sizes of the model in a Hugging Face folder, as the fields of a configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from muletrain.errors import ConfigError
from muletrain.model.hf import import_hf, spec_in
from muletrain.model.native import is_native
from muletrain.model.traced.folder import import_traced, run_context, traced_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_NOT_TIED = (
    "model.from: its output matrix differs from its embedding, although config.json ties them: both are kept and trained, as "
    "transformers does, and what is exported is not tied"
)
SIZES = ("layers", "width", "vocab", "context", "architecture")


def sizes_in(folder: Path, given: dict[str, Any], *, weights: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that describe the model in ``folder``, whose ``weights`` must fit if they count. Raises
    CheckpointError or ConfigError."""
    context = run_context(folder, given.get("context"))
    if is_native(folder):
        untie = given.get("untie", False)
        spec = spec_in(folder, context=context, untie=untie)
        if weights:
            tied, spec = spec.tie, import_hf(folder, context=context, untie=untie)[0]
            if tied > spec.tie:
                note(_NOT_TIED)
        own = {
            "dropout": given.get("dropout", 0.0),
            "share_layers": given.get("share_layers", False),
            "untie": untie,
        }
        return {**json.loads(spec.to_json()), **own}
    own = {name: given[name] for name in ("dropout", "untie") if name in given}
    model = traced_in(folder, context=context, **own)
    if weights:
        declared, model = model, import_traced(folder, context=context, **own)
        if declared != model:
            note(_NOT_TIED)
    chain = {"chain": model.chain_name} if weights or "chain" in given else {}
    return {**{name: getattr(model, name) for name in SIZES}, **chain, **own}


def check_given(given: dict[str, Any], sizes: Mapping[str, object], beside: str) -> None:
    """Raises ConfigError if the user gave other sizes than ``sizes``, those of ``beside``."""
    for name, value in given.items():
        if value != sizes.get(name):
            raise ConfigError(
                f"model.{name}: {value!r} beside {beside} has {sizes.get(name, 'sizes of its own')!r}; leave it out"
            )
